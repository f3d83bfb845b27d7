"""How much faster other stages would be, from the timeline of a recorded step.

python benchmarks/studies/rebalance.py profile.json step.json   # what `penstock profile` and `trace=step.json` wrote
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.layout.announce import compact
from penstock.layout.partition import partition, split_into
from penstock.planning.profile import Profile, UnitCost, seconds_of, stages_of
from penstock.schedule.actions import Action, Kind, Schedule
from penstock.simulation.simulate import Costs, simulate


@dataclass(frozen=True)
class Rebalance:
    """A step as it was run, and the same schedule with other stages.

    Attributes:
        measured: seconds of the recorded step.
        before, after: units of each stage.
        seconds: of each stage and microbatch, before and after.
        predicted: seconds of a step, before and after.
    """

    measured: float
    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]
    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    predicted: tuple[float, float]

    @property
    def gain(self) -> float:
        """How much faster a step would be: 0.1 is ten percent more steps in the same time."""
        return self.predicted[0] / self.predicted[1] - 1

    def __str__(self) -> str:
        lines = [f"recorded step {self.measured:.4g} s; simulated from its actions {self.predicted[0]:.4g} s"]
        if self.gain < 0.005:
            return "\n".join([*lines, "the stages are balanced: no others are faster"])
        lines.append(f"with other stages {self.predicted[1]:.4g} s, {self.gain:.1%} faster:")
        for stage, units in enumerate(self.after):
            old, new = (times[stage] * 1e3 for times in self.seconds)
            lines.append(f"  stage {stage}: {compact(units)} ({new:.1f} ms a microbatch, now {old:.1f} ms)")
        return "\n".join(lines)


def rebalance(profile: Profile, trace: str | Path, sizes: Sequence[int] | None = None) -> Rebalance:
    """What stages of equal seconds would gain over those of a recorded step.

    The trace says how long each stage takes; within a stage the profile says which unit takes which share. Ranks are
    taken to be equally fast.

    Args:
        profile: of the model that was run.
        trace: a .json timeline that `trace=` wrote.
        sizes: units of each stage of the run; None if they were balanced by the library.

    Raises:
        ValueError: the file is no timeline of a step, or does not fit the model.
    """
    schedule, times, measured = read_step(trace)
    parts = profile.parts
    num_stages = schedule.num_stages
    if num_stages > len(parts):
        raise ValueError(f"{trace} has {num_stages} stages, but {profile.model} has only {len(parts)} parts")
    if sizes is None:
        sizes = partition(seconds_of(parts), [1.0] * num_stages).sizes
    elif sum(sizes) != len(parts) or len(sizes) != num_stages:
        raise ValueError(
            f"stages of {', '.join(map(str, sizes))} parts do not fit {num_stages} stages of {len(parts)} parts"
        )
    # A part takes its share, by the profile, of its stage's seconds.
    seconds: list[float] = []
    for run, of_stage in zip(split_into(parts, sizes), times, strict=True):
        of_parts = seconds_of(run)
        seconds += [part / (sum(of_parts) or 1.0) * sum(of_stage) for part in of_parts]
    found = partition(seconds, [1.0] * num_stages).sizes
    now, then = (tuple(sum(run) for run in split_into(seconds, split)) for split in (sizes, found))
    old = simulate(schedule, Costs.of_stages(times)).makespan
    # Of each stage's seconds as much is F, B and W as of all together.
    kinds = [sum(column) for column in zip(*times, strict=True)]
    new_times = [[kind / sum(kinds) * whole for kind in kinds] for whole in then]
    new = simulate(schedule, Costs.of_stages(new_times)).makespan
    if new >= old:
        found, new, then = tuple(sizes), old, now
    before, after = (_names(stages_of(parts, split)) for split in (sizes, found))
    return Rebalance(measured, before, after, (now, then), (old, new))


def read_step(path: str | Path) -> tuple[Schedule, list[list[float]], float]:
    """The schedule of a recorded step, the median seconds of F, B and W on each stage, and those of the whole step.

    Where the backward is not split, half of it counts as W. Of several steps in the file the schedule is the first
    one's, and the step's seconds are the median.

    Raises:
        ValueError: the file is no timeline of a step.
    """
    try:
        events = [
            event for event in json.loads(Path(path).read_text())["traceEvents"] if event.get("cat") in tuple("FBW")
        ]
        spans: dict[int, list[float]] = defaultdict(list)
        durations: dict[tuple[str, int], list[float]] = defaultdict(list)
        rows: dict[int, list[Action]] = defaultdict(list)
        rank_of: dict[int, int] = {}
        for event in sorted(events, key=lambda event: event["ts"]):
            stage, rank = event["args"]["stage"], event["tid"] // 2
            durations[event["cat"], stage].append(event["dur"] * 1e-6)
            step = event["args"].get("step", 0)
            spans[step] += [event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6]
            if step != min(spans):
                continue
            rows[rank].append(Action(Kind(event["cat"]), stage, event["args"]["microbatch"]))
            rank_of[stage] = rank
        splits = any(kind == "W" for kind, _ in durations)
        count = 1 + max(action.microbatch for row in rows.values() for action in row)
        first = min(rows)  # a pipeline's own ranks, counted from 0
        schedule = Schedule(
            "recorded", len(rank_of), count, tuple(rank_of[stage] - first for stage in range(len(rank_of))),
            tuple(tuple(rows[rank]) for rank in sorted(rows)), splits,
        )  # fmt: skip
        times = []
        for stage in range(len(rank_of)):
            forward, backward = (statistics.median(durations[kind, stage]) for kind in "FB")
            weight = sum(durations["W", stage]) / count / len(spans) if splits else backward / 2
            times.append([forward, backward - (0 if splits else weight), weight])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is no recorded step (trace=step.json writes one): {error!r}") from error
    return schedule, times, statistics.median(max(span) - min(span) for span in spans.values())


def _names(stages: Sequence[Sequence[UnitCost]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(unit.name for unit in stage) for stage in stages)


if __name__ == "__main__":
    print(rebalance(Profile.read(sys.argv[1]), sys.argv[2]))

"""What other stages would gain, from the timeline of a step that was really run."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from penstock.planning.describe import compact
from penstock.planning.partition import partition
from penstock.planning.profile import Profile, UnitCost
from penstock.schedule import Action, Costs, Kind, Schedule, simulate


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
    parts = profile.parts()
    num_stages = schedule.num_stages
    if num_stages > len(parts):
        raise ValueError(f"{trace} has {num_stages} stages, but {profile.model} has only {len(parts)} parts")
    if sizes is None:
        sizes = partition([sum(unit.seconds for unit in part) for part in parts], [1.0] * num_stages).sizes
    elif sum(sizes) != len(parts) or len(sizes) != num_stages:
        raise ValueError(
            f"stages of {', '.join(map(str, sizes))} parts do not fit {num_stages} stages of {len(parts)} parts"
        )
    before = _stages(parts, sizes)
    # Of each part, its share of its stage's seconds.
    seconds = []
    for stage, units in enumerate(before):
        whole = sum(unit.seconds for unit in units) or 1.0
        own = parts[sum(sizes[:stage]) : sum(sizes[: stage + 1])]
        seconds += [sum(unit.seconds for unit in part) / whole * sum(times[stage]) for part in own]
    found = partition(seconds, [1.0] * num_stages)
    each = tuple(
        tuple(sum(seconds[a:b]) for a, b in pairwise(accumulate(split, initial=0))) for split in (sizes, found.sizes)
    )
    shares = [_mean_shares(times)] * num_stages
    old = simulate(schedule, _costs(times)).makespan
    new_times = [[share * whole for share in mix] for mix, whole in zip(shares, each[1], strict=True)]
    new = simulate(schedule, _costs(new_times)).makespan
    if new >= old:
        found_sizes, new, each = tuple(sizes), old, (each[0], each[0])
    else:
        found_sizes = found.sizes
    return Rebalance(measured, _names(before), _names(_stages(parts, found_sizes)), (each[0], each[1]), (old, new))


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


def _mean_shares(times: Sequence[Sequence[float]]) -> list[float]:
    sums = [sum(column) for column in zip(*times, strict=True)]
    return [part / sum(sums) for part in sums]


def _costs(times: Sequence[Sequence[float]]) -> Costs:
    forward, backward, weight = (tuple(column) for column in zip(*times, strict=True))
    return Costs(forward=forward, backward=backward, weight=weight)


def _stages(parts: Sequence[Sequence[UnitCost]], sizes: Sequence[int]) -> list[list[UnitCost]]:
    return [[unit for part in parts[a:b] for unit in part] for a, b in pairwise(accumulate(sizes, initial=0))]


def _names(stages: Sequence[Sequence[UnitCost]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(unit.name for unit in stage) for stage in stages)

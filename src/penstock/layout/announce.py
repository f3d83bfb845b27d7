"""The pipelines of a run as lines, for the log or the terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.layout.layout import Layout, PipelineLayout

logger = logging.getLogger("penstock")


@dataclass(frozen=True)
class Announcement:
    """What is said of the pipelines of a run: of each its schedule and microbatches in words; what the model's units
    cost, by name; and for which `samples`, in words."""

    model_name: str
    layout: Layout
    schedules: Sequence[str]
    microbatches: Sequence[str]
    costs: Mapping[str, float]
    samples: str

    def lines(self) -> Iterator[str]:
        layout, costs = self.layout, self.costs
        count, sharded = len(layout.pipelines), layout.tensor_parallel_size
        yield f"{self.model_name} on {layout.world_size} rank{'s' * (layout.world_size != 1)}: {count} pipeline" + (
            "s" * (count != 1) + f" of {sharded} tensor-parallel ranks each" * (sharded > 1)
        )
        kinds = [
            (pipeline.stages, schedule, number)
            for pipeline, schedule, number in zip(layout.pipelines, self.schedules, self.microbatches, strict=True)
        ]
        for (stages, schedule, number), those in groupby(range(count), lambda index: kinds[index]):
            first, *others = those
            sums = [sum(costs[unit] for unit in units) for units in stages]
            whole = sum(sums) or 1.0
            slowest = f"slowest stage {max(sums) * len(sums) / whole:.2f} times the mean {self.samples}"
            yield f"pipeline {first}: schedule {schedule}, {number}, {slowest}"
            for stage, units in enumerate(stages):
                share, where = sums[stage] / whole, ranks_of(layout.pipelines[first], stage)
                yield f"  stage {stage} on rank {where}: {share:.1%} of the cost, {compact(units)}"
            if others:
                ranks = _range(layout.pipelines[others[0]].first_rank, layout.pipelines[others[-1]].ranks()[-1])
                yield f"pipeline{'s' * (len(others) > 1)} {_range(others[0], others[-1])}: alike, ranks {ranks}"


def announce(announcement: Announcement) -> None:
    """Write it to the log, at level INFO, or, where that is not kept, to stderr, unless PENSTOCK_QUIET is set. For one
    rank to call."""
    logged = logger.isEnabledFor(logging.INFO)
    if not logged and os.environ.get("PENSTOCK_QUIET", "0") not in ("", "0"):
        return
    for line in announcement.lines():
        if logged:
            logger.info("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def ranks_of(pipeline: PipelineLayout, stage: int) -> str:
    """The global ranks that hold a stage: several with tensor parallelism."""
    first = pipeline.global_rank(stage)
    size = pipeline.tensor_parallel_size
    return _range(first, first + size - 1)


def compact(units: Sequence[str]) -> str:
    """Names of units, with runs of a list's entries as one: `transformer.wte, transformer.h.0-3`."""
    shown: list[tuple[str, int | None, int | None]] = []
    for unit in units:
        head, _, tail = unit.rpartition(".")
        if not tail.isdigit():
            shown.append((unit, None, None))
        elif shown and shown[-1][0] == head and shown[-1][2] == int(tail) - 1:
            shown[-1] = (head, shown[-1][1], int(tail))
        else:
            shown.append((head, int(tail), int(tail)))
    return ", ".join(
        name if first is None else f"{name}.{first}" if first == last else f"{name}.{first}-{last}"
        for name, first, last in shown
    )

"""The pipelines of a run as lines in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from penstock.layout.layout import Layout, PipelineLayout

logger = logging.getLogger("penstock")


def announce(
    model_name: str, layout: Layout, schedules: Sequence[str], microbatches: Sequence[str], costs: Mapping[str, float]
) -> None:
    """Log, at level INFO, what the pipelines of a run are. For one rank to call."""
    if not logger.isEnabledFor(logging.INFO):
        return
    count = len(layout.pipelines)
    sharded = f" of {layout.tensor_parallel_size} tensor-parallel ranks each" * (layout.tensor_parallel_size > 1)
    logger.info(
        "%s on %d rank%s: %d pipeline%s%s",
        *(model_name, layout.world_size, "s" * (layout.world_size != 1), count, "s" * (count != 1), sharded),
    )
    for index, pipeline in enumerate(layout.pipelines):
        sums = [sum(costs[unit] for unit in units) for units in pipeline.stages]
        whole = sum(sums) or 1.0
        logger.info(
            "pipeline %d: schedule %s, %s, slowest stage %.2f times the mean",
            *(index, schedules[index], microbatches[index], max(sums) * len(sums) / whole),
        )
        for stage, units in enumerate(pipeline.stages):
            share, where = sums[stage] / whole, ranks_of(pipeline, stage)
            logger.info("  stage %d on rank %s: %.1f%% of the cost, %s", stage, where, 100 * share, compact(units))


def ranks_of(pipeline: PipelineLayout, stage: int) -> str:
    """The global ranks that hold a stage: several with tensor parallelism."""
    first = pipeline.global_rank(stage)
    size = pipeline.tensor_parallel_size
    return str(first) if size == 1 else f"{first}-{first + size - 1}"


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

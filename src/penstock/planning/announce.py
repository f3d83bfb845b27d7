"""What a run says once in the log: layout, schedules and balance. No torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from penstock.planning.describe import compact, ranks_of
from penstock.planning.layout import Layout

logger = logging.getLogger("penstock")


def announce(
    model_name: str, layout: Layout, schedules: Sequence[str], microbatches: Sequence[str], costs: Mapping[str, float]
) -> None:
    """Log, at level INFO, what the pipelines of a run are. For one rank to call.

    Args:
        schedules, microbatches: of each pipeline, in words.
        costs: the relative cost of each unit.
    """
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

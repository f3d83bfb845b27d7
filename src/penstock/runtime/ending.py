"""The end of a training step: gradients, the loss and overflows are summed over the pipelines."""

from __future__ import annotations

from .precision import multiply_gradients
from .reduction import ReductionReport
from .station import Station


def sum_over_pipelines(
    station: Station, loss: float, scaled: bool, reduce_gradients: bool, loss_scale: float
) -> tuple[float, ReductionReport | None]:
    """Complete the gradients, and sum the loss. Every rank calls this, also one without any microbatch.

    Args:
        loss: this pipeline's share of the global batch's loss.
        scaled: whether the caller scaled the losses on this rank; it is enough that one rank knows.
        reduce_gradients: whether to sum them now. They lose their scale in any case.
        loss_scale: that of the gradients.

    Returns:
        The loss of the global batch, and what the reduction took (None without one).
    """
    totals, reducer, report = station.totals, station.reducer, None
    if reduce_gradients:
        reducer.launch_rest()
    if totals.several:
        # Behind every bucket, which is one order on all ranks, and under way while they are waited for.
        totals.start(loss, scaled)
    if reduce_gradients and reducer.active:
        report = reducer.finish()
    if totals.several:
        loss, scaled = totals.finish()
    multiply_gradients(station.parameters, 1.0 / loss_scale)
    if reduce_gradients and scaled:
        station.share_overflow()
    return loss, report

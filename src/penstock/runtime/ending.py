"""The end of a training step: gradients, the loss and overflows are summed over the pipelines."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cuts import LOSS_DTYPE
from .precision import multiply_gradients
from .reduction import ReductionReport
from .station import Station


def sum_over_pipelines(
    station: Station,
    losses: Sequence[torch.Tensor],
    scaled: bool,
    reduce_gradients: bool,
    loss_scale: float,
    left: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, ReductionReport | None, int]:
    """Complete the gradients, and sum the loss. Every rank calls this, also one without any microbatch.

    Args:
        losses: the microbatches' shares of the global batch's loss; shape (), float64.
        scaled: whether the caller scaled the losses on this rank; it is enough that one rank knows.
        reduce_gradients: whether to sum them now. They lose their scale in any case.
        loss_scale: that of the gradients.
        left: whether this rank left the step early. Its gradients are worth nothing then, but it is counted on.

    Returns:
        This pipeline's loss and that of the global batch (shape (), where the stage computes), what the reduction took
        (None without one), and how many ranks left the step early.
    """
    totals, reducer, report = station.totals, station.reducer, None
    if reduce_gradients:
        reducer.launch_rest()
    own = loss = torch.stack(list(losses)).sum() if losses else torch.zeros((), dtype=LOSS_DTYPE, device=station.device)
    num_left = int(left)
    if totals.shared:
        # Behind every bucket, which is one order on all ranks, and under way while they are waited for.
        totals.start(loss, scaled, left)
    if reduce_gradients and reducer.active:
        report = reducer.finish()
    if totals.shared:
        loss, scaled, num_left = totals.finish()
    multiply_gradients(station.parameters, 1.0 / loss_scale)
    if reduce_gradients and scaled and not num_left:
        station.share_overflow()
    return own, loss, report, num_left

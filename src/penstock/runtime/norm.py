"""The gradient norm of the whole model, every logical parameter counted once, and overflow shared by all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist


def clip_grads(
    parameters: Iterable[torch.nn.Parameter],
    norm_of_all: Callable[[float], torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of `parameters` so that the whole model's norm is at most `max_norm`.

    `norm_of_all(norm_type)` gives that norm, the same on every rank to the last bit, so that replicas stay equal.

    Returns the norm before clipping: a tensor of shape ().

    Raises:
        ValueError: `max_norm` is negative or `norm_type` is not positive.
        RuntimeError: the norm is not finite and `error_if_nonfinite`. All ranks raise.
    """
    if max_norm < 0 or not norm_type > 0:
        raise ValueError(
            f"max_norm must not be negative and norm_type must be positive, got {max_norm} and {norm_type}"
        )
    parameters = list(parameters)
    norm = norm_of_all(norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradients' total norm of order {norm_type} is {float(norm)}, so they cannot be clipped"
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm if any(p.dtype == torch.float64 for p in parameters) else norm.to(torch.float32)


def grad_norm(
    counted: Sequence[torch.nn.Parameter], norm_type: float, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """The norm of the whole model's gradients, not finite if one of them is not: shape (), float64.

    `counted` are the parameters this rank answers for: each logical parameter is counted by one rank of the world.
    """
    gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
    largest = math.isinf(norm_type)
    # The sum runs over ranks and over very unlike tensors: float64 keeps it independent of their order in practice.
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch.stack([n.to(torch.float64) for n in torch._foreach_norm(gradients, norm_type)])
        total = norms.max() if largest else norms.pow(norm_type).sum()
    dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return total if largest else total.pow(1.0 / norm_type)


def share_overflow(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> None:
    """Make a gradient overflow on one rank an overflow on all ranks.

    A GradScaler looks only at its own rank's gradients. When another rank's are not finite, one of this rank's is made
    infinite, so that all scalers skip the step and lower their scale together.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    mine = torch.zeros((), device=device)
    if gradients:
        # A sum of finite norms is finite unless it overflows by itself, which float64 cannot here.
        norms = torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(gradients, 1)])
        mine = (~torch.isfinite(norms).all()).to(torch.float32)
    anywhere = mine.clone()
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
    if gradients:
        # No reading of the value: on an accelerator the host need not wait.
        first = gradients[0].view(-1)[:1]
        first.copy_(torch.where((anywhere > mine).expand(1), torch.full_like(first, math.inf), first))

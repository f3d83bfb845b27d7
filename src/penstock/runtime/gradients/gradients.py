"""Everything about one rank's gradients: who else holds the parameters, sums, deferral, the norm, and mixed precision.

Mixed precision is autocast where a stage computes, and scaled losses so that float16 gradients do not vanish. The scale
is put on where the backward begins, on the last stage, and taken off when the step's gradients are complete. So between
steps `.grad` is always the unsplit model's gradient, whatever clips, logs or accumulates it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.context import RankContext
from penstock.runtime.gradients.holders import HeldParameter
from penstock.runtime.gradients.reduction import GradientReducer
from penstock.runtime.gradients.weight_gradients import WeightGradientQueues


class Gradients:
    def __init__(self, held: Sequence[HeldParameter], context: RankContext):
        self.parameters = [weight.parameter for weight in held]
        self.queues = WeightGradientQueues()
        self.reducer = GradientReducer(held, context, self.queues.awaits)
        self.norm = GradientNorm(held, context)

    def prepare(self, loss_scale: float) -> None:
        """Before a step's first backward."""
        self.reducer.prepare()
        # An interrupt in an earlier step may have left some.
        self.queues.clear()
        # Gradients left from an earlier step must have the scale of those that are added to them.
        multiply_gradients(self.parameters, loss_scale)

    def clear(self) -> None:
        """Forget what is under way."""
        self.reducer.forget_sums()
        self.queues.clear()


class GradientNorm:
    """Norms over all ranks' gradients; every rank of the layout makes the same calls. `held` is what this rank
    holds."""

    def __init__(self, held: Sequence[HeldParameter], context: RankContext):
        self._parameters = [weight.parameter for weight in held]
        self._held, self._context = held, context

    def clip(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale this rank's gradients so that the whole model's norm is at most `max_norm`; see `total`.

        Returns the norm before clipping: a tensor of shape (), the same on every rank to the last bit, so replicas stay
        equal. ValueError: `max_norm` is negative or `norm_type` is not positive."""
        if max_norm < 0 or not norm_type > 0:
            raise ValueError(
                f"max_norm must not be negative and norm_type must be positive, got {max_norm} and {norm_type}"
            )
        norm = self.total(norm_type, error_if_nonfinite)
        torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm

    def total(
        self, norm_type: float, error_if_nonfinite: bool, held: Sequence[HeldParameter] | None = None
    ) -> torch.Tensor:
        """`of_all` in the type that clipping returns, float64 or float32. If it is not finite and `error_if_nonfinite`,
        all ranks raise RuntimeError."""
        norm = self.of_all(norm_type, held)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"the gradients' total norm of order {norm_type} is {float(norm)}, so they cannot be clipped"
                ": skip this step, or set error_if_nonfinite=False"
            )
        return norm if any(p.dtype == torch.float64 for p in self._parameters) else norm.to(torch.float32)

    def held_of(self, gradients: Sequence[torch.Tensor]) -> list[HeldParameter | None]:
        """Whose these gradients are: parameters of this rank, or None for others'."""
        places: dict[tuple[Any, ...], HeldParameter] = {}
        for weight in self._held:
            if weight.parameter.grad is not None:
                places[_place(weight.parameter.grad)] = weight
        return [places.get(_place(gradient)) for gradient in gradients]

    def of_all(self, norm_type: float = 2.0, held: Sequence[HeldParameter] | None = None) -> torch.Tensor:
        """The norm of the whole model's gradients, or of those of `held` and of what the other ranks give: shape (),
        float64. Not finite if one of them is not."""
        # Each logical parameter is counted by one rank.
        rank, index = self._context.rank, self._context.place.tensor_parallel_rank
        counted = [
            weight.parameter for weight in (self._held if held is None else held) if weight.counted_by(rank, index)
        ]
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        largest = math.isinf(norm_type)
        # The sum runs over ranks and over very unlike tensors: float64 keeps it independent of their order in practice.
        total = torch.zeros((), dtype=torch.float64, device=self._context.device)
        if gradients:
            norms = torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(gradients, norm_type)])
            total = norms.max() if largest else norms.pow(norm_type).sum()
        # A backend's maximum may drop a NaN: whether there is one goes beside it.
        sent = torch.stack([total.nan_to_num(math.inf, math.inf), total.isnan().to(total)]) if largest else total
        with self._context.board.guard("computing the gradient norm", self._context.everyone):
            operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(sent, operation, group=self._context.groups.world)
        return torch.where(sent[1] > 0, math.nan, sent[0]) if largest else sent.pow(1.0 / norm_type)


def _place(gradient: torch.Tensor) -> tuple[Any, ...]:
    """What a gradient and its `detach()` have in common."""
    if gradient.layout is not torch.strided:
        return (id(gradient),)
    return gradient.untyped_storage()._cdata, gradient.storage_offset(), gradient.numel()


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products run in `dtype`; one that changes nothing for None."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def autocast_now(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """A maker of contexts in which autocast is as it is at the moment of this call: on in one type, or off."""
    kind = device.type
    return partial(torch.autocast, kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))


def multiply_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiply all gradients in place. Exact for powers of two that stay within the range of the type."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)

"""A microbatch between its forward and its backward; what stands between the user's `loss.backward()` and the stage's.

On the last stage a hook on the loss notes that its backward came. On the others a proxy loss stands for it, whose
backward ignores the value that comes in (scaling was applied on the last stage, and arrives with the gradients) and
gives the next stage's gradients to autograd, which goes on into the stage's graph. If some outputs may get no gradient,
autograd must not reach them: a `torch.autograd.Function` behind one would see zeros for None. Then the proxy's graph
leads to no output, and the backward of those that have a gradient is run inside the proxy's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from transformers.utils import ModelOutput

from penstock.modeling.graph.loss import set_loss
from penstock.runtime.gradients.weight_gradients import direct_apply

# Autograd's own, which runs a backward and calls what is queued at its end.
autograd_engine = torch.autograd.Variable._execution_engine
# For `filter`, which with this makes no call of Python.
requires_grad = attrgetter("requires_grad")
# Called when a loss's backward begins, with the incoming gradient. Gives the gradients of the outputs to which the
# proxy leads, if it leads to any.
OnBackward = Callable[[torch.Tensor | None], Sequence[torch.Tensor | None]]


@dataclass(eq=False)
class LiveMicrobatch:
    """A microbatch between its forward and the end of its backward on one stage. The caller is given its output and
    calls the loss's backward if the stage is its rank's top one."""

    microbatch: int
    # Of what was received, the tensors that require a gradient, until their gradients are sent.
    leaves: Sequence[torch.Tensor]
    # What is no argument stays the class's until it is set.
    sent: Sequence[torch.Tensor] = field(default=(), init=False)  # of what was sent, likewise
    connected: bool = field(default=False, init=False)  # whether the proxy's graph leads to `sent`
    output: Any = field(default=None, init=False)
    loss: torch.Tensor | None = field(default=None, init=False)
    called: bool = field(default=False, init=False)  # whether the caller has called the loss's backward

    def take_output(self) -> Any:
        """The output to yield, of which nothing is kept here."""
        output, self.output = self.output, None
        return output

    def run_backward(self, gradient: torch.Tensor | None) -> None:
        """Call the loss's backward in the caller's place."""
        assert self.loss is not None
        self.loss.backward(gradient)


@dataclass(init=False)
class StageOutput(ModelOutput):  # type: ignore[misc]  # a library without types
    """What a stage that does not hold the model's output yields: only the loss. The `others` of its fields are None."""

    loss: torch.Tensor | None = None

    def __init__(self, loss: torch.Tensor | None = None, others: Collection[str] = ()):
        self.__dict__["_others"] = others
        # ModelOutput's own method takes ten times as long, for any number of fields.
        if loss is not None:
            set_loss(self, loss)

    def __getattr__(self, name: str) -> None:
        if name in self.__dict__.get("_others", ()):
            return
        raise AttributeError(f"the model's output has no field {name!r}")


def hook_loss(loss: torch.Tensor, on_backward: OnBackward, scale: float = 1.0) -> torch.Tensor:
    """The last stage's loss, such that its backward is noticed and gives `scale` times the gradients: `loss` itself,
    unless that has no graph. An operation that gives this one tensor must have made it, as it makes a share of the
    model's loss: its node is hooked."""
    if not loss.requires_grad:
        loss = loss.detach().requires_grad_(True).clone()
    assert loss.grad_fn is not None

    def hook(gradients: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        (gradient,) = gradients
        on_backward(gradient)
        return None if scale == 1.0 else (gradient * scale,)

    # Not a hook of the tensor, which takes more than twice as long.
    loss.grad_fn.register_prehook(hook)
    return loss


def proxy_loss(
    value: torch.Tensor, dtype: torch.dtype, on_backward: OnBackward, outputs: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """A loss of value `value` whose backward calls `on_backward`, and goes on to `outputs` with what that gives."""
    loss: torch.Tensor = _apply(on_backward, value, dtype, *(outputs or (_anchor(value.device),)))
    return loss


@cache
def _anchor(device: torch.device) -> torch.Tensor:
    """What lets autograd know that a proxy has a gradient; the anchor itself never gets one."""
    return torch.empty((), device=device, requires_grad=True)


def run_backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """The backward of those of a stage's outputs that have a gradient."""
    given = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    if given:
        tensors, theirs = zip(*given, strict=True)
        # As torch.autograd.backward does, which compares shapes before: the boundary has seen to them.
        autograd_engine.run_backward(tensors, theirs, False, False, (), True, True)


def copied(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of `value` as `dtype`: `to(dtype, copy=True)`, which takes twice the time."""
    return value.clone() if value.dtype is dtype else value.type(dtype)


class _ProxyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, on_backward: OnBackward, value: torch.Tensor, dtype: torch.dtype, *outputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.on_backward = on_backward
        return copied(value, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *(ctx.on_backward(gradient) or (None,))  # the anchor has none


_apply = direct_apply(_ProxyLoss)

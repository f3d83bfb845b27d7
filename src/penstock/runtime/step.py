"""What a training step of one rank is made of, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from transformers.utils import ModelOutput

from penstock.modeling.graph.loss import set_field

from .reduction import ReductionReport

# For `filter`, which with this makes no call of Python.
requires_grad = attrgetter("requires_grad")


@dataclass(init=False)
class StageOutput(ModelOutput):
    """What a stage that does not hold the model's output yields: only the loss."""

    loss: torch.Tensor | None = None

    def __init__(self, loss: torch.Tensor | None = None):
        # ModelOutput's own takes ten times as long, for any number of fields.
        if loss is not None:
            set_field(self, "loss", loss)


class Live:
    """A microbatch between its forward and the end of its backward on one stage."""

    __slots__ = ("answered", "leaves", "loss", "output", "sent")

    def __init__(self, received: Sequence[torch.Tensor]):
        # Of what was received and sent, the tensors that require a gradient.
        self.leaves = list(filter(requires_grad, received))
        self.sent: list[torch.Tensor] = []
        self.loss: torch.Tensor | None = None
        self.output: Any = None
        # Whether the gradients of what was received have been sent.
        self.answered = False


@dataclass(frozen=True)
class StepReport:
    """A training step as this rank saw it.

    The losses are tensors of shape () where the stage computes, so that no host waits for them until it reads `loss` or
    `global_loss`.

    Attributes:
        own_sum: sum of the losses it yielded (this pipeline's share of the global batch's loss).
        global_sum: the global batch's loss, over all pipelines; the same on every rank.
        seconds: duration.
        bubble: share of it this rank spent waiting for other stages; None on an accelerator, whose host does not wait.
        num_microbatches: microbatches of this pipeline.
        reduction: what gradient reduction took; None under `no_sync` or where nothing is shared.
    """

    own_sum: torch.Tensor
    global_sum: torch.Tensor
    seconds: float
    bubble: float | None
    num_microbatches: int
    reduction: ReductionReport | None

    @property
    def loss(self) -> float:
        """The value of `own_sum`."""
        return float(self.own_sum)

    @property
    def global_loss(self) -> float:
        """The value of `global_sum`."""
        return float(self.global_sum)

"""What a training step of one rank is made of, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import ModelOutput

from .reduction import ReductionReport


@dataclass
class StageOutput(ModelOutput):
    """What a stage that does not hold the model's output yields: only the loss."""

    loss: torch.Tensor | None = None


@dataclass
class Live:
    """A microbatch between its forward and the end of its backward on one stage."""

    received: list[torch.Tensor]
    sent: list[torch.Tensor] = field(default_factory=list)
    loss: torch.Tensor | None = None
    output: Any = None
    # Whether the gradients of what was received have been sent.
    answered: bool = False

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.received if tensor.requires_grad]


@dataclass(frozen=True)
class StepReport:
    """A training step as this rank saw it.

    Attributes:
        loss: sum of the losses it yielded (this pipeline's share of the global batch's loss).
        global_loss: the global batch's loss, over all pipelines; the same on every rank.
        seconds: duration.
        bubble: share of it this rank spent waiting for other stages; None on an accelerator, whose host does not wait.
        num_microbatches: microbatches of this pipeline.
        reduction: what gradient reduction took; None under `no_sync` or where nothing is shared.
    """

    loss: float
    global_loss: float
    seconds: float
    bubble: float | None
    num_microbatches: int
    reduction: ReductionReport | None

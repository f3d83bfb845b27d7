"""What a training step of one rank is made of, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import ModelOutput

from penstock.modeling.plan import Plan

from .reduction import ReductionReport

# Seeds of neighbouring steps and microbatches lie far apart (odd multipliers, so that no two coincide early).
STEP_STRIDE, MICROBATCH_STRIDE = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
SEED_MASK = (1 << 63) - 1


@dataclass
class StageOutput(ModelOutput):
    """What a stage that does not hold the model's output yields: only the loss."""

    loss: torch.Tensor | None = None


@dataclass(frozen=True)
class StepInputs:
    """The microbatches of one rank's pipeline in one step.

    Attributes:
        microbatches: each one's keyword arguments to the model.
        plans: each one's plan.
        signatures: each one's plan and input shapes; equal signatures have equal shapes at every cut.
        counts: each one's numbers of terms in the means that make up the loss.
        sizes: each one's number of samples.
        first_microbatch: the index of the first one in the global batch (it seeds dropout).
        number: the number of the step, counted from 0 alike on all ranks.
        fingerprint: a digest of the inputs that all ranks of the pipeline must share.
    """

    microbatches: Sequence[Mapping[str, Any]]
    plans: Sequence[Plan]
    signatures: Sequence[Any]
    counts: Sequence[Sequence[int]]
    sizes: Sequence[int]
    first_microbatch: int
    number: int
    fingerprint: int

    @classmethod
    def of(
        cls,
        microbatches: Sequence[Mapping[str, Any]],
        plans: Sequence[Plan],
        sizes: Sequence[int],
        first_microbatch: int,
        number: int,
        fingerprint: int,
        with_counts: bool,
    ) -> StepInputs:
        """Of microbatches and their plans. `with_counts`: on the last stage, which weighs the loss."""
        # Counting reads the labels.
        counts = [
            plan.loss.counts(microbatch) if with_counts and plan.loss is not None else ()
            for plan, microbatch in zip(plans, microbatches, strict=True)
        ]
        signatures = [(plan.digest, _shapes(microbatch)) for plan, microbatch in zip(plans, microbatches, strict=True)]
        return cls(microbatches, plans, signatures, counts, sizes, first_microbatch, number, fingerprint)

    def total_counts(self) -> list[int]:
        """`counts`, summed over the microbatches."""
        return [sum(column) for column in zip(*self.counts, strict=True)]

    def seed(self, base: int, microbatch: int) -> int:
        """The seed of a microbatch's dropout: of the step and its place in the global batch, not of the layout."""
        index = self.first_microbatch + microbatch
        return (base + self.number * STEP_STRIDE + index * MICROBATCH_STRIDE) & SEED_MASK


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


def _shapes(microbatch: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides the shapes at every cut: the inputs' shapes and types."""
    return tuple(
        (name, value.shape, value.dtype) for name, value in microbatch.items() if isinstance(value, torch.Tensor)
    )

"""The notice that opens a step on each stage: a few integers by which a stage knows that it works on the same step.

It goes down the pipeline ahead of the first activation. A rank that was given another batch, or is at another step,
says so at once instead of computing nonsense.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .inputs import StepInputs
from .transfer import DTYPES

MASK = (1 << 62) - 1
MIX = 1_000_003


class BatchMismatch(RuntimeError):
    """The ranks of one pipeline were given different batches, or are at different steps."""


class Notice(NamedTuple):
    """`state` sums up what decides dtypes and gradient flags at a cut: which parameters are trainable in all stages
    up to here, and autocast."""

    call: int
    fingerprint: int
    num_microbatches: int
    state: int

    @classmethod
    def of(cls, inputs: StepInputs, parameters: Iterable[torch.nn.Parameter], device: torch.device) -> Notice:
        """This rank's own notice."""
        trainable = hash(tuple(parameter.requires_grad for parameter in parameters))
        autocast = 0
        if torch.is_autocast_enabled(device.type):
            autocast = 1 + DTYPES.index(torch.get_autocast_dtype(device.type))
        state = ((trainable * MIX + autocast) * 2 + torch.is_grad_enabled()) & MASK
        return cls(inputs.call, inputs.fingerprint, len(inputs.microbatches), state)

    def after(self, below: int) -> Notice:
        """This notice with the state of the stages below folded in."""
        return self._replace(state=(below * MIX + self.state) & MASK)


def check_notice(theirs: Notice, mine: Notice, stage: int) -> None:
    """Compare the notice of the stage below with this rank's own.

    Raises:
        BatchMismatch: they are about different steps or batches.
    """
    for field, what in (
        ("call", "call {} of the model"),
        ("num_microbatches", "a batch of {} microbatches"),
        ("fingerprint", "a batch with digest {:x}"),
    ):
        one, other = getattr(theirs, field), getattr(mine, field)
        if one != other:
            raise BatchMismatch(
                f"stage {stage - 1} was given {what.format(one)}, stage {stage} {what.format(other)}: all ranks of one "
                "pipeline must be given the same batch (use model.data_parallel_rank and model.data_parallel_size, or "
                "model.prepare_dataloader, to share a data set out between pipelines)"
            )

"""What an engine is made with."""

from __future__ import annotations

import datetime
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from penstock.data.microbatch import BatchDims
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.stage.split import SplitModel
from penstock.runtime.context import RankContext
from penstock.runtime.failures.position import PATIENCE_SECONDS
from penstock.runtime.gradients.holders import HeldParameter


class OwnerChoice(Protocol):
    """Chooses which holders of each parameter keep its optimizer's state and update it: its owners."""

    def __call__(
        self, held: Sequence[HeldParameter], before: Sequence[HeldParameter], context: RankContext
    ) -> list[HeldParameter] | None:
        """What this rank holds, with owners on which all ranks agree; None on all of them if every holder is one. All
        ranks call this together. The parameters in `before`, what it held in this layout until now, keep theirs."""


class SequenceParts(Protocol):
    """Cuts sequences, of which each of several pipelines computes a part, for as long as the ranks work together."""

    def cut(
        self, microbatches: Sequence[Mapping[str, Any]], criterion: Criterion | None
    ) -> Sequence[Mapping[str, Any]]:
        """This rank's part of the inputs of whole sequences. Raises, alike on all ranks, what says why they cannot be
        cut."""

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sums over the parts. The last stages' ranks call this together."""

    def join(self, output: Any, part: Mapping[str, Any], whole: Mapping[str, Any], losses: Collection[str]) -> Any:
        """The output for whole sequences, from a part's. The last stages' ranks call this together. `losses`: names of
        fields that are shares."""


class SharesSequences(Protocol):
    """Makes what cuts the sequences of a model whose stages are placed."""

    def __call__(self, split: SplitModel, context: RankContext) -> SequenceParts:
        """All ranks call this together."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Fields named like a key of `penstock.config.configuration.Configuration` mean what it does. All are equal on all
    ranks; only the plugin lets `patience` and `timeout` differ.

    They are filled from the configuration or the plugin (`_plan` in `api/initialize.py`, `config/plugin_settings.py`),
    but for two (`api/builder.py`): `plan_and_build` completes `batch_dim` by what the example inputs show, and `build`
    fills in `share_sequences` by the layout.

    Attributes:
        num_microbatches, microbatch_size: how a batch is split, if not by its own number of microbatches.
        batch_dim: of inputs, the dimension that has the samples, or None, where it is not the first.
        timeout: how long a transfer may take; None for that of torch's default process group.
        patience: how many seconds a rank waits for others before it says so.
        autocast, trace, trace_steps: what the engine's attributes of these names are at first.
        owner_choice: who keeps the optimizer's state of each parameter; None: every rank that holds it.
        share_sequences: how pipelines share sequences; None: each computes whole ones.
    """

    num_microbatches: int | None = None
    microbatch_size: int | None = None
    batch_dim: BatchDims = field(default_factory=dict)
    loss_chunk_tokens: int | None = None
    trace: str | os.PathLike[str] | None = None
    trace_steps: tuple[int, int] | None = None
    timeout: datetime.timedelta | None = None
    patience: float = PATIENCE_SECONDS
    autocast: torch.dtype | None = None
    owner_choice: OwnerChoice | None = None
    share_sequences: SharesSequences | None = None

"""What a rank knows about itself in a formation of ranks: its place, its device, its groups, what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from penstock.layout.layout import Layout, PipelineLayout, Place
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.failures.interrupts import Interrupts

if TYPE_CHECKING:
    from penstock.runtime.comm.groups import Groups


@dataclass(frozen=True)
class RankContext:
    """One rank's place in a layout, and what it works together with others by."""

    layout: Layout
    rank: int
    device: torch.device
    groups: Groups
    board: FailureBoard
    interrupts: Interrupts

    @cached_property
    def place(self) -> Place:
        """Which pipeline, pipeline rank and tensor-parallel rank this is."""
        return self.layout.place_of(self.rank)

    @cached_property
    def pipeline(self) -> PipelineLayout:
        """This rank's pipeline."""
        return self.layout.pipelines[self.place.pipeline]

    @property
    def replica(self) -> int:
        """The replica that this rank is in; see `Layout.num_replicas`."""
        return self.layout.replica_of(self.place.pipeline)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages this rank holds."""
        return self.pipeline.stages_of(self.place.pipeline_rank)

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """The global ranks of this rank's pipeline, those that share a stage's weights included."""
        return self.pipeline.ranks()

    @property
    def batch_ranks(self) -> tuple[int, ...]:
        """The global ranks of this rank's replica, which take the same batch, ascending."""
        return tuple(rank for pipeline in self.layout.of_replica(self.replica) for rank in pipeline.ranks())

    @property
    def everyone(self) -> Sequence[int]:
        """All global ranks."""
        return range(self.layout.world_size)

    @property
    def holds_output(self) -> bool:
        """Whether this rank holds its pipeline's last stage, which has the model's output."""
        return self.pipeline.stage_to_rank[-1] == self.place.pipeline_rank

    @property
    def output_rank(self) -> int:
        """The global rank that holds the last stage, of those with this rank's tensor-parallel rank."""
        return self.rank_of(self.pipeline.num_stages - 1)

    def rank_of(self, stage: int) -> int:
        """The global rank that holds `stage` of this pipeline, of those with this rank's tensor-parallel rank."""
        return self.pipeline.global_rank(stage, self.place.tensor_parallel_rank)

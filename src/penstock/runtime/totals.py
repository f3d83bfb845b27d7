"""What the pipelines of a layout sum up in a step besides gradients: the loss, and the terms of its means."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from penstock.planning.layout import Layout

from .failure import FailureBoard
from .groups import Groups

# Means that may make up one loss (BERT's pretraining has two).
MAX_LOSS_TERMS = 16


class Totals:
    """Sums over the pipelines of a layout. All ranks make these calls in one order with those of the gradients.

    Attributes:
        several: whether there is more than one pipeline.
        shared: whether there is another rank at all, which may know what this one does not.
    """

    def __init__(self, layout: Layout, rank: int, groups: Groups, board: FailureBoard):
        place = layout.place_of(rank)
        self.several = len(layout.pipelines) > 1
        self.shared = layout.world_size > 1
        self._speaks = (
            place.rank_in_pipeline == layout.pipelines[place.pipeline].stage_to_rank[-1]
            and place.tensor_parallel_rank == 0
        )
        self._everyone = range(layout.world_size)
        self._groups = groups
        self._board = board
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._work: dist.Work | None = None

    def counts(self, counts: Sequence[int]) -> Sequence[int]:
        """The numbers of terms in the loss's means over the global batch. Called on the pipelines' last stages only.

        Args:
            counts: this pipeline's; empty if it has no microbatch, and then so is the result.
        """
        if not self.several:
            return counts
        # A pipeline without a microbatch does not know how many means there are.
        totals = torch.zeros(MAX_LOSS_TERMS, dtype=torch.int64)
        totals[: len(counts)] = torch.tensor(counts, dtype=torch.int64)
        with self._board.guard("counting the loss's terms", dist.get_process_group_ranks(self._groups.last_stages)):
            dist.all_reduce(totals, group=self._groups.last_stages)
        return totals.tolist()[: len(counts)]

    def start(self, loss: float, flag: bool, left: bool = False) -> None:
        """Begin to sum `loss` over the pipelines, and to ask whether any rank raises `flag`; `finish` gives both.

        Args:
            loss: this pipeline's share of the global batch's loss. Only the last stage's counts.
            left: whether this rank left the step early; `finish` gives how many ranks did.
        """
        self._sums = torch.tensor([loss if self._speaks else 0.0, float(flag), float(left)], dtype=torch.float64)
        with self._board.guard("summing losses", self._everyone):
            self._work = dist.all_reduce(self._sums, group=self._groups.world_control, async_op=True)

    def finish(self) -> tuple[float, bool, int]:
        """What `start` began."""
        with self._board.guard("summing losses", self._everyone):
            if self._work is not None:
                self._work.wait()
        self._work = None
        loss, flag, left = self._sums.tolist()
        return loss, bool(flag), int(left)

    def ask(self, number: int) -> list[int]:
        """Every rank's `number`. All ranks call this together."""
        mine = torch.tensor([number])
        every = [torch.empty_like(mine) for _ in self._everyone]
        with self._board.guard("asking who left the training step", self._everyone):
            dist.all_gather(every, mine, group=self._groups.world_control)
        return [int(theirs) for theirs in every]

    def clear(self) -> None:
        """Forget what is under way, so that nothing keeps a dead group's connections open."""
        self._work = None

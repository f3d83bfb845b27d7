"""The sums over the pipelines of a layout in a step, besides gradients: the loss, the terms of its means, samples."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.runtime.context import RankContext

# Means that may make up one loss (BERT's pretraining has two).
MAX_LOSS_TERMS = 16


class StepFacts(NamedTuple):
    """What one rank knows at the end of a step; summed, what all ranks do. Samples and tokens are a pipeline's."""

    num_left: int = 0
    num_interrupted: int = 0
    num_samples: int = 0
    num_tokens: int = 0


NO_FACTS = StepFacts()


class Totals:
    """Sums over the pipelines of a layout. All ranks make these calls in one order with those of the gradients.
    `shared`: whether there is another rank at all, which may know what this one does not."""

    def __init__(self, context: RankContext):
        self._several = len(context.layout.pipelines) > 1
        self.shared = context.layout.world_size > 1
        self._speaks = context.holds_output and context.place.tensor_parallel_rank == 0
        self._context = context
        self._sums = torch.zeros(0, dtype=torch.float64)
        self._work: dist.Work | None = None
        self._on_host = context.device.type == "cpu"
        self._loss = torch.zeros(())
        self._loss_work: dist.Work | None = None
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._num_counts = 0
        self._counts_work: dist.Work | None = None

    def start_counts(self, counts: Sequence[int]) -> None:
        """Begin to sum the numbers of terms in the loss's means, empty if this pipeline has no microbatch, as is the
        result then; `finish_counts` gives those of the global batch. Both are called on last stages only."""
        # A pipeline without a microbatch does not know how many means there are.
        if self._several and len(counts) > MAX_LOSS_TERMS:
            raise ValueError(
                f"this loss is a sum of {len(counts)} means, but over several pipelines it may be of {MAX_LOSS_TERMS} "
                "at most"
            )
        self._counts = torch.tensor([*counts, *[0] * (MAX_LOSS_TERMS - len(counts))], dtype=torch.int64)
        self._num_counts = len(counts)
        if self._several:
            with self._counting():
                self._counts_work = dist.all_reduce(self._counts, group=self._context.groups.last_stages, async_op=True)

    def finish_counts(self) -> Sequence[int]:
        """What `start_counts` began."""
        if self._counts_work is not None:
            with self._counting():
                self._counts_work.wait()
            self._counts_work = None
        return self._counts.tolist()[: self._num_counts]

    def counts(self, counts: Sequence[int]) -> Sequence[int]:
        """`start_counts` and `finish_counts` in one."""
        self.start_counts(counts)
        return self.finish_counts()

    def _counting(self) -> contextlib.AbstractContextManager[None]:
        ranks = dist.get_process_group_ranks(self._context.groups.last_stages) if self._several else ()
        return self._context.board.guard("counting the loss's terms", ranks)

    def start(self, loss: torch.Tensor, mine: StepFacts = NO_FACTS) -> None:
        """Begin to sum `loss` over the pipelines, and what all ranks have found; `finish` gives both. The loss is this
        pipeline's share of the global batch's, shape (), float64. Only the last stage's counts. On an accelerator it is
        summed there, and no host waits for it."""
        value = float(loss) if self._on_host and self._speaks else 0.0
        if not self._speaks:
            mine = mine._replace(num_samples=0, num_tokens=0)
        self._sums = torch.tensor([value, *mine], dtype=torch.float64)
        self._loss = loss
        with self._context.board.guard("summing losses", self._context.everyone):
            if not self._on_host:
                self._loss = loss.clone() if self._speaks else torch.zeros_like(loss)
                self._loss_work = dist.all_reduce(self._loss, group=self._context.groups.world, async_op=True)
            self._work = dist.all_reduce(self._sums, group=self._context.groups.world_control, async_op=True)

    def finish(self) -> tuple[torch.Tensor, StepFacts]:
        """What `start` began: the loss, where it was, and what all ranks have found."""
        with self._context.board.guard("summing losses", self._context.everyone):
            for work in (self._work, self._loss_work):
                if work is not None:
                    work.wait()
        self._work = self._loss_work = None
        value, *found = self._sums.tolist()
        loss = torch.tensor(value, dtype=torch.float64) if self._on_host else self._loss
        return loss, StepFacts(*map(int, found))

    def sums(self, values: Sequence[float]) -> list[float]:
        """Of what the pipelines' last stages give, on every rank; what others give counts for nothing. All ranks call
        this together, with as many values."""
        if not self.shared:
            return list(values)
        own = torch.tensor(values if self._speaks else [0.0] * len(values), dtype=torch.float64)
        with self._context.board.guard("summing over the pipelines", self._context.everyone):
            dist.all_reduce(own, group=self._context.groups.world_control)
        return own.tolist()

    def ask(self, number: int) -> list[int]:
        """Every rank's `number`. All ranks call this together."""
        mine = torch.tensor([number])
        every = [torch.empty_like(mine) for _ in self._context.everyone]
        with self._context.board.guard("asking who left the training step", self._context.everyone):
            dist.all_gather(every, mine, group=self._context.groups.world_control)
        return [int(theirs) for theirs in every]

    def clear(self) -> None:
        """Forget what is under way, so that nothing keeps a dead group's connections open."""
        self._work = self._loss_work = self._counts_work = None

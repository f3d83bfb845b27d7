"""Sums over a layout's pipelines in a step, besides gradients: the loss, the elements of its means, samples."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.runtime.context import RankContext

# Means that may make up one loss over several pipelines (BERT's pretraining has two).
MAX_MEANS = 16


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
        # Whether this is the first of the pipelines that share their samples.
        self._counts_samples = context.pipeline is context.layout.of_replica(context.replica)[0]
        self._context = context
        self._on_host = context.device.type == "cpu"
        # What is summed of the elements, and of the loss and the facts; and what of it is under way.
        self._counts: Sequence[float] = ()
        self._summed_counts = torch.zeros(MAX_MEANS, dtype=torch.float64)
        self._loss = self._sums = torch.zeros(())
        self._counting: list[dist.Work] = []
        self._summing: list[dist.Work] = []

    def start_counts(self, counts: Sequence[float]) -> None:
        """Begin to sum the numbers of elements in the loss's means, empty if this pipeline has no microbatch, as is the
        result then; `finish_counts` gives those of the global batch. Both are called on last stages only."""
        # A pipeline without a microbatch does not know how many means there are.
        if self._several and len(counts) > MAX_MEANS:
            raise ValueError(
                f"this loss is a sum of {len(counts)} means, but over several pipelines it may be of {MAX_MEANS} "
                "at most"
                ": add fewer means up, or train over one pipeline"
            )
        self._counts = counts
        if self._several:
            self._summed_counts = torch.tensor([*counts, *[0] * (MAX_MEANS - len(counts))], dtype=torch.float64)
            with self._guard_counts():
                group = self._context.groups.last_stages
                self._counting.append(dist.all_reduce(self._summed_counts, group=group, async_op=True))

    def finish_counts(self) -> Sequence[float]:
        """What `start_counts` began."""
        while self._counting:
            with self._guard_counts():
                self._counting.pop().wait()
            self._counts = self._summed_counts.tolist()[: len(self._counts)]
        return self._counts

    def _guard_counts(self) -> contextlib.AbstractContextManager[None]:
        ranks = dist.get_process_group_ranks(self._context.groups.last_stages)
        return self._context.board.guard("counting the elements of the loss's means", ranks)

    def start(self, loss: torch.Tensor, mine: StepFacts = NO_FACTS) -> None:
        """Begin to sum `loss` over the pipelines, and what all ranks have found; `finish` gives both. The loss is this
        pipeline's share of the global batch's, shape (), float64; that of the last stage alone is added. On an
        accelerator it is summed there, and no host waits for it."""
        if not self._speaks:
            loss, mine = torch.zeros_like(loss), mine._replace(num_samples=0, num_tokens=0)
        elif not self._counts_samples:
            mine = mine._replace(num_samples=0)
        groups = self._context.groups
        self._sums = torch.tensor([float(loss) if self._on_host else 0.0, *mine], dtype=torch.float64)
        with self._guard("summing losses"):
            if not self._on_host:
                self._loss = loss.clone()
                self._summing.append(dist.all_reduce(self._loss, group=groups.world, async_op=True))
            self._summing.append(dist.all_reduce(self._sums, group=groups.world_control, async_op=True))

    def finish(self) -> tuple[torch.Tensor, StepFacts]:
        """What `start` began: the loss, where it was, and what all ranks have found."""
        with self._guard("summing losses"):
            while self._summing:
                self._summing.pop().wait()
        value, *sums = self._sums.tolist()
        loss = torch.tensor(value, dtype=torch.float64) if self._on_host else self._loss
        return loss, StepFacts(*map(int, sums))

    def sums(self, values: Sequence[float], doing: str = "summing over the pipelines") -> list[float]:
        """Sum what the pipelines' last stages give; what others give counts for nothing. Every rank gets the sums. All
        ranks call this together, with as many values."""
        if not self.shared:
            return list(values)
        sums = torch.tensor(values if self._speaks else [0.0] * len(values), dtype=torch.float64)
        with self._guard(doing):
            dist.all_reduce(sums, group=self._context.groups.world_control)
        return sums.tolist()

    def _guard(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return self._context.board.guard(doing, self._context.everyone)

    def clear(self) -> None:
        """Forget what is under way, so that nothing keeps a dead group's connections open."""
        self._counting.clear()
        self._summing.clear()

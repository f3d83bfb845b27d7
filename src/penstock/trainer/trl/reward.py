"""TRL's RewardTrainer over pipelines: a score for each completion, and a loss of each pair's difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.trainer.own_loss import OwnLoss, Term
from penstock.trainer.trl.pairs import join_pairs, microbatches_of_pairs, num_pairs

# An input that only the loss reads: one number for each pair. TRL gives it to the model, too, which drops it.
MARGIN = "margin"


class Reward(OwnLoss):
    """A batch is [chosen; rejected]; the loss is a mean over its pairs."""

    trainer_class = "trl.RewardTrainer"

    def microbatches(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        return microbatches_of_pairs(batch, self.sizes(num_pairs(batch)))

    def join_rows(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return join_pairs(rows)

    def terms(self) -> Sequence[Term]:
        return [Term(num_pairs)]

    def arguments(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in super().arguments(batch).items() if name != MARGIN}

    def evaluate(
        self,
        model: Callable[..., Any],
        inputs: Mapping[str, Any],
        num_items_in_batch: torch.Tensor | int | None,
        return_outputs: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        def without_margin(margin: Any = None, **arguments: Any) -> Any:
            return model(**arguments)

        return super().evaluate(without_margin, inputs, num_items_in_batch, return_outputs)

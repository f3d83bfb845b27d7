"""TRL's DPOTrainer over pipelines: pairs of completions, and a reference that the model may not leave too far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainingArguments

from penstock.trainer.own_loss import Term
from penstock.trainer.trainer_adapter import not_over_pipelines
from penstock.trainer.trl.pairs import join_pairs, microbatches_of_pairs, num_pairs
from penstock.trainer.trl.reference import AgainstReference

# Of the losses in TRL's list, the one that is a mean over the tokens of the chosen completions.
OVER_TOKENS = ("sft",)


class DPO(AgainstReference):
    """A batch is [chosen; rejected]."""

    trainer_class = "trl.DPOTrainer"

    def refuse_arguments(self, args: TrainingArguments) -> None:
        super().refuse_arguments(args)
        if self.trainer._is_vision_dataset:
            raise not_over_pipelines(
                "DPOTrainer with images",
                "its batches do not say which images a pair has. Leave images out of the data set",
            )

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        chosen, rejected = self.trainer.compute_ref_log_probs(self.trainer.ref_model or self.trainer.model, inputs)
        return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def microbatches(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        return microbatches_of_pairs(batch, self.sizes(num_pairs(batch)))

    def join_rows(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return join_pairs(rows)

    def terms(self) -> Sequence[Term]:
        names, weights = self.trainer.loss_types, self.trainer.loss_weights
        over_pairs = [pair for pair in zip(names, weights, strict=True) if pair[0] not in OVER_TOKENS]
        over_tokens = [pair for pair in zip(names, weights, strict=True) if pair[0] in OVER_TOKENS]
        terms: list[Term] = []
        for count, chosen in ((num_pairs, over_pairs), (_chosen_tokens, over_tokens)):
            if chosen:
                kinds, factors = zip(*chosen, strict=True)
                further = {"aux_loss_enabled": False} if terms else {}  # the router's loss enters one term only
                terms.append(Term(count, {"loss_types": list(kinds), "loss_weights": list(factors), **further}))
        return terms


def _chosen_tokens(batch: Mapping[str, Any]) -> int:
    chosen, _ = batch["completion_mask"][:, 1:].chunk(2)
    return int(chosen.sum())

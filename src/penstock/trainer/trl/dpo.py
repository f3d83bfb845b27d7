"""TRL's DPOTrainer over pipelines: pairs of completions, and a reference that the model may not leave too far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from penstock.trainer.adapter import not_over_pipelines
from penstock.trainer.trl.own_loss import OwnLoss, Term
from penstock.trainer.trl.pairs import joined_pairs, num_pairs, pieces_of_pairs
from penstock.trainer.trl.reference import with_columns

# Of the losses in TRL's list, the one that is a mean over the tokens of the chosen completions.
OVER_TOKENS = "sft"


class DPO(OwnLoss):
    """A batch is [chosen; rejected]. Its reference's log-probabilities are computed before the step, as if they were
    precomputed: by the base of the adapters, or by a second model over the same stages."""

    trainer_class = "DPOTrainer"
    when_completed: ClassVar[Mapping[str, Any]] = {"precompute_ref_logps": True}

    def refuse_plugin(self) -> None:
        raise not_over_pipelines(
            "a HeterogeneousParallelPlugin with DPOTrainer", 'use parallelism={"pipeline_parallel_size": ...}'
        )

    def refuse_arguments(self, args: TrainingArguments) -> None:
        super().refuse_arguments(args)
        if getattr(self.trainer, "_is_vision_dataset", False):
            raise not_over_pipelines("DPOTrainer with images", "its batches do not say which images a pair has")

    @contextmanager
    def while_made(self) -> Iterator[None]:
        self.trainer._precompute_ref_logps = self._precomputed
        with super().while_made():
            yield

    def _precomputed(self, dataset: Any, name: str, batch_size: int) -> Any:
        """In place of the trainer's own method, which refuses data sets without a length."""
        if not hasattr(dataset, "__len__"):
            return type(self.trainer)._precompute_ref_logps(self.trainer, dataset, name, batch_size)
        return with_columns(self.trainer, dataset, batch_size, self._reference)

    def _reference(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        reference = self.trainer.ref_model or self.trainer.model
        chosen, rejected = self.trainer.compute_ref_log_probs(reference, inputs)
        return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def completed(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return inputs if "ref_chosen_logps" in inputs else {**inputs, **self._reference(inputs)}

    def pieces(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        return pieces_of_pairs(batch, self.sizes(num_pairs(batch)))

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return joined_pairs(parts)

    def terms(self) -> Sequence[Term]:
        names, weights = self.trainer.loss_types, self.trainer.loss_weights
        over_pairs = [pair for pair in zip(names, weights, strict=True) if pair[0] != OVER_TOKENS]
        over_tokens = [pair for pair in zip(names, weights, strict=True) if pair[0] == OVER_TOKENS]
        terms: list[Term] = []
        for count, chosen in ((num_pairs, over_pairs), (_chosen_tokens, over_tokens)):
            if chosen:
                kinds, factors = zip(*chosen, strict=True)
                further = {"aux_loss_enabled": False} if terms else {}  # once
                terms.append(Term(count, {"loss_types": list(kinds), "loss_weights": list(factors), **further}))
        return terms


def _chosen_tokens(batch: Mapping[str, Any]) -> int:
    chosen, _ = batch["completion_mask"][:, 1:].chunk(2)
    return int(chosen.sum())

"""TRL's KTOTrainer over pipelines: single completions, each desirable or not, against a reference.

Its loss has a mean over all processes inside: how far the model is from the reference on mismatched pairs of prompt and
completion (KTO, https://arxiv.org/abs/2402.01306, equation 7). These pairs have no gradient, so they run before the
step, and that mean, KL, is known when the first microbatch's loss is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainingArguments

from penstock.data.microbatch import batch_size_of
from penstock.trainer.own_loss import Term
from penstock.trainer.trainer_adapter import not_over_pipelines
from penstock.trainer.trl.reference import AgainstReference

# How the names of the mismatched pairs' inputs and figures begin.
OF_MISMATCHED = ("KL_", "ref_KL_")


class KTO(AgainstReference):
    """The log-probabilities of the mismatched pairs are computed before the step, as the reference's are."""

    trainer_class = "trl.KTOTrainer"

    def refuse_arguments(self, args: TrainingArguments) -> None:
        super().refuse_arguments(args)
        if self.trainer._is_vision_dataset:
            raise not_over_pipelines("KTOTrainer with images", "leave them out of the data set")

    @property
    def precomputed_attributes(self) -> Mapping[str, Any]:  # type: ignore[override]  # read only
        return {**super().precomputed_attributes, "_compute_kl_logps": lambda model, batch: self._mismatched}

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        trainer = self.trainer
        matched, mismatched = trainer.compute_ref_log_probs(trainer.ref_model or trainer.model, inputs)
        return {"ref_logps": matched, **({} if mismatched is None else {"ref_KL_logps": mismatched})}

    def add_precomputed(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        # As the model is now, of shape (samples,); None for a loss without KL.
        self._mismatched: torch.Tensor | None = self.trainer._compute_kl_logps(self.trainer.model, inputs)
        return super().add_precomputed(inputs)

    def microbatches(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Without the mismatched pairs: KL is of the whole batch. It stands in the loss as `logps - reference - KL`
        alone, so it is added to the reference."""
        batch = {**batch, "ref_logps": batch["ref_logps"] + self._kl(batch)}
        return super().microbatches(
            {name: value for name, value in batch.items() if not name.startswith(OF_MISMATCHED)}
        )

    def _kl(self, batch: Mapping[str, Any]) -> torch.Tensor | float:
        """The mean over the mismatched pairs of all pipelines' batches, as TRL has it."""
        if self._mismatched is None:
            return 0.0
        mine = (self._mismatched - batch["ref_KL_logps"]).mean()
        mean: torch.Tensor = self.trainer.accelerator.gather_for_metrics(mine).mean().clamp(min=0)
        return mean

    def terms(self) -> Sequence[Term]:
        return [Term(batch_size_of, changes={"calculate_KL": False})]

"""TRL's ORPOTrainer and CPOTrainer over pipelines: pairs of completions, without a reference.

Each of their losses is a mean over pairs, of how far the chosen completion is preferred, and one over tokens of the
chosen completions, of their log-probability. There is no fused head: as in an evaluation, all ranks of a pipeline are
sent the logits of the batch, for the metrics that are logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainingArguments

from penstock.data.microbatch import batch_size_of
from penstock.trainer.own_loss import OwnLoss, Term
from penstock.trainer.trainer_adapter import not_over_pipelines
from penstock.trainer.trl.fused_head import IGNORED
from penstock.trainer.trl.pairs import join_pairs


class CPO(OwnLoss):
    """A batch has a row for each pair. `compute_loss` calls the model with [chosen; rejected]."""

    trainer_class = "trl.experimental.cpo.CPOTrainer"
    notes_in = ("_stored_metrics",)
    # The trainer's method whose first result is the loss of each pair.
    pair_loss_method = "cpo_loss"

    def refuse_arguments(self, args: TrainingArguments) -> None:
        super().refuse_arguments(args)
        name = type(self.trainer).__name__
        if self.trainer.is_encoder_decoder:
            raise not_over_pipelines(f"{name} with an encoder and a decoder", "take a causal language model")
        if args.generate_during_eval:
            raise not_over_pipelines("generate_during_eval", "call generate() after train()")

    def join_rows(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return join_pairs(rows)

    def terms(self) -> Sequence[Term]:
        over_tokens = {self.pair_loss_method: self._no_preference, "aux_loss_enabled": False}
        return [
            Term(batch_size_of, {"concatenated_forward": self._without_likelihood}),
            Term(self.chosen_tokens, over_tokens),
        ]

    def chosen_tokens(self, batch: Mapping[str, Any]) -> int:
        """The number of tokens in the mean of the chosen completions' log-probabilities."""
        return int((batch["chosen_labels"][:, 1:] != IGNORED).sum())

    def _without_likelihood(self, model: Any, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        forward = self.trainer.concatenated_forward(model, batch)
        return (*forward[:4], torch.zeros_like(forward[4]), *forward[5:])

    def _no_preference(self, *logps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        losses, *metrics = getattr(self.trainer, self.pair_loss_method)(*logps)
        return (torch.zeros_like(losses), *metrics)


class ORPO(CPO):
    """Here the log-probability is that of the prompts, too."""

    trainer_class = "trl.experimental.orpo.ORPOTrainer"
    pair_loss_method = "odds_ratio_loss"

    def chosen_tokens(self, batch: Mapping[str, Any]) -> int:
        return int(batch["chosen_attention_mask"][:, 1:].sum())

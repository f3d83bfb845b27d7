"""TRL's SFTTrainer. It logs metrics besides the loss that are made from logits, which are on the last stage only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from penstock.modeling.graph.chunked_loss import ChunkedLogits
from penstock.trainer.trainer_adapter import Metrics, TrainerAdapter, not_over_pipelines
from penstock.trainer.trl.fused_head import IGNORED

# Logits are looked at in parts of so many numbers, as each part is copied a few times.
PART = 1 << 24


class SFT(TrainerAdapter):
    """SFTTrainer: the model's own loss, with the metrics of `TokenMetrics`. The model runs without TRL's fused head,
    which would give the same loss."""

    trainer_class = "trl.SFTTrainer"

    def refuse_arguments(self, args: TrainingArguments) -> None:
        super().refuse_arguments(args)
        if args.loss_type not in (None, "nll"):
            raise not_over_pipelines(f"loss_type={args.loss_type!r}", "use compute_loss_func")

    def metrics(self, inputs: Mapping[str, Any]) -> Metrics:
        self._weigh_routers()
        return TokenMetrics(self.trainer, inputs)

    def _weigh_routers(self) -> None:
        """Let the model weigh the routers' loss of a mixture of experts as TRL does: averaged over a step's batches."""
        trainer = self.trainer
        if not getattr(trainer, "aux_loss_enabled", False):
            return
        replicas = self.engine.layout.num_replicas if self.engine.own_means else 1
        batches = trainer.current_gradient_accumulation_steps * replicas if torch.is_grad_enabled() else 1
        for module in trainer.model.modules():
            if hasattr(module, "router_aux_loss_coef"):
                module.router_aux_loss_coef = trainer.router_aux_loss_coef / batches


class TokenMetrics:
    """The metrics of one batch of a pipeline, and `aux_loss` of a mixture of experts."""

    def __init__(self, trainer: Trainer, inputs: Mapping[str, Any]) -> None:
        self._trainer = trainer
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        # As TRL counts them: a packed row has no mask.
        counted = 0 if positions is None else positions.shape[1]
        self._num_tokens = int(mask.sum()) if mask is not None else counted
        self._sums: torch.Tensor | None = None

    def add(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Take the metrics of the outputs of the batch or of a microbatch; outputs without logits have none."""
        logits, routers = outputs.get("logits"), outputs.get("aux_loss")
        if not isinstance(logits, torch.Tensor):
            return
        if isinstance(logits, DTensor):  # the vocabulary is shared out among tensor-parallel ranks, which all come here
            logits = logits.full_tensor()
        samples = torch.tensor(float(len(logits)), dtype=torch.float64, device=logits.device)
        weighed = torch.zeros_like(samples) if routers is None else routers.detach().to(samples) * samples
        sums = torch.cat([token_sums(logits, following_labels(inputs)), torch.stack([weighed, samples])])
        self._sums = sums if self._sums is None else self._sums + sums

    def note(self) -> None:
        """Add the metrics of all pipelines' batches to what the trainer logs next. Every rank calls this."""
        trainer = self._trainer
        engine, state = trainer.pipelines.engine, trainer.accelerator.gradient_state
        layout, pipeline = engine.layout, engine.place.pipeline
        numbers = [*([0.0] * 5 if self._sums is None else self._sums.tolist()), float(self._num_tokens)]
        if layout.part_of(pipeline):  # all parts were given the tokens
            numbers[-1] = 0.0
        every = torch.zeros(layout.num_replicas, len(numbers), dtype=torch.float64)
        every[layout.replica_of(pipeline)] = torch.tensor(numbers, dtype=torch.float64)
        every = torch.tensor(engine.sum_over_pipelines(every.flatten().tolist()), dtype=every.dtype).view(every.shape)
        if state.end_of_dataloader and state.remainder > 0:
            every = every[: state.remainder]  # as accelerate does, of what fills up the last batches
        entropy, right, labels, routers, samples, tokens = every.sum(0).tolist()
        mode = "train" if trainer.model.training else "eval"
        if mode == "train":
            trainer._total_train_tokens += int(tokens)
        metrics = trainer._metrics[mode]
        metrics["entropy"].append(entropy / labels if labels else 0.0)
        metrics["mean_token_accuracy"].append(right / labels if labels else 0.0)
        metrics["num_tokens"] = [trainer._total_train_tokens]
        if getattr(trainer, "aux_loss_enabled", False):
            metrics["aux_loss"].append(routers / samples)


def following_labels(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Of each token the label of the one that follows. In a part of a sequence they were shifted before it was cut."""
    shifted: torch.Tensor | None = inputs.get("shift_labels")
    if shifted is not None:
        return shifted
    return torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)


def token_sums(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Over the tokens that have a label: the entropy of their prediction, whether it is right, and 1, summed up in
    float64, shape (3,). `logits`: (samples, tokens, vocabulary), of the token that follows; `following`: its label."""
    sums = torch.zeros(3, dtype=torch.float64, device=logits.device)
    count = max(1, PART // logits.shape[-1])
    with torch.no_grad():
        following = following.to(logits.device)
        if isinstance(logits, ChunkedLogits):
            rows: Iterable[torch.Tensor] = logits.in_parts(count)
        else:
            rows = logits.detach().flatten(0, -2).split(count)
        for chunk, wanted in zip(rows, following.flatten().split(count), strict=True):
            kept = wanted != IGNORED
            raised = chunk[kept]
            raised = raised if raised.dtype == torch.float64 else raised.to(torch.float32)
            # Not p log p: a token that cannot be is -inf in the logits.
            entropy = torch.special.entr(raised.softmax(-1)).sum(dtype=torch.float64)
            right = (raised.argmax(-1) == wanted[kept]).sum()
            sums += torch.stack([entropy, right.to(torch.float64), kept.sum().to(torch.float64)])
    return sums

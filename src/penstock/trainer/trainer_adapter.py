"""What one kind of Trainer computes and logs in a step and in an evaluation, over whatever pipelines.

`TrainerAdapter` is that of transformers' own `Trainer`. A trainer of TRL with a loss or metrics of its own has a class
in `penstock.trainer.trl`, chosen by `choose_adapter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol
from unittest import mock

import torch
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.data.packed import LENGTHS, cut_packed, is_packed
from penstock.modeling.graph.loss import NUM_ITEMS, Criterion
from penstock.modeling.libraries import base_of, configuration_of
from penstock.runtime.engine import DEFAULT_MICROBATCHES_PER_RANK, Engine


def not_over_pipelines(name: str, instead: str) -> ValueError:
    """The error for what a Trainer can do alone, and what to do instead."""
    return ValueError(f"{name} does not work over pipelines: {instead}")


def counting_alone(args: TrainingArguments) -> AbstractContextManager[Any]:
    """Inside, a Trainer with these arguments counts the labels of its own pipeline's batches alone."""
    counting: AbstractContextManager[Any] = mock.patch.object(args, "average_tokens_across_devices", False)
    return counting


class Metrics(Protocol):
    """What a trainer logs of one batch of a pipeline besides the loss."""

    def add(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Take what there is to see in the outputs for some inputs: of a microbatch, or of the whole batch. Ranks
        without the last stage have outputs without logits."""

    def note(self) -> None:
        """Add the metrics of all pipelines' batches to what the trainer logs next. Every rank calls this."""


class NoMetrics:
    """Of a trainer that logs nothing besides the loss."""

    def add(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        pass

    def note(self) -> None:
        pass


class TrainerAdapter:
    """What transformers' Trainer computes: the model's own loss, that of `compute_loss_func`, or a smoothed one.

    It is made before the Trainer's own `__init__`. Every rank makes every call, in the same order, but for those of the
    criterion, which the last stage makes.

    Attributes:
        trainer_class: where TRL gives users the class which this adapter is for: "trl.DPOTrainer".
        owner: the trainer's class, or the base of it, whose `compute_loss` is adapted.
    """

    trainer_class: ClassVar[str] = ""

    def __init__(self, trainer: Trainer, owner: type[Trainer]) -> None:
        self.trainer, self.owner = trainer, owner

    @property
    def engine(self) -> Engine:
        engine: Engine = self.trainer.pipelines.engine
        return engine

    def while_made(self) -> AbstractContextManager[None]:
        """Around the Trainer's own `__init__`."""
        return nullcontext()

    # -- checks ----------------------------------------------------------------------------------------------------

    def refuse_plugin(self) -> None:
        """Raise ValueError if this trainer cannot train over a plugin's pipelines."""

    def refuse_parts(self) -> None:
        """Raise NotImplementedError if this trainer cannot train where each pipeline has a part of every sequence."""

    def refuse_arguments(self, args: TrainingArguments) -> None:
        """Raise ValueError for arguments that this trainer alone has, and that cannot be used over pipelines. No rank
        waits for another yet."""

    def begin(self) -> None:
        """Take up the trainer, whose own `__init__` has returned."""
        for name in ("compute_loss_func", "label_smoother"):
            if getattr(self.trainer, name, None) is not None and not self.trainer.model_accepts_loss_kwargs:
                raise not_over_pipelines(
                    name,
                    "this model's forward takes no num_items_in_batch to divide the loss by"
                    ". Leave it out, and let the model compute its own loss",
                )

    # -- a training step -------------------------------------------------------------------------------------------

    def step_inputs(
        self, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None
    ) -> Mapping[str, Any]:
        """What a training step on this pipeline's batch calls the model with.

        Args:
            inputs: the batch, as the Trainer has prepared it.
            num_items_in_batch: the number of labels in all batches that one optimizer step takes, if the Trainer has
                counted them.
        """
        if self.trainer.model_accepts_loss_kwargs:
            inputs = self.with_num_items(inputs, num_items_in_batch)
        return self._cut(inputs)

    @property
    def criterion(self) -> Criterion | None:
        """What computes the loss from the outputs, `compute_loss_func` or label smoothing; None for the model."""
        function = getattr(self.trainer, "compute_loss_func", None) or getattr(self.trainer, "label_smoother", None)
        return self._own_loss if function else None

    def divisor(self, inputs: Mapping[str, Any]) -> int:
        """The loss of a batch is divided by this before its backward.

        - A loss that is divided by `num_items_in_batch`, the number of labels in all batches of an optimizer's step, is
          its part of the sum already: by 1, or by the batches of an accumulation if the trainer's
          `loss_is_scaled_for_ga` is False.
        - Another one is a mean of its own, and the step's loss is the mean of these: by the batches of an accumulation,
          unless that attribute is True; and by the replicas, if the engine only adds up their means
          (`Engine.own_means`).
        """
        of_all = NUM_ITEMS in inputs
        scaled = self.trainer.loss_is_scaled_for_ga  # what the user's class says of an accumulation, if it does
        batches: int = 1 if (of_all if scaled is None else scaled) else self.trainer.current_gradient_accumulation_steps
        return batches * self.engine.layout.num_replicas if self.engine.own_means and not of_all else batches

    def metrics(self, inputs: Mapping[str, Any]) -> Metrics:
        """What is logged of a batch, as the Trainer has prepared it, besides the loss. In a training step it is asked
        after `step_inputs`."""
        return NoMetrics()

    def with_num_items(
        self, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None
    ) -> Mapping[str, Any]:
        """The inputs of a training step with the number of labels that its loss is divided by, if it is known. Raises
        ValueError if it is not, but the loss is not the model's own."""
        if num_items_in_batch is not None:
            inputs = {**inputs, NUM_ITEMS: torch.as_tensor(num_items_in_batch)}
        if self.criterion is not None and not (NUM_ITEMS in inputs and "labels" in inputs):
            raise ValueError(
                "compute_loss_func and label_smoothing_factor need batches with labels, a tensor, to be exact over "
                f"pipelines; this one has {', '.join(inputs)}"
            )
        return inputs

    def _own_loss(self, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        if getattr(self.trainer, "compute_loss_func", None) is not None:
            function, shifting = self.trainer.compute_loss_func, {}
        else:
            shifted = type(base_of(self.trainer.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            function, shifting = self.trainer.label_smoother, {"shift_labels": shifted}
        loss: torch.Tensor = function(outputs, inputs["labels"], num_items_in_batch=inputs[NUM_ITEMS], **shifting)
        return loss

    def _cut(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs; a packed row of sequences is split into microbatches."""
        if not is_packed(inputs):
            return inputs
        inputs, engine = self._without_lengths(inputs), self.engine
        wanted = engine.options.num_microbatches or DEFAULT_MICROBATCHES_PER_RANK * engine.context.pipeline.num_ranks
        if engine.options.microbatch_size is not None:  # of the samples that were packed into one row
            wanted = math.ceil(self.trainer.args.per_device_train_batch_size / engine.options.microbatch_size)
        pieces = cut_packed(inputs, wanted, first_microbatch=engine.context.replica * wanted)
        return {**inputs, **pieces}

    def _without_lengths(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs without what only kernels of flash attention read: it would make another plan for each batch."""
        if "flash" in str(getattr(configuration_of(self.trainer.model), "_attn_implementation", "")):
            return inputs
        return {name: value for name, value in inputs.items() if name not in LENGTHS}

    # -- evaluation ------------------------------------------------------------------------------------------------

    def counting_labels(self) -> AbstractContextManager[None]:
        """Around an evaluation's step, in which the Trainer counts labels: of this pipeline's batch, as the loss is."""
        return counting_alone(self.trainer.args)

    def evaluate(
        self,
        model: Callable[..., Any],
        inputs: Mapping[str, Any],
        num_items_in_batch: torch.Tensor | int | None,
        return_outputs: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        """The loss of this pipeline's batch, and the model's outputs for it, at least if `return_outputs`, without
        gradients."""
        inputs = self._without_lengths(inputs)
        metrics: Metrics = self.trainer.pipelines.metrics(inputs)
        # Not that of the trainer's class, which may look at logits for its metrics.
        loss, outputs = Trainer.compute_loss(self.trainer, model, {**inputs}, True, num_items_in_batch)
        if self.engine.context.holds_output:
            metrics.add(outputs, inputs)
        metrics.note()
        return loss, outputs

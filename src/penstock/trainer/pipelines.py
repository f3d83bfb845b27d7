"""Over which pipelines a Trainer trains: `EqualPipelines`, all of as many stages, or a plugin's.

The mixin asks its `pipelines` wherever these differ. Whether there is a plugin it asks once, when it makes them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from transformers import Trainer, TrainingArguments

from penstock.api.initialize import ConfigLike, initialize
from penstock.checkpoint.training_state import capture_random_state, restore_random_state
from penstock.config.configuration import Configuration
from penstock.model.pipeline_model import PipelineModel, loss_tensor
from penstock.runtime.engine import Engine
from penstock.trainer.accelerator import PipelineAccelerator
from penstock.trainer.trainer_adapter import Metrics, TrainerAdapter, not_over_pipelines

T = TypeVar("T")


class Pipelines(ABC):
    """What a Trainer does differently for the pipelines that it trains over. Every rank makes every call.

    Where a method is given `own`, that is the Trainer's own method of the same purpose.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def adapter(self) -> TrainerAdapter:
        adapter: TrainerAdapter = self.trainer.adapter
        return adapter

    @property
    def engine(self) -> Engine:
        """That of the parallelised model."""
        if not isinstance(self.trainer.model, PipelineModel):
            raise ValueError(
                'PipelineTrainer needs parallelism={"pipeline_parallel_size": ...}, or a model that '
                "penstock.initialize() has parallelised"
            )
        return self.trainer.model.pipeline

    # -- forming ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def refuse_arguments(self, args: TrainingArguments) -> None:
        """Raise ValueError for arguments that cannot be used. No rank waits for another yet."""

    @property
    @abstractmethod
    def parallelises(self) -> bool:
        """Whether these pipelines are still to be formed, of a whole model."""

    @abstractmethod
    def build(self) -> None:
        """Parallelise the Trainer's model and set up its accelerator, if its pipelines are known already."""

    @abstractmethod
    def samples_per_step(self, args: TrainingArguments) -> int:
        """Samples in an optimizer's step, over all pipelines."""

    # -- a run -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def loader(self, own: Callable[[], Any]) -> Any:
        """The loader of the training data."""

    @abstractmethod
    def begin(
        self, place: tuple[int, int], max_steps: int, steps_per_epoch: int, folder: str | None
    ) -> tuple[int, int]:
        """Be ready to train from the checkpoint in `folder`, or from the start. Returns the epoch, and the batch in it,
        to begin with. `place`: those that the Trainer itself has found."""

    @abstractmethod
    def prepare(self, own: Callable[[], tuple[Any, Any]], loader: Any) -> tuple[Any, Any]:
        """The model to train, and what the Trainer's loop over an epoch goes over."""

    @abstractmethod
    def begin_epoch(self, epoch: int) -> bool:
        """Go to where an epoch begins here, or goes on. Returns whether the Trainer must skip the steps that were made
        before, although it has loaded no checkpoint."""

    @abstractmethod
    def step(self, inputs: Any, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
        """Forward and backward of a batch; see `TrainerAdapter.step_inputs`. Returns its loss over all pipelines, on
        every rank: ()."""

    @abstractmethod
    def metrics(self, inputs: Mapping[str, Any]) -> Metrics:
        """What is logged of a batch, as the Trainer has prepared it, besides the loss."""

    @abstractmethod
    def repeated_after_loss(self, work: Callable[[], T]) -> T:
        """Do what all ranks do together outside of a step, again after one was lost meanwhile."""

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @abstractmethod
    def load_weights(self, folder: str) -> None:
        """Load the weights of a checkpoint, where the Trainer does."""

    @abstractmethod
    def save_random_state(self, own: Callable[[], None]) -> None:
        """Save the states of the random generators."""

    @abstractmethod
    def note_random_state(self, folder: str) -> None:
        """Keep the states to which the random generators were set as the optimizer's state in `folder` was loaded."""

    @abstractmethod
    def load_random_state(self, own: Callable[[], None], folder: str) -> None:
        """Load what `save_random_state` saved."""


class EqualPipelines(Pipelines):
    """Pipelines that all have as many stages: those of `parallelism`, or of a model that is parallelised already."""

    def __init__(self, trainer: Trainer, parallelism: ConfigLike | None) -> None:
        super().__init__(trainer)
        self._random_states: dict[str, dict[str, Any]] = {}  # by the folder of a checkpoint
        self._parallelism = None if parallelism is None else Configuration.from_any(parallelism)
        if self._parallelism is not None and not self._parallelism.enable:
            raise ValueError("parallelism with enable=False is no parallelism: use the Trainer itself")

    def refuse_arguments(self, args: TrainingArguments) -> None:
        pass

    @property
    def parallelises(self) -> bool:
        return self._parallelism is not None

    def build(self) -> None:
        trainer = self.trainer
        if self._parallelism is not None:
            trainer.model = initialize(trainer.model, self._parallelism)
        engine = self.engine
        if trainer.model.configuration is None:
            raise ValueError(
                "PipelineTrainer takes equal pipelines, but HeterogeneousParallelPlugin made this model's"
                ": give the Trainer the whole model, and parallelism=plugin"
            )
        if len(engine.layout.pipelines) > 1 and not trainer.args.average_tokens_across_devices:
            raise not_over_pipelines(
                "average_tokens_across_devices=False",
                "a loss is always over all pipelines' batches together. Leave it out",
            )
        # On a CPU accelerate has nothing for fp16, and the plain Trainer goes on in the model's own type.
        halves = {"bf16": torch.bfloat16, "fp16": torch.float16} if trainer.accelerator.native_amp else {}
        engine.autocast = halves.get(trainer.accelerator.mixed_precision)
        # As in the plain Trainer, for which a batch is what one process has. Of one in parts no pipeline has the mean.
        engine.own_means = engine.layout.context_parallel_size == 1
        if not engine.own_means:
            trainer.adapter.refuse_parts()
        PipelineAccelerator.take_over(trainer.accelerator, trainer.model)

    def samples_per_step(self, args: TrainingArguments) -> int:
        per_pipeline: int = self.trainer._train_batch_size * args.gradient_accumulation_steps
        return per_pipeline * self.engine.layout.num_replicas

    def loader(self, own: Callable[[], Any]) -> Any:
        return own()

    def begin(
        self, place: tuple[int, int], max_steps: int, steps_per_epoch: int, folder: str | None
    ) -> tuple[int, int]:
        return place

    def prepare(self, own: Callable[[], tuple[Any, Any]], loader: Any) -> tuple[Any, Any]:
        return own()

    def begin_epoch(self, epoch: int) -> bool:
        return False

    def step(self, inputs: Any, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
        """Gradients are summed over pipelines with the last batch of an accumulation: the Trainer calls this for each
        batch, and for all but the last inside `accelerator.no_sync(model)`, which is `PipelineModel.no_sync`."""
        trainer, adapter, engine = self.trainer, self.adapter, self.engine
        batch = trainer._prepare_inputs(inputs)
        step_inputs = adapter.step_inputs(batch, num_items_in_batch)
        divisor, metrics = adapter.divisor(step_inputs), self.metrics(batch)
        with trainer.compute_loss_context_manager():
            loop = engine.train(step_inputs, adapter.criterion)
            for output in loop:
                metrics.add(output, loop.inputs)
                trainer.accelerator.backward(output.loss / divisor)
        metrics.note()
        return loss_tensor(engine, engine.last_step.global_loss / divisor).to(trainer.args.device)

    def metrics(self, inputs: Mapping[str, Any]) -> Metrics:
        return self.adapter.metrics(inputs)

    def repeated_after_loss(self, work: Callable[[], T]) -> T:
        return work()

    def load_weights(self, folder: str) -> None:
        self.trainer.load_weights(folder)

    def save_random_state(self, own: Callable[[], None]) -> None:
        own()

    def note_random_state(self, folder: str) -> None:
        self._random_states = {folder: capture_random_state()}

    def load_random_state(self, own: Callable[[], None], folder: str) -> None:
        """Call the Trainer's `own`, then set those that `load_optimizer_state` has chosen for this rank: the loader has
        drawn from them since. In a folder without an optimizer's state each rank has its own, if there are as many."""
        saved = [name for name in os.listdir(folder) if name.startswith("rng_state")]
        if folder in self._random_states or len(saved) == self.trainer.args.world_size:
            own()
        if folder in self._random_states:
            restore_random_state(self._random_states[folder])

"""transformers' Trainer over pipeline stages: `PipelineTrainer`, and a mixin for classes derived from `Trainer`."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

if importlib.util.find_spec("accelerate") is None:
    raise ImportError(
        "penstock.integrations.transformers needs accelerate, as transformers' Trainer does: "
        'pip install "penstock[trainer]"'
    )

import torch
from transformers import Trainer
from transformers.optimization import AdafactorSchedule
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from penstock.api.initialize import ConfigLike
from penstock.api.plugin import HeterogeneousParallelPlugin
from penstock.checkpoint.files import load_data
from penstock.checkpoint.formats import TRAINING_VARIANT
from penstock.checkpoint.manifest import manifest_name
from penstock.checkpoint.model_methods import load_optimizer_state, save_optimizer_state
from penstock.checkpoint.training_state import restore_object
from penstock.model.pipeline_model import PipelineModel, PipelinePreTrainedModel, num_parameters_of_whole
from penstock.modeling.libraries import base_of
from penstock.modeling.placeholders.ghosts import shown_whole
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.comm.settings import bits_of, float_of
from penstock.runtime.engine import Engine
from penstock.trainer.choose_adapter import adapter_of
from penstock.trainer.decisions import CommonDecisions
from penstock.trainer.pipelines import EqualPipelines, Pipelines
from penstock.trainer.plugin_pipelines import PluginPipelines
from penstock.trainer.trainer_adapter import not_over_pipelines

logger = logging.getLogger(__name__)

SCHEDULER_FILE = "scheduler.pt"
OPTIMIZER_FILE = "optimizer.pt"

# What may not be set, by the name of the argument, and what to do instead.
REFUSED_IF_SET = {
    "torch_compile": "compile the model's blocks before the Trainer takes it",
    "use_liger_kernel": "apply Liger's kernels to the model before the Trainer takes it",
    "neftune_noise_alpha": "it draws its noise on the first stage only: add the noise in the model's own code",
    "auto_find_batch_size": "give per_device_train_batch_size",
    "torch_empty_cache_steps": "call torch.cuda.empty_cache() in a callback",
    "eval_use_gather_object": "let the model return tensors",
    "enable_jit_checkpoint": "use save_strategy and save_steps",
    "debug": "leave it out: it looks at values of other stages. torch.autograd.set_detect_anomaly works",
    "activation_offloading": "use gradient_checkpointing, or torch.autograd.graph.save_on_cpu() around train()",
    "save_on_each_node": "all ranks must share a file system",
    "push_to_hub": "push the saved folder afterwards: it is an ordinary one",
    "deepspeed": "leave it out: the pipelines take its place",
    "fsdp": "leave it out: the pipelines take its place",
    "parallelism_config": "use parallelism=... of the Trainer",
}


def replaces_trainer_method(ours: Callable[..., Any]) -> Any:
    """Makes `ours`, a method of the mixin, replace the Trainer's method of its name, for the mixin's objects.

    `ours` stands in for `Trainer`'s own method, last in the order of classes: methods of TRL's or the user's classes
    run first, and reach it by `super()`. So the class `Trainer` has `ours` while the method runs, in the whole process.
    Other trainers still find their own method: `instead` looks who calls. Calls may be nested, as in a callback that
    trains a second model. They may not overlap in two threads; neither could what two threads of one rank send."""
    name = ours.__name__

    @functools.wraps(ours)
    def entered(self: PipelineTrainerMixin, *args: Any, **kwargs: Any) -> Any:
        original = getattr(Trainer, name)

        def instead(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            return (ours if trainer is self else original)(trainer, *args, **kwargs)

        with mock.patch.object(Trainer, name, instead):
            return getattr(super(PipelineTrainerMixin, self), name)(*args, **kwargs)

    return entered


def wraps_trainer_method(ours: Callable[..., Any]) -> Any:
    """As `replaces_trainer_method`, but `ours(self, own, *args)` runs around the Trainer's method: `own()` calls that
    with the same arguments."""
    original = getattr(Trainer, ours.__name__)

    @functools.wraps(ours)
    def around_original(self: PipelineTrainerMixin, *args: Any) -> Any:
        return ours(self, partial(original, self, *args), *args)

    return replaces_trainer_method(around_original)


def _num_parameters_without_embeddings(engine: Engine) -> int:
    return num_parameters_of_whole(engine.split.model, only_trainable=False, exclude_embeddings=True)


class PipelineTrainerMixin(Trainer):  # type: ignore[misc]  # a library without types
    """A mixin to put before a class derived from transformers' `Trainer`: it trains the model over pipeline stages.

    All other arguments are the Trainer's. Every rank runs the same script, and every call is made on every rank. A
    batch is one pipeline's: `per_device_train_batch_size` samples for each pipeline, not for each rank.

    Args:
        parallelism: the section "model_parallelism" of the configuration as a dict, such as
            `{"pipeline_parallel_size": 2}`, or whatever `penstock.initialize` takes. Or a HeterogeneousParallelPlugin,
            for pipelines of different depth, or with `elastic=` for a run that survives lost processes. None for a
            model that `penstock.initialize`, `from_pretrained` or `from_config` has parallelised.

    Raises:
        ValueError: an argument cannot be used over pipelines; names it, on all ranks alike.
        what `penstock.initialize` raises.
    """

    model: Any
    callback_handler: CommonDecisions
    # Whether what is logged next is a training step's.
    _logs_a_step = False
    # As for a batch by itself; train() sets it for each step.
    current_gradient_accumulation_steps = 1

    def __init__(
        self, *args: Any, parallelism: ConfigLike | HeterogeneousParallelPlugin | None = None, **kwargs: Any
    ) -> None:
        self.adapter = adapter_of(self, PipelineTrainerMixin)
        self.pipelines: Pipelines = (
            PluginPipelines(self, parallelism)
            if isinstance(parallelism, HeterogeneousParallelPlugin)
            else EqualPipelines(self, parallelism)
        )
        if kwargs.get("peft_config") is not None and isinstance(
            args[0] if args else kwargs.get("model"), PipelineModel
        ):
            raise not_over_pipelines(
                "peft_config", "the model is parallelised already. Give the whole model, and parallelism=... as well"
            )
        with self.adapter.while_made():
            super().__init__(*args, **kwargs)
        self.callback_handler = CommonDecisions(self.callback_handler, self._exchange_decisions)
        if isinstance(self.lr_scheduler, AdafactorSchedule):
            self.lr_scheduler.__class__ = _RatesOfThisRank
        self.adapter.begin()

    # -- forming ---------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse arguments that cannot be used, parallelise the model, and set up the accelerator."""
        self._refuse_arguments()
        if self.model is None:
            raise not_over_pipelines("model_init", "give the model itself")
        super().create_accelerator_and_postprocess()
        if self.args.gradient_checkpointing and self.pipelines.parallelises:
            # As `train` does, which gives it its arguments; the default schedule depends on it.
            renamed = "activation_checkpointing_enable"
            getattr(self.model, renamed if hasattr(self.model, renamed) else "gradient_checkpointing_enable")()
        self.pipelines.build()

    def _refuse_arguments(self) -> None:
        self.pipelines.refuse_arguments(self.args)
        self.adapter.refuse_arguments(self.args)
        for name, instead in REFUSED_IF_SET.items():
            if getattr(self.args, name, None):
                raise not_over_pipelines(name, instead)
        if self.args.train_sampling_strategy == "batch_rebalance":
            raise not_over_pipelines("train_sampling_strategy='batch_rebalance'", "use 'random' or 'group_by_length'")
        optim = getattr(self.args.optim, "value", self.args.optim)
        if any(word in optim for word in ("lomo", "layerwise")):
            raise not_over_pipelines(f"{optim=}", "it steps inside the backward. Take another optim")
        if getattr(self.args.accelerator_config, "dispatch_batches", None):
            raise not_over_pipelines(
                "accelerator_config.dispatch_batches", "each pipeline reads its own batches. Leave it out"
            )

    @replaces_trainer_method
    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Do nothing: the model is on its device already."""

    @replaces_trainer_method
    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples in an optimizer's step, over all pipelines."""
        return self.pipelines.samples_per_step(args)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. With `resume_from_checkpoint=True` it goes on from the newest checkpoint that is whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_whole(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # -- a run -----------------------------------------------------------------------------------------------------

    @wraps_trainer_method
    def get_train_dataloader(self, own: Callable[[], Any]) -> Any:
        return self.pipelines.loader(own)

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, *args: Any) -> tuple[int, int]:
        place = super()._init_training_state(max_steps, steps_per_epoch, *args)
        _, checkpoint, _ = args
        return self.pipelines.begin(place, max_steps, steps_per_epoch, checkpoint)

    @wraps_trainer_method
    def _prepare_for_training(
        self, own: Callable[[], Any], max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        return self.pipelines.prepare(own, train_dataloader)

    def _run_epoch(self, **given: Any) -> None:
        if self.pipelines.begin_epoch(given["epoch"]):
            given["resume_from_checkpoint"] = True
        super()._run_epoch(**given)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self.pipelines.repeated_after_loss(partial(super().evaluate, *args, **kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self.pipelines.repeated_after_loss(partial(super().predict, *args, **kwargs))

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's: an ordinary folder of the whole model."""
        self.pipelines.repeated_after_loss(partial(super().save_model, *args, **kwargs))

    # -- decisions of callbacks ------------------------------------------------------------------------------------

    def _exchange_decisions(self, mine: Sequence[int]) -> Mapping[int, Sequence[int]]:
        def exchange() -> Mapping[int, Sequence[int]]:
            with self.pipelines.engine.together(Call.DECIDE, mine) as facts_by_rank:
                return facts_by_rank

        exchanged: Mapping[int, Sequence[int]] = self.pipelines.repeated_after_loss(exchange)
        return exchanged

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, which all ranks call: they log a step together, or none does."""
        self._logs_a_step = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._logs_a_step = False

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **kwargs)
        if self._logs_a_step:
            self._logs_a_step = False
            self.callback_handler.agree(self.control)

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """Whether this evaluation was the best by rank 0's metrics, also if another rank's differ."""
        is_best: bool = super()._determine_best_metric(*args, **kwargs)
        if self.args.metric_for_best_model is None:
            return is_best
        state = self.state
        mine = [int(is_best), state.best_global_step or 0, bits_of(float(state.best_metric))]
        by_rank = self._exchange_decisions(mine)
        if (first := list(by_rank[min(by_rank)][:3])) != mine:
            state.best_global_step, state.best_metric = first[1] or None, float_of(first[2])
        return bool(first[0])

    @replaces_trainer_method
    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError(
            "push_to_hub() of a PipelineTrainer: call trainer.save_model(folder) on every rank, and then "
            "huggingface_hub.upload_folder(repo_id=..., folder_path=folder) on one"
        )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, by all ranks; then tells the engine where a run goes on from."""
        self.pipelines.repeated_after_loss(partial(super()._save_checkpoint, *args, **kwargs))
        engine = self.pipelines.engine
        resume = engine.board.resume
        resume.clear()
        resume["trainer"] = "trainer.train(resume_from_checkpoint=True)"
        path = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        engine.recovery.note_saved(path)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As the Trainer's. On a rank that has nothing to train it gets what `model.parameters()` ends with."""
        made: torch.optim.Optimizer = super().create_optimizer(model)
        if not any(group["params"] for group in made.param_groups):
            made.param_groups[-1]["params"] += [
                parameter for parameter in self.model.parameters() if parameter.requires_grad
            ]
        return made

    # -- steps -----------------------------------------------------------------------------------------------------

    @replaces_trainer_method
    def training_step(
        self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of a batch in microbatches. Returns its loss over all pipelines, on every rank: ()."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        return self.pipelines.step(inputs, num_items_in_batch)

    @wraps_trainer_method
    def floating_point_ops(self, own: Callable[[], int], inputs: Mapping[str, Any]) -> int:
        """As the Trainer's, of the whole model on every rank."""
        base = base_of(self.model)
        if not isinstance(base, PipelinePreTrainedModel):
            with shown_whole(self.model):
                return own()
        number = base.pipeline.of_formation(_num_parameters_without_embeddings)  # the same for every batch
        with mock.patch.object(self.model, "num_parameters", lambda exclude_embeddings: number):
            return own()

    def get_num_trainable_parameters(self) -> int:
        """Of the whole model. Every rank calls it."""
        if not isinstance(base_of(self.model), PipelineModel):  # before an elastic run, which then forms its pipelines
            return sum(each.numel() for each in self.model.parameters() if each.requires_grad)
        return num_parameters_of_whole(self.model, only_trainable=True, exclude_embeddings=False)

    @wraps_trainer_method
    def store_flos(self, own: Callable[[], None]) -> None:
        """As the Trainer's, which sums them over all ranks: each batch counts once."""
        if self.pipelines.engine.rank not in self.accelerator.first_ranks:
            self.current_flos *= 0  # of the type that the first ranks have
        own()

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In evaluation: the loss of this pipeline's batch. Training does not call it."""
        if torch.is_grad_enabled():
            raise RuntimeError("over pipelines compute_loss is for evaluation only: training runs in training_step")
        loss, outputs = self.adapter.evaluate(model, inputs, num_items_in_batch, return_outputs)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_below(self, *args: Any, **kwargs: Any) -> Any:
        """The `compute_loss` of the class that the mixin stands before."""
        return super().compute_loss(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a loss is of this pipeline's batch alone."""
        with self.adapter.counting_labels():
            return super().prediction_step(*args, **kwargs)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @replaces_trainer_method
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write an ordinary folder of the whole model; all ranks take part."""
        folder = self.args.output_dir if output_dir is None else output_dir
        # Not by the Trainer's own method: of a module of the user's it would write this rank's stages alone.
        self.model.save_parallelized(folder, merge_checkpoints=True, safe_serialization=True)
        if not self.args.should_save:
            return
        processing_class = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing_class is not None:
            processing_class.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    @replaces_trainer_method
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the optimizer's state, each rank its part, and the scheduler's as the Trainer does."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_FILE))
        save_optimizer_state(self.optimizer, self.pipelines.engine, output_dir)

    @wraps_trainer_method
    def _save_rng_state(self, own: Callable[[], None], output_dir: str) -> None:
        self.pipelines.save_random_state(own)

    @replaces_trainer_method
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of this rank's stages; the folder may be of any number of stages, or of a plain Trainer."""
        self.pipelines.load_weights(resume_from_checkpoint)

    def load_weights(self, folder: str) -> None:
        """Load the weights of this rank's stages from `folder`, which may be of a plain Trainer."""
        self.pipelines.engine.refuse_if_over()
        self.model.load_ordinary(folder)

    @replaces_trainer_method
    def _load_best_model(self) -> None:
        self.pipelines.repeated_after_loss(partial(self.load_weights, self.state.best_model_checkpoint))

    @replaces_trainer_method
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what `_save_optimizer_and_scheduler` wrote, from any number of stages."""
        if checkpoint is None:
            return
        if not os.path.exists(os.path.join(checkpoint, manifest_name(TRAINING_VARIANT))):
            if os.path.exists(os.path.join(checkpoint, OPTIMIZER_FILE)):
                raise ValueError(
                    f"{checkpoint} has the optimizer of a Trainer without pipelines, which cannot be continued: remove "
                    f"{OPTIMIZER_FILE} to continue with its weights and a new optimizer"
                )
            logger.warning("%s has no optimizer state: training goes on with a new optimizer", checkpoint)
            return
        load_optimizer_state(self.optimizer, self.pipelines.engine, checkpoint)
        self.pipelines.note_random_state(checkpoint)
        path = os.path.join(checkpoint, SCHEDULER_FILE)
        restore_object(self.lr_scheduler, load_data(path), f"the scheduler's state in {path}")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.pipelines.load_random_state(partial(super()._load_rng_state, checkpoint), checkpoint)


class PipelineTrainer(PipelineTrainerMixin):
    """transformers' `Trainer` over pipeline stages: the same arguments, and `parallelism`."""


class _RatesOfThisRank(AdafactorSchedule):  # type: ignore[misc]  # a library without types
    """Shows the rate of the first parameter that this rank trains, as another rank may have the model's first."""

    def get_lr(self) -> list[float]:
        optimizer: Any = self.optimizer
        rates = []
        for group, base in zip(optimizer.param_groups, self.base_lrs, strict=True):
            first = next((parameter for parameter in group["params"] if parameter.grad is not None), None)
            rates.append(base if first is None else optimizer._get_lr(group, optimizer.state[first]))
        return rates


def _newest_whole(folder: str) -> str | None:
    """The newest of the Trainer's checkpoints that is whole: it has the file which rank 0 writes last."""
    folders = [path for path in Path(folder).glob("checkpoint-*") if path.name.partition("-")[2].isdecimal()]
    whole = [path for path in folders if (path / TRAINER_STATE_NAME).exists()]
    return str(max(whole, key=lambda path: int(path.name.partition("-")[2]))) if whole else None

"""transformers' Trainer over pipeline stages: `PipelineTrainer`, and a mixin for classes derived from `Trainer`."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

if importlib.util.find_spec("accelerate") is None:
    raise ImportError(
        "penstock.trainer.pipeline_trainer needs accelerate, as transformers' Trainer does: "
        'pip install "penstock[trainer]"'
    )

import torch
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.optimization import AdafactorSchedule
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from penstock.api.initialize import ConfigLike, initialize
from penstock.api.plugin import HeterogeneousParallelPlugin
from penstock.checkpoint.files import load_data
from penstock.checkpoint.folders import TRAINING_VARIANT
from penstock.checkpoint.manifest import manifest_name
from penstock.checkpoint.model_methods import load_optimizer_state, save_optimizer_state
from penstock.checkpoint.training_state import restore_object
from penstock.config.configuration import Configuration
from penstock.data.packed import LENGTHS, cut_packed, is_packed
from penstock.model.pipeline_model import PipelineModel, loss_tensor
from penstock.modeling.graph.loss import NUM_ITEMS, Criterion
from penstock.modeling.libraries import base_of, configuration_of
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.comm.settings import bits_of, float_of
from penstock.runtime.engine import DEFAULT_MICROBATCHES_PER_RANK, Engine
from penstock.trainer.accelerator import PipelineAccelerator
from penstock.trainer.decisions import CommonDecisions
from penstock.trainer.plugin_training import PluginTraining
from penstock.trainer.trl.sft import TokenMetrics, is_sft, is_sft_class, weigh_routers

logger = logging.getLogger(__name__)

SCHEDULER_FILE = "scheduler.pt"
OPTIMIZER_FILE = "optimizer.pt"

# What may not be set, by the name of the argument, and what to do instead.
REFUSED_IF_SET = {
    "torch_compile": "compile the model's blocks before the Trainer takes it",
    "use_liger_kernel": "apply Liger's kernels to the model before the Trainer takes it",
    "neftune_noise_alpha": "it draws its noise on the first stage only",
    "auto_find_batch_size": "give per_device_train_batch_size",
    "torch_empty_cache_steps": "call torch.cuda.empty_cache() in a callback",
    "eval_use_gather_object": "let the model return tensors",
    "enable_jit_checkpoint": "use save_strategy and save_steps",
    "activation_offloading": "use gradient_checkpointing, or torch.autograd.graph.save_on_cpu() around train()",
    "save_on_each_node": "all ranks must share a file system",
    "push_to_hub": "push the saved folder afterwards: it is an ordinary one",
    "deepspeed": "leave it out: the pipelines take its place",
    "fsdp": "leave it out: the pipelines take its place",
    "parallelism_config": "use parallelism=... of the Trainer",
}

# What TRL's trainers other than SFTTrainer do in their `compute_loss`, and what to do instead.
RUNS_THE_MODEL = (
    "it runs the model itself. Write a loop of your own, with the loss as a criterion: examples/run_dpo.py has that of "
    "DPOTrainer, a reward model's is alike, and what GRPO and its kin train on comes from model.generate()"
)


def in_place_of_the_trainers(ours: Callable[..., Any], with_plugin_only: bool = False) -> Any:
    """Makes of `ours`, a method of the mixin, the Trainer's own method of its name, for the mixin's objects. Classes
    between the mixin and the Trainer that define it, too, are called, and come to `ours` by `super()`."""
    name = ours.__name__

    @functools.wraps(ours)
    def entered(self: PipelineTrainerMixin, *args: Any, **kwargs: Any) -> Any:
        trainers = getattr(Trainer, name)
        is_ours = self._plugin is not None or not with_plugin_only

        def instead(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            return (ours if trainer is self and is_ours else trainers)(trainer, *args, **kwargs)

        with mock.patch.object(Trainer, name, instead):
            return getattr(super(PipelineTrainerMixin, self), name)(*args, **kwargs)

    return entered


with_a_plugin_in_place_of_the_trainers = partial(in_place_of_the_trainers, with_plugin_only=True)


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
        ValueError: an argument cannot be used over pipelines; names it. Before any communication.
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
        self._plugin: PluginTraining | None = None
        self._parallelism: Configuration | None = None
        if isinstance(parallelism, HeterogeneousParallelPlugin):
            self._plugin = PluginTraining(self, parallelism)
        elif parallelism is not None:
            self._parallelism = Configuration.from_any(parallelism)
            if not self._parallelism.enable:
                raise ValueError("parallelism with enable=False is no parallelism: use the Trainer itself")
        if kwargs.get("peft_config") is not None and isinstance(
            args[0] if args else kwargs.get("model"), PipelineModel
        ):
            raise _not_over_pipelines(
                "peft_config", "the model is parallelised already. Give the whole model, and parallelism=... as well"
            )
        self._refuse_own_losses()
        super().__init__(*args, **kwargs)
        self.callback_handler = CommonDecisions(self.callback_handler, self._exchange_decisions)
        if isinstance(self.lr_scheduler, AdafactorSchedule):
            self.lr_scheduler.__class__ = _RatesOfThisRank
        for name in ("compute_loss_func", "label_smoother"):
            if getattr(self, name, None) is not None and not self.model_accepts_loss_kwargs:
                raise _not_over_pipelines(
                    name, "this model's forward takes no num_items_in_batch to divide the loss by"
                )

    # -- forming ---------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse arguments that cannot be used, parallelise the model, and set up the accelerator."""
        self._refuse_arguments()
        if self.model is None:
            raise _not_over_pipelines("model_init", "give the model itself")
        super().create_accelerator_and_postprocess()
        if self.args.gradient_checkpointing and (self._plugin is not None or self._parallelism is not None):
            # As `train` does; the default schedule depends on it.
            self.model.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
        if self._plugin is not None:
            self._plugin.form()
            return
        if self._parallelism is not None:
            self.model = initialize(self.model, self._parallelism)
        engine = self._engine
        if self.model.configuration is None:
            raise ValueError("PipelineTrainer takes equal pipelines, but HeterogeneousParallelPlugin made this model's")
        if len(engine.layout.pipelines) > 1 and not self.args.average_tokens_across_devices:
            raise _not_over_pipelines(
                "average_tokens_across_devices=False", "a loss is always over all pipelines' batches together"
            )
        # On a CPU accelerate has nothing for fp16, and the plain Trainer goes on in the model's own type.
        halves = {"bf16": torch.bfloat16, "fp16": torch.float16} if self.accelerator.native_amp else {}
        engine.autocast = halves.get(self.accelerator.mixed_precision)
        # As in the plain Trainer, for which a batch is what one process has.
        engine.own_means = True
        PipelineAccelerator.take_over(self.accelerator, self.model)

    @property
    def _engine(self) -> Engine:
        if not isinstance(self.model, PipelineModel):
            raise ValueError(
                'PipelineTrainer needs parallelism={"pipeline_parallel_size": ...}, or a model that '
                "penstock.initialize() has parallelised"
            )
        return self.model.pipeline

    def _refuse_arguments(self) -> None:
        if self._plugin is not None:
            self._plugin.refuse(self.args)
        for name, instead in REFUSED_IF_SET.items():
            if getattr(self.args, name, None):
                raise _not_over_pipelines(name, instead)
        if self.args.train_sampling_strategy == "batch_rebalance":
            raise _not_over_pipelines("train_sampling_strategy='batch_rebalance'", "use 'random' or 'group_by_length'")
        if getattr(self.args, "loss_type", None) not in (None, "nll"):
            raise _not_over_pipelines(f"loss_type={self.args.loss_type!r}", "use compute_loss_func")
        optim = getattr(self.args.optim, "value", self.args.optim)
        if any(word in optim for word in ("lomo", "layerwise")):
            raise _not_over_pipelines(f"{optim=}", "it steps inside the backward")
        if getattr(self.args.accelerator_config, "dispatch_batches", None):
            raise _not_over_pipelines("accelerator_config.dispatch_batches", "each pipeline reads its own batches")

    def _refuse_own_losses(self) -> None:
        """A `compute_loss` of the user's would not be called in training."""
        for kind in type(self).__mro__:
            # SFTTrainer's adds metrics to the model's own loss; see TokenMetrics.
            if kind in (PipelineTrainerMixin, Trainer) or "compute_loss" not in vars(kind) or is_sft_class(kind):
                continue
            instead = RUNS_THE_MODEL if kind.__module__.startswith("trl.") else "use compute_loss_func"
            raise _not_over_pipelines(f"{kind.__name__}.compute_loss", instead)

    @in_place_of_the_trainers
    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Do nothing: the model is on its device already."""

    @in_place_of_the_trainers
    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples in an optimizer's step, over all pipelines."""
        if self._plugin is not None:
            return self._plugin.plugin.global_batch_size
        per_pipeline: int = self._train_batch_size * args.gradient_accumulation_steps
        return per_pipeline * len(self._engine.layout.pipelines)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. With `resume_from_checkpoint=True` it goes on from the newest checkpoint that is whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_whole(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    @property
    def _with_plugin(self) -> PluginTraining:
        assert self._plugin is not None
        return self._plugin

    # -- with a plugin ---------------------------------------------------------------------------------------------

    @with_a_plugin_in_place_of_the_trainers
    def get_train_dataloader(self) -> Any:
        return self._with_plugin.loader()

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, *args: Any) -> tuple[int, int]:
        """With a plugin the model is parallelised here, where a process may find that it joins a run under way."""
        found: tuple[int, int] = super()._init_training_state(max_steps, steps_per_epoch, *args)
        _, checkpoint, _ = args
        return found if self._plugin is None else self._plugin.begin(max_steps, steps_per_epoch, checkpoint)

    @with_a_plugin_in_place_of_the_trainers
    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        # Known to accelerate, so that no evaluation takes the time to prepare it.
        self.model_wrapped = self.accelerator.prepare_model(self.model)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self.accelerator.optimizer = self.optimizer
        return self.model, self._with_plugin.empty_batches(train_dataloader)

    def _run_epoch(self, **given: Any) -> None:
        if self._plugin is not None:
            self._plugin.begin_epoch(given["epoch"])
            # A process that joins a run skips the steps that were made, too.
            given["resume_from_checkpoint"] = True
        super()._run_epoch(**given)

    def _surviving(self, work: Callable[[], Any]) -> Any:
        """Do what all ranks do together outside of a step; with an elastic plugin again if a rank is lost meanwhile."""
        return work() if self._plugin is None else self._plugin.surviving(work)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self._surviving(partial(super().evaluate, *args, **kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._surviving(partial(super().predict, *args, **kwargs))

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's: an ordinary folder of the whole model."""
        self._surviving(partial(super().save_model, *args, **kwargs))

    # -- decisions of callbacks ------------------------------------------------------------------------------------

    def _exchange_decisions(self, mine: Sequence[int]) -> Mapping[int, Sequence[int]]:
        def exchange() -> Mapping[int, Sequence[int]]:
            with self._engine.together(Call.DECIDE, mine) as said:
                return said

        exchanged: Mapping[int, Sequence[int]] = self._surviving(exchange)
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
            self.callback_handler.make_alike(self.control)

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """Whether this evaluation was the best by rank 0's metrics, also if another rank's differ."""
        found: bool = super()._determine_best_metric(*args, **kwargs)
        if self.args.metric_for_best_model is None:
            return found
        state = self.state
        mine = [int(found), state.best_global_step or 0, bits_of(float(state.best_metric))]
        every = self._exchange_decisions(mine)
        if (first := list(every[min(every)][:3])) != mine:
            state.best_global_step, state.best_metric = first[1] or None, float_of(first[2])
        return bool(first[0])

    @in_place_of_the_trainers
    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError(
            "push_to_hub() of a PipelineTrainer: call trainer.save_model(folder) on every rank, and then "
            "huggingface_hub.upload_folder(repo_id=..., folder_path=folder) on one"
        )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._surviving(partial(super()._save_checkpoint, *args, **kwargs))
        resume = self._engine.board.resume
        resume.clear()
        resume["trainer"] = "trainer.train(resume_from_checkpoint=True)"
        path = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        self._engine.recovery.note_saved(path)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As the Trainer's. On a rank that has nothing to train it gets what `model.parameters()` ends with."""
        made: torch.optim.Optimizer = super().create_optimizer(model)
        if not any(group["params"] for group in made.param_groups):
            made.param_groups[-1]["params"] += [one for one in self.model.parameters() if one.requires_grad]
        return made

    # -- steps -----------------------------------------------------------------------------------------------------

    @in_place_of_the_trainers
    def training_step(
        self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of a batch in microbatches. Returns its loss over all pipelines, on every rank: ()."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if self._plugin is not None:
            return self._plugin.step()
        inputs = self._prepare_inputs(inputs)
        if self.model_accepts_loss_kwargs:
            inputs = self._with_number(inputs, num_items_in_batch)
        # A mean over this batch alone is averaged over those of the accumulation, and over the pipelines'.
        batches = self.current_gradient_accumulation_steps * len(self._engine.layout.pipelines)
        divisor = 1 if NUM_ITEMS in inputs else batches
        metrics = self._token_metrics(inputs)
        with self.compute_loss_context_manager():
            loop = self._engine.train(self._cut(inputs), self._criterion)
            for output in loop:
                if metrics is not None:
                    metrics.add(output, loop.inputs)
                self.accelerator.backward(output.loss / divisor)
        if metrics is not None:
            metrics.note()
        return loss_tensor(self._engine, self._engine.last_step.global_loss / divisor).to(self.args.device)

    def _token_metrics(self, inputs: Mapping[str, Any]) -> TokenMetrics | None:
        """What notes the metrics of TRL's SFTTrainer for a batch, if this is one; it then weighs routers as well."""
        if self._plugin is not None or not is_sft(self):
            return None
        weigh_routers(self)
        return TokenMetrics(self, inputs)

    def _cut(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs; a packed row of sequences is split into microbatches."""
        if not is_packed(inputs):
            return inputs
        inputs, engine = self._without_lengths(inputs), self._engine
        wanted = engine.options.num_microbatches or DEFAULT_MICROBATCHES_PER_RANK * engine.context.pipeline.num_ranks
        pieces = cut_packed(inputs, wanted, first_microbatch=engine.place.pipeline * wanted)
        return {**inputs, **pieces}

    def _without_lengths(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs without what only kernels of flash attention read: it would make another plan for each batch."""
        if "flash" in str(getattr(configuration_of(self.model), "_attn_implementation", "")):
            return inputs
        return {name: value for name, value in inputs.items() if name not in LENGTHS}

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In evaluation: the loss of this pipeline's batch. Training does not call it."""
        if torch.is_grad_enabled():
            raise RuntimeError("over pipelines compute_loss is for evaluation only: training runs in training_step")
        inputs = self._without_lengths(inputs)
        metrics = self._token_metrics(inputs)
        # Not TRL's, which looks at logits for its metrics; any other is the Trainer's.
        loss, outputs = Trainer.compute_loss(self, model, {**inputs}, True, num_items_in_batch)
        if metrics is not None:
            if self._engine.context.holds_output:
                metrics.add(outputs, inputs)
            metrics.note()
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a loss is of this pipeline's batch alone."""
        with self._alone():
            return super().prediction_step(*args, **kwargs)

    def _alone(self) -> AbstractContextManager[Any]:
        """Inside, the Trainer counts the labels of this pipeline's batches alone."""
        return mock.patch.object(self.args, "average_tokens_across_devices", False)

    @property
    def _criterion(self) -> Criterion | None:
        """What computes the loss from the outputs, `compute_loss_func` or label smoothing; None for the model."""
        own = getattr(self, "compute_loss_func", None) or getattr(self, "label_smoother", None)
        return self._own_loss if own else None

    def _with_number(self, inputs: Mapping[str, Any], number: torch.Tensor | int | None) -> Mapping[str, Any]:
        """The inputs of a training step with the number of labels that its loss is divided by, if it is known. Raises
        ValueError if it is not, but the loss is not the model's own."""
        if number is not None:
            inputs = {**inputs, NUM_ITEMS: torch.as_tensor(number)}
        if self._criterion is not None and not (NUM_ITEMS in inputs and "labels" in inputs):
            raise ValueError(
                "compute_loss_func and label_smoothing_factor need batches with labels, a tensor, to be exact over "
                f"pipelines; this one has {', '.join(inputs)}"
            )
        return inputs

    def _own_loss(self, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        if getattr(self, "compute_loss_func", None) is not None:
            own, shifting = self.compute_loss_func, {}
        else:
            shifted = type(base_of(self.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            own, shifting = self.label_smoother, {"shift_labels": shifted}
        loss: torch.Tensor = own(outputs, inputs["labels"], num_items_in_batch=inputs[NUM_ITEMS], **shifting)
        return loss

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @in_place_of_the_trainers
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

    @in_place_of_the_trainers
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the optimizer's state in one file for each stage, and the scheduler's as the Trainer does."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_FILE))
        save_optimizer_state(self.optimizer, self._engine, output_dir)

    @with_a_plugin_in_place_of_the_trainers
    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: with a plugin the optimizer's files hold the states."""

    @in_place_of_the_trainers
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of this rank's stages; the folder may be of any number of stages, or of a plain Trainer."""
        if self._plugin is None:  # which loads them when the pipelines stand, see `_init_training_state`
            self._load_weights(resume_from_checkpoint)

    def _load_weights(self, folder: str) -> None:
        self._engine.refuse_if_over()
        self.model.load_ordinary(folder)

    @in_place_of_the_trainers
    def _load_best_model(self) -> None:
        self._surviving(partial(self._load_weights, self.state.best_model_checkpoint))

    @in_place_of_the_trainers
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
        load_optimizer_state(self.optimizer, self._engine, checkpoint)
        path = os.path.join(checkpoint, SCHEDULER_FILE)
        restore_object(self.lr_scheduler, load_data(path), f"the scheduler's state in {path}")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Each rank's own generators if the number of ranks is the saved one; else `_load_optimizer_and_scheduler`
        has set all ranks to the first one's."""
        if checkpoint is None or self._plugin is not None:
            return
        saved = [name for name in os.listdir(checkpoint) if name.startswith("rng_state")]
        if len(saved) == self.args.world_size:
            super()._load_rng_state(checkpoint)


class PipelineTrainer(PipelineTrainerMixin):
    """transformers' `Trainer` over pipeline stages: the same arguments, and `parallelism`."""


class _RatesOfThisRank(AdafactorSchedule):  # type: ignore[misc]  # a library without types
    """Shows the rate of the first parameter that this rank trains, as another rank may have the model's first."""

    def get_lr(self) -> list[float]:
        optimizer: Any = self.optimizer
        rates = []
        for group, base in zip(optimizer.param_groups, self.base_lrs, strict=True):
            first = next((one for one in group["params"] if one.grad is not None), None)
            rates.append(base if first is None else optimizer._get_lr(group, optimizer.state[first]))
        return rates


def _not_over_pipelines(name: str, instead: str) -> ValueError:
    return ValueError(f"{name} does not work over pipelines: {instead}")


def _newest_whole(folder: str) -> str | None:
    """The newest of the Trainer's checkpoints that is whole: it has the file which is written last."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.partition("-")[2].isdecimal()]
    whole = [path for path in found if (path / TRAINER_STATE_NAME).exists()]
    return str(max(whole, key=lambda path: int(path.name.partition("-")[2]))) if whole else None

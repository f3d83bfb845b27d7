"""A Trainer over a plugin's pipelines: of different depth, and with `elastic=` changing while it trains.

A step is the Booster's; all else stays the Trainer's own. As a step takes its batch itself, and takes it again if a
rank is lost meanwhile, the Trainer's loop goes over empty batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader
from transformers import ProgressCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from penstock.api.booster import Booster
from penstock.api.plugin import HeterogeneousParallelPlugin
from penstock.data.batch import MicrobatchedBatch
from penstock.data.loader import Batches, HeterogeneousDataLoader
from penstock.model.pipeline_model import PipelineModel
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.optimizer import PipelineOptimizer
from penstock.trainer.accelerator import PipelineAccelerator
from penstock.trainer.pipelines import Pipelines, T
from penstock.trainer.trainer_adapter import Metrics, NoMetrics, counting_alone

# What may not be set with a plugin, by the name of the argument, and what to do instead.
REFUSED_WITH_PLUGIN = {
    "bf16": "give the plugin precision='bf16'",
    "fp16": "give the plugin precision='fp16'",
    "dataloader_persistent_workers": "leave it out: the loader may change while it is read",
    "ignore_data_skip": "a loader goes on where it was",
}
# Methods of the Trainer that nobody calls with a plugin: it has its own loader, and its step may be made again.
NOT_CALLED = (
    "_get_dataloader", "_get_train_sampler", "_load_rng_state", "_load_scaler", "_prepare_input", "_prepare_inputs",
    "_wrap_model", "autocast_smart_context_manager", "compute_loss_context_manager",
)  # fmt: skip
# Arguments of the Trainer by which the calls of all processes of an elastic run are decided.
DECIDING = (
    "max_steps", "num_train_epochs", "max_grad_norm", "logging_strategy", "logging_steps", "eval_strategy",
    "eval_steps", "eval_delay", "save_strategy", "save_steps", "per_device_eval_batch_size", "load_best_model_at_end",
    "metric_for_best_model", "save_only_model", "learning_rate", "lr_scheduler_type",
)  # fmt: skip

_OWN_LOADER = ValueError(
    "get_train_dataloader of a class of your own does not work with a plugin, whose loader shares the data out: give "
    "train_dataset and data_collator"
)


class CountingBooster(Booster):
    """Adds to each global batch its number of labels, as a Trainer counts them."""

    def __init__(self, pipelines: PluginPipelines) -> None:
        super().__init__(pipelines.plugin)
        self._pipelines = pipelines

    def step_inputs(self, batch: MicrobatchedBatch) -> Mapping[str, Any]:
        """The batch, and the number of labels in the whole global batch, by which its loss is divided."""
        trainer, engine, number = self._pipelines.trainer, self._pipelines.engine, None
        if "labels" in batch and trainer.model_accepts_loss_kwargs:
            # The Trainer's own rule, for each microbatch: a collator may have shifted some.
            with counting_alone(trainer.args):
                counted = [
                    trainer._get_num_items_in_batch([microbatch], trainer.args.device)
                    for microbatch in batch.microbatches
                ]
            if None not in counted:
                with engine.together(Call.COUNT_LABELS, [sum(int(count) for count in counted)]) as gathered:
                    total = sum(gathered[rank][0] for rank in trainer.accelerator.first_ranks)
                number = torch.tensor(total, device=engine.device)
        return self._pipelines.adapter.with_num_items(batch, number)


class PluginPipelines(Pipelines):
    """The pipelines of a plugin."""

    def __init__(self, trainer: Trainer, plugin: HeterogeneousParallelPlugin) -> None:
        super().__init__(trainer)
        self.adapter.refuse_plugin()
        if plugin.settings.context_parallel_size > 1:
            self.adapter.refuse_parts()
        self.plugin = plugin
        self.booster = CountingBooster(self)
        self._loader: HeterogeneousDataLoader | None = None
        self._sums: tuple[float, float, int, int] | None = None  # of the logs, on a process that has joined
        self._batches: Batches | None = None  # of the epoch under way

    def refuse_arguments(self, args: TrainingArguments) -> None:
        plugin = self.plugin
        refused = {name: instead for name, instead in REFUSED_WITH_PLUGIN.items() if getattr(args, name, None)}
        if args.gradient_accumulation_steps != 1:
            refused["gradient_accumulation_steps"] = "a step is the plugin's global batch"
        if args.per_device_train_batch_size != plugin.microbatch_size:
            refused[f"per_device_train_batch_size={args.per_device_train_batch_size}"] = (
                f"give the plugin's microbatch_size, {plugin.microbatch_size}"
            )
        if args.train_sampling_strategy not in ("random", "sequential"):
            refused[f"train_sampling_strategy={args.train_sampling_strategy!r}"] = "use 'random' or 'sequential'"
        if args.include_num_input_tokens_seen != "no":
            refused["include_num_input_tokens_seen"] = "no rank reads all inputs"
        if plugin.settings.elastic is not None and args.eval_on_start:
            refused["eval_on_start"] = "a process that joins would evaluate alone"
        if not args.average_tokens_across_devices:
            refused["average_tokens_across_devices=False"] = "a loss is always of the whole global batch"
        if plugin.settings.max_norm:
            refused["max_norm of the plugin"] = "use max_grad_norm"
        for kind in type(self.trainer).__mro__:
            if kind is not Trainer and kind.__module__.partition(".")[0] != "penstock":
                instead = "it would not be called. Use train_dataset and data_collator"
                refused |= {f"{kind.__name__}.{name}": instead for name in NOT_CALLED if name in vars(kind)}
        for name, instead in refused.items():
            raise ValueError(f"{name} does not work with a plugin: {instead}")

    # -- forming ---------------------------------------------------------------------------------------------------

    @property
    def parallelises(self) -> bool:
        return True

    def build(self) -> None:
        if self.plugin.settings.elastic is None:
            self.trainer.model = self.plugin.configure(self.trainer.model)[0]
            self._take_over()

    def _take_over(self) -> None:
        PipelineAccelerator.take_over(self.trainer.accelerator, self.trainer.model)

    def samples_per_step(self, args: TrainingArguments) -> int:
        return self.plugin.global_batch_size

    # -- a run -----------------------------------------------------------------------------------------------------

    def loader(self, own: Callable[[], Any]) -> HeterogeneousDataLoader:
        """In the order of the plugin's own sampler."""
        trainer, args = self.trainer, self.trainer.args
        dataset, collate = trainer.train_dataset, trainer.data_collator
        if dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        if hasattr(dataset, "column_names"):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description="training")
        workers = {"prefetch_factor": args.dataloader_prefetch_factor} if args.dataloader_num_workers else {}
        self._loader = self.plugin.prepare_dataloader(
            dataset,
            shuffle=args.train_sampling_strategy == "random",
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            **workers,
        )
        return self._loader

    def begin(
        self, place: tuple[int, int], max_steps: int, steps_per_epoch: int, folder: str | None
    ) -> tuple[int, int]:
        """Make optimizer and scheduler, with `elastic=` meet the other processes, and load the checkpoint, unless this
        process joins a run."""
        loader = self._loader
        if loader is None:
            raise _OWN_LOADER
        self._boost(loader, max_steps)
        if self.joined:  # epochs may have been stopped before their end
            joined = loader.state_dict()
            return joined["epoch"], -(-joined["position"] // loader.global_batch_size)
        trainer, run = self.trainer, self.plugin.run
        epoch, step = divmod(trainer.state.global_step, steps_per_epoch)

        def load() -> int:
            trainer.load_weights(folder)
            trainer._load_optimizer_and_scheduler(folder)
            position = step * loader.global_batch_size
            loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "position": position})
            return int(trainer.state.global_step)

        if folder is not None:
            if run is None:
                load()
            else:
                run.load(load)
        return epoch, step

    def _boost(self, loader: HeterogeneousDataLoader, max_steps: int) -> None:
        trainer, args = self.trainer, self.trainer.args
        if isinstance(trainer.optimizer, PipelineOptimizer):
            trainer.optimizer = trainer.optimizer.unwrap()
        if trainer._created_lr_scheduler:
            trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
        trainer.create_optimizer()
        trainer.create_scheduler(num_training_steps=max_steps)
        if self.plugin.settings.elastic is None:
            trainer.optimizer = self.plugin.wrap_optimizer(trainer.optimizer, trainer.model)
            return
        if isinstance(trainer.model, PipelineModel):
            raise RuntimeError("with elastic= a Trainer trains once: make a new one, with a new plugin and model")
        self.plugin.on_place = self._take_place
        facts = self.plugin.more_facts
        facts["the Trainer's callbacks"] = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
        facts.update({f"the Trainer's {name}": str(getattr(trainer.args, name)) for name in DECIDING})
        given = trainer.model, trainer.optimizer, None, loader, trainer.lr_scheduler
        trainer.model, trainer.optimizer, *_ = self.booster.boost(*given)
        self._take_over()
        run = self.plugin.run
        assert run is not None
        run.num_steps = max_steps
        if args.save_strategy != "no":
            run.save_unfinished = partial(trainer._save_checkpoint, trainer.model, trial=None)
        self.booster.register("trainer", self)

    @property
    def joined(self) -> bool:
        return self.plugin.run is not None and self.plugin.run.joined

    def state_dict(self) -> dict[str, Any]:
        """What a process that joins needs to know about the Trainer."""
        trainer = self.trainer
        callbacks = [
            callback.state() for callback in trainer.callback_handler.callbacks if isinstance(callback, ExportableState)
        ]
        sums = trainer._tr_loss.item(), trainer._total_loss_scalar
        steps = trainer._globalstep_last_logged, trainer._initial_global_step
        return {"state": asdict(trainer.state), "callbacks": callbacks, "sums": (*sums, *steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self.trainer
        trainer.state = TrainerState(**state["state"])
        trainer.state.global_step = self.booster.step
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        self._sums = state["sums"]
        callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
        for callback, saved in zip(callbacks, state["callbacks"], strict=True):
            for name, value in saved["attributes"].items():
                setattr(callback, name, value)

    def _take_place(self, rank: int, world_size: int) -> None:
        """Tell accelerate and the Trainer which rank this is now."""
        trainer = self.trainer
        for state in (PartialState(), trainer.accelerator.state):
            # No distributed world of accelerate's: the Trainer would talk to it in calls that nobody repeats.
            state.distributed_type, state.num_processes, state.process_index = DistributedType.NO, world_size, rank
        trainer.args._n_gpu = min(trainer.args.n_gpu, 1)
        trainer.state.is_world_process_zero = rank == 0
        if rank == 0:
            for callback in trainer.callback_handler.callbacks:
                has_begun = hasattr(trainer, "_tr_loss")
                if isinstance(callback, ProgressCallback) and callback.training_bar is None and has_begun:
                    callback.on_train_begin(trainer.args, trainer.state, trainer.control)

    # -- steps -----------------------------------------------------------------------------------------------------

    def prepare(self, own: Callable[[], tuple[Any, Any]], loader: Any) -> tuple[Any, Any]:
        trainer = self.trainer
        # Known to accelerate, so that no evaluation takes the time to prepare it.
        trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(trainer.callback_handler, name, getattr(trainer, name))
        trainer.callback_handler.train_dataloader = loader
        trainer.accelerator.optimizer = trainer.optimizer
        return trainer.model, self._empty_batches(loader)

    def _empty_batches(self, returned: Any) -> DataLoader[dict[str, Any]]:
        """What the Trainer's loop goes over: an empty batch for each step of an epoch. It can skip the first ones.
        `returned`: by `get_train_dataloader`."""
        if self._loader is None or returned is not self._loader:
            raise _OWN_LOADER
        steps: Any = [{}] * len(self._loader)
        # With a generator of its own it draws nothing from the user's random stream.
        return DataLoader(steps, collate_fn=lambda samples: samples[0], generator=torch.Generator())

    def begin_epoch(self, epoch: int) -> bool:
        trainer, loader = self.trainer, self._loader
        assert loader is not None
        if self._sums is not None:
            loss, total, trainer._globalstep_last_logged, trainer._initial_global_step = self._sums
            trainer._tr_loss += loss
            trainer._total_loss_scalar, self._sums = total, None
        loader.set_epoch(epoch)
        self._batches = iter(loader)
        return True  # a process that joins a run has loaded none

    def step(self, inputs: Any, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
        """A step on the next global batch; the Trainer's own batches are empty."""
        assert self._batches is not None
        done = self.booster.execute_pipeline(self._batches, self.trainer.model, self.adapter.criterion)
        loss: torch.Tensor = done["loss"]
        return loss

    def metrics(self, inputs: Mapping[str, Any]) -> Metrics:
        """None: a step or an evaluation may be made again."""
        return NoMetrics()

    def repeated_after_loss(self, work: Callable[[], T]) -> T:
        """With `elastic=` all ranks end it together, and do it again after one was lost meanwhile. Who had done it
        already does it again for the others' sake: logs, callbacks and decisions stay as they were."""
        run = self.plugin.run
        if self.plugin.settings.elastic is None:
            return work()
        if run is None:
            raise RuntimeError("with elastic= the model is parallelised by train(): call it first")
        if run.in_call:
            return work()
        engine, begin = run.engine, self._snapshot()
        done: list[T] = []

        def once() -> T:
            now = self._snapshot()
            if not done:
                self._restore(begin)
            result = work()
            with engine.together(Call.BETWEEN_STEPS):
                pass
            if done:
                self._restore(now)
                return done[0]
            done.append(result)
            return result

        outcome: T = run.run_without_gradients(once)
        return outcome

    def _snapshot(self) -> tuple[Any, ...]:
        """What an evaluation or a save changes besides the model and files."""
        trainer = self.trainer
        callbacks = {
            callback: {k: v for k, v in vars(callback).items() if isinstance(v, bool | int | float | str | None)}
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, ExportableState)
        }
        return list(trainer.state.log_history), copy(trainer.control), callbacks, trainer.model.training

    def _restore(self, snapshot: tuple[Any, ...]) -> None:
        trainer = self.trainer
        logs, control, callbacks, training = snapshot
        trainer.state.log_history, trainer.control = list(logs), copy(control)
        for callback, values in callbacks.items():
            vars(callback).update(values)
        trainer.model.train(training)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def load_weights(self, folder: str) -> None:
        """Do nothing: `begin` loads them when the pipelines stand."""

    def save_random_state(self, own: Callable[[], None]) -> None:
        """Do nothing: the optimizer's files hold the states."""

    def note_random_state(self, folder: str) -> None:
        """Do nothing: its loader does not draw from them."""

    def load_random_state(self, own: Callable[[], None], folder: str) -> None:
        """Do nothing: they come with the optimizer's."""

"""The Trainer over a plugin's pipelines: of different depth, and with `elastic=` changing while it trains.

A step is the Booster's: the plugin's loader shares a global batch out among the pipelines, and all else that the
Trainer does between steps (logging, evaluation, checkpoints, callbacks) stays the Trainer's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import ProgressCallback, TrainerState
from transformers.optimization import GreedyLR
from transformers.trainer_callback import ExportableState

from penstock.booster import Booster
from penstock.data.batch import MicrobatchedBatch
from penstock.data.loader import HeterogeneousDataLoader
from penstock.integrations.accelerator import PipelineAccelerator
from penstock.modeling.graph.loss import NUM_ITEMS
from penstock.optimizer import PipelineOptimizer
from penstock.pipeline_model import PipelineModel
from penstock.plugin import HeterogeneousParallelPlugin
from penstock.runtime.comm.rollcall import Call

# What may not be set with a plugin, by the name of the argument, and what to do instead.
REFUSED_IF_SET = {
    "bf16": "give the plugin precision='bf16'",
    "fp16": "give the plugin precision='fp16'",
    "dataloader_persistent_workers": "leave it out: the loader may change while it is read",
    "ignore_data_skip": "a loader goes on where it was",
}
# Arguments of the Trainer by which the calls of all processes of an elastic run are decided.
DECIDING = (
    "max_steps", "num_train_epochs", "max_grad_norm", "logging_strategy", "logging_steps", "eval_strategy",
    "eval_steps", "eval_delay", "save_strategy", "save_steps", "per_device_eval_batch_size", "load_best_model_at_end",
    "metric_for_best_model", "save_only_model", "learning_rate", "lr_scheduler_type",
)  # fmt: skip


class PluginTraining:
    """What a Trainer does differently when its `parallelism` is a plugin.

    Args:
        trainer: a PipelineTrainer, of which the arguments are known.
        plugin: with its pipelines set, or with `elastic=`.
    """

    def __init__(self, trainer: Any, plugin: HeterogeneousParallelPlugin) -> None:
        self.trainer = trainer
        self.plugin = plugin
        self.booster = Booster(plugin)
        self.booster.complete = self._count_items
        self._loader: HeterogeneousDataLoader | None = None
        self._folder: str | None = None  # a checkpoint to go on from, once the model is parallelised
        self._sums: tuple[float, float, int, int] | None = None  # of the logs, on a process that has joined
        self._generation = -1
        self._start = (0, 0)  # the epoch, and the step in it, with which training begins here

    def refuse(self, args: Any) -> None:
        """Raise ValueError for arguments that cannot be used with a plugin."""
        plugin = self.plugin
        refused = {name: instead for name, instead in REFUSED_IF_SET.items() if getattr(args, name, None)}
        if args.gradient_accumulation_steps != 1:
            refused["gradient_accumulation_steps"] = "a step is the plugin's global batch"
        if args.per_device_train_batch_size != plugin.microbatch_size:
            refused[f"per_device_train_batch_size={args.per_device_train_batch_size}"] = (
                f"give the plugin's microbatch_size, {plugin.microbatch_size}"
            )
        if args.train_sampling_strategy not in ("random", "sequential"):
            refused[f"train_sampling_strategy={args.train_sampling_strategy!r}"] = "use 'random' or 'sequential'"
        if getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False):
            refused["include_num_input_tokens_seen"] = "no rank reads all inputs"
        if plugin.elastic is not None and args.eval_on_start:
            refused["eval_on_start"] = "a process that joins would evaluate alone"
        if not args.average_tokens_across_devices:
            refused["average_tokens_across_devices=False"] = "a loss is always of the whole global batch"
        if plugin.max_norm:
            refused["max_norm of the plugin"] = "use max_grad_norm"
        for name, instead in refused.items():
            raise ValueError(f"{name} does not work with a plugin: {instead}")

    # -- forming ---------------------------------------------------------------------------------------------------

    def form(self) -> None:
        """Parallelise the model now, if the pipelines are known."""
        if self.plugin.elastic is None:
            self.trainer.model = self.plugin.configure(self.trainer.model)[0]
            self._take_over()

    def _take_over(self) -> None:
        PipelineAccelerator.take_over(self.trainer.accelerator, self.trainer.model)

    def loader(self) -> HeterogeneousDataLoader:
        """Of the training data, in the order of the plugin's own sampler."""
        trainer, args = self.trainer, self.trainer.args
        dataset, collate = trainer.train_dataset, trainer.data_collator
        if dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        if hasattr(dataset, "column_names"):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description="training")
        workers = {}
        if args.dataloader_num_workers:
            workers = {"prefetch_factor": args.dataloader_prefetch_factor}
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

    def begin(self, max_steps: int, steps_per_epoch: int) -> tuple[int, int]:
        """Make optimizer and scheduler, with `elastic=` meet the other processes, and load what is to be loaded.

        Returns the epoch, and the step in it, with which training begins here.
        """
        loader = self._loader
        assert loader is not None
        self._boost(loader, max_steps)
        self._load(loader, steps_per_epoch)
        self._start = divmod(self.trainer.state.global_step, steps_per_epoch)
        if self.joined:  # epochs may have been stopped before their end
            place = loader.state_dict()
            self._start = place["epoch"], -(-place["position"] // loader.global_batch_size)
        return self._start

    def _boost(self, loader: HeterogeneousDataLoader, max_steps: int) -> None:
        trainer = self.trainer
        if isinstance(trainer.optimizer, PipelineOptimizer):
            trainer.optimizer = trainer.optimizer.unwrap()
        if trainer._created_lr_scheduler:
            trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
        trainer.create_optimizer()
        trainer.create_scheduler(num_training_steps=max_steps)
        if self.plugin.elastic is None:
            trainer.optimizer = self.plugin._wrap(trainer.optimizer, trainer.model)
            return
        if isinstance(trainer.model, PipelineModel):
            raise RuntimeError("with elastic= a Trainer trains once: make a new one, with a new plugin and model")
        alike = self.plugin.also_alike
        alike["the Trainer's callbacks"] = [type(one).__name__ for one in trainer.callback_handler.callbacks]
        alike.update({f"the Trainer's {name}": str(getattr(trainer.args, name)) for name in DECIDING})
        given = trainer.model, trainer.optimizer, None, loader, trainer.lr_scheduler
        trainer.model, trainer.optimizer, *_ = self.booster.boost(*given)
        self._take_over()
        self.booster.register("trainer", self)
        self._take_place()

    @property
    def joined(self) -> bool:
        """Whether this process joined a run under way."""
        return self.plugin.run is not None and self.plugin.run.joined

    def state_dict(self) -> dict[str, Any]:
        """What a process that joins needs to know of the Trainer."""
        trainer = self.trainer
        callbacks = [one.state() for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
        sums = trainer._tr_loss.item(), trainer._total_loss_scalar
        steps = trainer._globalstep_last_logged, trainer._initial_global_step
        return {"state": asdict(trainer.state), "callbacks": callbacks, "sums": (*sums, *steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the Trainer's state of another process."""
        trainer = self.trainer
        trainer.state = TrainerState(**state["state"])
        trainer.state.global_step = self.booster.step
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        self._sums = state["sums"]
        own = [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
        for one, saved in zip(own, state["callbacks"], strict=True):
            for name, value in saved["attributes"].items():
                setattr(one, name, value)

    def _take_place(self) -> None:
        """Tell accelerate and the Trainer which rank this is now."""
        run, trainer = self.plugin.run, self.trainer
        if run is None or run.decision is None or run.decision.generation == self._generation:
            return
        self._generation = run.decision.generation
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for state in (PartialState(), trainer.accelerator.state):
            # No distributed world of accelerate's: the Trainer would talk to it in calls that nobody repeats.
            state.distributed_type, state.num_processes, state.process_index = DistributedType.NO, world_size, rank
        trainer.args._n_gpu = min(trainer.args.n_gpu, 1)
        trainer.state.is_world_process_zero = rank == 0
        if rank == 0:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback) and callback.training_bar is None and self._has_begun:
                    callback.on_train_begin(trainer.args, trainer.state, trainer.control)

    @property
    def _has_begun(self) -> bool:
        """Whether training has begun here."""
        return hasattr(self.trainer, "_tr_loss")

    # -- steps -----------------------------------------------------------------------------------------------------

    def run_epoch(self, epoch: int, num_steps: int, trial: Any, ignore_keys_for_eval: Any, start_time: float) -> None:
        """The rest of an epoch of `num_steps` optimizer steps."""
        trainer, args, model, loader = self.trainer, self.trainer.args, self.trainer.model, self._loader
        assert loader is not None
        if self._sums is not None:
            loss, total, trainer._globalstep_last_logged, trainer._initial_global_step = self._sums
            trainer._tr_loss += loss
            trainer._total_loss_scalar, self._sums = total, None
        loader.set_epoch(epoch)
        batches = iter(loader)
        tell = trainer.callback_handler
        criterion = trainer._criterion if trainer._has_own_loss else None
        grad_norm = learning_rate = None

        def log_save_evaluate() -> None:
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time,
                learning_rate=learning_rate,
            )  # fmt: skip

        for step in range(self._start[1] if epoch == self._start[0] else 0, num_steps):
            trainer.control = tell.on_step_begin(args, trainer.state, trainer.control)
            model.train()
            if callable(getattr(trainer.optimizer.unwrap(), "train", None)):  # of schedule-free ones
                trainer.optimizer.unwrap().train()
            skipped = trainer.optimizer.num_skipped_steps
            loss = self.booster.execute_pipeline(batches, model, criterion)["loss"]
            limit = args.max_grad_norm
            grad_norm = trainer.optimizer.clip_grad_by_norm(limit if limit and limit > 0 else math.inf)
            trainer.control = tell.on_pre_optimizer_step(args, trainer.state, trainer.control)
            trainer.optimizer.step()
            self._take_place()
            trainer.control = tell.on_optimizer_step(args, trainer.state, trainer.control)
            learning_rate = trainer._get_learning_rate()
            stepped = trainer.optimizer.num_skipped_steps == skipped
            if stepped and not isinstance(trainer.lr_scheduler, ReduceLROnPlateau | GreedyLR):
                trainer.lr_scheduler.step()
            trainer.optimizer.zero_grad()
            if args.logging_nan_inf_filter and not torch.isfinite(loss):
                steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
                trainer._tr_loss += trainer._tr_loss / steps
            else:
                trainer._tr_loss += loss
            trainer.state.global_step += 1
            trainer.state.epoch = epoch + (step + 1) / num_steps
            trainer.control = tell.on_step_end(args, trainer.state, trainer.control)
            log_save_evaluate()
            if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                break
        trainer.control = tell.on_epoch_end(args, trainer.state, trainer.control)
        log_save_evaluate()

    def _count_items(self, batch: MicrobatchedBatch) -> Mapping[str, Any]:
        """The batch, and as the Trainer counts them the labels of the whole global batch, which its loss is divided
        by."""
        trainer = self.trainer
        if "labels" not in batch or not trainer.model_accepts_loss_kwargs:
            if trainer._has_own_loss:
                raise ValueError(
                    "compute_loss_func and label_smoothing_factor need batches with labels to be exact over pipelines; "
                    f"this one has {', '.join(batch)}"
                )
            return batch
        # The Trainer's own rule, for each microbatch: a collator may have shifted some.
        counted = [trainer._count_labels(microbatch) for microbatch in batch.microbatches]
        if None in counted:
            return batch
        engine = trainer._engine
        with engine.together(Call.COUNT_LABELS, [sum(int(count) for count in counted)]) as said:
            total = sum(said[rank][0] for rank in trainer.accelerator.first_ranks)
        return {**batch, NUM_ITEMS: torch.tensor(total, device=engine.device)}

    def surviving(self, work: Callable[[], Any]) -> Any:
        """Do what all ranks do between steps; with `elastic=` again after one was lost meanwhile.

        It ends on all ranks together. A rank that had done it already does it again for the others' sake, which leaves
        nothing behind: logs, callbacks and what the Trainer decided stay as they were.
        """
        run = self.plugin.run
        if self.plugin.elastic is None:
            return work()
        if run is None or run.engine is None:
            raise RuntimeError("with elastic= the model is parallelised by train(): call it first")
        if run.performing:
            return work()
        engine, begin = run.engine, self._snapshot()
        done: list[Any] = []

        def once() -> Any:
            self._take_place()
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

        result = run.do(once)
        self._take_place()
        return result

    def _snapshot(self) -> tuple[Any, ...]:
        """What an evaluation or a save changes besides the model and files."""
        trainer = self.trainer
        callbacks = {
            one: {k: v for k, v in vars(one).items() if isinstance(v, bool | int | float | str | None)}
            for one in trainer.callback_handler.callbacks
            if isinstance(one, ExportableState)
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

    def resume_from(self, folder: str) -> None:
        """Go on from a checkpoint when the model is parallelised."""
        self._folder = folder

    def _load(self, loader: HeterogeneousDataLoader, steps_per_epoch: int) -> None:
        """Load the checkpoint that training goes on from, unless this process joins a run under way."""
        run, trainer, folder = self.plugin.run, self.trainer, self._folder
        self._folder = None
        if folder is None or self.joined:
            return
        epoch, steps = divmod(trainer.state.global_step, steps_per_epoch)
        position = steps * loader.global_batch_size

        def load() -> int:
            trainer._load_weights(folder)
            trainer._load_optimizer_and_scheduler(folder)
            loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "position": position})
            return int(trainer.state.global_step)

        if run is None:
            load()
        else:
            run.load(load)

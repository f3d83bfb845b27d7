"""The Trainer over the pipelines of a plugin: unlike ones, and with `elastic=` ones that change while it trains.

A step is the Booster's: the plugin's loader shares a global batch out among the pipelines, and all else that the
Trainer does between steps (logging, evaluation, checkpoints, callbacks) stays the Trainer's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from penstock.optimizer import PipelineOptimizer
from penstock.pipeline_model import PipelineModel
from penstock.plugin import HeterogeneousParallelPlugin

# What may not be set with a plugin, by the name of the argument, and what to do instead.
REFUSED_IF_SET = {
    "bf16": "give the plugin precision='bf16'",
    "fp16": "give the plugin precision='fp16'",
    "dataloader_persistent_workers": "leave it out: the loader may change while it is read",
}


class PluginTraining:
    """What a Trainer whose `parallelism` is a plugin does in its own way.

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
        self._sums: tuple[float, float, int] | None = None  # of the logs, on a process that has joined
        self._generation = -1

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

    def begin(self, max_steps: int, steps_per_epoch: int) -> None:
        """Make optimizer and scheduler, with `elastic=` meet the other processes, and load what is to be loaded."""
        assert self._loader is not None
        self._boost(self._loader, max_steps)
        self._load(self._loader, steps_per_epoch)

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
        given = trainer.model, trainer.optimizer, None, loader, trainer.lr_scheduler
        trainer.model, trainer.optimizer, *_ = self.booster.boost(*given)
        self._take_over()
        self.booster.register("trainer", self)
        self._take_place()

    @property
    def joined(self) -> bool:
        """Whether this process came to a run under way."""
        return self.plugin.run is not None and self.plugin.run.joined

    def state_dict(self) -> dict[str, Any]:
        """What a process that joins needs to know of the Trainer."""
        trainer = self.trainer
        callbacks = [one.state() for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
        sums = trainer._tr_loss.item(), trainer._total_loss_scalar, trainer._globalstep_last_logged
        return {"state": asdict(trainer.state), "callbacks": callbacks, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the Trainer's state of another process."""
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
            loss, total, trainer._globalstep_last_logged = self._sums
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

        for step in range(trainer.state.global_step - epoch * num_steps, num_steps):
            trainer.control = tell.on_step_begin(args, trainer.state, trainer.control)
            model.train()
            loss = self.booster.execute_pipeline(batches, model, criterion)["loss"]
            grad_norm = trainer.optimizer.clip_grad_by_norm(args.max_grad_norm or math.inf)
            trainer.control = tell.on_pre_optimizer_step(args, trainer.state, trainer.control)
            trainer.optimizer.step()
            self._take_place()
            trainer.control = tell.on_optimizer_step(args, trainer.state, trainer.control)
            learning_rate = trainer._get_learning_rate()
            if not isinstance(trainer.lr_scheduler, ReduceLROnPlateau | GreedyLR):
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
        count = torch.zeros((), dtype=torch.int64)
        if dist.get_rank() in trainer.accelerator.first_ranks:
            for microbatch in batch.microbatches:
                count += (microbatch["labels"] != -100).sum().cpu()
        dist.all_reduce(count, group=trainer._engine.groups.world_control)
        return {**batch, "num_items_in_batch": count.to(trainer.args.device)}

    def surviving(self, work: Callable[[], Any]) -> Any:
        """Do what all ranks do between steps; with `elastic=` again after one was lost meanwhile."""
        run, trainer = self.plugin.run, self.trainer
        if self.plugin.elastic is None:
            return work()
        if run is None or run.engine is None:
            raise RuntimeError("with elastic= the model is parallelised by train(): call it first")
        num_logs = len(trainer.state.log_history)

        def once() -> Any:
            self._take_place()
            del trainer.state.log_history[num_logs:]
            return work()

        if run.performing:
            return work()
        result = run.do(once)
        self._take_place()
        return result

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
        position = 0 if trainer.args.ignore_data_skip else steps * loader.global_batch_size

        def load() -> int:
            trainer._load_weights(folder)
            trainer._load_optimizer_and_scheduler(folder)
            loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "position": position})
            return int(trainer.state.global_step)

        if run is None:
            load()
        else:
            run.load(load)

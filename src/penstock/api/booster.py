"""Booster: the training loop of ColossalAI on top of `HeterogeneousParallelPlugin`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.api.plugin import Configured, HeterogeneousParallelPlugin
from penstock.checkpoint import model_methods
from penstock.checkpoint.load import is_parallelized
from penstock.data.batch import MicrobatchedBatch
from penstock.data.loader import HeterogeneousDataLoader
from penstock.elastic.changes import Change
from penstock.elastic.run import ElasticRun
from penstock.model.pipeline_model import PipelineModel, loss_tensor
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.instrumentation import record_of
from penstock.modeling.stage.outputs import NamedOutput, merge_outputs, without_graph
from penstock.runtime.engine import Engine
from penstock.runtime.evaluation import evaluate_together, shapes_of_one_more
from penstock.runtime.optimizer import PipelineOptimizer

PathLike = str | os.PathLike[str]


class Booster:
    """Trains with a plugin: `boost` once, `execute_pipeline` and the optimizer's step in the loop.

    Every rank calls every method, `leave` apart.

    Args:
        plugin: a HeterogeneousParallelPlugin whose pipelines are set.
    """

    def __init__(self, plugin: HeterogeneousParallelPlugin) -> None:
        if not isinstance(plugin, HeterogeneousParallelPlugin):
            raise TypeError(f"plugin must be a HeterogeneousParallelPlugin, got {type(plugin).__name__}")
        self.plugin = plugin

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: HeterogeneousDataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Configured:
        """Parallelise `model`, and `optimizer`, `criterion`, `dataloader` and `lr_scheduler` with it, as
        `HeterogeneousParallelPlugin.configure` does."""
        return self.plugin.configure(model, optimizer, criterion, dataloader, lr_scheduler)

    # -- elastic runs ----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """With `elastic=`, how many optimizer steps the run has made: where a process that joins begins."""
        return self._run().step

    @property
    def changes(self) -> list[Change]:
        """With `elastic=`, what happened to the run's members, as this process saw it."""
        return self._run().records.complete

    def register(self, name: str, one: Any) -> None:
        """With `elastic=`, give the state of an object of your own to each process that joins.

        Args:
            name: the same in every process, and used once.
            one: has `state_dict()` and `load_state_dict()`. The scheduler and the loader that were given to `boost` are
                registered already.

        Raises:
            TypeError: it lacks one of the two.
            ValueError: the name is taken.
        """
        self._run().states.register(name, one)

    def leave(self) -> None:
        """With `elastic=`, leave the run at the end of the step: the process ends with status 0, or 75 if all leave."""
        self._run().leave()

    def _run(self) -> ElasticRun:
        if self.plugin.run is None:
            raise RuntimeError("this needs a run with HeterogeneousParallelPlugin(elastic=...), after boost")
        return self.plugin.run

    # -- steps -----------------------------------------------------------------------------------------------------

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: Any,
        criterion: Criterion | None = None,
        optimizer: PipelineOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Forward and backward of the next global batch; with gradients disabled, forward only.

        Outside of `no_sync`, gradients are complete when this returns: take the optimizer's step next.

        Args:
            data_iter: gives this pipeline's shares of global batches, from a loader of `plugin.prepare_dataloader`.
            model: from `boost`.
            criterion: `criterion(outputs, inputs)` gives the mean loss of a microbatch, from the model's outputs and
                the keyword arguments it was called with. None takes that of `boost`, or else the loss in the model's
                outputs.
            optimizer: from `boost`; may be left out.
            return_loss: whether to return the loss.
            return_outputs: whether to return the model's outputs.

        Returns:
            "loss": of the *global* batch, over all pipelines, on every rank: a tensor of shape () without a graph; None
            unless asked for. "outputs": the model's output for this pipeline's share of the batch, without a graph: on
            the last stage in training, on every rank with gradients disabled. None elsewhere, unless asked for, and on
            a pipeline that has no sample of the batch.

        Raises:
            StopIteration: `data_iter` has ended.
            TypeError: its loader was not prepared by the plugin.
            ValueError: there is nothing to compute a loss from.
            PipelineFailure: a rank of the job was lost or failed; names the rank and its cause.
        """
        pipeline = _pipeline_of(model)
        step = partial(self._step, pipeline, criterion, optimizer, return_loss, return_outputs)
        pause = None if pipeline.reduces_gradients else pipeline.no_sync
        return pipeline.recovery.run_step(data_iter, step, pause)

    def _step(
        self,
        pipeline: Engine,
        criterion: Criterion | None,
        optimizer: PipelineOptimizer | None,
        return_loss: bool,
        return_outputs: bool,
        batch: Any,
    ) -> dict[str, Any]:
        """`execute_pipeline` on a batch."""
        if not isinstance(batch, MicrobatchedBatch):
            raise TypeError(
                f"the data iterator gave a {type(batch).__name__}, which does not say which microbatches are this "
                "pipeline's: iterate over a loader made with plugin.prepare_dataloader(dataset, ...)"
            )
        batch = batch.to(pipeline.device)
        criterion = record_of(pipeline.split.model).criterion if criterion is None else criterion
        outputs: Any = None
        if not torch.is_grad_enabled():
            loss, outputs = evaluate_together(pipeline, batch, criterion, share_outputs=return_outputs)
        else:
            kept = []
            for output in pipeline.train(self.step_inputs(batch), criterion):
                self.backward(output.loss, optimizer)
                if return_outputs and pipeline.context.holds_output:
                    kept.append(without_graph(output))
            if kept:
                parts, sizes = pipeline.microbatches(batch)
                outputs = merge_outputs(kept, sizes, grown=lambda: shapes_of_one_more(pipeline, parts[0], sizes[0]))
            loss = pipeline.last_step.global_loss
        if isinstance(outputs, NamedOutput):
            outputs = outputs.original()
        return {
            "loss": loss_tensor(pipeline, loss) if return_loss else None,
            "outputs": outputs if return_outputs else None,
        }

    def step_inputs(self, batch: MicrobatchedBatch) -> Mapping[str, Any]:
        """What a training step on `batch` calls the model with. A class of your own may add to it."""
        return batch

    def backward(self, loss: torch.Tensor, optimizer: PipelineOptimizer | None = None) -> None:
        """The backward of a `loss` that `for output in model(**batch)` gave, with fp16's scale; `optimizer` unused."""
        loss.backward()

    def clip_grad_norm(
        self, optimizer: PipelineOptimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of the whole model's gradients to `max_norm`. Returns the norm before clipping, shape ().

        `optimizer` is that from `boost`; `norm_type` and `error_if_nonfinite` are as in torch's `clip_grad_norm_`.
        """
        return _checked(optimizer).clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def no_sync(
        self, model: Any, optimizer: PipelineOptimizer | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, steps of `model` only accumulate gradients on each rank; the first step outside reduces them.
        `optimizer` is unused."""
        return _pipeline_of(model).no_sync()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_model(
        self,
        model: Any,
        checkpoint: PathLike,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
    ) -> None:
        """Save the model as an ordinary checkpoint folder, which plain transformers loads.

        `model.save_parallelized(folder)` writes a file per rank instead, all at once; `load_model` reads both.

        Args:
            model: from `boost`.
            checkpoint: the folder.
            shard: split the weights into files of at most `size_per_shard` megabytes, with an index file. No rank then
                gathers more than that.
            use_safetensors: write `.safetensors` instead of `.bin`.
            gather_dtensor, prefix: arguments of ColossalAI; only the defaults are possible.

        Raises:
            ValueError: `prefix` or `gather_dtensor` is given.
            CheckpointError: some rank could not write; names the rank and the path.
        """
        if prefix is not None or not gather_dtensor:
            raise ValueError("save_model writes transformers' own file names: leave prefix and gather_dtensor out")
        pipeline = _pipeline_of(model)
        size = {"max_shard_size": f"{size_per_shard}MB"} if shard else {}

        def save() -> None:
            model.save_parallelized(checkpoint, merge_checkpoints=True, safe_serialization=use_safetensors, **size)
            pipeline.board.resume["model"] = f"booster.load_model(model, {os.fspath(checkpoint)!r})"

        pipeline.recovery.run_without_gradients(save)

    def load_model(self, model: Any, checkpoint: PathLike, strict: bool = True) -> Any:
        """Load into `model` the weights of the folder `checkpoint`, from `save_model`, `save_parallelized` or
        transformers' `save_pretrained`.

        Every rank reads its own part only. The pipelines may differ from those that saved it.

        Args:
            strict: refuse an ordinary folder that lacks weights of the model, or has others.

        Raises:
            CheckpointError: the folder holds no checkpoint of this model. No weight has changed then.
        """
        _pipeline_of(model)
        if is_parallelized(checkpoint):
            return model.from_parallelized(checkpoint)
        model.load_ordinary(checkpoint, strict)
        return model

    def save_optimizer(self, optimizer: PipelineOptimizer, checkpoint: PathLike, shard: bool = False) -> None:
        """Save the state of `optimizer`, fp16's loss scale, and what decides the run's random numbers.

        `checkpoint` is a folder with a file per rank that keeps a part, whatever `shard`. It may be that of the model.

        Raises:
            CheckpointError: some rank could not write; names the rank and the path.
        """
        pipeline = _checked(optimizer).pipeline

        def save() -> None:
            model_methods.save_optimizer_state(optimizer, pipeline, checkpoint)
            pipeline.board.resume["optimizer"] = f"booster.load_optimizer(optimizer, {os.fspath(checkpoint)!r})"

        pipeline.recovery.run_without_gradients(save)

    def load_optimizer(self, optimizer: PipelineOptimizer, checkpoint: PathLike) -> None:
        """Load into `optimizer` what `save_optimizer` wrote to the folder `checkpoint`, with any pipelines.

        Raises:
            CheckpointError: the folder holds no optimizer state of this model.
        """
        model_methods.load_optimizer_state(optimizer, _checked(optimizer).pipeline, checkpoint)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: PathLike) -> None:
        """Save the state of `lr_scheduler` to the file `checkpoint`. One rank writes it, as it is the same on all."""
        model_methods.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: PathLike) -> None:
        """Load into `lr_scheduler` what `save_lr_scheduler` wrote to `checkpoint`.

        Raises:
            CheckpointError: the file cannot be read.
        """
        model_methods.load_lr_scheduler(lr_scheduler, checkpoint)


def _pipeline_of(model: Any) -> Engine:
    if not isinstance(model, PipelineModel):
        raise TypeError(
            f"the {type(model).__name__} is not parallelised: use the model that booster.boost(...) returned"
        )
    return model.pipeline


def _checked(optimizer: Any) -> PipelineOptimizer:
    if not isinstance(optimizer, PipelineOptimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"the {kind} is not wrapped: use the optimizer that booster.boost(...) returned")
    return optimizer

"""What a parallelised model can do besides being its own class: the methods both faces add to it."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from penstock.checkpoint import (
    AdapterFolder,
    GroupComm,
    SavingRank,
    from_parallelized,
    load_ordinary,
    save_adapter,
    save_parallelized,
)
from penstock.checkpoint.adapters import load_adapters
from penstock.checkpoint.comm import OnceLost
from penstock.checkpoint.save_pretrained import SaveOptions
from penstock.checkpoint.tensors import whole_shape, whole_state
from penstock.config import Configuration
from penstock.data.loader import prepare_dataloader
from penstock.generation import generate
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.instrumentation import known_of, mix_in, original_class, record_of
from penstock.modeling.placeholders.ghosts import absent_parameters
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.engine import Engine


class PipelineModel:
    """Mixed into the class of a model that `initialize()` or the plugin has parallelised.

    Calling the model with gradients enabled starts a training step and returns an iterator over microbatches; calling
    it with gradients disabled returns one ordinary output for the whole batch.

    `parameters()`, `state_dict()` and `num_parameters()` are of this rank's stages; `save_pretrained` and
    `num_parameters(whole=True)` are of the whole model.

    Optimizers take no empty list of parameters. On a rank that has nothing to train while others have, `parameters()`
    and `named_parameters()` therefore end with a parameter that stands in: one number that nothing reads or saves.
    """

    @property
    def pipeline(self) -> Engine:
        """What runs the model."""
        engine: Engine = record_of(cast(torch.nn.Module, self)).engine
        return engine

    @property
    def configuration(self) -> Configuration | None:
        """What `initialize()` was asked for; None if the plugin parallelised the model."""
        configuration: Configuration | None = record_of(cast(torch.nn.Module, self)).configuration
        return configuration

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train or evaluate on this pipeline's batch, given as the model's own keyword arguments.

        `criterion=` takes a `criterion(outputs, inputs)` for this call, in place of that of `initialize()`; None is the
        model's own loss. See `initialize`.

        With gradients enabled: an iterator that yields one output per microbatch. Call `backward()` on each one's
        `loss` before taking the next. Each loss is the microbatch's share of the global batch's loss, so that the
        losses sum to the unsplit model's; it is known on every rank. The other fields (logits, ...) are on the last
        stage only.

        With gradients disabled: the model's own output for the whole batch, on every rank. Inside generate(): one step
        of it.

        Raises:
            ValueError: an empty batch, no tensors, too few samples, no labels in training, or a criterion that fails.
            PipelineFailure: a rank of the job was lost or failed; names the rank and its cause.
        """
        if self.pipeline.decoding.running:
            return self.pipeline.decoding.forward(self._bind(args, kwargs))
        criterion = record_of(cast(torch.nn.Module, self)).criterion
        if "criterion" in kwargs and (kwargs["criterion"] is None or callable(kwargs["criterion"])):
            criterion = kwargs.pop("criterion")
        inputs = self._bind(args, kwargs)
        if torch.is_grad_enabled():
            return self.pipeline.train(inputs, criterion)
        return self.pipeline.evaluate(inputs, criterion)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As of any module, of this rank's stages; see the class for what may stand at the end."""
        trainable = False
        own = super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]  # the model's
        for name, parameter in own:
            trainable = trainable or parameter.requires_grad
            yield name, parameter
        # Whoever asks for every name of tied weights wants what is in the model.
        if not trainable and recurse and remove_duplicate and (stand_in := stand_in_of(self)) is not None:
            yield f"{prefix}{'.' if prefix else ''}{STAND_IN}", stand_in

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, over stages: on every rank the result of the unsplit model."""
        return generate(self, super().generate, *args, **kwargs)  # type: ignore[misc]  # the model class's own

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's pipeline among the pipelines, which each take their own batches."""
        return self.pipeline.place.pipeline

    @property
    def data_parallel_size(self) -> int:
        """The number of pipelines."""
        return len(self.pipeline.layout.pipelines)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, steps only accumulate gradients on this rank; the first step outside reduces them."""
        return self.pipeline.no_sync()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of the whole model's gradients, over all stages and pipelines; every rank calls it.

        Returns the norm before clipping, shape (). Raises ValueError for a negative `max_norm`, RuntimeError if the
        norm is not finite and `error_if_nonfinite`.
        """
        return self.pipeline.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def prepare_dataloader(self, dataset: Dataset, batch_size: int, **options: Any) -> DataLoader:
        """A loader of this pipeline's own batches of `batch_size` samples: every sample once per epoch over all
        pipelines."""
        return prepare_dataloader(
            dataset, batch_size, num_replicas=self.data_parallel_size, rank=self.data_parallel_rank, **options
        )

    def save_parallelized(
        self, save_directory: str | os.PathLike[str], merge_checkpoints: bool = False, **kwargs: Any
    ) -> None:
        """Save the model: a file per rank, or with `merge_checkpoints` one ordinary checkpoint for transformers.

        Takes `save_pretrained`'s arguments. Every rank calls it. See `penstock.checkpoint.save_parallelized`.
        """
        pipeline = self.pipeline
        if merge_checkpoints and getattr(self, "_hf_peft_config_loaded", False):
            self._save_injected(save_directory, kwargs)
            return
        world, ranks = checkpoint_comms(pipeline)
        with pipeline.saving():
            save_parallelized(
                cast(PreTrainedModel, self),
                save_directory,
                place=saving_rank(pipeline),
                world_comm=world,
                pipeline_comm=ranks,
                merge_checkpoints=merge_checkpoints,
                **kwargs,
            )
        how = "penstock.from_pretrained({!r}, config=...)" if merge_checkpoints else "model.from_parallelized({!r})"
        pipeline.board.resume["model"] = how.format(os.fspath(save_directory))

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """transformers' `save_pretrained`: one ordinary checkpoint of the whole model. Every rank calls it.

        Takes the same arguments; `safe_serialization=False` writes `.bin` files. `is_main_process` has no effect, as
        each rank writes what it holds. See `save_parallelized`.

        Raises:
            ValueError: `push_to_hub` or `distributed_checkpoint` is asked for.
        """
        self.save_parallelized(save_directory, merge_checkpoints=True, **{"safe_serialization": True, **kwargs})

    def save_adapter(
        self,
        save_directory: str | os.PathLike[str],
        name: str,
        select: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
        write: Callable[[str, Mapping[str, torch.Tensor]], None],
    ) -> None:
        """Save one adapter as one ordinary folder; see `penstock.checkpoint.AdapterFolder`. Every rank calls it."""
        pipeline = self.pipeline
        world, ranks = checkpoint_comms(pipeline)
        model = cast(PreTrainedModel, self)
        with pipeline.saving():
            save_adapter(
                model,
                save_directory,
                AdapterFolder(model, name, select, write),
                place=saving_rank(pipeline),
                world_comm=world,
                pipeline_comm=ranks,
            )

    def _save_injected(self, save_directory: str | os.PathLike[str], arguments: dict[str, Any]) -> None:
        """Save the active adapter of transformers' `add_adapter`, as transformers' `save_pretrained` does."""
        SaveOptions.parse({name: value for name, value in arguments.items() if name != "state_dict"})
        model: Any = self
        if len(active := model.active_adapters()) != 1:
            raise ValueError(f"one adapter is saved at a time, but {', '.join(active) or 'none'} are active")

        def write(folder: str, state: Mapping[str, torch.Tensor]) -> None:
            super(PipelineModel, self).save_pretrained(folder, state_dict=dict(state), **arguments)  # type: ignore[misc]

        self.save_adapter(
            save_directory, active[0], lambda state: model.get_adapter_state_dict(state_dict=dict(state)), write
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        """Refused: the weights are on several ranks.

        Raises:
            NotImplementedError: says what to do.
        """
        raise NotImplementedError(
            "push_to_hub() of a parallelised model: each rank has a part of it. Call model.save_pretrained(folder) on "
            "every rank, and then huggingface_hub.upload_folder(repo_id=..., folder_path=folder) on one"
        )

    def num_parameters(
        self, only_trainable: bool = False, exclude_embeddings: bool = False, *, whole: bool = False
    ) -> int:
        """transformers' `num_parameters`, of this rank's stages, or with `whole` of the unsplit model.

        Only with `whole` and `only_trainable` every rank must call it, as no rank knows what others have frozen.
        """
        if not whole:
            number: int = super().num_parameters(only_trainable, exclude_embeddings)  # type: ignore[misc]  # the model's
            return number
        pipeline, model = self.pipeline, cast(PreTrainedModel, self)
        embeddings = {
            f"{name}.weight" for name, child in model.named_modules() if isinstance(child, torch.nn.Embedding)
        }
        left_out = embeddings if exclude_embeddings else set()
        if only_trainable:
            index = pipeline.place.tensor_parallel_rank
            own = sum(
                one.parameter.numel()
                for one in pipeline.held
                if one.parameter.requires_grad and one.name not in left_out and one.counted_by(pipeline.rank, index)
            )
            with pipeline.together(Call.COUNT, [own]) as said:
                return sum(facts[0] for facts in said.values())
        state = whole_state(model)
        counted = [names[0] for names in pipeline.split.aliases if names[0] not in left_out]
        return sum(math.prod(whole_shape(model, name, state[name])) for name in counted)

    def extra_repr(self) -> str:
        """Which part of the model this rank holds."""
        pipeline, said = self.pipeline, super().extra_repr()  # type: ignore[misc]  # the model class's own
        stages = pipeline.context.stages
        held = [unit for stage in stages for unit in pipeline.split.stages[stage]]
        numbers = ", ".join(map(str, stages))
        part = (
            f"stage {numbers} of {pipeline.context.pipeline.num_stages} (counted from 0), on rank {pipeline.rank}: "
            f"holds {', '.join(held)}; the other units are shown without their weights"
        )
        return f"{said}\n{part}" if said else part

    def load_ordinary(self, directory: str | os.PathLike[str], strict: bool = True) -> None:
        """Load the weights of an ordinary checkpoint, as `save_pretrained` writes it. Every rank calls it and reads its
        own part only.

        Args:
            strict: refuse a folder that lacks weights of the model, or has others.

        Raises:
            CheckpointError: the folder holds no checkpoint of this model. No weight has changed then.
        """
        pipeline, model = self.pipeline, cast(Any, self)
        comm, _ = checkpoint_comms(pipeline)
        with pipeline.together(Call.LOAD_MODEL):
            if getattr(model, "_hf_peft_config_loaded", False):
                load_adapters(
                    model, dict.fromkeys(model.active_adapters(), os.fspath(directory)), world_comm=comm, strict=strict
                )
                return
            stages, local = pipeline.split.stages, pipeline.split.local_stages
            load_ordinary(model, directory, own_class(model), stages, local, world_comm=comm, strict=strict)

    def from_parallelized(self, directory: str | os.PathLike[str], variant: str | None = None) -> PipelineModel:
        """Load what `save_parallelized` wrote, from any number of stages and tensor-parallel ranks, into this model;
        returns it. `variant` is the one it was saved with."""
        comm, _ = checkpoint_comms(self.pipeline)
        with self.pipeline.together(Call.LOAD):
            from_parallelized(cast(PreTrainedModel, self), directory, world_comm=comm, variant=variant)
        return self

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Positional arguments under the names of the model's own forward; a mapping alone is taken as its
        arguments."""
        if not args:
            return dict(kwargs)
        if len(args) == 1 and isinstance(args[0], Mapping):
            return {**args[0], **kwargs}
        names = list(inspect.signature(self.forward).parameters)  # type: ignore[attr-defined]  # the model's own
        return {**dict(zip(names, args, strict=False)), **kwargs}


STAND_IN = "nothing_to_train_on_this_rank"


def stand_in_of(model: Any) -> torch.nn.Parameter | None:
    """What stands in for parameters on a rank that has none to train; None if no rank has any."""
    record = known_of(model)
    if record.engine is None or not any(one.requires_grad for _, one in absent_parameters(model)):
        return None
    if record.stand_in is None:
        record.stand_in = torch.nn.Parameter(torch.zeros(1, device=record.engine.device))
    record.stand_in.requires_grad_(True)
    return record.stand_in


def checkpoint_comms(pipeline: Engine) -> tuple[GroupComm, GroupComm]:
    """How all ranks, and the ranks of this pipeline, talk about checkpoints."""
    pipeline.check_open()
    guard = OnceLost(pipeline.board.guard)
    return GroupComm(pipeline.groups.world_control, guard), GroupComm(pipeline.groups.model_parallel_control, guard)


def saving_rank(pipeline: Engine) -> SavingRank:
    """Where this rank stands among those that save."""
    place = pipeline.place
    return SavingRank(
        place.pipeline_rank,
        pipeline.context.pipeline.num_ranks,
        is_writer=place.pipeline == 0,
        pipeline=place.pipeline,
        tensor_parallel_rank=place.tensor_parallel_rank,
        tensor_parallel_size=pipeline.layout.tensor_parallel_size,
    )


def attach(
    model: PreTrainedModel,
    pipeline: Engine,
    configuration: Configuration | None = None,
    criterion: Criterion | None = None,
) -> PreTrainedModel:
    """Make `model` a PipelineModel driven by `pipeline`: the same object, its class a subclass with the same name."""
    if pipeline.rank == 0:
        _warn_of_batch_statistics(model)
    mix_in(model, PipelineModel)
    record = record_of(model)
    record.engine, record.configuration, record.criterion = pipeline, configuration, criterion
    return model


def _warn_of_batch_statistics(model: PreTrainedModel) -> None:
    normalising = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    ]
    if normalising:
        shown = ", ".join(normalising[:3]) + (f" and {len(normalising) - 3} more" if len(normalising) > 3 else "")
        warnings.warn(
            f"in training, batch normalisation ({shown}) takes its statistics from each microbatch: the run equals the "
            "unsplit model accumulating over the same microbatches, not over the whole batch at once",
            stacklevel=3,
        )


def own_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class a parallelised model had before."""
    own: type[PreTrainedModel] = original_class(type(model))
    return own

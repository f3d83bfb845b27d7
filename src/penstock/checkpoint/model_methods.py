"""The methods of a parallelised model, its optimizer and its scheduler that save and load them.

Also saving methods of a model's own class, which write the whole model in a format of theirs, on one rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from penstock.checkpoint.file_specs import (
    Content,
    FileSpec,
    SaveFormat,
    SaveOptions,
    SavingReport,
    each_file,
    first_holders,
    refuse_unsupported,
    tell_reports,
    writers_of,
)
from penstock.checkpoint.formats import TRAINING_VARIANT, AdapterFormat, ParallelFormat
from penstock.checkpoint.load import from_parallelized, load_adapters, load_ordinary
from penstock.checkpoint.model_state import parts_of_state
from penstock.checkpoint.ranks import CheckpointRanks, SavingRank
from penstock.checkpoint.save import Save, save_parallelized
from penstock.checkpoint.tensors import tied_groups
from penstock.checkpoint.training_state import (
    CommonState,
    RunProgress,
    TrainingState,
    load_object,
    load_training_state,
    restore_object,
    save_object,
    state_of,
)
from penstock.checkpoint.untrusted import CheckpointError
from penstock.modeling.instrumentation import absent_of, original_class, record_of
from penstock.modeling.libraries import base_of
from penstock.modeling.weights.whole import shards_of
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.engine import Engine
from penstock.runtime.optimizer import LossScale, PipelineOptimizer

Select = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
Write = Callable[[str, Mapping[str, torch.Tensor]], None]


def save_model(
    model: Any,
    directory: str | os.PathLike[str],
    merge: bool,
    own_save: Callable[..., Any] | None,
    arguments: dict[str, Any],
) -> None:
    """See `PipelineModel.save_parallelized`; `own_save` is the model class's own `save_pretrained`."""
    pipeline = model.pipeline
    if merge and getattr(model, "_hf_peft_config_loaded", False):  # adapters of transformers' `add_adapter`
        _save_injected(model, directory, own_save, arguments)
        how = "model.load_ordinary({!r})"
    else:
        ranks = checkpoint_ranks(pipeline)
        with pipeline.saving(Call.SAVE_WHOLE if merge else Call.SAVE):
            save_parallelized(model, directory, world_comm=ranks, merge_checkpoints=merge, **arguments)
        how = "penstock.from_pretrained({!r}, config=...)" if merge else "model.from_parallelized({!r})"
    pipeline.board.resume["model"] = how.format(os.fspath(directory))


def save_one_adapter(model: Any, directory: str | os.PathLike[str], name: str, select: Select, write: Write) -> None:
    """See `PipelineModel.save_adapter`."""
    ranks = checkpoint_ranks(model.pipeline)
    with model.pipeline.saving(Call.SAVE_ADAPTER):
        Save(AdapterFormat(model, SaveOptions(), name, select, write), directory, ranks).run()


def _save_injected(
    model: Any, directory: str | os.PathLike[str], own_save: Callable[..., Any] | None, arguments: dict[str, Any]
) -> None:
    """Save the active adapter of transformers' `add_adapter`, as transformers' `save_pretrained` does."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"this {type(model).__name__} has adapters: save_lora_adapter(folder) saves them. The whole model is in "
            "the folder that it came from"
        )
    SaveOptions.parse({name: value for name, value in arguments.items() if name != "state_dict"})
    assert own_save is not None
    save: Callable[..., Any] = own_save
    if len(active := model.active_adapters()) != 1:
        raise ValueError(
            f"one adapter is saved at a time, but {', '.join(active) or 'none'} are active"
            ": choose one with set_adapter(name)"
        )

    def write(folder: str, state: Mapping[str, torch.Tensor]) -> None:
        save(folder, state_dict=dict(state), **arguments)

    # Through the method, which integrations/peft.py may have changed.
    model.save_adapter(directory, active[0], lambda state: model.get_adapter_state_dict(state_dict=dict(state)), write)


def load_model(model: Any, directory: str | os.PathLike[str], strict: bool) -> None:
    """See `PipelineModel.load_ordinary`."""
    pipeline = model.pipeline
    comm = checkpoint_ranks(pipeline)
    with pipeline.together(Call.LOAD_MODEL):
        if folders := model.adapter_folders(os.fspath(directory)):
            load_adapters(model, folders, world_comm=comm, strict=strict)
            return
        stages, local = pipeline.split.stages, pipeline.split.local_stages
        load_ordinary(model, directory, original_class(type(model)), stages, local, world_comm=comm, strict=strict)


def load_parallelized(model: Any, directory: str | os.PathLike[str], variant: str | None) -> None:
    """See `PipelineModel.from_parallelized`."""
    comm = checkpoint_ranks(model.pipeline)
    with model.pipeline.together(Call.LOAD):
        from_parallelized(base_of(model), directory, world_comm=comm, variant=variant)


def checkpoint_ranks(pipeline: Engine | None) -> CheckpointRanks:
    """The ranks that save and load together: all that the engine has; without one this process alone."""
    if pipeline is None:
        return CheckpointRanks()
    pipeline.refuse_if_over()
    place = pipeline.place
    return CheckpointRanks(
        pipeline.context.groups.world_control,
        pipeline.board.guard,
        SavingRank(
            sum(before.num_ranks for before in pipeline.layout.pipelines[: place.pipeline]) + place.pipeline_rank,
            pipeline.context.pipeline.num_ranks,
            place.pipeline,
            place.tensor_parallel_rank,
            pipeline.layout.tensor_parallel_size,
            pipeline.layout.context_parallel_size,
        ),
    )


def save_by_own_method(model: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the model's own class that saves it, on one rank, where the model is whole meanwhile. Returns
    what it returned; None on the other ranks. Raises CheckpointError if it fails, or a rank cannot give its part."""
    world = checkpoint_ranks(model.pipeline)
    what, whole, returned = f"save by {type(model).__name__}.{name}()", _WholeModel(model, SaveOptions()), list[Any]()

    def report() -> SavingReport:
        refuse_unsupported(model, merged=None)
        if own_names := parts_of_state(model)[1]:
            raise CheckpointError(
                f"{own_names[0]} is neither a parameter nor a buffer, so it cannot be given to {name}(): save with "
                "save_pretrained, or save_parallelized"
            )
        return whole.report(world.place, "")

    def call(file: FileSpec, content: Content) -> None:
        assert not isinstance(content, bytes)
        for names in tied_groups(model):
            content.update((name, content[names[0]]) for name in names if name in content and names[0] in content)
        with _made_whole(model, content), _NoCollectives(name):
            returned.append(getattr(model, name)(*args, **kwargs))

    with model.pipeline.saving(Call.SAVE_BY_OWN_METHOD):
        reports = tell_reports(world, what, report)
        world.together(f"running {name}() to {what}", lambda: each_file(whole, reports, world, call))
    model.pipeline.board.resume.setdefault("model", f"what {type(model).__name__}.{name}() has written")
    return returned[0] if returned else None


class _WholeModel(SaveFormat):
    """What the leader lacks of the model, as if it were one file."""

    def plan(self, reports: Sequence[SavingReport], rank: int) -> list[FileSpec]:
        leader, shards = writers_of(reports)[0], shards_of(self.model)
        sources = first_holders(reports, shards)
        lacking = {name: source for name, source in sources.items() if source.ranks[0] != leader or name in shards}
        return [FileSpec("the whole model", leader, lacking)]


class _NoCollectives(TorchDispatchMode):
    """Inside, what ranks do together is refused: the others wait until this one is done."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise RuntimeError(
                f"{self._name}() calls torch.distributed ({func.__name__}), but it runs on one rank alone, which has "
                "the whole model meanwhile: leave out of it what ranks do together, such as a barrier"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _made_whole(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the model is whole: what it lacks as ghosts, or has in shards, has these values, by name; buffers, too.

    Parameters are themselves, so that what is tied stays tied. The model's class is its own, without what is mixed in.
    """
    with ExitStack() as undo:
        undo.callback(setattr, record_of(model), "tensor_parallel", record_of(model).tensor_parallel)
        record_of(model).tensor_parallel = None
        for full, value in values.items():
            prefix, _, name = full.rpartition(".")
            module = model.get_submodule(prefix)
            absent = absent_of(module).get(name)
            parameter = module._parameters.get(name) if absent is None else absent.tensor
            is_parameter = isinstance(parameter, nn.Parameter)
            if isinstance(parameter, nn.Parameter):
                undo.callback(setattr, parameter, "data", parameter.data)
                parameter.data, value = value, parameter
            registry: dict[str, Any] = module._parameters if is_parameter else module._buffers
            if name not in registry:
                undo.callback(vars(module).__setitem__, name, vars(module).pop(name))
                undo.callback(registry.pop, name)
                registry[name] = value
        undo.callback(setattr, model, "__class__", type(model))
        model.__class__ = original_class(type(model))
        yield


PathLike = str | os.PathLike[str]


def unwrapped(optimizer: Any) -> Optimizer | None:
    """The optimizer inside this library's or accelerate's wrapper; None for None. Raises TypeError for others."""
    inner = optimizer.unwrap() if isinstance(optimizer, PipelineOptimizer) else optimizer
    inner = getattr(inner, "optimizer", inner)
    if inner is not None and not isinstance(inner, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    return inner


def loss_scale_of(optimizer: Any) -> LossScale | None:
    """float16's loss scale, which the engine of the optimizer uses as well; None if there is none."""
    return optimizer.loss_scale if isinstance(optimizer, PipelineOptimizer) else None


def progress_of(pipeline: Engine) -> RunProgress | None:
    """What decides the random numbers of the next step and evaluation; None before the engine was formed."""
    if pipeline.seed is None:
        return None
    return RunProgress(pipeline.seed, pipeline.step_number, pipeline.num_evaluations)


def restore_progress(pipeline: Engine, loaded: CommonState) -> None:
    """Go on with the random numbers of the run that was loaded, if it was one over pipelines."""
    if loaded.run is not None:
        pipeline.seed, pipeline.step_number = loaded.run.seed, loaded.run.steps_begun
        pipeline.num_evaluations = loaded.run.evaluations


def save_optimizer_state(optimizer: Any, pipeline: Engine, folder: PathLike) -> None:
    """Write the state of an optimizer of this rank's stages, fp16's loss scale, and what decides the run's random
    numbers: the files of a `ParallelFormat` without a model. Every rank calls it. Raises CheckpointError."""
    scale, ranks = loss_scale_of(optimizer), checkpoint_ranks(pipeline)
    extra = {} if scale is None else {"loss_scale": scale.state_dict()}
    state = TrainingState(unwrapped(optimizer), step=pipeline.step_number, extra=extra, run=progress_of(pipeline))
    with pipeline.saving(Call.SAVE_OPTIMIZER):
        files = ParallelFormat(pipeline.split.model, SaveOptions(variant=TRAINING_VARIANT), state, with_model=False)
        Save(files, folder, ranks).run()


def load_optimizer_state(optimizer: Any, pipeline: Engine, folder: PathLike) -> None:
    """Load what `save_optimizer_state` wrote, from any layout. Raises CheckpointError."""
    with pipeline.together(Call.LOAD_OPTIMIZER):
        state = load_training_state(
            pipeline.split.model,
            folder,
            TrainingState(unwrapped(optimizer)),
            world_comm=checkpoint_ranks(pipeline),
            variant=TRAINING_VARIANT,
        )
    pipeline.step_number = state.step  # files saved before 0.4 have only this
    restore_progress(pipeline, state)
    if (scale := loss_scale_of(optimizer)) is not None and "loss_scale" in state.extra:
        restore_object(scale, state.extra["loss_scale"], f"the loss scale in {folder}")
        pipeline.loss_scale = scale.scale


def save_lr_scheduler(lr_scheduler: LRScheduler, path: PathLike) -> None:
    """See `Booster.save_lr_scheduler`."""
    save_object(state_of(lr_scheduler), path, world_comm=_world())


def load_lr_scheduler(lr_scheduler: LRScheduler, path: PathLike) -> None:
    """See `Booster.load_lr_scheduler`."""
    content = load_object(path, world_comm=_world())
    restore_object(lr_scheduler, content, f"the scheduler's state in {path}")


def _world() -> CheckpointRanks:
    return CheckpointRanks(dist.group.WORLD if dist.is_initialized() else None)

"""The methods of a parallelised model that save and load it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock.checkpoint.adapters import AdapterFolder, load_adapters
from penstock.checkpoint.comm import CheckpointRanks
from penstock.checkpoint.load import from_parallelized
from penstock.checkpoint.ordinary import load_ordinary
from penstock.checkpoint.plan import SavingRank
from penstock.checkpoint.save import Save, save_parallelized
from penstock.checkpoint.save_pretrained import SaveOptions
from penstock.modeling.adapters import base_of
from penstock.modeling.instrumentation import original_class
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.engine import Engine

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
    if merge and _has_injected(model):
        _save_injected(model, directory, own_save, arguments)
        return
    ranks = saving_ranks(pipeline)
    with pipeline.saving():
        save_parallelized(model, directory, **ranks, merge_checkpoints=merge, **arguments)
    how = "penstock.from_pretrained({!r}, config=...)" if merge else "model.from_parallelized({!r})"
    pipeline.board.resume["model"] = how.format(os.fspath(directory))


def save_one_adapter(model: Any, directory: str | os.PathLike[str], name: str, select: Select, write: Write) -> None:
    """See `PipelineModel.save_adapter`."""
    ranks = saving_ranks(model.pipeline)
    with model.pipeline.saving():
        Save(AdapterFolder(model, SaveOptions(variant=name), select, write), directory, **ranks).run()


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
        raise ValueError(f"one adapter is saved at a time, but {', '.join(active) or 'none'} are active")

    def write(folder: str, state: Mapping[str, torch.Tensor]) -> None:
        save(folder, state_dict=dict(state), **arguments)

    # Through the method, which PEFT's room may have changed.
    model.save_adapter(directory, active[0], lambda state: model.get_adapter_state_dict(state_dict=dict(state)), write)


def load_model(model: Any, directory: str | os.PathLike[str], strict: bool) -> None:
    """See `PipelineModel.load_ordinary`."""
    pipeline = model.pipeline
    comm = checkpoint_comm(pipeline)
    with pipeline.together(Call.LOAD_MODEL):
        if folders := model._adapter_folders(os.fspath(directory)):
            load_adapters(model, folders, world_comm=comm, strict=strict)
            return
        stages, local = pipeline.split.stages, pipeline.split.local_stages
        load_ordinary(model, directory, original_class(type(model)), stages, local, world_comm=comm, strict=strict)


def load_parallelized(model: Any, directory: str | os.PathLike[str], variant: str | None) -> None:
    """See `PipelineModel.from_parallelized`."""
    comm = checkpoint_comm(model.pipeline)
    with model.pipeline.together(Call.LOAD):
        from_parallelized(base_of(model), directory, world_comm=comm, variant=variant)


def _has_injected(model: Any) -> bool:
    """Whether a model has adapters of transformers' `add_adapter`."""
    return getattr(model, "_hf_peft_config_loaded", False)


def checkpoint_comm(pipeline: Engine) -> CheckpointRanks:
    """How all ranks talk about checkpoints."""
    pipeline.check_open()
    return CheckpointRanks(pipeline.groups.world_control, pipeline.board.guard)


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
        before=sum(one.num_ranks for one in pipeline.layout.pipelines[: place.pipeline]),
    )


def saving_ranks(pipeline: Engine) -> dict[str, Any]:
    """What every save is told of the ranks, by its names in `penstock.checkpoint`."""
    return {"place": saving_rank(pipeline), "world_comm": checkpoint_comm(pipeline)}

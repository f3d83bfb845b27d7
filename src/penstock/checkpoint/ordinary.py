"""Loading an ordinary checkpoint, as `save_pretrained` or a merge writes it, into a model that is split already."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel

from penstock.modeling.stage_loading import load_stage
from penstock.modeling.tensor_parallel import take_slices

from .comm import Comm, together
from .errors import CheckpointError
from .manifest import manifest_name
from .tensors import held_state, tensor_parallel_of, tied_groups

SHOWN = 5


def is_parallelized(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a checkpoint with a file for each stage."""
    return os.path.exists(os.path.join(directory, manifest_name()))


def load_ordinary(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    model_class: type[PreTrainedModel],
    stages: Sequence[Sequence[str]],
    local_stages: Collection[int],
    *,
    world_comm: Comm,
    strict: bool = True,
) -> None:
    """Copy the weights of this rank's stages from an ordinary checkpoint into the model's existing parameters.

    They are read as transformers' own `from_pretrained` reads them, names converted and all.

    Args:
        model_class: the model's own class.
        stages: names of units per stage. local_stages: those held here.
        strict: refuse a checkpoint that lacks weights of the model or has others. Otherwise those it lacks stay.

    Raises:
        CheckpointError: it cannot be read on some rank, or does not fit. No rank's model has changed then.
    """
    directory = os.path.abspath(directory)
    loaded: list[dict[str, torch.Tensor]] = []

    def read() -> None:
        if not os.path.isdir(directory):
            raise CheckpointError(f"{directory} is no directory")
        with torch.random.fork_rng(devices=[]):  # what the folder lacks is drawn at random
            fresh, info = load_stage(model_class, directory, stages, local_stages, tensor_parallel_of(model))
        faults = {"lacks": info.missing_keys, "has no place in the model for": info.unexpected_keys}
        for what, names in faults.items() if strict else ():
            if names:
                raise CheckpointError(f"{directory} {what} {', '.join(names[:SHOWN])}")
        lacking = set(info.missing_keys)
        for group in tied_groups(model):
            lacking.update(group if lacking & set(group) else ())
        every = {**held_state(fresh), **take_slices(fresh)}
        found = {name: tensor for name, tensor in every.items() if name not in lacking}
        for name, target in held_state(model).items():
            if name in found and found[name].shape != target.shape:
                shapes = f"{list(found[name].shape)} in the checkpoint, {list(target.shape)} in the model"
                raise CheckpointError(f"{directory} has another shape of {name}: {shapes}")
        loaded.append(found)

    together(world_comm, f"load {directory}", read)
    with torch.no_grad():
        for name, target in held_state(model).items():
            if name in loaded[0]:
                target.copy_(loaded[0][name])

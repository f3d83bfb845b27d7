"""Loading an ordinary checkpoint, as `save_pretrained` writes it, into a model that is split already.

transformers reads it. What it would open is checked before.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from collections.abc import Collection, Sequence
from itertools import product

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.modeling.weights.load import load_stage
from penstock.modeling.weights.whole import tensor_parallel_of, whole_state
from penstock.random_state import restored
from penstock.tensor_parallel import take_shards

from .comm import CheckpointRanks
from .files import check_archive, open_tensors
from .names import EXTENSIONS, STAGING, check_plain, weight_file_names
from .staging import read_index
from .tensors import held_state, tied_groups
from .untrusted import CheckpointError, cannot_read, damaged, is_directory, kind_of, locate, open_plain

# Names in an error.
_SHOWN = 5


def load_ordinary(
    model: nn.Module,
    directory: str | os.PathLike[str],
    model_class: type,
    stages: Sequence[Sequence[str]],
    local_stages: Collection[int],
    *,
    world_comm: CheckpointRanks,
    strict: bool = True,
) -> None:
    """Copy the weights of this rank's stages from an ordinary checkpoint into the model's existing parameters.

    They are read as transformers' own `from_pretrained` reads them, names converted and all; those of a module that is
    no model of transformers as its `load_state_dict` takes them. Without `strict` weights that it lacks stay.

    Raises:
        CheckpointError: it cannot be read on some rank, or does not fit. No rank's model has changed then.
    """
    directory = os.path.abspath(directory)
    loaded: list[dict[str, torch.Tensor]] = []

    def read() -> None:
        files = check_ordinary(directory)
        try:
            if isinstance(model, PreTrainedModel):
                found, missing, unexpected = _of_stages(model, directory, model_class, stages, local_stages)
            else:
                found, missing, unexpected = _of_module(model, files)
        except CheckpointError:
            raise
        except Exception as error:
            raise _blame(files, directory, error) from None
        faults = {"lacks": missing, "has no place in the model for": unexpected}
        for what, names in faults.items() if strict else ():
            if names:
                raise CheckpointError(f"{directory} {what} {', '.join(list(names)[:_SHOWN])}")
        for name, target in held_state(model).items():
            if name in found and found[name].shape != target.shape:
                shapes = f"{list(found[name].shape)} in the checkpoint, {list(target.shape)} in the model"
                raise CheckpointError(f"{directory} has another shape of {name}: {shapes}")
        loaded.append(found)

    world_comm.together(f"reading the files to load {directory}", read)
    with torch.no_grad():
        for name, target in held_state(model).items():
            if name in loaded[0]:
                target.copy_(loaded[0][name])


# What a checkpoint has for this rank, and names that it lacks, and that have no place in the model.
Read = tuple[dict[str, torch.Tensor], Collection[str], Collection[str]]


def _of_stages(
    model: PreTrainedModel,
    directory: str,
    model_class: type,
    stages: Sequence[Sequence[str]],
    local_stages: Collection[int],
) -> Read:
    # The model's own configurations: those in the folder are not needed, and could name anything.
    given = {"config": model.config, "local_files_only": True}
    if model.can_generate():
        given["generation_config"] = model.generation_config
    with restored([torch.default_generator]):  # what the folder lacks is drawn at random
        fresh, info = load_stage(model_class, directory, stages, local_stages, tensor_parallel_of(model), **given)
    lacking = set(info.missing_keys)
    for group in tied_groups(model):
        lacking.update(group if lacking & set(group) else ())
    every = {**held_state(fresh), **take_shards(fresh)}
    found = {name: tensor for name, tensor in every.items() if name not in lacking}
    return found, info.missing_keys, info.unexpected_keys


def _of_module(model: nn.Module, files: Sequence[str]) -> Read:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_tensors(locate(path), path)) for path in files]
        read = {name: file.read for file in opened for name in file.names}
        source = {name: name for name in read}
        for group in tied_groups(model):  # a file may have one of the names alone
            source.update((name, one) for one in group if one in read for name in group if name not in read)
        found = {name: read[source[name]](source[name]) for name in held_state(model) if name in source}
    whole = whole_state(model)
    return found, [name for name in whole if name not in source], [name for name in read if name not in whole]


def check_ordinary(directory: str) -> list[str]:
    """Check what transformers would open in a folder that somebody else may have made; paths of the files of weights.

    Raises CheckpointError for what is no regular file of this folder, leads out of it, or is not what its name says.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(f"{directory} is no directory")
    for name in sorted(os.listdir(directory)):
        # transformers would look for weights elsewhere then.
        if name == "adapter_config.json" or (name.startswith("shard-") and name.endswith(".safetensors")):
            what = "a distributed checkpoint" if name.startswith("shard-") else "an adapter"
            raise CheckpointError(
                f"{os.path.join(directory, name)} makes this the folder of {what}; load it with transformers in one "
                "process, and save the whole model with save_pretrained"
            )
    for extension, diffusers in product(EXTENSIONS, (False, True)):
        single, index = (os.path.join(directory, name) for name in weight_file_names(extension, None, diffusers))
        # In transformers' own order: the first that exists is taken.
        if kind_of(single) is not None:
            return [_check_weights(single)]
        if kind_of(index) is not None:
            return _check_index(directory, index, extension)
    raise CheckpointError(
        f"{directory} has no weights: no model.safetensors, no pytorch_model.bin, and no index of either"
    )


def _check_index(directory: str, path: str, extension: str) -> list[str]:
    weight_map = read_index(path)
    for tensor, place in weight_map.items():
        folder, _, name = place.rpartition("/")
        # The shards of a save that was interrupted are still where they were staged.
        if folder and not (STAGING.fullmatch(folder) and is_directory(os.path.join(directory, folder))):
            check_plain(place, f"{path} is damaged: a file name in it")
        check_plain(name, f"{path} is damaged: a file name in it")
        if not name.endswith(extension):
            raise damaged(path, ["weight_map", tensor], place, f"the name of a file of weights, *{extension}")
    if not weight_map:
        raise damaged(path, ["weight_map"], weight_map, "at least one weight")
    return [_check_weights(os.path.join(directory, name)) for name in sorted(set(weight_map.values()))]


def _check_weights(path: str) -> str:
    try:
        found = locate(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if path.endswith(".safetensors"):
        with open_tensors(found, path):
            pass
    elif zipfile.is_zipfile(found):  # files of old versions of torch are none
        with open_plain(path) as file:
            check_archive(file, path)
    return path


def _blame(files: Sequence[str], directory: str, error: Exception) -> CheckpointError:
    """The error for a folder that transformers could not load; it does not say which file it could not read."""
    for path in files if isinstance(error, pickle.UnpicklingError) else ():
        try:
            torch.load(locate(path), weights_only=True, map_location="meta")
        except Exception as fault:
            return cannot_read(path, fault)
    return cannot_read(directory, error)

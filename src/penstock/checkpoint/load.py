"""Loading a checkpoint into a model that is split already: a parallel one of any layout, or an ordinary one."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Collection, Sequence
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.modeling.tensor_parallel import take_shards
from penstock.modeling.weights.load import load_stage
from penstock.random_state import restored

from .comm import Comm, together
from .files import check_archive, open_tensors
from .manifest import MODEL, Manifest, read_manifest
from .names import EXTENSIONS, STAGING, check_plain, manifest_name, weight_file_names
from .reader import CheckpointReader, Resharding
from .tensors import (
    dtype_name,
    dtype_of,
    held_state,
    shards_of,
    tensor_parallel_of,
    tensor_parallel_place,
    tied_groups,
    whole_shape,
    whole_state,
)
from .untrusted import CheckpointError, cannot_read, is_directory, kind_of, locate, open_plain, read_json

Model = TypeVar("Model", bound=nn.Module)

# Names in an error.
_SHOWN = 5


def from_parallelized(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    world_comm: Comm,
    variant: str | None = None,
) -> Model:
    """Load what `save_parallelized` wrote into the parameters and buffers that `model` has on this rank.

    Values are copied into the existing parameters, so an optimizer goes on working. A rank reads the tensors it holds
    and no others. Nothing in a file is executed. Every rank calls this; if it fails on one, every rank raises, and no
    rank's model has changed.

    Args:
        model: a split model, or a whole one. Its tensor-parallel size may differ from that of the saving run, as the
            number of its stages may.

    Returns:
        `model`.

    Raises:
        CheckpointError: a file is missing, truncated or not the one that was saved, or the checkpoint is of another
            class, or of a model with other names or shapes. The message names the file, or the tensors.
    """
    load = WeightsLoad(model, directory, variant)
    doing = f"load {load.directory}"
    try:
        together(world_comm, doing, "checking the files", load.check)
        together(world_comm, doing, "copying the weights", load.apply)
    finally:
        load.close()
    return model


class WeightsLoad:
    """What `from_parallelized` does on one rank, in two steps: nothing has changed before `apply`."""

    def __init__(self, model: PreTrainedModel, directory: str | os.PathLike[str], variant: str | None = None) -> None:
        self.directory = os.path.abspath(directory)
        self._model = model
        self._variant = variant
        self._targets = _targets(model)
        self._sources: dict[str, tuple[str, Resharding]] = {}
        self._reader: CheckpointReader | None = None

    def check(self) -> None:
        """Check that the checkpoint is whole and of this model. Raises CheckpointError."""
        model, directory = self._model, self.directory
        manifest = read_manifest(directory, self._variant)
        check_class(manifest, directory, type(model).__name__)
        manifest.check_files(directory)
        self._reader = reader = CheckpointReader(directory, manifest, MODEL, tensor_parallel_place(model))
        every_source, held = _match(model, manifest, reader, directory), shards_of(model)
        for name in self._targets:
            source = every_source[name]
            self._sources[name] = source, Resharding(reader.saved_sharding(source), held.get(name))
        reader.verify(dict(self._sources.values()))

    @torch.no_grad()
    def apply(self) -> None:
        """Copy the values."""
        assert self._reader is not None
        for name, target in self._targets.items():
            target.copy_(self._reader.read(*self._sources[name]))

    def close(self) -> None:
        """Close the files."""
        if self._reader is not None:
            self._reader.close()


def check_class(manifest: Manifest, directory: str, model_class: str) -> None:
    """Raise CheckpointError unless the checkpoint is of this class."""
    if manifest.model_class != model_class:
        raise CheckpointError(f"{directory} holds a {manifest.model_class}, but the model is a {model_class}")


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """The live parameters and persistent buffers of this rank, tied ones under one of their names."""
    targets: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.is_meta:
            targets.setdefault(id(tensor), (name, tensor))
    return dict(targets.values())


def _match(model: nn.Module, manifest: Manifest, reader: CheckpointReader, directory: str) -> dict[str, str]:
    """For each name of the unsplit model, the name under which the checkpoint has it.

    All names of a tied weight get the same one, that of its first holder, so that its holders end up equal. The whole
    model is compared, not only this rank's part, so that every rank finds the same fault.
    """
    whole = whole_state(model)
    found = reader.locations
    sources = {name: name for name in whole if name in found}
    for group in manifest.tied:
        present = sorted((name for name in group if name in found), key=lambda name: found[name].pipeline_rank)
        sources.update({name: present[0] for name in group if name in whole and present})
    for group in tied_groups(model):
        candidates = list(dict.fromkeys(sources[name] for name in group if name in sources))
        if len({found[name].info for name in candidates}) > 1:
            raise CheckpointError(f"{directory} has different values for {candidates}, which the model ties together")
        sources.update({name: candidates[0] for name in group if name in whole and candidates})

    aliases = {name for group in manifest.tied for name in group}
    _refuse("lacks tensors of the model", directory, [name for name in whole if name not in sources])
    _refuse(
        "has tensors that the model does not have",
        directory,
        [name for name in found if name not in whole and name not in aliases],
    )
    different = []
    for name, tensor in whole.items():
        saved, expected = reader.whole_shape(sources[name]), whole_shape(model, name, tensor)
        if saved != expected:
            different.append(f"{name}: {list(saved)} in the checkpoint, {list(expected)} in the model")
    _refuse("has tensors of other shapes", directory, different)
    other = []
    for name, tensor in whole.items():
        there, here = found[sources[name]].info.dtype, dtype_name(tensor.dtype)
        if _sort_of(dtype_of(there)) != _sort_of(tensor.dtype):
            other.append(f"{name}: {there} in the checkpoint, {here} in the model")
    _refuse("has tensors of other types", directory, other)
    return sources


def _sort_of(dtype: torch.dtype) -> tuple[bool, bool]:
    """What must agree for values to be converted: integers do not become weights."""
    return dtype.is_floating_point, dtype.is_complex


def _refuse(what: str, directory: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise CheckpointError(f"{directory} {what}: {'; '.join(names[:_SHOWN])}{more}")


def check_ordinary(directory: str) -> list[str]:
    """Check what transformers would open in a folder that somebody else may have made.

    Returns:
        paths of the files of weights.

    Raises:
        CheckpointError: naming what is no regular file of this folder, leads out of it, or is not what its name says.
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
    for extension in EXTENSIONS:
        single, index = (os.path.join(directory, name) for name in weight_file_names(extension, None))
        # In transformers' own order: the first that exists is taken.
        if kind_of(single) is not None:
            return [_check_weights(single)]
        if kind_of(index) is not None:
            return _check_index(directory, index, extension)
    raise CheckpointError(
        f"{directory} has no weights: no model.safetensors, no pytorch_model.bin, and no index of either"
    )


def _check_index(directory: str, path: str, extension: str) -> list[str]:
    content = read_json(path)
    shards: dict[str, None] = {}
    for _, place in content["weight_map"].items():
        folder, _, name = place.text().rpartition("/")
        # The shards of a save that was interrupted are still where they were staged.
        if folder and not (STAGING.fullmatch(folder) and is_directory(os.path.join(directory, folder))):
            check_plain(place.text(), f"{path} is damaged: a file name in it")
        check_plain(name, f"{path} is damaged: a file name in it")
        if not name.endswith(extension):
            place.refuse(f"the name of a file of weights, *{extension}")
        shards[place.text()] = None
    if not shards:
        content["weight_map"].refuse("at least one weight")
    for _ in content["metadata"].items():
        pass
    return [_check_weights(os.path.join(directory, name)) for name in sorted(shards)]


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


def is_parallelized(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a checkpoint with a file for each stage."""
    return os.path.exists(os.path.join(directory, manifest_name()))


def load_ordinary(
    model: nn.Module,
    directory: str | os.PathLike[str],
    model_class: type,
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
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"{type(model).__name__} is no model of transformers: load an ordinary folder before it is parallelised, "
            "with model.load_state_dict(...), or save without merging and call from_parallelized"
        )
    directory = os.path.abspath(directory)
    loaded: list[dict[str, torch.Tensor]] = []

    def read() -> None:
        files = check_ordinary(directory)
        # The model's own configurations: those in the folder are not needed, and could name anything.
        given = {"config": model.config, "local_files_only": True}
        if model.can_generate():
            given["generation_config"] = model.generation_config
        try:
            with restored([torch.default_generator]):  # what the folder lacks is drawn at random
                fresh, info = load_stage(
                    model_class, directory, stages, local_stages, tensor_parallel_of(model), **given
                )
        except Exception as error:
            raise _blame(files, directory, error) from None
        faults = {"lacks": info.missing_keys, "has no place in the model for": info.unexpected_keys}
        for what, names in faults.items() if strict else ():
            if names:
                raise CheckpointError(f"{directory} {what} {', '.join(names[:_SHOWN])}")
        lacking = set(info.missing_keys)
        for group in tied_groups(model):
            lacking.update(group if lacking & set(group) else ())
        every = {**held_state(fresh), **take_shards(fresh)}
        found = {name: tensor for name, tensor in every.items() if name not in lacking}
        for name, target in held_state(model).items():
            if name in found and found[name].shape != target.shape:
                shapes = f"{list(found[name].shape)} in the checkpoint, {list(target.shape)} in the model"
                raise CheckpointError(f"{directory} has another shape of {name}: {shapes}")
        loaded.append(found)

    together(world_comm, f"load {directory}", "reading the files", read)
    with torch.no_grad():
        for name, target in held_state(model).items():
            if name in loaded[0]:
                target.copy_(loaded[0][name])

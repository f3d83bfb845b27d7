"""Loading weights into a model that is split already.

From a parallel checkpoint of any layout; from an ordinary one, which transformers reads once what it would open is
checked; and from the folders of adapters.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.checkpoint.files import check_archive, open_tensors
from penstock.checkpoint.manifest import (
    ADAPTER,
    EXTENSIONS,
    MODEL,
    STAGING,
    Manifest,
    check_plain,
    manifest_name,
    weight_file_names,
    whole_manifest,
)
from penstock.checkpoint.model_state import (
    MARK,
    as_values,
    fill,
    held_state,
    own_name,
    parts_of_state,
    registered_names,
)
from penstock.checkpoint.ranks import CheckpointRanks
from penstock.checkpoint.reader import CheckpointReader, Resharding
from penstock.checkpoint.staging import read_index
from penstock.checkpoint.tensors import DTYPES, dtype_name, of_run, outline, tied_groups
from penstock.checkpoint.untrusted import (
    CheckpointError,
    CheckpointMismatch,
    cannot_read,
    damaged,
    is_directory,
    kind_of,
    locate,
    open_plain,
)
from penstock.modeling.placeholders.ghosts import shown_whole
from penstock.modeling.weights.load import load_stage
from penstock.modeling.weights.whole import (
    sharding_in,
    shards_of,
    take_shards,
    tensor_parallel_place,
    whole_shape,
    whole_state,
)
from penstock.random_state import restored

Model = TypeVar("Model", bound=nn.Module)

# Names in an error.
_SHOWN = 5


def from_parallelized(
    model: Model, directory: str | os.PathLike[str], *, world_comm: CheckpointRanks, variant: str | None = None
) -> Model:
    """Load what `save_parallelized` wrote, on any layout, into the parameters and buffers that a model has here.

    A rank reads the tensors it holds and no others. Every rank calls this. Raises CheckpointError, on all ranks, if a
    file is missing, truncated or not the one that was saved, or the checkpoint is of another class, or of a model with
    other names or shapes. No rank's model has changed then."""
    directory = os.path.abspath(directory)
    copy, _ = checked_weights(model, directory, world_comm, variant)
    world_comm.together(f"copying the weights to load {directory}", copy)
    return model


def checked_weights(
    model: nn.Module, directory: str, world: CheckpointRanks, variant: str | None = None
) -> tuple[Callable[[], None], Manifest]:
    """Check on all ranks that a checkpoint is whole and of this model. Returns what copies its values on this rank, and
    its table of contents. Raises CheckpointMismatch if it is of another model, CheckpointError if it is damaged."""
    sources: dict[str, tuple[str, Resharding]] = {}
    readers = list[tuple[CheckpointReader, Manifest]]()

    def check() -> None:
        manifest = whole_manifest(directory, variant, type(model).__name__)
        reader = CheckpointReader(directory, manifest, MODEL, tensor_parallel_place(model))
        readers.append((reader, manifest))
        every_source, held = match(model, manifest, reader, directory), shards_of(model)
        themselves, others = parts_of_state(model)
        for name in (*themselves, *others):
            source = every_source[name]
            sources[name] = source, Resharding(reader.saved_sharding(source), held.get(name))
        reader.verify(dict(sources.values()))

    world.together(f"checking the files to load {directory}", check)
    ((reader, manifest),) = readers
    return partial(fill, model, _CheckpointValues(reader, sources)), manifest


@dataclass(frozen=True)
class _CheckpointValues(Mapping[str, Any]):
    """A checkpoint's values by the names in the model, read when they are asked for. `sources`: where each is."""

    reader: CheckpointReader
    sources: Mapping[str, tuple[str, Resharding]]

    def __getitem__(self, name: str) -> Any:
        source, sharding = self.sources[name]
        return as_values({source: self.reader.read(source, sharding)})[own_name(source)]

    def __contains__(self, name: object) -> bool:
        return name in self.sources  # Mapping's would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)


def saved_sources(manifest: Manifest, reader: CheckpointReader) -> dict[str, str]:
    """For each name of the saved model, the name under which the checkpoint has it; of a tied weight that of its first
    holder."""
    locations = reader.locations
    sources = {name: name for name in locations}
    for group in manifest.tied:
        present = sorted((name for name in group if name in locations), key=lambda name: locations[name].pipeline_rank)
        sources.update(dict.fromkeys(group, present[0]) if present else {})
    return sources


def match(model: nn.Module, manifest: Manifest, reader: CheckpointReader, directory: str) -> dict[str, str]:
    """For each name of the unsplit model, the name under which the checkpoint has it. Raises CheckpointMismatch if its
    weights are not those of the checkpoint. The whole model is compared, so that every rank finds the same fault."""
    whole, registered = of_run(model, whole_state(model)), registered_names(model)
    locations = reader.locations
    saved = {own_name(name): source for name, source in saved_sources(manifest, reader).items()}
    sources = {name: source for name, source in saved.items() if name in whole}
    for group in tied_groups(model):
        candidates = list(dict.fromkeys(sources[name] for name in group if name in sources))
        if len({locations[name].info for name in candidates}) > 1:
            raise CheckpointMismatch(
                f"{directory} has different values for {candidates}, which the model ties together"
                ": untie them in the model that is to be loaded (tie_word_embeddings=False in its configuration)"
            )
        sources.update({name: candidates[0] for name in group if name in whole and candidates})

    aliases = {name for group in manifest.tied for name in group}
    foreign = [name for name in locations if own_name(name) not in whole and name not in aliases]
    _refuse(directory, "lacks tensors of the model", [name for name in whole if name not in sources])
    _refuse(directory, "has tensors that the model does not have", foreign)
    shapes, types = list[str](), list[str]()
    for name in filter(registered.__contains__, whole):  # of others the shapes may change
        tensor = whole[name]
        shape, expected = reader.whole_shape(sources[name]), whole_shape(model, name, tensor)
        if shape != expected:
            shapes.append(f"{name}: {list(shape)} in the checkpoint, {list(expected)} in the model")
        there, here = locations[sources[name]].info.dtype, tensor.dtype
        # Integers do not become weights.
        if (DTYPES[there].is_floating_point, DTYPES[there].is_complex) != (here.is_floating_point, here.is_complex):
            types.append(f"{name}: {there} in the checkpoint, {dtype_name(here)} in the model")
    _refuse(directory, "has tensors of other shapes", shapes)
    _refuse(directory, "has tensors of other types", types)
    return sources


def _refuse(directory: str, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise CheckpointMismatch(f"{directory} {what}: {'; '.join(names[:_SHOWN])}{more}")


def is_parallelized(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a parallel checkpoint."""
    return os.path.exists(os.path.join(directory, manifest_name()))


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
    no model of transformers as its `load_state_dict` takes them. Without `strict` weights that it lacks stay. Raises
    CheckpointError if it cannot be read on some rank, or does not fit. No rank's model has changed then."""
    directory = os.path.abspath(directory)
    loaded: list[Mapping[str, Any]] = []

    def read() -> None:
        files = check_ordinary(directory)
        try:
            if isinstance(model, PreTrainedModel):
                tensors, missing, unexpected = _of_stages(model, directory, model_class, stages, local_stages)
            else:
                tensors, missing, unexpected = _of_module(model, files)
        except CheckpointError:
            raise
        except Exception as error:
            raise _blame(files, directory, error) from None
        faults = {"lacks": missing, "has no place in the model for": unexpected}
        for what, names in faults.items() if strict else ():
            if names:
                raise CheckpointError(f"{directory} {what} {', '.join(list(names)[:_SHOWN])}")
        for name, target in parts_of_state(model)[0].items():
            if name in tensors and tensors[name].shape != target.shape:
                shapes = f"{list(tensors[name].shape)} in the checkpoint, {list(target.shape)} in the model"
                raise CheckpointError(f"{directory} has another shape of {name}: {shapes}")
        loaded.append(tensors)

    world_comm.together(f"reading the files to load {directory}", read)
    fill(model, loaded[0])


# What a checkpoint has for this rank, and names that it lacks, and that have no place in the model.
Read = tuple[Mapping[str, Any], Collection[str], Collection[str]]


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
        fresh, info = load_stage(model_class, directory, stages, local_stages, sharding_in(model), **given)
    lacking = set(info.missing_keys)
    for group in tied_groups(model):
        lacking.update(group if lacking & set(group) else ())
    every = {**held_state(fresh), **take_shards(fresh)}
    tensors = {name: tensor for name, tensor in every.items() if name not in lacking and not name.endswith(MARK)}
    return tensors, info.missing_keys, info.unexpected_keys


def _of_module(model: nn.Module, files: Sequence[str]) -> Read:
    read = {name: tensor for path in files for name, tensor in open_tensors(locate(path), path).items()}
    tensors = dict(read)
    for group in tied_groups(model):  # a file may have one of the names alone
        tensors.update((name, read[alias]) for alias in group if alias in read for name in group if name not in read)
    values, whole = as_values(tensors), whole_state(model)
    unknown = [name for name in map(own_name, read) if name not in whole]
    return values, [name for name in whole if name not in values], unknown


def check_ordinary(directory: str) -> list[str]:
    """Check what transformers would open in a folder that somebody else may have made. Returns the paths of the files
    of weights. Raises CheckpointError if there are none, or one is no regular file of this folder, leads out of it, or
    is not what its name says."""
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
    raise CheckpointError(f"{directory} has no weights: no model.safetensors, no pytorch_model.bin, nor their indices")


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
        place = locate(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if path.endswith(".safetensors"):
        open_tensors(place, path)
    elif zipfile.is_zipfile(place):  # files of old versions of torch are none
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


# -- adapters ----------------------------------------------------------------------------------------------------------


def load_adapters(
    model: nn.Module, folders: Mapping[str, str], *, world_comm: CheckpointRanks, strict: bool = True
) -> None:
    """Copy the weights of ordinary adapter folders, by adapter, into the adapters that a split model has on this rank.

    Without `strict` weights that a folder lacks stay. Raises CheckpointError if a folder cannot be read on some rank,
    or does not fit. No rank's model has changed then."""
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    states: dict[str, dict[str, torch.Tensor]] = {}

    def read() -> None:
        for name, folder in folders.items():
            if not any(kind_of(os.path.join(folder, f"{ADAPTER}{extension}")) for extension in EXTENSIONS):
                raise CheckpointError(f"{folder} has no weights of the adapter {name}: no {ADAPTER}{EXTENSIONS[0]}")
            try:
                state = load_peft_weights(folder, device="cpu")
            except Exception as error:
                raise cannot_read(folder, error) from None
            with shown_whole(model):
                every = model.state_dict()
                whole = {key: outline(tensor) for key, tensor in every.items() if isinstance(tensor, torch.Tensor)}
                wanted = get_peft_model_state_dict(model, whole, name, save_embedding_layers=False)
            state = _under_names_of(wanted, state)
            lacking = [key for key in wanted if key not in state] if strict else []
            if lacking:
                raise CheckpointError(f"{folder} lacks weights of the adapter {name}: {', '.join(lacking[:_SHOWN])}")
            for key, tensor in wanted.items():
                if key in state and state[key].shape != tensor.shape:
                    shapes = f"{list(state[key].shape)} in the file, {list(tensor.shape)} in the model"
                    raise CheckpointError(f"{folder} has another shape of {key}: {shapes}")
            states[name] = state

    world_comm.together(f"reading the adapters to load {', '.join(folders.values())}", read)
    for name, state in states.items():
        set_peft_model_state_dict(model, state, adapter_name=name)


def _under_names_of(wanted: Collection[str], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` as the model names it: a file has the names in a PeftModel."""
    prefix = "base_model.model."
    if any(name.startswith(prefix) for name in wanted):
        return dict(state)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}

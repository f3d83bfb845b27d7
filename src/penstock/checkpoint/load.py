"""Loading a parallel checkpoint into a model, whatever number of stages wrote it."""

from __future__ import annotations

import os
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from .comm import Comm, together
from .errors import CheckpointError
from .manifest import MODEL, Manifest, read_manifest
from .reader import CheckpointReader
from .slices import Cuts, SliceReader, saved_cut
from .tensors import dtype_name, dtype_of, shards_of, tensor_parallel_place, tied_groups, whole_shape, whole_state

Model = TypeVar("Model", bound=PreTrainedModel)

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
    directory = os.path.abspath(directory)
    targets = _targets(model)
    sources: dict[str, tuple[str, Cuts]] = {}

    def check() -> SliceReader:
        manifest = read_manifest(directory, variant)
        check_class(manifest, directory, type(model).__name__)
        manifest.check_files(directory)
        reader = SliceReader(directory, manifest, MODEL, tensor_parallel_place(model), opened)
        every_source, held = _match(model, manifest, reader.readers[0], directory), shards_of(model)
        locations = reader.readers[0].locations
        for name in targets:
            source = every_source[name]
            sources[name] = source, Cuts(saved_cut(manifest, source, locations[source].info.shape), held.get(name))
        reader.verify(dict(sources.values()))
        return reader

    @torch.no_grad()
    def copy() -> None:
        for name, target in targets.items():
            target.copy_(made[0].read(*sources[name]))

    doing = f"load {directory}"
    opened: list[CheckpointReader] = []
    made: list[SliceReader] = []
    try:
        together(world_comm, doing, "checking the files", lambda: made.append(check()))
        together(world_comm, doing, "copying the weights", copy)
    finally:
        for reader in opened:
            reader.__exit__(None, None, None)
    return model


def check_class(manifest: Manifest, directory: str, model_class: str) -> None:
    """Raise CheckpointError unless the checkpoint is of this class."""
    if manifest.model_class != model_class:
        raise CheckpointError(f"{directory} holds a {manifest.model_class}, but the model is a {model_class}")


def _targets(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The live parameters and persistent buffers of this rank, tied ones under one of their names."""
    targets: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.is_meta:
            targets.setdefault(id(tensor), (name, tensor))
    return dict(targets.values())


def _match(model: PreTrainedModel, manifest: Manifest, reader: CheckpointReader, directory: str) -> dict[str, str]:
    """For each name of the unsplit model, the name under which the checkpoint has it.

    All names of a tied weight get the same one, that of its first holder, so that its holders end up equal. The whole
    model is compared, not only this rank's part, so that every rank finds the same fault.
    """
    whole = whole_state(model)
    found = reader.locations
    sources = {name: name for name in whole if name in found}
    for group in manifest.tied:
        present = sorted((name for name in group if name in found), key=lambda name: found[name].stage)
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
        saved = found[sources[name]].info.shape
        if (cut := saved_cut(manifest, sources[name], saved)) is not None:
            saved = tuple(cut.whole_shape(saved, manifest.tensor_parallel_size))
        expected = whole_shape(model, name, tensor)
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

"""Loading the weights of a parallel checkpoint of any layout into a model that is split already."""

from __future__ import annotations

import os
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.modeling.weights.whole import shards_of, tensor_parallel_place, whole_shape, whole_state

from .comm import CheckpointRanks
from .manifest import MODEL, Manifest, whole_manifest
from .names import manifest_name
from .reader import CheckpointReader, Resharding
from .tensors import DTYPES, dtype_name, of_run, tied_groups
from .untrusted import CheckpointError

Model = TypeVar("Model", bound=nn.Module)

# Names in an error.
_SHOWN = 5


def from_parallelized(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    world_comm: CheckpointRanks,
    variant: str | None = None,
) -> Model:
    """Load what `save_parallelized` wrote, on any layout, into the parameters and buffers that a model has here.

    A rank reads the tensors it holds and no others. Every rank calls this.

    Raises:
        CheckpointError: on all ranks: a file is missing, truncated or not the one that was saved, or the checkpoint is
            of another class, or of a model with other names or shapes. No rank's model has changed then.
    """
    load = WeightsLoad(model, directory, variant)
    try:
        world_comm.together(f"checking the files to load {load.directory}", load.check)
        world_comm.together(f"copying the weights to load {load.directory}", load.apply)
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
        manifest = whole_manifest(directory, self._variant, type(model).__name__)
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


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """The live parameters and persistent buffers of this rank, tied ones under one of their names."""
    targets: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in of_run(model, model.state_dict(keep_vars=True)).items():
        if not tensor.is_meta:
            targets.setdefault(id(tensor), (name, tensor))
    return dict(targets.values())


def _match(model: nn.Module, manifest: Manifest, reader: CheckpointReader, directory: str) -> dict[str, str]:
    """For each name of the unsplit model, the name under which the checkpoint has it.

    All names of a tied weight get that of its first holder, so that its holders end up equal. The whole model is
    compared, so that every rank finds the same fault.
    """
    whole = of_run(model, whole_state(model))
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
        if _sort_of(DTYPES[there]) != _sort_of(tensor.dtype):
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


def is_parallelized(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a checkpoint with a file for each stage."""
    return os.path.exists(os.path.join(directory, manifest_name()))

"""Reading a checkpoint's tensors as a rank needs them: whole, or its own slice, however the saving run had cut them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from penstock.modeling.tensor_parallel import Slicing

from .manifest import MODEL, Manifest
from .reader import CheckpointReader
from .tensors import shards_of, tensor_parallel_place


def shard_of(manifest: Manifest, name: str) -> Slicing:
    """How the saving run had cut a tensor."""
    return Slicing(*manifest.shards[name])


class SliceReader:
    """The model's tensors in the files of all tensor-parallel ranks of the saving run.

    Args:
        opened: takes up the readers, for the caller to close.
    """

    def __init__(self, directory: str, manifest: Manifest, opened: list[CheckpointReader]) -> None:
        self._manifest = manifest
        for rank in range(manifest.tensor_parallel_size):
            opened.append(CheckpointReader(directory, manifest, MODEL, rank))
        self.readers = opened

    def verify(self, model: nn.Module, sources: Mapping[str, str]) -> None:
        """Check that the files hold what this rank reads as it was saved; raises CheckpointError."""
        needed: dict[int, dict[str, None]] = {}
        for name, source in sources.items():
            for rank in self._files(model, name, source):
                needed.setdefault(rank, {})[source] = None
        for rank, names in needed.items():
            self.readers[rank].verify(names)

    def copy(self, model: nn.Module, targets: Mapping[str, torch.Tensor], sources: Mapping[str, str]) -> None:
        """Fill `targets`, by name, from the tensors of the names in `sources`; one tensor at a time is whole."""
        cuts, (index, size) = shards_of(model), tensor_parallel_place(model)
        with torch.no_grad():
            for name, target in targets.items():
                source = sources[name]
                files = self._files(model, name, source)
                tensors = [tensor for rank in files for _, tensor in self.readers[rank].read([source])]
                if self._same(model, name, source):
                    target.copy_(tensors[0])
                    continue
                cut = source in self._manifest.shards
                whole = shard_of(self._manifest, source).join(tensors) if cut else tensors[0]
                target.copy_(cuts[name].take(whole, index, size) if name in cuts else whole)

    def _files(self, model: nn.Module, name: str, source: str) -> Iterator[int]:
        """The saving run's tensor-parallel ranks whose files a tensor is read from."""
        if source not in self._manifest.shards:
            return iter((0,))
        if self._same(model, name, source):
            return iter((tensor_parallel_place(model)[0],))
        return iter(range(self._manifest.tensor_parallel_size))

    def _same(self, model: nn.Module, name: str, source: str) -> bool:
        """Whether this rank's slice is what one file holds."""
        if source not in self._manifest.shards or name not in shards_of(model):
            return False
        same_size = tensor_parallel_place(model)[1] == self._manifest.tensor_parallel_size
        return same_size and shards_of(model)[name] == shard_of(self._manifest, source)

"""Reading a parallel checkpoint's tensors as a rank needs them: whole, or its own shard, whatever layout wrote them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.modeling.tensor_parallel import Sharding

from .files import OpenFile, open_tensors
from .manifest import Manifest
from .tensors import TensorInfo
from .untrusted import CheckpointError, cannot_read


@dataclass(frozen=True)
class Location:
    """Where a tensor is: the file, the pipeline rank that wrote it, and its name there."""

    file_name: str
    pipeline_rank: int
    stored_name: str
    info: TensorInfo


class CheckpointReader:
    """The tensors of one part of a checkpoint, over all its files, which open when needed.

    Args:
        part: `manifest.MODEL` or `manifest.TRAINING`.
    """

    def __init__(self, directory: str, manifest: Manifest, part: str, tensor_parallel_rank: int) -> None:
        self._directory = directory
        self._manifest = manifest
        self._open: dict[str, OpenFile] = {}
        self._stack = contextlib.ExitStack()
        self.locations: dict[str, Location] = {}
        # What several ranks hold is read from the first of them, by everybody.
        for file_name, entry in manifest.entries(part, tensor_parallel_rank):
            for name, info in entry.tensors.items():
                self.locations.setdefault(name, Location(file_name, entry.stage, name, info))
            for name, stored_name in entry.aliases.items():
                info = entry.tensors[stored_name]
                self.locations.setdefault(name, Location(file_name, entry.stage, stored_name, info))

    def close(self) -> None:
        self._open.clear()
        self._stack.close()

    def verify(self, names: Iterable[str]) -> None:
        """Check that the files hold these tensors as they were saved. Reads each once and keeps none.

        Raises:
            CheckpointError: naming the file and the tensor.
        """
        for name in names:
            location = self.locations[name]
            tensor = self._read(location)
            # The shape first: what a small file claims to hold may be larger than the memory.
            if not location.info.fits(tensor) or TensorInfo.of(tensor) != location.info:
                raise CheckpointError(
                    f"{self._path(location.file_name)} is not the file that was saved: {name} differs from what "
                    "the checkpoint's table of contents says"
                )

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor, backed by its file: copy it, and do not keep it."""
        for name in names:
            yield name, self._read(self.locations[name])

    def _read(self, location: Location) -> torch.Tensor:
        if location.file_name not in self._open:
            opened = open_tensors(self._path(location.file_name), location.file_name)
            self._open[location.file_name] = self._stack.enter_context(opened)
        file = self._open[location.file_name]
        if location.stored_name not in file.names:
            path = self._path(location.file_name)
            raise CheckpointError(f"{path} is not the file that was saved: it has no {location.stored_name}")
        try:
            return file.read(location.stored_name)
        except Exception as error:
            raise cannot_read(self._path(location.file_name), error) from None

    def _path(self, file_name: str) -> str:
        return self._manifest.path_of(self._directory, file_name)


@dataclass(frozen=True)
class Resharding:
    """How the saving run had sharded a tensor, and how this rank holds it; None where it is whole."""

    saved: Sharding | None = None
    wanted: Sharding | None = None


def saved_sharding(manifest: Manifest, name: str, shape: Sequence[int], count: int = 1) -> Sharding | None:
    """How the saving run had sharded a parameter; None if it was whole.

    Args:
        shape: of what was sharded over `count` ranks, or of one shard.

    Raises:
        CheckpointError: it cannot have been sharded like that.
    """
    if name not in manifest.shards:
        return None
    dim, blocks = manifest.shards[name]
    if not -len(shape) <= dim < len(shape) or shape[dim] < 1 or shape[dim] % (blocks * count):
        raise CheckpointError(
            f"the checkpoint's table of contents is damaged: shards[{name!r}] is [{dim}, {blocks}], which does not go "
            f"with the shape {list(shape)}"
        )
    return Sharding(dim, blocks)


class ShardReader:
    """The tensors in the files of all tensor-parallel ranks of the saving run.

    Args:
        part: `manifest.MODEL` or `manifest.TRAINING`.
        place: this rank's index in its tensor-parallel group, and the group's size.
    """

    def __init__(self, directory: str, manifest: Manifest, part: str, place: tuple[int, int]) -> None:
        self._place = place
        self._saved_size = manifest.tensor_parallel_size
        self.readers = [CheckpointReader(directory, manifest, part, rank) for rank in range(self._saved_size)]

    def close(self) -> None:
        for reader in self.readers:
            reader.close()

    def verify(self, tensors: Mapping[str, Resharding]) -> None:
        """Check that the files hold what this rank reads as it was saved; raises CheckpointError."""
        needed: dict[int, dict[str, None]] = {}
        for name, sharding in tensors.items():
            for rank in self._files(sharding):
                needed.setdefault(rank, {})[name] = None
        for rank, names in needed.items():
            for name in names:
                self._compare_shards(name, rank)
            self.readers[rank].verify(names)

    def _compare_shards(self, name: str, rank: int) -> None:
        """Check that a rank's files have a shard like the first rank's."""
        found = self.readers[rank].locations.get(name)
        expected = self.readers[0].locations[name].info
        if found is None or (found.info.shape, found.info.dtype) != (expected.shape, expected.dtype):
            has = "nothing" if found is None else f"{found.info.dtype} of shape {list(found.info.shape)}"
            raise CheckpointError(
                f"the checkpoint's table of contents is damaged: for tensor_parallel_rank {rank} it has {has} as "
                f"{name}, expected {expected.dtype} of shape {list(expected.shape)}, as for the first"
            )

    def read(self, name: str, sharding: Resharding) -> torch.Tensor:
        """A tensor as this rank holds it. It may be backed by a file: copy it, and do not keep it."""
        tensors = [tensor for rank in self._files(sharding) for _, tensor in self.readers[rank].read([name])]
        if self._alike(sharding):
            return tensors[0]
        whole = tensors[0] if sharding.saved is None else sharding.saved.join(tensors)
        return whole if sharding.wanted is None else sharding.wanted.take(whole, *self._place)

    def _alike(self, sharding: Resharding) -> bool:
        """Whether this rank holds what one file does."""
        return sharding.saved == sharding.wanted and (sharding.saved is None or self._place[1] == self._saved_size)

    def _files(self, sharding: Resharding) -> Sequence[int]:
        """The saving run's tensor-parallel ranks whose files a tensor is read from."""
        if sharding.saved is None:
            return (0,)
        return (self._place[0],) if self._alike(sharding) else range(self._saved_size)

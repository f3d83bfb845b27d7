"""Reading a parallel checkpoint's tensors as a rank needs them: whole, or its own shard, whatever layout wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from penstock.checkpoint.files import open_tensors
from penstock.checkpoint.manifest import SEPARATOR, Manifest
from penstock.checkpoint.tensors import TensorInfo, checksum
from penstock.checkpoint.untrusted import CheckpointError
from penstock.modeling.sharding import Sharding


@dataclass(frozen=True)
class Location:
    """Where a tensor is: the file, the pipeline rank that wrote it, and its name there."""

    file_name: str
    pipeline_rank: int
    name: str
    info: TensorInfo


@dataclass(frozen=True)
class Resharding:
    """How the saving run had sharded a tensor, and how this rank holds it; None where it is whole."""

    saved: Sharding | None = None
    wanted: Sharding | None = None


def sharding_in_manifest(manifest: Manifest, name: str, shape: Sequence[int], count: int = 1) -> Sharding | None:
    """How the saving run had sharded a parameter; None if it was whole. `shape`: that of what `count` shards are
    together. Raises CheckpointError if it cannot have been sharded like that."""
    if name not in manifest.shards:
        return None
    dim, blocks = manifest.shards[name]
    if not -len(shape) <= dim < len(shape) or shape[dim] < 1 or shape[dim] % (blocks * count):
        raise CheckpointError(
            f"the checkpoint's table of contents is damaged: shards[{name!r}] is [{dim}, {blocks}], which does not go "
            f"with the shape {list(shape)}"
        )
    return Sharding(dim, blocks)


class CheckpointReader:
    """The tensors of one part of a checkpoint, in the files of all ranks of the saving run, which open when needed.
    `part`: `manifest.MODEL` or `manifest.TRAINING`. `place`: this rank's index in its tensor-parallel group, and the
    group's size. `locations`: of each tensor; of a sharded one where the first shard is."""

    def __init__(self, directory: str, manifest: Manifest, part: str, place: tuple[int, int] = (0, 1)) -> None:
        self._directory = directory
        self._manifest = manifest
        self._place = place
        self._saved_size = manifest.tensor_parallel_size
        self._shards = _locations(manifest, part)
        self._open: dict[str, dict[str, torch.Tensor]] = {}
        self.locations = self._shards[0]

    def saved_sharding(self, name: str) -> Sharding | None:
        """How the saving run had sharded a tensor; see `sharding_in_manifest`."""
        return sharding_in_manifest(self._manifest, name, self.locations[name].info.shape)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor before it was sharded."""
        shape, sharding = self.locations[name].info.shape, self.saved_sharding(name)
        return shape if sharding is None else tuple(sharding.whole_shape(shape, self._saved_size))

    def verify(self, tensors: Mapping[str, Resharding]) -> None:
        """Check that the files hold what this rank reads as it was saved; raises CheckpointError."""
        for name, sharding in tensors.items():
            for rank in self._files(sharding):
                self.check(self._shard(name, rank))

    def check(self, location: Location) -> None:
        """Check that a file holds a tensor as it was saved. Reads it once and does not keep it."""
        tensor = self._read(location)
        # The shape first: a small file may claim to hold more than fits into memory.
        if not location.info.fits(tensor) or checksum(tensor) != location.info.checksum:
            raise CheckpointError(
                f"{self.path_of(location)} is not the file that was saved: {location.name} differs from what "
                "the checkpoint's table of contents says"
            )

    def read(self, name: str, sharding: Resharding) -> torch.Tensor:
        """A tensor as this rank holds it. It may be backed by a file: copy it, and do not keep it."""
        tensors = [self._read(self._shard(name, rank)) for rank in self._files(sharding)]
        if self._holds_one_file(sharding):
            return tensors[0]
        whole = tensors[0] if sharding.saved is None else sharding.saved.join(tensors)
        return whole if sharding.wanted is None else sharding.wanted.take(whole, *self._place)

    def _holds_one_file(self, sharding: Resharding) -> bool:
        """Whether this rank holds what one file does."""
        return sharding.saved == sharding.wanted and (sharding.saved is None or self._place[1] == self._saved_size)

    def _files(self, sharding: Resharding) -> Sequence[int]:
        """The saving run's tensor-parallel ranks whose files a tensor is read from."""
        if sharding.saved is None:
            return (0,)
        return (self._place[0],) if self._holds_one_file(sharding) else range(self._saved_size)

    def _shard(self, name: str, rank: int) -> Location:
        """Where a tensor-parallel rank's shard is, which must be like the first rank's."""
        location, expected = self._shards[rank].get(name), self.locations[name].info
        if location is None or (location.info.shape, location.info.dtype) != (expected.shape, expected.dtype):
            has = "nothing" if location is None else f"{location.info.dtype} of shape {list(location.info.shape)}"
            raise CheckpointError(
                f"the checkpoint's table of contents is damaged: for tensor_parallel_rank {rank} it has {has} as "
                f"{name}, expected {expected.dtype} of shape {list(expected.shape)}, as for the first"
            )
        return location

    def _read(self, location: Location) -> torch.Tensor:
        if location.file_name not in self._open:
            self._open[location.file_name] = open_tensors(self.path_of(location), location.file_name)
        if (tensor := self._open[location.file_name].get(location.name)) is None:
            raise CheckpointError(f"{self.path_of(location)} is not the file that was saved: it has no {location.name}")
        return tensor

    def path_of(self, location: Location) -> str:
        """Where a tensor's file is now."""
        return self._manifest.path_of(self._directory, location.file_name)


def _locations(manifest: Manifest, part: str) -> list[dict[str, Location]]:
    """For each tensor-parallel rank of the saving run, where its files have each tensor. What several ranks of a
    pipeline hold is read from the first of them, by everybody."""
    locations: list[dict[str, Location]] = [{} for _ in range(manifest.tensor_parallel_size)]
    order = attrgetter("pipeline_rank", "tensor_parallel_rank")
    for file_name, entry in sorted(manifest.files.items(), key=lambda item: order(item[1])):
        names = {name: name for name in entry.tensors} | entry.aliases if entry.part == part else {}
        for name, stored in names.items():
            if stored not in entry.tensors:  # of a damaged table: the name is then found to be lacking
                continue
            location = Location(file_name, entry.pipeline_rank, stored, entry.tensors[stored])
            locations[entry.tensor_parallel_rank].setdefault(name, location)
            if name.partition(SEPARATOR)[0] not in manifest.shards:  # whole, whichever of the ranks has written it
                locations[0].setdefault(name, location)
    return locations

"""Reading a checkpoint's tensors as a rank needs them: whole, or its own slice, however the saving run had cut them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.modeling.tensor_parallel import Slicing

from .errors import CheckpointError
from .manifest import Manifest
from .reader import CheckpointReader


@dataclass(frozen=True)
class Cuts:
    """How the saving run had cut a tensor, and how this rank holds it; None where it is whole."""

    saved: Slicing | None = None
    wanted: Slicing | None = None


def saved_cut(manifest: Manifest, name: str, shape: Sequence[int], count: int = 1) -> Slicing | None:
    """How the saving run had cut a parameter; None if it was whole.

    Args:
        shape: of what was cut into `count` slices, or of one slice.

    Raises:
        CheckpointError: it cannot have been cut like that.
    """
    if name not in manifest.shards:
        return None
    dim, blocks = manifest.shards[name]
    if not -len(shape) <= dim < len(shape) or shape[dim] < 1 or shape[dim] % (blocks * count):
        raise CheckpointError(
            f"the checkpoint's table of contents is damaged: shards[{name!r}] is [{dim}, {blocks}], which does not go "
            f"with the shape {list(shape)}"
        )
    return Slicing(dim, blocks)


class SliceReader:
    """The tensors in the files of all tensor-parallel ranks of the saving run.

    Args:
        part: `manifest.MODEL` or `manifest.TRAINING`.
        place: this rank's index in its tensor-parallel group, and the group's size.
        opened: takes up the readers, for the caller to close.
    """

    def __init__(
        self, directory: str, manifest: Manifest, part: str, place: tuple[int, int], opened: list[CheckpointReader]
    ) -> None:
        self._place = place
        self._saved_size = manifest.tensor_parallel_size
        self.readers: list[CheckpointReader] = []
        for rank in range(self._saved_size):
            self.readers.append(CheckpointReader(directory, manifest, part, rank))
            opened.append(self.readers[-1])

    def verify(self, tensors: Mapping[str, Cuts]) -> None:
        """Check that the files hold what this rank reads as it was saved; raises CheckpointError."""
        needed: dict[int, dict[str, None]] = {}
        for name, cuts in tensors.items():
            for rank in self._files(cuts):
                needed.setdefault(rank, {})[name] = None
        for rank, names in needed.items():
            for name in names:
                self._compare_slices(name, rank)
            self.readers[rank].verify(names)

    def _compare_slices(self, name: str, rank: int) -> None:
        """Check that a rank's files have a slice like the first rank's."""
        found = self.readers[rank].locations.get(name)
        expected = self.readers[0].locations[name].info
        if found is None or (found.info.shape, found.info.dtype) != (expected.shape, expected.dtype):
            has = "nothing" if found is None else f"{found.info.dtype} of shape {list(found.info.shape)}"
            raise CheckpointError(
                f"the checkpoint's table of contents is damaged: for tensor_parallel_rank {rank} it has {has} as "
                f"{name}, expected {expected.dtype} of shape {list(expected.shape)}, as for the first"
            )

    def read(self, name: str, cuts: Cuts) -> torch.Tensor:
        """A tensor as this rank holds it. It may be backed by a file: copy it, and do not keep it."""
        tensors = [tensor for rank in self._files(cuts) for _, tensor in self.readers[rank].read([name])]
        if self._alike(cuts):
            return tensors[0]
        whole = tensors[0] if cuts.saved is None else cuts.saved.join(tensors)
        return whole if cuts.wanted is None else cuts.wanted.take(whole, *self._place)

    def _alike(self, cuts: Cuts) -> bool:
        """Whether this rank holds what one file does."""
        return cuts.saved == cuts.wanted and (cuts.saved is None or self._place[1] == self._saved_size)

    def _files(self, cuts: Cuts) -> Sequence[int]:
        """The saving run's tensor-parallel ranks whose files a tensor is read from."""
        if cuts.saved is None:
            return (0,)
        return (self._place[0],) if self._alike(cuts) else range(self._saved_size)

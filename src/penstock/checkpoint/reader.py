"""Finding and reading single tensors of a parallel checkpoint, whatever layout wrote it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch

from .errors import CheckpointError, cannot_read
from .files import Reader, open_tensors
from .manifest import Manifest
from .tensors import TensorInfo


@dataclass(frozen=True)
class Location:
    """Where a tensor is: the file, the stage that wrote it, and its name there."""

    file_name: str
    stage: int
    stored_name: str
    info: TensorInfo


class CheckpointReader:
    """The tensors of one part of a checkpoint, over all its files. Use as a context manager; files open when needed.

    Args:
        part: `manifest.MODEL` or `manifest.TRAINING`.
    """

    def __init__(self, directory: str, manifest: Manifest, part: str, tensor_parallel_rank: int) -> None:
        self._directory = directory
        self._manifest = manifest
        self._open: dict[str, Reader] = {}
        self._stack = contextlib.ExitStack()
        self.locations: dict[str, Location] = {}
        # What several stages hold is read from the first of them, by everybody.
        for file_name, entry in manifest.entries(part, tensor_parallel_rank):
            for name, info in entry.tensors.items():
                self.locations.setdefault(name, Location(file_name, entry.stage, name, info))
            for name, stored_name in entry.aliases.items():
                info = entry.tensors[stored_name]
                self.locations.setdefault(name, Location(file_name, entry.stage, stored_name, info))

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

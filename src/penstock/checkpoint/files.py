"""One file of tensors: written durably, read lazily, in torch's or in safetensors' format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .errors import CheckpointError

SaveFunction = Callable[[Any, str], Any]


class Reader(Protocol):
    """An open file of tensors."""

    names: frozenset[str]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, backed by the file: its pages are read when they are touched."""


def write_tensors(path: str, tensors: Mapping[str, torch.Tensor], save_function: SaveFunction | None = None) -> None:
    """Write tensors to a new file and have them on disk before returning. The format follows from the name.

    Args:
        tensors: contiguous CPU tensors, as `tensors.to_cpu` makes them. safetensors knows no shared tensors.
        save_function: writes `.bin` files instead of `torch.save`; called with the dictionary and the path.

    Raises:
        CheckpointError: naming the path, whatever went wrong.
    """
    try:
        if path.endswith(".safetensors"):
            save_file(dict(tensors), path, metadata={"format": "pt"})
        elif save_function is not None:
            save_function(dict(tensors), path)
        else:
            with open(path, "wb") as file:
                torch.save(dict(tensors), file)
        flush_file(path)
    except Exception as error:
        raise CheckpointError(f"cannot write {path}: {type(error).__name__}: {error}") from error


def write_bytes(path: str, content: bytes) -> None:
    """Write a new file and have it on disk before returning."""
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {type(error).__name__}: {error}") from error


def flush_file(path: str) -> None:
    """Have a file, or the names in a directory, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_tensors(path: str) -> AbstractContextManager[Reader]:
    """Open a file of tensors. No code in it is ever run.

    Raises:
        CheckpointError: naming the path, if it is no whole file of its format.
    """
    return _open_safetensors(path) if path.endswith(".safetensors") else _open_torch(path)


class _TorchReader:
    def __init__(self, path: str) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise CheckpointError(f"{path} is no file of tensors")
        self._state: dict[str, torch.Tensor] = state
        self.names = frozenset(state)

    def read(self, name: str) -> torch.Tensor:
        return self._state[name]


class _SafetensorsReader:
    def __init__(self, file: Any) -> None:
        self._file = file
        self.names = frozenset(file.keys())

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


@contextmanager
def _open_torch(path: str) -> Any:
    try:
        reader = _TorchReader(path)
    except CheckpointError:
        raise
    except Exception as error:  # a broken archive raises a dozen different types
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    yield reader


@contextmanager
def _open_safetensors(path: str) -> Any:
    try:
        file = safe_open(path, framework="pt", device="cpu").__enter__()
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    try:
        yield _SafetensorsReader(file)
    finally:
        file.__exit__(None, None, None)

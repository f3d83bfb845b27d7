"""A small object that is the same on all ranks, such as a scheduler's state, in a file of its own."""

from __future__ import annotations

import io
import os
from typing import Any

import torch

from .comm import Comm, together
from .errors import CheckpointError
from .files import flush_file, write_bytes


def save_object(content: Any, path: str | os.PathLike[str], *, world_comm: Comm) -> None:
    """Write plain data to a file, from the first rank. A kill at any moment leaves the previous file whole.

    Raises:
        CheckpointError: it cannot be written, or is no plain data that can be loaded without running code.
    """
    path = os.path.abspath(path)

    def write() -> None:
        if world_comm.rank:
            return
        buffer = io.BytesIO()
        torch.save(content, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"it has something that is no plain data: {error}") from error
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_bytes(f"{path}.draft", buffer.getvalue())
        os.replace(f"{path}.draft", path)
        flush_file(os.path.dirname(path))

    together(world_comm, f"save {path}", write)


def load_object(path: str | os.PathLike[str], *, world_comm: Comm) -> Any:
    """What `save_object` wrote. No code in the file is run. Raises CheckpointError if some rank cannot read it."""
    path = os.path.abspath(path)
    found: list[Any] = []
    together(world_comm, f"load {path}", lambda: found.append(torch.load(path, weights_only=True)))
    return found[0]

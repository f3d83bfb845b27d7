"""A small object that is the same on all ranks, such as a scheduler's state, in a file of its own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import uuid
from typing import Any

import torch

from .comm import Comm, together
from .errors import CheckpointError, no_plain_data
from .files import flush_file, load_data, write_bytes, writing
from .plain_files import is_regular


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
            raise CheckpointError(f"it has {no_plain_data(error)}") from None
        folder, name = os.path.split(path)
        with writing(path, "plain data", len(buffer.getvalue())):
            os.makedirs(folder, exist_ok=True)
            # Nobody can have put a link to another file under this name.
            draft = os.path.join(folder, f".{name}.saving-{uuid.uuid4().hex}")
            try:
                write_bytes(draft, buffer.getvalue())
                os.replace(draft, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.remove(draft)
                raise
            flush_file(folder)
        _remove_drafts(folder, name)

    together(world_comm, f"save {path}", "writing the file", write, unchanged=f"what was in {path} before is intact")


def load_object(path: str | os.PathLike[str], *, world_comm: Comm) -> Any:
    """What `save_object` wrote. No code in the file is run. Raises CheckpointError if some rank cannot read it."""
    path = os.path.abspath(path)
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(load_data(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None

    together(world_comm, f"load {path}", "reading the file", read)
    return found[0]


def _remove_drafts(folder: str, name: str) -> None:
    """Tidy up behind killed saves."""
    pattern = re.compile(re.escape(f".{name}.saving-") + r"[0-9a-f]{32}")
    for draft in os.listdir(folder):
        if pattern.fullmatch(draft) and is_regular(os.path.join(folder, draft)):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, draft))

"""Objects as plain data, which is loaded without running code: in a file of their own, and back into the objects."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .files import flush_file, load_data, write_bytes, writing
from .plan import CheckpointRanks
from .untrusted import CheckpointError, describe, refused_global, typed

# Under which key the name of a scheduler's class stands beside its state.
_CLASS = "scheduler_class"


def plain_data(content: Any, what: str) -> bytes:
    """The content of a file that can be loaded without running code; raises CheckpointError if there is none."""
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        name = refused_global(error)
        found = describe(error) if name is None else f"a {name}"
        raise CheckpointError(f"{what} has something that is no plain data: {found}") from None
    return buffer.getvalue()


def state_of(stateful: Any) -> Any:
    """The state of an object; of a learning-rate scheduler with the name of its class."""
    state = stateful.state_dict()
    return {**state, _CLASS: _class_of(stateful)} if isinstance(stateful, LRScheduler) else state


def _class_of(scheduler: LRScheduler) -> str:
    """The name of its class, and of those that it consists of."""
    parts = ", ".join(map(_class_of, getattr(scheduler, "_schedulers", ())))
    return f"{type(scheduler).__name__}({parts})" if parts else type(scheduler).__name__


def restore_object(stateful: Any, content: Any, what: str) -> None:
    """Give an object the state that was saved for it, or raise CheckpointError.

    A learning-rate scheduler takes whatever names it is given as its attributes: its own methods' names too, and those
    of a scheduler of another class. That is refused.
    """
    if isinstance(stateful, LRScheduler):
        content = typed(dict[str, Any], content, what)
        if _CLASS in content:
            saved, here = typed(str, content.pop(_CLASS), what, _CLASS), _class_of(stateful)
            if saved != here:
                raise CheckpointError(f"{what} is that of a {saved}, but is loaded into a {here}: make a {saved}")
        if hidden := sorted(name for name in content if callable(getattr(type(stateful), name, None))):
            raise CheckpointError(f"{what} is damaged: it would replace {', '.join(hidden[:5])} of the scheduler")
    try:
        stateful.load_state_dict(content)
    except Exception as error:
        raise CheckpointError(f"{what} does not fit: {describe(error)}") from error


def save_object(content: Any, path: str | os.PathLike[str], *, world_comm: CheckpointRanks) -> None:
    """Write plain data to a file, from the first rank. A kill at any moment leaves the previous file whole."""
    path = os.path.abspath(path)

    def write() -> None:
        if world_comm.rank:
            return
        data = plain_data(content, "it")
        folder, name = os.path.split(path)
        draft = os.path.join(folder, f".{name}.saving")
        with writing(path, "plain data", len(data)):
            os.makedirs(folder, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.remove(draft)  # of a save that was killed
            try:
                write_bytes(draft, data)
                flush_file(draft)
                os.replace(draft, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.remove(draft)
                raise
            flush_file(folder)

    world_comm.together(f"writing the file to save {path}", write, f"what was in {path} before is intact")


def load_object(path: str | os.PathLike[str], *, world_comm: CheckpointRanks) -> Any:
    """What `save_object` wrote. No code in the file is run. Raises CheckpointError if some rank cannot read it."""
    path = os.path.abspath(path)
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(load_data(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None

    world_comm.together(f"reading the file to load {path}", read)
    return found[0]

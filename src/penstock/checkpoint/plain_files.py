"""Opening what is in a folder that somebody else may have made: regular files of that folder, and nothing else.

A name in such a folder may be a link to any file of the user, a pipe that blocks whoever opens it, or a device. This
guards against a folder that was made to do harm, not against somebody who changes it while it is read.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any, BinaryIO

from .errors import CheckpointError
from .fields import Field

# No table of contents of a model that fits in a cluster comes near this.
MAX_JSON_BYTES = 256 * 1024**2

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(path: str) -> str | None:
    """`"a regular file"`, `"a link"` and so on, without following links; None if nothing is there."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return "a regular file" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no regular file")


def is_regular(path: str) -> bool:
    return kind_of(path) == "a regular file"


def is_directory(path: str) -> bool:
    """Whether a directory is there, and no link to one."""
    return kind_of(path) == "a directory"


def locate(path: str) -> str:
    """The regular file that `path` stands for: itself, or what a link leads to within the same folder.

    Links of a hub's cache, from `snapshots/<revision>/` to `blobs/` beside it, are followed too.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: it is no regular file, or a link that leads out of its folder.
    """
    kind = kind_of(path)
    if kind is None:
        raise FileNotFoundError(2, os.strerror(2), path)
    found = path
    if kind == "a link":
        found = os.path.realpath(path)
        folder = os.path.realpath(os.path.dirname(path))
        snapshots, _ = os.path.split(folder)
        cache, name = os.path.split(snapshots)
        allowed = {folder, os.path.join(cache, "blobs")} if name == "snapshots" else {folder}
        if os.path.dirname(found) not in allowed:
            raise CheckpointError(
                f"{path} is a link that leads out of its folder, to {found}; if that is meant, put a copy there"
            )
        if (kind := kind_of(found)) is None:
            raise FileNotFoundError(2, os.strerror(2), path)
    if kind != "a regular file":
        raise CheckpointError(f"{path} is {kind}, but must be a regular file")
    return found


def open_plain(path: str) -> BinaryIO:
    """Open the file that `locate` finds. Never blocks.

    Raises:
        FileNotFoundError: nothing is there. OSError: it cannot be opened.
        CheckpointError: as `locate`.
    """
    # Not blocking and not following, should the file have been exchanged since it was looked at.
    descriptor = os.open(locate(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_json(path: str) -> Field:
    """The content of a JSON file, to be read field by field.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: naming the file, if it cannot be read or is not strict JSON with each key once.
    """
    try:
        with open_plain(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_JSON_BYTES:
                raise CheckpointError(f"{path} has {size} bytes, but may have {MAX_JSON_BYTES} at most")
            content = json.loads(file.read(MAX_JSON_BYTES), object_pairs_hook=_once, parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise
    except RecursionError:
        raise CheckpointError(f"cannot read {path}: its JSON is nested too deeply") from None
    except (OSError, ValueError) as error:  # not JSON, not text, an integer of thousands of digits
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    return Field(content, path)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        last = {name: place for place, (name, _) in enumerate(pairs)}
        twice = next(name for place, (name, _) in enumerate(pairs) if last[name] != place)
        raise ValueError(f"{twice[:80]!r} stands twice in one object")
    return content


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")

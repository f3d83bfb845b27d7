"""Reading what somebody else may have made: regular files of one folder, and data of known types.

A name in such a folder may be a link to any file of the user, a pipe that blocks whoever opens it, or a device. This
guards against a folder that was made to do harm, not against somebody who changes it while it is read. What is absurd
is refused with a CheckpointError that names file, field and value.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import reprlib
import stat
from collections.abc import Iterable
from dataclasses import Field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, BinaryIO, get_args, get_origin, get_type_hints

_SHOWN = 300


# More stages, or shards of one, than any machine has devices.
MAX_RANKS = 65536
Count = Annotated[int, (0, 2**63 - 1)]
Place = Annotated[int, (0, MAX_RANKS - 1)]
Checksum = Annotated[int, (0, 2**32 - 1)]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names the file, and where ranks work together the rank."""


class CheckpointMismatch(CheckpointError):
    """What is to be saved or loaded does not fit: the model, the optimizer or another object. The checkpoint is whole,
    as far as it was checked."""


def describe(error: BaseException) -> str:
    """The error in one line, with its type unless it is this package's own."""
    text = " ".join(str(error).split())
    if isinstance(error, CheckpointError):
        return text
    return f"{type(error).__name__}: {text[:_SHOWN]}" if text else type(error).__name__


def refused_global(error: Exception) -> str | None:
    """The class or function that torch's unpickler, which loads plain data only, did not let a file name."""
    match = re.search(r"GLOBAL (\S+) (?:was not|whose module)", str(error))
    return match and match[1]


def cannot_read(path: str, error: Exception) -> CheckpointError:
    """The error for a file that another library could not read. Chain it with `from None`: torch advises to load what
    its unpickler refuses with `weights_only=False`, which would run the code in it."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, pickle.UnpicklingError):
        if name := refused_global(error):
            return CheckpointError(
                f"{path} asks to run code when it is loaded ({name[:80]}), and was refused: files are read as data "
                "only. Save what you need of it as plain tensors and numbers; do not trust it if it is not yours"
            )
        return CheckpointError(f"{path} is damaged, or holds more than tensors and plain data: nothing in it was run")
    return CheckpointError(f"cannot read {path}: {describe(error)}")


# Far more than the table of contents of any model that fits in a cluster.
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
    """The regular file that `path` stands for: itself, or what a link leads to within the same folder, or in a hub's
    cache from `snapshots/<revision>/` to `blobs/` beside it. Raises FileNotFoundError if nothing is there,
    CheckpointError if it is no regular file, or a link out of its folder."""
    kind = kind_of(path)
    if kind is None:
        raise FileNotFoundError(2, os.strerror(2), path)
    place = path
    if kind == "a link":
        place = os.path.realpath(path)
        folder = os.path.realpath(os.path.dirname(path))
        snapshots, _ = os.path.split(folder)
        cache, name = os.path.split(snapshots)
        allowed = {folder, os.path.join(cache, "blobs")} if name == "snapshots" else {folder}
        if os.path.dirname(place) not in allowed:
            raise CheckpointError(
                f"{path} is a link that leads out of its folder, to {place}; if you want that, put a copy there instead"
            )
        if (kind := kind_of(place)) is None:
            raise FileNotFoundError(2, os.strerror(2), path)
    if kind != "a regular file":
        raise CheckpointError(f"{path} is {kind}, but must be a regular file")
    return place


def open_plain(path: str) -> BinaryIO:
    """Open the file that `locate` finds. Never blocks. Raises CheckpointError as that does, or OSError."""
    # Not blocking and not following, should the file have been exchanged since it was looked at.
    descriptor = os.open(locate(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_json(path: str) -> Any:
    """The content of a JSON file, whose types are left to `typed`. Raises FileNotFoundError, or CheckpointError if it
    cannot be read or is not strict JSON with each key once."""
    try:
        with open_plain(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_JSON_BYTES:
                raise CheckpointError(f"{path} has {size} bytes, but may have {MAX_JSON_BYTES} at most")
            return json.loads(file.read(MAX_JSON_BYTES), object_pairs_hook=_once, parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise
    except RecursionError:
        raise CheckpointError(f"cannot read {path}: its JSON is nested too deeply") from None
    except (OSError, ValueError) as error:  # not JSON, not text, an integer of thousands of digits
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        last = {name: place for place, (name, _) in enumerate(pairs)}
        twice = next(name for place, (name, _) in enumerate(pairs) if last[name] != place)
        raise ValueError(f"{twice[:80]!r} stands twice in one object")
    return content


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


# In the metadata of a dataclass's field: the name that files give it, if it is another.
KEY = "key"


def _key_of(attribute: Field[Any]) -> str:
    key: str = attribute.metadata.get(KEY, attribute.name)
    return key


def content_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by the names that files give them; the inverse of `typed`."""
    return {_key_of(attribute): getattr(value, attribute.name) for attribute in fields(value)}


@cache
def _fields_of(kind: type) -> dict[str, tuple[str, Any, bool]]:
    """For each field of a dataclass its name in files, its type, and whether it must be given."""
    hints = get_type_hints(kind, include_extras=True)
    # If it must be given, both are MISSING.
    return {
        attribute.name: (_key_of(attribute), hints[attribute.name], attribute.default is attribute.default_factory)
        for attribute in fields(kind)
    }


_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 60


def damaged(file: str, where: Iterable[Any], value: Any, expected: str) -> CheckpointError:
    """The error for a value that a file has at this place: it names file, field and value."""
    name = ""
    for key in where:
        if isinstance(key, str) and key.isidentifier():
            name += f".{key}" if name else key
        else:
            name += f"[{_shorten.repr(key)}]"
    return CheckpointError(f"{file} is damaged: {name or 'its content'} is {_shorten.repr(value)}, expected {expected}")


def typed(kind: Any, value: Any, file: str, *where: Any) -> Any:
    """What a file has at this place, as a `kind`, in which every part is of the type that is written there. `kind`: a
    dataclass, whose fields with defaults may be missing; `dict[str, ...]`, `list[...]`, `tuple[...]`, `str`, `int`,
    `bool`, `Any`, `... | None`; `Annotated[int, (least, most)]`, or `Annotated[str, names]` with the texts that it may
    be. Raises CheckpointError, see `damaged`."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) or origin is dict:
        if not isinstance(value, dict):
            raise damaged(file, where, value, "an object")
        for key in value:
            if not isinstance(key, str) or not key.isprintable():
                raise damaged(file, where, value, f"an object with printable keys, not {_shorten.repr(key)}")
        if origin is dict:
            return {key: typed(parts[1], entry, file, *where, key) for key, entry in value.items()}
        given = {}
        for name, (key, type_, needed) in _fields_of(kind).items():
            if needed and key not in value:
                raise damaged(file, where, value, f"an object with {key!r}")
            if needed or value.get(key) is not None:
                given[name] = typed(type_, value[key], file, *where, key)
        return kind(**given)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise damaged(file, where, value, "a list")
        kinds = [parts[0]] * len(value) if origin is list or parts[-1] is ... else parts
        if len(value) != len(kinds):
            raise damaged(file, where, value, f"{len(kinds)} values")
        return origin(typed(kind, value[index], file, *where, index) for index, kind in enumerate(kinds))
    if NoneType in parts:
        return None if value is None else typed(parts[0], value, file, *where)
    allowed = parts[1] if origin is Annotated else None
    kind = parts[0] if origin is Annotated else kind
    fits = type(value) is kind and (kind is not str or value.isprintable())
    if fits and (allowed is None or (value in allowed if kind is str else allowed[0] <= value <= allowed[1])):
        return value
    # In words only now: sorting the dtypes for each tensor took most of the time of reading a table of contents.
    if allowed is None:
        raise damaged(file, where, value, {str: "printable text", int: "an integer", bool: "true or false"}[kind])
    expected = f"one of {sorted(allowed)}" if kind is str else f"an integer from {allowed[0]} to {allowed[1]}"
    raise damaged(file, where, value, expected)

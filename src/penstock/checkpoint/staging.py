"""Replacing a checkpoint so that a kill at any moment leaves a whole one: the previous or the new.

A checkpoint is several files under fixed names, in a folder that may hold the user's files too. Exchanging whole
folders is not atomic on most shared file systems and would lose files that appear meanwhile, and renaming the files one
by one mixes two checkpoints if it is interrupted. So:

1. Everything is written to a staging folder *inside* the checkpoint's (the same file system).
2. The list of renames is written beside it as a journal. All of it is on disk before the next step. Until here the
   previous checkpoint is untouched.
3. The renames are done in an order of which every prefix is a whole checkpoint for its readers: the first that matters
   replaces, in one atomic step, the file readers start from (the table of contents, the index, or the single file of
   weights), and until the end what this file refers to stays reachable.
4. The staging folder is removed.

A kill leaves a staging folder behind. If this folder's own table of contents or index refers to it, the next save
completes the journal first; if not, it removes the folder. Two jobs that save into one folder at the same time are not
kept apart.

Somebody else may have made the folder, journal and all. So what a found journal says is done only where it is what a
save writes there: plain names, of the kinds of files that go with the table of contents that names the staging folder,
and no links. No other file is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .files import flush_file, flush_files, write_bytes, writing
from .manifest import read_manifest
from .names import (
    EXTENSIONS,
    FINAL_INDEX,
    STAGED_INDEX,
    STAGED_MANIFEST,
    STAGING,
    check_plain,
    is_configuration,
    is_rank_file,
    is_shard,
    is_side_file,
    is_some_rank_file,
    variant_of_index,
    variant_of_manifest,
    weight_file_names,
)
from .untrusted import CheckpointError, Field, is_directory, kind_of, read_json

# (what to do, name in the staging folder or "", name in the checkpoint's folder)
Operation = tuple[Literal["replace", "publish", "remove"], str, str]

_JOURNAL = "journal.json"
_INDICES = (STAGED_INDEX, FINAL_INDEX)


def prepare(directory: str) -> str:
    """Make the checkpoint's folder and a staging folder in it, after tidying up behind an interrupted save.

    Returns:
        the staging folder's name, relative to `directory`.

    Raises:
        CheckpointError: the folder cannot be made, or has the journal of a save that is none of this library's.
    """
    with writing(directory, "the checkpoint's folder"):
        os.makedirs(directory, exist_ok=True)
    for name in sorted(os.listdir(directory)):
        if STAGING.fullmatch(name) and is_directory(os.path.join(directory, name)):
            table = _table_naming(directory, name)
            if table is not None:
                _perform(directory, name, _read_journal(directory, name, table))
            _remove_staging(os.path.join(directory, name))
    staging = f".saving-{uuid.uuid4().hex}"
    with writing(os.path.join(directory, staging), "the folder in which files are staged"):
        os.mkdir(os.path.join(directory, staging))
    return staging


def discard(directory: str, staging: str) -> None:
    """Forget what was staged, unless readers start from it. Never raises: the error that led here matters more."""
    with contextlib.suppress(Exception):
        if _table_naming(directory, staging) is None:
            _remove_staging(os.path.join(directory, staging))


def commit(directory: str, staging: str, operations: Sequence[Operation]) -> None:
    """Make what was staged the checkpoint.

    Small files may not be on disk yet; what is written by several ranks is.

    Args:
        operations: in order. `replace` moves a staged file to its final name, `publish` gives it that name too but
            keeps it staged, `remove` deletes a file of an earlier checkpoint.

    Raises:
        CheckpointError: naming the path. What readers find is whole nevertheless; the next save goes on from here.
    """
    for kind, _, target in operations:
        found = kind_of(os.path.join(directory, target))
        if found not in (None, "a regular file", "a link"):  # of a link not what it leads to is replaced, but itself
            path = os.path.join(directory, target)
            raise CheckpointError(f"cannot {kind} {path}: it is {found}, and is in the way of the checkpoint's file")
    folder = os.path.join(directory, staging)
    # Nothing reads it before a table of contents or an index leads to the staging folder.
    write_bytes(os.path.join(folder, _JOURNAL), json.dumps(list(operations)).encode())
    staged = dict.fromkeys(source for _, source, _ in operations if source)
    flush_files([*(os.path.join(folder, name) for name in (*staged, _JOURNAL)), folder, directory])
    _perform(directory, staging, operations)
    _remove_staging(folder)


def _perform(directory: str, staging: str, operations: Sequence[Operation]) -> None:
    """Do the operations; those already done are skipped."""
    for number, (kind, source, target) in enumerate(operations):
        staged, final = os.path.join(directory, staging, source), os.path.join(directory, target)
        with writing(final, "putting a checkpoint's file in its place"):
            if kind == "remove":
                with contextlib.suppress(FileNotFoundError):
                    os.remove(final)
            elif os.path.exists(staged):
                if kind == "publish":
                    _publish(staged, final)
                else:
                    os.replace(staged, final)
            # Flushed in this order, in case the machine loses power; it costs milliseconds each time.
            if not all(map(_in_any_order, operations[number : number + 2])) or number + 1 == len(operations):
                flush_file(directory)


def _in_any_order(operation: Operation) -> bool:
    """Whether a reader finds this file staged as well as in its place, or starts from another: it may go before or
    after others of this kind."""
    kind, source, target = operation
    moves = kind == "replace" and source == target
    return kind == "publish" or (moves and (is_some_rank_file(target) or is_configuration(target)))


def _publish(staged: str, final: str) -> None:
    link = staged + ".link"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(link)
        os.link(staged, link)
    except OSError:
        # A file system without hard links: for the moment until the index is replaced the file is missed by readers.
        os.replace(staged, final)
    else:
        os.replace(link, final)


@dataclass(frozen=True)
class _Table:
    """A table of contents, or an index, that readers start from and that names a staging folder.

    Attributes:
        replaced: its own name, and that of an index beside it, each with what it can come from in the staging folder.
        files: what it says the checkpoint consists of.
        may_remove: whether a file of this name can be one of an earlier checkpoint that this one replaces.
    """

    replaced: Mapping[str, Collection[str]]
    files: frozenset[str]
    may_remove: Callable[[str], bool]


def _table_naming(directory: str, staging: str) -> _Table | None:
    """The table of contents or index in a folder that refers to this staging folder. What cannot be read refers to
    nothing: no reader can start from it."""
    for name in sorted(os.listdir(directory)):
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            table = _manifest_naming(directory, name, staging) or _index_naming(directory, name, staging)
            if table is not None:
                return table
    return None


def _manifest_naming(directory: str, name: str, staging: str) -> _Table | None:
    is_manifest, variant = variant_of_manifest(name)
    if not is_manifest or (manifest := read_manifest(directory, variant)).staging != staging:
        return None
    files, index = frozenset(manifest.files), weight_file_names(".safetensors", variant)[1]

    def may_remove(old: str) -> bool:
        return (is_rank_file(old, variant) and old not in files) or old == index

    return _Table({name: (STAGED_MANIFEST,), index: _INDICES}, files, may_remove)


def _index_naming(directory: str, name: str, staging: str) -> _Table | None:
    extension, variant = variant_of_index(name)
    if extension is None:
        return None
    content = read_json(os.path.join(directory, name))
    places = {place.text() for _, place in content["weight_map"].items()}
    files = frozenset(place.removeprefix(f"{staging}/") for place in places if place.startswith(f"{staging}/"))
    if not files or not all(is_shard(file, extension, variant) for file in files):
        return None
    whole = [single for end in EXTENSIONS for single in weight_file_names(end, variant) if single != name]

    def may_remove(old: str) -> bool:
        return old in whole or (old not in files and any(is_shard(old, end, variant) for end in EXTENSIONS))

    return _Table({name: _INDICES}, files, may_remove)


def _read_journal(directory: str, staging: str, table: _Table) -> list[Operation]:
    """What an interrupted commit had decided on; nothing if it was interrupted while it removed the staging folder.

    Raises:
        CheckpointError: it says what no save of this checkpoint would do.
    """
    path = os.path.join(directory, staging, _JOURNAL)
    try:
        content = read_json(path)
    except FileNotFoundError:
        return []
    operations: list[Operation] = []
    for entry in content.elements():
        parts = list(entry.elements())
        if len(parts) != 3:
            entry.refuse("what to do, a staged name, and a final name")
        kind, source, target = (part.text() for part in parts)
        for part in parts[1:] if source else parts[2:]:
            check_plain(part.text(), f"{path}, the journal of an interrupted save, is damaged: a name in it")
        moves = target in table.files and source == target
        if kind == "remove" and source == "" and table.may_remove(target):
            operations.append(("remove", "", target))
        elif kind == "publish" and moves:
            operations.append(("publish", source, target))
        elif kind == "replace" and (moves or source in table.replaced.get(target, ())):
            operations.append(("replace", source, target))
        elif kind == "replace" and source == target and is_side_file(target) and not variant_of_manifest(target)[0]:
            # The save that follows writes its own. One of these may also be the user's: it stays.
            if is_configuration(target) or kind_of(os.path.join(directory, target)) is None:
                operations.append(("replace", source, target))
        else:
            _refuse_journal(entry, directory, staging)
        _refuse_others(path, os.path.join(directory, staging, source) if source else None)
        _refuse_others(path, os.path.join(directory, target))
    return operations


def _refuse_journal(entry: Field, directory: str, staging: str) -> None:
    entry.refuse(
        "what a save of this checkpoint does; nothing was done. If the folder is not yours, save elsewhere; if it is, "
        f"remove {os.path.join(directory, staging)} once you know that you do not need what is in it"
    )


def _refuse_others(journal: str, path: str | None) -> None:
    """What a found journal moves, replaces and removes are regular files."""
    kind = None if path is None else kind_of(path)
    if kind not in (None, "a regular file"):
        raise CheckpointError(f"{journal} is damaged: {path} is {kind}, expected a regular file or nothing")


def _remove_staging(folder: str) -> None:
    """Remove a staging folder, as far as that is possible: the files that are directly in it, as a save leaves them."""
    with contextlib.suppress(OSError):
        # The journal last: without it the others cannot be put in their places.
        for name in sorted(os.listdir(folder), key=lambda name: name == _JOURNAL):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, name))
        os.rmdir(folder)

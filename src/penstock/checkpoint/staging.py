"""Replacing a checkpoint so that a kill at any moment leaves a whole one: the previous or the new.

A checkpoint is several files under fixed names, in a folder that may hold the user's files too. Exchanging whole
folders is not atomic on most shared file systems and would lose files that appear meanwhile, and renaming the files one
by one mixes two checkpoints if it is interrupted. So:

1. Everything is written to a staging folder *inside* the checkpoint's (the same file system) and is on disk.
2. The list of renames is written beside it as a journal. Until here the previous checkpoint is untouched.
3. The renames are done in an order of which every prefix is a whole checkpoint for its readers: the first that matters
   replaces, in one atomic step, the file readers start from (the table of contents, the index, or the single file of
   weights), and until the end what this file refers to stays reachable.
4. The staging folder is removed.

A kill leaves a staging folder behind. If the table of contents or the index already refers to it, the next save
completes the journal first; if not, it removes the folder. No file is touched that is not part of a checkpoint. Two
jobs that save into one folder at the same time are not kept apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from typing import Literal

from .errors import CheckpointError
from .files import flush_file, write_bytes

# (what to do, name in the staging folder or "", name in the checkpoint's folder)
Operation = tuple[Literal["replace", "publish", "remove"], str, str]

_STAGING = re.compile(r"\.saving-[0-9a-f]{32}")
_JOURNAL = "journal.json"


def prepare(directory: str) -> str:
    """Make the checkpoint's folder and a staging folder in it, after tidying up behind an interrupted save.

    Returns:
        the staging folder's name, relative to `directory`.
    """
    os.makedirs(directory, exist_ok=True)
    for name in os.listdir(directory):
        if _STAGING.fullmatch(name):
            if _is_referred_to(directory, name):
                _perform(directory, name, _read_journal(os.path.join(directory, name)))
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
    staging = f".saving-{uuid.uuid4().hex}"
    os.mkdir(os.path.join(directory, staging))
    flush_file(directory)
    return staging


def discard(directory: str, staging: str) -> None:
    """Forget what was staged, unless readers start from it. Never raises: the error that led here matters more."""
    with contextlib.suppress(OSError):
        if not _is_referred_to(directory, staging):
            shutil.rmtree(os.path.join(directory, staging), ignore_errors=True)


def commit(directory: str, staging: str, operations: Sequence[Operation]) -> None:
    """Make what was staged the checkpoint.

    Args:
        operations: in order. `replace` moves a staged file to its final name, `publish` gives it that name too but
            keeps it staged, `remove` deletes a file of an earlier checkpoint.

    Raises:
        CheckpointError: naming the path. What readers find is whole nevertheless; the next save goes on from here.
    """
    folder = os.path.join(directory, staging)
    draft = os.path.join(folder, _JOURNAL + ".draft")
    write_bytes(draft, json.dumps(list(operations)).encode())
    flush_file(folder)
    os.replace(draft, os.path.join(folder, _JOURNAL))
    flush_file(folder)
    _perform(directory, staging, operations)
    shutil.rmtree(folder, ignore_errors=True)


def _perform(directory: str, staging: str, operations: Sequence[Operation]) -> None:
    """Do the operations; those already done are skipped."""
    for kind, source, target in operations:
        staged, final = os.path.join(directory, staging, source), os.path.join(directory, target)
        try:
            if kind == "remove":
                with contextlib.suppress(FileNotFoundError):
                    os.remove(final)
            elif os.path.exists(staged):
                if kind == "publish":
                    _publish(staged, final)
                else:
                    os.replace(staged, final)
        except OSError as error:
            raise CheckpointError(f"cannot {kind} {final}: {type(error).__name__}: {error}") from error
        # In this order on disk too, should the machine lose power.
        flush_file(directory)


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


def _is_referred_to(directory: str, staging: str) -> bool:
    """Whether a table of contents or an index that readers use names this staging folder."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if name.endswith(".json") and os.path.isfile(path):
            with open(path, "rb") as file:
                if staging.encode() in file.read():
                    return True
    return False


def _read_journal(folder: str) -> list[Operation]:
    """What an interrupted commit had decided on; nothing if it was interrupted while it removed the staging folder."""
    try:
        with open(os.path.join(folder, _JOURNAL), encoding="utf-8") as file:
            return [(kind, source, target) for kind, source, target in json.load(file)]
    except FileNotFoundError:
        return []

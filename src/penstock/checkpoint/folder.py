"""A folder of checkpoints, one for each step: which are there, which of them are whole, and removing older ones."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass

from .files import flush_file
from .manifest import whole_manifest
from .names import (
    STAGING,
    is_configuration,
    is_rank_file,
    manifest_name,
    weight_file_names,
)
from .staging import discard
from .untrusted import CheckpointError, describe, is_directory, is_regular, kind_of

_STEP = re.compile(r"step-(\d{8,15})", re.ASCII)


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder.

    Attributes:
        path: its own folder.
        step: as its name says; None for a folder that is no step of another.
        fault: why it cannot be loaded; None if all of its files are there in their sizes.
        unfinished: whether it has no table of contents: a save was interrupted, or is under way.
    """

    path: str
    step: int | None
    fault: str | None
    unfinished: bool = False


def step_folder(folder: str | os.PathLike[str], step: int) -> str:
    """Where the checkpoint of a step is: `step-00000120` in `folder`."""
    return os.path.join(os.path.abspath(folder), f"step-{step:08d}")


def find_checkpoints(folder: str | os.PathLike[str]) -> list[Found]:
    """The checkpoints in a folder, the newest first; the folder itself if it is one. Raises CheckpointError.

    Reads tables of contents and sizes. Whether values are those that were saved shows when they are read.
    """
    folder = os.path.abspath(folder)
    if kind_of(os.path.join(folder, manifest_name())) is not None:
        return [_look_at(folder, None)]
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is no directory")
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder}: {describe(error)}") from None
    steps = {int(found[1]): name for name in names if (found := _STEP.fullmatch(name))}
    paths = [(step, os.path.join(folder, name)) for step, name in sorted(steps.items(), reverse=True)]
    return [_look_at(path, step) for step, path in paths if is_directory(path)]


def _look_at(path: str, step: int | None) -> Found:
    if kind_of(os.path.join(path, manifest_name())) is None:
        return Found(path, step, "it has no table of contents: its save did not finish", unfinished=True)
    try:
        whole_manifest(path)
    except (CheckpointError, OSError) as error:
        return Found(path, step, describe(error))
    return Found(path, step, None)


def remove_older(folder: str | os.PathLike[str], keep_last: int) -> None:
    """Remove the checkpoints of earlier steps than the `keep_last` newest whole ones. What cannot be removed stays.

    Only a checkpoint's own files are removed, and its folder if nothing else is in it.
    """
    with contextlib.suppress(CheckpointError, OSError):
        found = [one for one in find_checkpoints(folder) if one.step is not None]
        whole = [one for one in found if one.fault is None]
        if len(whole) < keep_last:
            return
        oldest_kept = whole[keep_last - 1].step or 0
        older = [one.path for one in found if one.step is not None and one.step < oldest_kept]
        if older:  # the newer ones' folders are on disk first, should the machine lose power
            flush_file(os.fspath(folder))
        for path in older:
            remove_checkpoint(path)


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint's files, the table of contents first, so that what is left if this is interrupted is seen to
    be no checkpoint. Errors are passed over: what is left is tried again by the next call."""
    with contextlib.suppress(OSError):
        table = os.path.join(path, manifest_name())
        # The staged files of a commit that was interrupted belong to the table of contents that names them.
        if is_regular(table):
            os.remove(table)
        indices = [weight_file_names(".safetensors", None, diffusers)[1] for diffusers in (False, True)]
        for name in sorted(os.listdir(path)):
            own = os.path.join(path, name)
            if STAGING.fullmatch(name) and is_directory(own):
                discard(path, name)
            elif (is_rank_file(name, None) or is_configuration(name) or name in indices) and is_regular(own):
                os.remove(own)
        os.rmdir(path)

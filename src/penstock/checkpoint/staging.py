"""Replacing a checkpoint so that a kill at any moment leaves a whole one: the previous or the new.

A checkpoint is several files under fixed names, in a folder that may hold the user's files too. Exchanging whole
folders would lose those, and renaming the files one by one mixes two checkpoints if it is interrupted. So:

1. Everything, small files beside the weights too, is written to a staging folder *inside* the checkpoint's (the same
   file system), and is on disk before the next step.
2. The small files are put in their places. Then what readers start from is replaced, each in one atomic step: the table
   of contents, the index (of a run after the table), or the single file of weights. A table or an index names the files
   where they are staged, and readers find them there. Older files from which readers would start before these are
   removed then.
3. The other files are put in their places, and the index is made to name them there. Files of earlier checkpoints,
   which are known by their names, and the staging folder are removed.

A kill leaves a staging folder behind. If the checkpoint's table of contents or index refers to it, the next save puts
its files in their places; then it removes it. Two jobs that save into one folder at the same time are not kept apart.

Somebody else may have made the folder. So of what an interrupted save left only regular files are moved, to the same
name in the checkpoint's folder, and only under the names that a save gives its indices and files of weights and states.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.checkpoint.files import flush_file, flush_files, replace_file, write_bytes, writing
from penstock.checkpoint.manifest import INDEX, MANIFEST, STAGING, is_shard, read_manifest
from penstock.checkpoint.untrusted import CheckpointError, is_directory, is_regular, kind_of, read_json, typed


@dataclass(frozen=True)
class Replacement:
    """How staged files become the checkpoint."""

    # Small files beside the weights, put in place first. A configuration that changed is the one thing that is not
    # atomic with the rest; that shows only when another model, or a resized one, is saved into a folder.
    sides: Sequence[str]
    # What readers start from: a table of contents, an index, or a single file of weights.
    starts: Sequence[str]
    # The files that these name.
    files: Collection[str] = ()
    # Files to remove, as readers would start from them before `starts`: the one in use until now last.
    hiding: Sequence[str] = ()
    # Files of earlier checkpoints that nothing refers to any more.
    old: Sequence[str] = ()


def prepare(directory: str) -> tuple[str, list[str]]:
    """Make the checkpoint's folder and a staging folder in it, after tidying up behind an interrupted save. Returns the
    name of the staging folder, and which folders were not there before. Raises CheckpointError."""
    made, path = list[str](), directory
    while not os.path.lexists(path):
        made.append(path)
        path = os.path.dirname(path)
    with writing(directory, "the checkpoint's folder"):
        os.makedirs(directory, exist_ok=True)
    for name in sorted(os.listdir(directory)):
        if STAGING.fullmatch(name) and is_directory(os.path.join(directory, name)):
            _put_in_place(directory, name, *_referred_to(directory, name))
            _remove_staging(os.path.join(directory, name))
    staging = f".saving-{uuid.uuid4().hex}"
    with writing(os.path.join(directory, staging), "the folder in which files are staged"):
        os.mkdir(os.path.join(directory, staging))
    return staging, made


def discard(directory: str, staging: str, made: Sequence[str] = ()) -> None:
    """Forget what was staged, unless readers start from it, and the folders `made` for it, if nothing else is in them.
    Never raises: the error that led here matters more."""
    with contextlib.suppress(Exception):
        if not any(_referred_to(directory, staging)):
            _remove_staging(os.path.join(directory, staging))
            for folder in made:
                os.rmdir(folder)


def commit(directory: str, staging: str, what: Replacement) -> None:
    """Make what was staged the checkpoint, once all of it is on disk. If it raises CheckpointError, what readers find
    is whole nevertheless; the next save goes on from here."""
    for target in (*what.sides, *what.starts, *what.files, *what.hiding, *what.old):
        path = os.path.join(directory, target)
        kind = kind_of(path)
        if kind not in (None, "a regular file", "a link"):  # a link is replaced itself, not what it leads to
            raise CheckpointError(
                f"cannot replace {path}: it is {kind}, and is in the way of the checkpoint's file"
                ". Move it away, or save to another folder"
            )
    folder = os.path.join(directory, staging)
    staged = dict.fromkeys([*what.sides, *what.starts, *what.files])
    flush_files([*(os.path.join(folder, name) for name in staged), folder, directory])
    for name in what.sides:
        _replace(os.path.join(folder, name), os.path.join(directory, name))
    for name in what.starts:
        _replace(os.path.join(folder, name), os.path.join(directory, name))
        flush_file(directory)
    for name in what.hiding:
        _remove(os.path.join(directory, name))
        flush_file(directory)
    _put_in_place(directory, staging, what.files, list(filter(INDEX.fullmatch, what.starts)))
    for name in what.old:
        _remove(os.path.join(directory, name))
    _remove_staging(folder)
    flush_file(directory)


def _put_in_place(directory: str, staging: str, files: Collection[str], indices: Sequence[str]) -> None:
    """Give staged files their final names, and make the indices that named them in the staging folder use these."""
    folder = os.path.join(directory, staging)
    for name in files:
        staged, final = os.path.join(folder, name), os.path.join(directory, name)
        kind = kind_of(staged)
        if kind not in (None, "a regular file"):
            raise CheckpointError(f"{staged} is {kind}, expected a regular file that an interrupted save left")
        if kind is not None:
            _publish(staged, final) if indices else _replace(staged, final)
    flush_file(directory)
    for name in indices:
        content = read_json(os.path.join(directory, name))
        content["weight_map"] = {key: place.removeprefix(f"{staging}/") for key, place in content["weight_map"].items()}
        replace_file(os.path.join(directory, name), _index_content(content), os.path.join(folder, f"{name}.draft"))


def write_index(
    folder: str, name: str, weight_map: Mapping[str, str], metadata: Mapping[str, object] | None = None
) -> None:
    """Stage the index of a save, which leads to the files where they are staged."""
    staged = {name: f"{os.path.basename(folder)}/{file_name}" for name, file_name in weight_map.items()}
    content = {"metadata": metadata or {}, "weight_map": staged}
    write_bytes(os.path.join(folder, name), _index_content(content))


def read_index(path: str) -> dict[str, str]:
    """Which file has which tensor, as an index of transformers says. Raises CheckpointError."""
    index: WeightIndex = typed(WeightIndex, read_json(path), path)
    return index.weight_map


@dataclass(frozen=True)
class WeightIndex:
    """The file that says which file of weights holds which tensor."""

    weight_map: dict[str, str]
    metadata: dict[str, Any]


def _index_content(content: Mapping[str, object]) -> bytes:
    """An index's text, as transformers writes it."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _replace(staged: str, final: str) -> None:
    with writing(final, "putting a checkpoint's file in its place"):
        os.replace(staged, final)


def _remove(path: str) -> None:
    with writing(path, "removing a file of an earlier checkpoint"), contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _publish(staged: str, final: str) -> None:
    """Give a staged file its final name as well."""
    link = staged + ".link"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(link)
        os.link(staged, link)
    except OSError:
        # A file system without hard links: readers miss the file until the index is replaced, a moment later.
        _replace(staged, final)
    else:
        _replace(link, final)


def _referred_to(directory: str, staging: str) -> tuple[set[str], list[str]]:
    """The staged files that tables of contents and indices in a folder refer to, and the names of such indices; first,
    an index that such a table still lacks is replaced. What cannot be read refers to nothing: no reader can start from
    it."""
    files, indices = set[str](), list[str]()
    for table in filter(None, map(MANIFEST.fullmatch, sorted(os.listdir(directory)))):
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            if (manifest := read_manifest(directory, table[1])).staging == staging:
                files |= manifest.files.keys()
                _finish_indices(directory, staging, manifest.files)
    for name in filter(INDEX.fullmatch, sorted(os.listdir(directory))):
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            places = read_index(os.path.join(directory, name)).values()
            staged = {place.removeprefix(f"{staging}/") for place in places if place.startswith(f"{staging}/")}
            if staged and all(file in files or is_shard(file, name) for file in staged):
                files |= staged
                indices.append(name)
    return files, indices


def _finish_indices(directory: str, staging: str, files: Collection[str]) -> None:
    """If a table of contents was replaced and the index that goes with it was not, replace the index too: plain
    transformers would read the new files by the old one."""
    folder = os.path.join(directory, staging)
    for name in filter(INDEX.fullmatch, os.listdir(folder)):
        staged = os.path.join(folder, name)
        places = set(read_index(staged).values()) if is_regular(staged) else set()
        if places and places <= {f"{staging}/{file}" for file in files}:
            _replace(staged, os.path.join(directory, name))
            flush_file(directory)


def _remove_staging(folder: str) -> None:
    """Remove a staging folder, as far as that is possible: the files that are directly in it, as a save leaves them."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, name))
        os.rmdir(folder)

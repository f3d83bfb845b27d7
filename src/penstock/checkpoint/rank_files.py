"""The files of a parallel checkpoint: those that each rank writes, their table of contents, and their places."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from .files import write_bytes, write_tensors
from .manifest import MODEL, STEMS, TRAINING, FileEntry, Manifest
from .merge import write_index
from .names import (
    STAGED_INDEX,
    STAGED_MANIFEST,
    common_file_name,
    is_rank_file,
    manifest_name,
    rank_file_name,
    weight_file_names,
)
from .safetensors_file import Behind
from .save_pretrained import SaveOptions
from .saving_ranks import SavingRank
from .staging import Replacement
from .tensors import TensorInfo, first_of_tied, to_cpu
from .untrusted import is_regular, kind_of

logger = logging.getLogger(__name__)


def write_rank_files(
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    common: bytes | None,
    folder: str,
    place: SavingRank,
    options: SaveOptions,
) -> dict[str, FileEntry]:
    """Write a rank's files, and have those with tensors on disk.

    Args:
        parts: the tensors that it writes of `manifest.MODEL` and of `manifest.TRAINING`.
        common: the file that every rank reads whole, if this rank writes it.
        place: has as its pipeline rank the number in the names of its files.
    """
    entries: dict[str, FileEntry] = {}
    if common is not None:
        name, ranks = common_file_name(options.variant), (place.pipeline_rank, place.tensor_parallel_rank)
        write_bytes(os.path.join(folder, name), common)
        entries[name] = FileEntry(TRAINING, *ranks, len(common), checksum=zlib.crc32(common))
    with Behind() as behind:
        written = [_write_tensors(tensors, part, folder, place, options, behind) for part, tensors in parts.items()]
    return entries | {name: entry() for name, entry in written}


def _write_tensors(
    state: Mapping[str, torch.Tensor], part: str, folder: str, place: SavingRank, options: SaveOptions, behind: Behind
) -> tuple[str, Callable[[], FileEntry]]:
    """Write a rank's part of the model, or of the optimizer's state, to a file of its own.

    Returns:
        the file's name, and what tells its entry once it is on disk.
    """
    ranks = place.tensor_parallel_rank, place.pipeline_rank
    name = rank_file_name(STEMS[part], *ranks, options.extension, options.variant)
    path = os.path.join(folder, name)
    tensors = to_cpu(state)
    first: dict[int, str] = {}
    stored = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    aliases = {name: stored_name for name, stored_name in stored.items() if stored_name != name}
    unique = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    # torch's format knows that two names are one tensor, so a .bin file is the whole state dict of its rank.
    written = unique if options.safe_serialization else tensors
    sums = write_tensors(path, written, options.save_function, behind)
    unsummed = {name: TensorInfo.of(tensor, 0) for name, tensor in unique.items()}  # which keeps no tensor in memory

    def entry() -> FileEntry:
        infos = {name: replace(info, checksum=sums[name]) for name, info in unsummed.items()}
        return FileEntry(part, place.pipeline_rank, place.tensor_parallel_rank, os.path.getsize(path), infos, aliases)

    return name, entry


def parallel_replacement(
    directory: str, folder: str, manifest: Manifest, sides: Sequence[str], options: SaveOptions, with_index: bool
) -> Replacement:
    """Stage the table of contents, and how it becomes that of the checkpoint in `directory`.

    Args:
        with_index: plain transformers shall find the weights as well. A tensor-parallel model's files have no index.
    """
    table, (_, index) = manifest_name(options.variant), weight_file_names(options.extension, options.variant)
    write_bytes(os.path.join(folder, STAGED_MANIFEST), manifest.dump())
    starts, old = {table: STAGED_MANIFEST}, list[str]()
    if with_index and manifest.tensor_parallel_size == 1:
        weights = {
            name: file for file, entry in manifest.files.items() if entry.part == MODEL for name in entry.tensors
        }
        write_index(weights, {}, folder)
        starts[index] = STAGED_INDEX
    elif kind_of(os.path.join(directory, index)) is not None and not options.variant:
        old.append(index)
    if kind_of(os.path.join(directory, table)) is not None:
        names = (name for name in os.listdir(directory) if is_rank_file(name, options.variant))
        old += sorted(
            name for name in names if name not in manifest.files and is_regular(os.path.join(directory, name))
        )
    return Replacement(sides, starts, manifest.files, old=old)


def warn_of_drift(manifest: Manifest) -> None:
    """Log a warning if holders of one weight have different values: the first one's will be loaded everywhere."""
    values: dict[tuple[int, str], TensorInfo] = {}
    first = first_of_tied(manifest.tied)
    for entry in sorted(manifest.files.values(), key=lambda entry: entry.stage):
        for name, info in entry.tensors.items() if entry.part == MODEL else ():
            key = (entry.tensor_parallel_rank, first.get(name, name))
            if values.setdefault(key, info) != info:
                logger.warning("stage %d holds other values of %s than an earlier stage", entry.stage, name)

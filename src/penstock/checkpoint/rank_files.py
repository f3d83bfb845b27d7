"""The files of a parallel checkpoint: what each rank writes, and the renames that make them the checkpoint."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .errors import CheckpointError
from .files import write_bytes, write_tensors
from .manifest import MODEL, TRAINING, FileEntry, Manifest, read_manifest
from .names import STAGED_MANIFEST, common_file_name, manifest_name, rank_file_name
from .options import SaveOptions
from .staging import Operation
from .tensors import TensorInfo, to_cpu

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        stage: along its pipeline, of `num_stages` ranks.
        is_writer: whether this pipeline is the one that writes.
    """

    stage: int
    num_stages: int
    tensor_parallel_rank: int
    tensor_parallel_size: int
    is_writer: bool

    @property
    def is_leader(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.is_writer and self.stage == 0 and self.tensor_parallel_rank == 0


def write_model_file(
    state: Mapping[str, torch.Tensor], folder: str, place: Place, options: SaveOptions
) -> dict[str, FileEntry]:
    """Write this rank's part of the model to `pytorch_model_tp_<t>_pp_<p>`. Returns the file's entry."""
    name = _file_name("pytorch_model", place, options)
    return {name: _write(state, os.path.join(folder, name), MODEL, place, options)}


def write_training_files(
    tensors: Mapping[str, torch.Tensor], common: bytes | None, folder: str, place: Place, options: SaveOptions
) -> dict[str, FileEntry]:
    """Write this rank's optimizer state to `optimizer_tp_<t>_pp_<p>`, and the common file if it is given here."""
    entries: dict[str, FileEntry] = {}
    if tensors:
        name = _file_name("optimizer", place, options)
        entries[name] = _write(tensors, os.path.join(folder, name), TRAINING, place, options)
    if common is not None:
        name = common_file_name(options.variant)
        write_bytes(os.path.join(folder, name), common)
        entry = FileEntry(TRAINING, place.stage, place.tensor_parallel_rank, len(common), checksum=zlib.crc32(common))
        entries[name] = entry
    return entries


def _file_name(stem: str, place: Place, options: SaveOptions) -> str:
    return rank_file_name(stem, place.tensor_parallel_rank, place.stage, options.extension, options.variant)


def _write(state: Mapping[str, torch.Tensor], path: str, part: str, place: Place, options: SaveOptions) -> FileEntry:
    tensors = to_cpu(state)
    first: dict[int, str] = {}
    stored = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    aliases = {name: stored_name for name, stored_name in stored.items() if stored_name != name}
    unique = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    # torch's format knows that two names are one tensor, so a .bin file is the whole state dict of its rank.
    write_tensors(path, unique if options.safe_serialization else tensors, options.save_function)
    infos = {name: TensorInfo.of(tensor) for name, tensor in unique.items()}
    return FileEntry(part, place.stage, place.tensor_parallel_rank, os.path.getsize(path), infos, aliases)


def parallel_operations(
    directory: str, folder: str, manifest: Manifest, sides: Sequence[str], options: SaveOptions
) -> list[Operation]:
    """Stage the table of contents, and list the renames that make `manifest` the checkpoint in `directory`.

    Replacing the table of contents comes first and decides; files whose turn has not come are found where they were
    staged. Files of the previous parallel checkpoint that the new one has not are removed last.
    """
    name = manifest_name(options.variant)
    write_bytes(os.path.join(folder, STAGED_MANIFEST), manifest.dump())
    operations: list[Operation] = [("replace", STAGED_MANIFEST, name)]
    operations += [("replace", file_name, file_name) for file_name in [*manifest.files, *sides]]
    try:
        previous = read_manifest(directory, options.variant)
    except CheckpointError:
        return operations  # none, or one that cannot be read any more
    return operations + [("remove", "", old) for old in sorted(previous.files.keys() - manifest.files.keys())]


def warn_of_drift(manifest: Manifest) -> None:
    """Log a warning if holders of one weight have different values: the first one's will be loaded everywhere."""
    values: dict[tuple[int, str], TensorInfo] = {}
    representative = {name: group[0] for group in manifest.tied for name in group}
    for entry in sorted(manifest.files.values(), key=lambda entry: entry.stage):
        for name, info in entry.tensors.items() if entry.part == MODEL else ():
            key = (entry.tensor_parallel_rank, representative.get(name, name))
            if values.setdefault(key, info) != info:
                logger.warning("stage %d holds other values of %s than an earlier stage", entry.stage, name)

"""The table of contents of a parallel checkpoint: which file holds which tensor, and how each must look.

Replacing this one file is what makes a new checkpoint the current one (see `staging`), so it names, for every file,
both the place where it was staged and its final name: a reader takes the first if it is still there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass, field, fields

from .names import EXTENSIONS, STAGING, check_plain, check_variant, common_file_name, manifest_name, rank_file_name
from .tensors import DTYPES, TensorInfo
from .untrusted import CheckpointError, Field, is_directory, locate, read_json

FORMAT = "penstock parallel checkpoint"
VERSION = 1

MODEL = "model"
TRAINING = "training"

# More stages, or slices of one, than any machine has devices.
MAX_RANKS = 65536

# How the names of the files with tensors begin.
STEMS = {MODEL: "pytorch_model", TRAINING: "optimizer"}
_MAX_DIMENSIONS = 64
_SHOWN = 5
_MOST = 2**63 - 1
_CRC = (0, 2**32 - 1)


@dataclass(frozen=True)
class FileEntry:
    """One file.

    Attributes:
        part: `"model"` or `"training"`.
        stage: the pipeline rank that wrote it, under the word that the file has for it.
        size: in bytes.
        tensors: what it holds, by name.
        aliases: further names of these tensors (tied weights), each with the name it is stored under.
        checksum: CRC-32 of a file that is read whole and holds no tensors of its own.
    """

    part: str
    stage: int
    tensor_parallel_rank: int
    size: int
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    checksum: int | None = None


@dataclass(frozen=True)
class Manifest:
    """A parallel checkpoint. The fields have the names that the file has.

    Attributes:
        num_stages: ranks of the pipeline that wrote it.
        staging: the folder inside the checkpoint's where its files were written first.
        tied: names that are one weight.
        shards: of each tensor that is sharded over the tensor-parallel ranks, the dimension, and the number of fused
            blocks along it that are each sharded by themselves. Every other tensor is whole in each rank's file.
    """

    model_class: str
    num_stages: int
    tensor_parallel_size: int
    staging: str
    tied: list[list[str]]
    files: dict[str, FileEntry]
    shards: dict[str, tuple[int, int]] = field(default_factory=dict)

    def dump(self) -> bytes:
        content = {"format": FORMAT, "version": VERSION} | {one.name: getattr(self, one.name) for one in fields(self)}
        # In one line: with indents it takes several times as long, which a small checkpoint notices.
        return (json.dumps(content, default=vars) + "\n").encode()

    def path_of(self, directory: str, file_name: str) -> str:
        """Where a file is now.

        Raises:
            CheckpointError: it is missing, or something else than a regular file of this folder.
        """
        staging, final = os.path.join(directory, self.staging), os.path.join(directory, file_name)
        try:
            if is_directory(staging):
                with contextlib.suppress(FileNotFoundError):
                    return locate(os.path.join(staging, file_name))
            return locate(final)
        except FileNotFoundError:
            raise CheckpointError(f"{final} is missing; the checkpoint consists of {sorted(self.files)}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {final}: {type(error).__name__}: {error}") from error

    def check_files(self, directory: str) -> None:
        """Check that every file is there and has its size.

        Raises:
            CheckpointError: naming the first that is missing, truncated, or no regular file of this folder.
        """
        for name, entry in self.files.items():
            path = self.path_of(directory, name)
            size = os.stat(path).st_size
            if size != entry.size:
                what = "is truncated" if size < entry.size else "is not the file that was saved"
                raise CheckpointError(f"{path} {what}: it has {size} bytes, the checkpoint's has {entry.size}")


def whole_manifest(directory: str, variant: str | None = None, model_class: str | None = None) -> Manifest:
    """The table of contents of a checkpoint that is whole as far as sizes tell.

    Args:
        model_class: the class that it must be of.

    Raises:
        CheckpointError: as `read_manifest` and `Manifest.check_files`, or it is of another class.
    """
    manifest = read_manifest(directory, variant)
    if model_class not in (None, manifest.model_class):
        raise CheckpointError(f"{directory} holds a {manifest.model_class}, but the model is a {model_class}")
    manifest.check_files(directory)
    return manifest


def read_manifest(directory: str, variant: str | None = None) -> Manifest:
    """Read a checkpoint's table of contents.

    Raises:
        ValueError: `variant` cannot be a part of a file's name.
        CheckpointError: it is missing, damaged, or of a later format. Whatever is absurd in it is named.
    """
    check_variant(variant)
    path = os.path.join(directory, manifest_name(variant))
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(_missing(directory, path)) from None
    if not isinstance(content.value, dict) or content.value.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the table of contents of a parallel checkpoint")
    if (version := content["version"].integer(1, _MOST)) != VERSION:
        raise CheckpointError(f"{path} has format version {version}; this Penstock reads {VERSION}")
    return _parse(content, variant)


def _missing(directory: str, path: str) -> str:
    if not os.path.isdir(directory):
        return f"{directory} is no directory"
    found = sorted(name for name in os.listdir(directory) if name.endswith(EXTENSIONS) and name.isprintable())
    hint = (
        f", but {', '.join(found[:_SHOWN])}: load an ordinary or merged checkpoint with from_pretrained"
        if found
        else ""
    )
    return f"{path} is missing: {directory} holds no parallel checkpoint{hint}"


def _parse(content: Field, variant: str | None) -> Manifest:
    num_stages = content["num_stages"].integer(1, MAX_RANKS)
    tensor_parallel_size = content["tensor_parallel_size"].integer(1, MAX_RANKS)
    files: dict[str, FileEntry] = {}
    for name, entry in content["files"].items():
        check_plain(name, f"{content.file} is damaged: a file name in it")
        part = entry["part"].text()
        if part not in STEMS:
            entry["part"].refuse(f"one of {sorted(STEMS)}")
        pipeline_rank = entry["stage"].integer(0, num_stages - 1)
        rank = entry["tensor_parallel_rank"].integer(0, tensor_parallel_size - 1)
        allowed = [rank_file_name(STEMS[part], rank, pipeline_rank, extension, variant) for extension in EXTENSIONS]
        allowed += [common_file_name(variant)] if part == TRAINING else []
        if name not in allowed:
            entry.refuse(f"it under a name that Penstock gives such a file: one of {allowed}")
        files[name] = parse_file(entry, part, pipeline_rank, rank)
        if (files[name].checksum is None) == (name == common_file_name(variant)):
            entry.refuse("a checksum for the file that every rank reads whole, and for no other")
    held = {(entry.stage, entry.tensor_parallel_rank) for entry in files.values() if entry.part == MODEL}
    if held and len(held) != num_stages * tensor_parallel_size:
        content["tensor_parallel_size"].refuse(
            f"one that goes with {len(held)} files of weights: one for each of num_stages {num_stages} times "
            f"tensor_parallel_size {tensor_parallel_size}"
        )
    staging, model_class = content["staging"], content["model_class"]
    if not STAGING.fullmatch(check_plain(staging.text(), f"{content.file} is damaged: the staging folder")):
        staging.refuse("the name of a folder that a save stages its files in: .saving- and 32 hexadecimal digits")
    if not model_class.text().isidentifier():
        model_class.refuse("the name of a class")
    shards = {}
    for name, shard in content["shards"].items() if content.get("shards") else ():
        numbers = list(shard.elements())
        if len(numbers) != 2:
            shard.refuse("a dimension and a number of blocks")
        shards[name] = numbers[0].integer(-_MAX_DIMENSIONS, _MAX_DIMENSIONS - 1), numbers[1].integer(1, _MOST)
    return Manifest(
        model_class=model_class.text(),
        num_stages=num_stages,
        tensor_parallel_size=tensor_parallel_size,
        staging=staging.text(),
        tied=[[name.text() for name in group.elements()] for group in content["tied"].elements()],
        files=files,
        shards=shards,
    )


def parse_file(entry: Field, part: str, pipeline_rank: int, tensor_parallel_rank: int) -> FileEntry:
    """A file's entry. Raises CheckpointError for an absurd one."""
    size = entry["size"].integer(0, _MOST)
    tensors = {name: _parse_tensor(info, size) for name, info in entry["tensors"].items()}
    aliases = {}
    for name, stored in entry["aliases"].items() if entry.get("aliases") else ():
        if stored.text() not in tensors:
            stored.refuse("the name of a tensor in the same file")
        aliases[name] = stored.text()
    checksum = entry.get("checksum")
    number = None if checksum is None else checksum.integer(*_CRC)
    return FileEntry(part, pipeline_rank, tensor_parallel_rank, size, tensors, aliases, number)


def _parse_tensor(info: Field, file_size: int) -> TensorInfo:
    dtype, shape = info["dtype"], info["shape"]
    if dtype.text() not in DTYPES:
        dtype.refuse("a dtype that this version of torch has")
    sizes = tuple(size.integer(0, _MOST) for size in shape.elements())
    if len(sizes) > _MAX_DIMENSIONS:
        shape.refuse(f"{_MAX_DIMENSIONS} dimensions at most")
    if (needed := math.prod(sizes) * DTYPES[dtype.value].itemsize) > file_size:
        shape.refuse(f"one that fits in the file: it takes {needed} bytes of {dtype.value}, the file has {file_size}")
    return TensorInfo(sizes, dtype.value, info["checksum"].integer(*_CRC))

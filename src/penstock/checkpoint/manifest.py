"""The files of a checkpoint: their names, and the table of contents of a parallel one.

The table says which file holds which tensor, and how each must look. It names the staging folder, too: a reader takes a
file from there while it is there (see `staging`). No file under another name is ever removed from a checkpoint's
folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import Annotated

from penstock.checkpoint.tensors import DTYPES, TensorInfo
from penstock.checkpoint.untrusted import (
    KEY,
    MAX_RANKS,
    CheckpointError,
    CheckpointMismatch,
    Checksum,
    Count,
    Place,
    content_of,
    damaged,
    is_directory,
    locate,
    read_json,
    typed,
)

# -- names -------------------------------------------------------------------------------------------------------------

EXTENSIONS = (".safetensors", ".bin")
ADAPTER = "adapter_model"
# The folder in which a save stages its files, inside the checkpoint's.
STAGING = re.compile(r"\.saving-[0-9a-f]{32}")

_VARIANT = r"[\w+.-]+"
# A table of contents, with its variant; and an index, with its files' stem, extension and variant.
MANIFEST = re.compile(rf"parallel_checkpoint(?:\.({_VARIANT}))?\.json")
INDEX = re.compile(
    r"(model(?=\.safetensors)|pytorch_model(?=\.bin)|diffusion_pytorch_model)(\.safetensors|\.bin)"
    rf"\.index(\.{_VARIANT})?\.json"
)
# The parts of a checkpoint, and how the names of their files with tensors begin.
MODEL, TRAINING = "model", "training"
STEMS = {MODEL: "pytorch_model", TRAINING: "optimizer"}
_RANK_FILE = re.compile(
    rf"(?:{'|'.join(STEMS.values())})_tp_[0-9]+_pp_[0-9]+(?:\.({_VARIANT}))?\.(?:bin|safetensors)"
    rf"|training_state(?:\.({_VARIANT}))?\.bin"
)
_MAX_NAME = 255


def check_variant(variant: str | None) -> None:
    """Raise ValueError for a variant that cannot be a part of a file's name."""
    if variant is not None and re.fullmatch(_VARIANT, variant) is None:
        raise ValueError(
            f"variant becomes part of file names and cannot be {variant!r}: use letters, digits and any of _ + . -"
        )


def check_plain(name: str, what: str) -> str:
    """`name`, which must be that of an entry of a folder; else CheckpointError says that `what` leads elsewhere."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable() or len(name) > _MAX_NAME:
        raise CheckpointError(f"{what} leads elsewhere: {name[:80]!r} is not the plain name of a file")
    return name


def _named(stem: str, extension: str, variant: str | None) -> str:
    return f"{stem}.{variant}{extension}" if variant else f"{stem}{extension}"


def manifest_name(variant: str | None = None) -> str:
    """The table of contents of a parallel checkpoint."""
    return _named("parallel_checkpoint", ".json", variant)


def rank_file_name(
    stem: str, tensor_parallel_rank: int, pipeline_rank: int, extension: str, variant: str | None
) -> str:
    """`pytorch_model_tp_0_pp_1.bin`, or `pytorch_model_tp_0_pp_1.fp16.bin` with variant `fp16`."""
    return _named(f"{stem}_tp_{tensor_parallel_rank}_pp_{pipeline_rank}", extension, variant)


def common_file_name(variant: str | None) -> str:
    """The file of what a training state holds besides the tensors of optimizers and of random generators."""
    return _named("training_state", ".bin", variant)


def is_rank_file(name: str, variant: str | None) -> bool:
    """Whether `name` is that of a file of weights or of the training state in a parallel checkpoint."""
    match = _RANK_FILE.fullmatch(name)
    return match is not None and (match[1] or match[2]) == variant


def is_diffusers(directory: str) -> bool:
    """Whether the configuration in a folder is that of a model of diffusers."""
    with contextlib.suppress(FileNotFoundError, TypeError):
        return "_class_name" in read_json(os.path.join(directory, "config.json"))
    return False


def weight_file_names(extension: str, variant: str | None, diffusers: bool = False) -> tuple[str, str]:
    """The standard names, in transformers or in diffusers, of a single file of weights, and of the index of several."""
    stem = "diffusion_pytorch_model" if diffusers else "model" if extension == ".safetensors" else "pytorch_model"
    return _named(stem, extension, variant), _named(f"{stem}{extension}.index", ".json", variant)


def is_shard(name: str, index: str) -> bool:
    """Whether `name` is that of one of the files of weights to which an index of the name `index` leads."""
    if (match := INDEX.fullmatch(index)) is None:
        return False
    stem, extension, middle = map(re.escape, match.groups(""))
    return re.fullmatch(rf"{stem}{middle}-\d{{5}}-of-\d{{5}}{extension}", name, re.ASCII) is not None


def is_configuration(name: str) -> bool:
    return name in ("config.json", "generation_config.json")


# -- the table of contents ---------------------------------------------------------------------------------------------

FORMAT = "penstock parallel checkpoint"
VERSION = 2  # 1 had the random states of all ranks in the file that every rank reads whole


# Between a parameter's name and the name of one of its states, in a file of tensors. No module name contains it.
SEPARATOR = "//"
_MOST = 64  # dimensions
_SHOWN = 5
_Number = Annotated[int, (1, MAX_RANKS)]
# A dimension, and a number of blocks.
_Shard = tuple[Annotated[int, (-_MOST, _MOST - 1)], Annotated[int, (1, 2**63 - 1)]]


@dataclass(frozen=True)
class FileEntry:
    """One file."""

    part: Annotated[str, STEMS]
    # That of the rank that wrote it. Ranks of other pipelines, which write a part of a sharded optimizer's state, have
    # the numbers that follow.
    pipeline_rank: Place = field(metadata={KEY: "stage"})
    tensor_parallel_rank: Place
    size: Count
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    # CRC-32 of the file that every rank reads whole; None for files of tensors.
    checksum: Checksum | None = None
    # Of older tables: further names, each with that under which the file has the tensor.
    aliases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A parallel checkpoint. In the file the fields have their names here, or that of their `KEY`."""

    model_class: str
    num_pipeline_ranks: _Number = field(metadata={KEY: "num_stages"})  # of the pipeline that wrote it
    tensor_parallel_size: _Number
    staging: str
    tied: list[list[str]]
    files: dict[str, FileEntry]
    # Of each tensor that is sharded over the tensor-parallel ranks, the dimension, and the number of fused blocks along
    # it that are each sharded by themselves. Every other tensor is whole, in whichever file it is.
    shards: dict[str, _Shard] = field(default_factory=dict)

    def dump(self) -> bytes:
        content = {"format": FORMAT, "version": VERSION} | content_of(self)
        # In one line: with indents it takes several times as long, which counts for a small checkpoint.
        return (json.dumps(content, default=content_of) + "\n").encode()

    def path_of(self, directory: str, file_name: str) -> str:
        """Where a file is now. Raises CheckpointError if it is missing, or no regular file of this folder."""
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
        """Check that every file is there and has its size. Raises CheckpointError, naming the first that has not."""
        for name, entry in self.files.items():
            path = self.path_of(directory, name)
            size = os.stat(path).st_size
            if size != entry.size:
                what = "is truncated" if size < entry.size else "is not the file that was saved"
                raise CheckpointError(f"{path} {what}: it has {size} bytes, the checkpoint's has {entry.size}")


def whole_manifest(directory: str, variant: str | None = None, model_class: str | None = None) -> Manifest:
    """The table of contents of a checkpoint that is whole as far as sizes tell. Raises CheckpointMismatch if it is of
    another class or format version, CheckpointError if it is damaged."""
    manifest = read_manifest(directory, variant)
    if model_class not in (None, manifest.model_class):
        raise CheckpointMismatch(
            f"{directory} holds a {manifest.model_class}, but the model is a {model_class}"
            f": make a {manifest.model_class}"
        )
    manifest.check_files(directory)
    return manifest


def read_manifest(directory: str, variant: str | None = None) -> Manifest:
    """Read a checkpoint's table of contents. Raises CheckpointError; whatever is absurd in it is named."""
    check_variant(variant)
    path = os.path.join(directory, manifest_name(variant))
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(_missing(directory, path)) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the table of contents of a parallel checkpoint")
    if (version := typed(_Number, content.get("version"), path, "version")) != VERSION:
        raise CheckpointMismatch(
            f"{path} has format version {version}; this Penstock reads {VERSION}"
            ": load it with the version of Penstock that saved it"
        )
    manifest: Manifest = typed(Manifest, content, path)
    _check(manifest, path, variant)
    return manifest


def _missing(directory: str, path: str) -> str:
    if not os.path.isdir(directory):
        return f"{directory} is no directory"
    files = sorted(name for name in os.listdir(directory) if name.endswith(EXTENSIONS) and name.isprintable())
    others = ", ".join(files[:_SHOWN])
    hint = f", but {others}: load an ordinary or merged checkpoint with from_pretrained" if files else ""
    return f"{path} is missing: {directory} holds no parallel checkpoint{hint}"


def _check(manifest: Manifest, path: str, variant: str | None) -> None:
    """Check that the parts of a table of contents go together. Raises CheckpointError."""
    num_ranks, size = manifest.num_pipeline_ranks, manifest.tensor_parallel_size
    for name, entry in manifest.files.items():
        check_plain(name, f"{path} is damaged: a file name in it")
        where = ("files", name)
        if entry.part == MODEL:
            typed(Annotated[int, (0, num_ranks - 1)], entry.pipeline_rank, path, *where, "stage")
        typed(Annotated[int, (0, size - 1)], entry.tensor_parallel_rank, path, *where, "tensor_parallel_rank")
        place = entry.tensor_parallel_rank, entry.pipeline_rank
        allowed = [rank_file_name(STEMS[entry.part], *place, extension, variant) for extension in EXTENSIONS]
        allowed += [common_file_name(variant)] if entry.part == TRAINING else []
        if name not in allowed:
            raise damaged(path, where, entry, f"it under a name that Penstock gives such a file: one of {allowed}")
        if (entry.checksum is None) == (name == common_file_name(variant)):
            expected = "a checksum for the file that every rank reads whole, and for no other"
            raise damaged(path, where, entry, expected)
        for tensor, info in entry.tensors.items():
            if (needed := math.prod(info.shape) * DTYPES[info.dtype].itemsize) > entry.size or len(info.shape) > _MOST:
                expected = (
                    f"{_MOST} dimensions at most, and one that fits in the file: it takes {needed} bytes of "
                    f"{info.dtype}, the file has {entry.size}"
                )
                raise damaged(path, (*where, "tensors", tensor, "shape"), list(info.shape), expected)
    weights = (entry for entry in manifest.files.values() if entry.part == MODEL)
    held = {(entry.pipeline_rank, entry.tensor_parallel_rank) for entry in weights}
    if held and len(held) != num_ranks * size:
        expected = (
            f"one that goes with {len(held)} files of weights: one for each of num_stages {num_ranks} times "
            f"tensor_parallel_size {size}"
        )
        raise damaged(path, ["tensor_parallel_size"], size, expected)
    if not STAGING.fullmatch(check_plain(manifest.staging, f"{path} is damaged: the staging folder")):
        expected = "the name of a folder that a save stages its files in: .saving- and 32 hexadecimals"
        raise damaged(path, ["staging"], manifest.staging, expected)
    if not manifest.model_class.isidentifier():
        raise damaged(path, ["model_class"], manifest.model_class, "the name of a class")

"""The table of contents of a parallel checkpoint: which file holds which tensor, and how each must look.

Replacing this one file is what makes a new checkpoint the current one (see `staging`), so it names, for every file,
both the place where it was staged and its final name: a reader takes the first if it is still there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import CheckpointError
from .tensors import TensorInfo

FORMAT = "penstock parallel checkpoint"
VERSION = 1

MODEL = "model"
TRAINING = "training"


@dataclass(frozen=True)
class FileEntry:
    """One file.

    Attributes:
        part: `"model"` or `"training"`.
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
    """A parallel checkpoint. `staging` is the folder inside the checkpoint's where its files were written first.

    `shards` says of each tensor that is cut over the tensor-parallel ranks how: the dimension, and the number of fused
    blocks along it that are each cut by themselves. Every other tensor is whole in each rank's file.
    """

    model_class: str
    num_stages: int
    tensor_parallel_size: int
    staging: str
    tied: list[list[str]]
    files: dict[str, FileEntry]
    shards: dict[str, tuple[int, int]] = field(default_factory=dict)

    def dump(self) -> bytes:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return (json.dumps(content, indent=1) + "\n").encode()

    def path_of(self, directory: str, file_name: str) -> str:
        """Where a file is now."""
        staged = os.path.join(directory, self.staging, file_name)
        return staged if os.path.exists(staged) else os.path.join(directory, file_name)

    def entries(self, part: str, tensor_parallel_rank: int) -> Iterator[tuple[str, FileEntry]]:
        for name, entry in self.files.items():
            if entry.part == part and entry.tensor_parallel_rank == tensor_parallel_rank:
                yield name, entry

    def check_files(self, directory: str) -> None:
        """Check that every file is there and has its size.

        Raises:
            CheckpointError: naming the first that is missing or truncated.
        """
        for name, entry in self.files.items():
            path = self.path_of(directory, name)
            try:
                size = os.stat(path).st_size
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing; the checkpoint consists of {sorted(self.files)}") from None
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
            if size != entry.size:
                what = "is truncated" if size < entry.size else "is not the file that was saved"
                raise CheckpointError(f"{path} {what}: it has {size} bytes, the checkpoint's has {entry.size}")


def manifest_name(variant: str | None = None) -> str:
    return f"parallel_checkpoint.{variant}.json" if variant else "parallel_checkpoint.json"


def rank_file_name(stem: str, tensor_parallel_rank: int, stage: int, extension: str, variant: str | None) -> str:
    """`pytorch_model_tp_0_pp_1.bin`, or `pytorch_model_tp_0_pp_1.fp16.bin` with variant `fp16`."""
    middle = f".{variant}" if variant else ""
    return f"{stem}_tp_{tensor_parallel_rank}_pp_{stage}{middle}{extension}"


def read_manifest(directory: str, variant: str | None = None) -> Manifest:
    """Read a checkpoint's table of contents.

    Raises:
        CheckpointError: it is missing, damaged, or of a later format.
    """
    path = os.path.join(directory, manifest_name(variant))
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise CheckpointError(_missing(directory, path)) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the table of contents of a parallel checkpoint")
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path} has format version {content.get('version')}; this Penstock reads {VERSION}")
    try:
        return _parse(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _missing(directory: str, path: str) -> str:
    if not os.path.isdir(directory):
        return f"{directory} is no directory"
    found = sorted(name for name in os.listdir(directory) if name.endswith((".bin", ".safetensors")))
    hint = f", but {', '.join(found)}: load an ordinary or merged checkpoint with from_pretrained" if found else ""
    return f"{path} is missing: {directory} holds no parallel checkpoint{hint}"


def _parse(content: Mapping[str, Any]) -> Manifest:
    files = {}
    for name, entry in content["files"].items():
        if os.path.basename(name) != name:
            raise ValueError(f"file name {name!r} leads elsewhere")
        tensors = {
            key: TensorInfo(tuple(info["shape"]), info["dtype"], info["checksum"])
            for key, info in entry["tensors"].items()
        }
        files[name] = FileEntry(**{**entry, "tensors": tensors})
    staging = content["staging"]
    if os.path.basename(staging) != staging:
        raise ValueError(f"staging folder {staging!r} leads elsewhere")
    return Manifest(
        model_class=content["model_class"],
        num_stages=content["num_stages"],
        tensor_parallel_size=content["tensor_parallel_size"],
        staging=staging,
        tied=content["tied"],
        files=files,
        shards={name: (int(dim), int(blocks)) for name, (dim, blocks) in content.get("shards", {}).items()},
    )

"""The names of the files that this library writes into a checkpoint's folder. Nothing else there is ever removed."""

from __future__ import annotations

import contextlib
import os
import re

from .untrusted import CheckpointError, read_json

EXTENSIONS = (".safetensors", ".bin")
# In the staging folder: what becomes the table of contents, and the index, which refers to files in the staging folder.
STAGED_MANIFEST = "manifest.staged"
STAGED_INDEX = "index.staged"
# The folder in which a save stages its files, inside the checkpoint's.
STAGING = re.compile(r"\.saving-[0-9a-f]{32}")

_VARIANT = r"[\w+.-]+"
_MANIFEST = re.compile(rf"parallel_checkpoint(?:\.({_VARIANT}))?\.json")
_INDEX = re.compile(
    r"(?:(diffusion_pytorch_)?model(\.safetensors)|(diffusion_)?pytorch_model(\.bin))"
    rf"\.index(?:\.({_VARIANT}))?\.json"
)
_RANK_FILE = re.compile(
    rf"(?:pytorch_model|optimizer)_tp_[0-9]+_pp_[0-9]+(?:\.({_VARIANT}))?\.(?:bin|safetensors)"
    rf"|training_state(?:\.({_VARIANT}))?\.bin"
)
_MAX_NAME = 255


def check_variant(variant: str | None) -> None:
    """Raise ValueError for a variant that cannot be a part of a file's name."""
    if variant is not None and re.fullmatch(_VARIANT, variant) is None:
        raise ValueError(f"variant becomes part of file names and cannot be {variant!r}")


def check_plain(name: str, what: str) -> str:
    """`name`, which must be that of an entry of a folder; else CheckpointError says that `what` leads elsewhere."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable() or len(name) > _MAX_NAME:
        raise CheckpointError(f"{what} leads elsewhere: {name[:80]!r} is not the plain name of a file")
    return name


def manifest_name(variant: str | None = None) -> str:
    """The table of contents of a parallel checkpoint."""
    return f"parallel_checkpoint.{variant}.json" if variant else "parallel_checkpoint.json"


def rank_file_name(
    stem: str, tensor_parallel_rank: int, pipeline_rank: int, extension: str, variant: str | None
) -> str:
    """`pytorch_model_tp_0_pp_1.bin`, or `pytorch_model_tp_0_pp_1.fp16.bin` with variant `fp16`."""
    middle = f".{variant}" if variant else ""
    return f"{stem}_tp_{tensor_parallel_rank}_pp_{pipeline_rank}{middle}{extension}"


def common_file_name(variant: str | None) -> str:
    """What a training state holds besides the optimizer's tensors."""
    return f"training_state.{variant}.bin" if variant else "training_state.bin"


def is_rank_file(name: str, variant: str | None) -> bool:
    """Whether `name` is that of a file of a parallel checkpoint, other than its table of contents."""
    found = _RANK_FILE.fullmatch(name)
    return found is not None and (found[1] or found[2]) == variant


def is_diffusers(directory: str) -> bool:
    """Whether the configuration in a folder is that of a model of diffusers."""
    with contextlib.suppress(FileNotFoundError, TypeError):
        return "_class_name" in read_json(os.path.join(directory, "config.json"))
    return False


def weight_file_names(extension: str, variant: str | None, diffusers: bool = False) -> tuple[str, str]:
    """The standard names, in transformers or in diffusers, of a single file of weights, and of the index of several."""
    stem = "diffusion_pytorch_model" if diffusers else "model" if extension == ".safetensors" else "pytorch_model"
    middle = f".{variant}" if variant else ""
    return f"{stem}{middle}{extension}", f"{stem}{extension}.index{middle}.json"


def is_shard(name: str, extension: str, variant: str | None, diffusers: bool = False) -> bool:
    """Whether `name` is that of one of several files of weights."""
    stem, _, _ = weight_file_names(extension, variant, diffusers)[0].rpartition(".")
    return re.fullmatch(re.escape(stem) + r"-\d{5}-of-\d{5}" + re.escape(extension), name, re.ASCII) is not None


def is_configuration(name: str) -> bool:
    return name in ("config.json", "generation_config.json")


def variant_of_manifest(name: str) -> tuple[bool, str | None]:
    """Whether `name` is that of a parallel checkpoint's table of contents, and of which variant."""
    found = _MANIFEST.fullmatch(name)
    return found is not None, None if found is None else found[1]


def variant_of_index(name: str) -> tuple[str | None, str | None, bool]:
    """The extension of the weights that a file of this name is the index of, None if it is none; the variant; and
    whether they are of diffusers."""
    found = _INDEX.fullmatch(name)
    if found is None:
        return None, None, False
    return found[2] or found[4], found[5], bool(found[1] or found[3])

"""Which parallel checkpoints a folder has, and what is in them, without their run.

Whether they are whole, removing older ones, and one ordinary folder made of one stand here, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from penstock.checkpoint.file_specs import HeldTensor, SaveOptions, SavingReport
from penstock.checkpoint.files import flush_file, write_bytes
from penstock.checkpoint.formats import ModelFormat
from penstock.checkpoint.load import match, saved_sources
from penstock.checkpoint.manifest import (
    MODEL,
    SEPARATOR,
    STAGING,
    TRAINING,
    Manifest,
    is_configuration,
    is_diffusers,
    is_rank_file,
    manifest_name,
    read_manifest,
    weight_file_names,
    whole_manifest,
)
from penstock.checkpoint.ranks import CheckpointRanks, SavingRank
from penstock.checkpoint.reader import CheckpointReader, Location, Resharding
from penstock.checkpoint.save import Save
from penstock.checkpoint.staging import discard
from penstock.checkpoint.tensors import DTYPES
from penstock.checkpoint.training_state import read_common
from penstock.checkpoint.untrusted import CheckpointError, describe, is_directory, is_regular, kind_of, open_plain
from penstock.modeling.instrumentation import record_of
from penstock.modeling.weights.initialise import meta_model, resolve_model_class

MAX_SIDE_BYTES = 16 * 1024**2
_STEP = re.compile(r"step-(\d{8,15})", re.ASCII)


# -- which there are ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint. `step`: as its folder's name says; None if that names none."""

    path: str
    step: int | None

    @property
    def has_table(self) -> bool:
        """Whether it has a table of contents; else its save was interrupted, or is under way."""
        return kind_of(os.path.join(self.path, manifest_name())) is not None

    @property
    def is_of_run(self) -> bool:
        """Whether it holds more than weights; True also if its table of contents cannot be read."""
        try:
            return any(entry.part == TRAINING for entry in read_manifest(self.path).files.values())
        except (CheckpointError, OSError):
            return True

    @property
    def fault(self) -> str | None:
        """Why it cannot be loaded; None if all of its files are there in their sizes. Whether values are those that
        were saved shows when they are read."""
        if not self.has_table:
            return "it has no table of contents: its save did not finish"
        try:
            whole_manifest(self.path)
        except (CheckpointError, OSError) as error:
            return describe(error)
        return None


def step_folder(folder: str | os.PathLike[str], step: int) -> str:
    """Where the checkpoint of a step is: `step-00000120` in `folder`."""
    return os.path.join(os.path.abspath(folder), f"step-{step:08d}")


def find_checkpoints(folder: str | os.PathLike[str]) -> list[FoundCheckpoint]:
    """The checkpoints in a folder, whole or not: those of steps, the newest first, and the folder itself if it is one,
    last unless it is of a step. Raises CheckpointError."""
    folder = os.path.abspath(folder)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is no directory")
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder}: {describe(error)}") from None
    steps = {step: name for name in names if (step := _step_of(name)) is not None}
    every = [FoundCheckpoint(os.path.join(folder, name), step) for step, name in sorted(steps.items(), reverse=True)]
    found = [each for each in every if is_directory(each.path) and not _was_removed(each.path)]
    itself = FoundCheckpoint(folder, _step_of(os.path.basename(folder)))
    newer = [each for each in found if itself.step is None or (each.step or 0) > itself.step]
    return [*newer, itself, *found[len(newer) :]] if itself.has_table else found


def _step_of(name: str) -> int | None:
    """The step that a folder of this name is of."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])


def _was_removed(path: str) -> bool:
    """Whether a folder holds only what `remove_checkpoint` leaves: files of the user's, or a model's own code."""
    with contextlib.suppress(OSError):
        names = os.listdir(path)
        return bool(names) and not any(map(_is_removed, names)) and manifest_name() not in names
    return False


def _is_removed(name: str) -> bool:
    """Whether `remove_checkpoint` takes what has this name, beside the table of contents."""
    indices = [weight_file_names(".safetensors", None, diffusers)[1] for diffusers in (False, True)]
    is_staging = STAGING.fullmatch(name) is not None
    return is_staging or is_rank_file(name, None) or is_configuration(name) or name in indices


def remove_older(folder: str | os.PathLike[str], keep_last: int, step: int) -> None:
    """Remove the checkpoints before that of a step, but for so many whole ones that with it `keep_last` are left. Those
    of later steps, from which the run has gone back, stay, and what cannot be removed. Only files under a checkpoint's
    own names are removed, and its folder if nothing else is in it."""
    with contextlib.suppress(CheckpointError, OSError):
        left, older = keep_last, list[str]()
        every = [found for found in find_checkpoints(folder) if found.path != os.path.abspath(folder)]
        checkpoints = [found for found in every if found.step is not None and found.step <= step]
        for checkpoint in checkpoints if len(checkpoints) > keep_last else ():
            if left == 0:
                older.append(checkpoint.path)
            elif checkpoint.fault is None:
                left -= 1
        if older:  # the newer ones' folders are on disk first, should the machine lose power
            flush_file(os.fspath(folder))
        for path in older:
            remove_checkpoint(path)


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint's files, the table of contents first, so that what is left if this is interrupted is seen to
    be no checkpoint. Errors are passed over: what is left is tried again by the next call. Files under names that may
    be anybody's stay, also the code of a model that brings its own."""
    with contextlib.suppress(OSError):
        table = os.path.join(path, manifest_name())
        # The staged files of a commit that was interrupted belong to the table of contents that names them.
        if is_regular(table):
            os.remove(table)
        for name in filter(_is_removed, sorted(os.listdir(path))):
            entry = os.path.join(path, name)
            if is_regular(entry):
                os.remove(entry)
            elif STAGING.fullmatch(name) and is_directory(entry):
                discard(path, name)
        os.rmdir(path)


def newest_checkpoint(folder: str | os.PathLike[str]) -> str:
    """The folder itself if it is a checkpoint, else its newest whole one. Raises CheckpointError if there is none."""
    reasons, found = "", find_checkpoints(folder)
    for checkpoint in [each for each in found if each.path == os.path.abspath(folder)] or found:
        if (fault := checkpoint.fault) is None:
            return checkpoint.path
        reasons += f"; {checkpoint.path}: {fault}"
    raise CheckpointError(f"{os.path.abspath(folder)} holds no whole checkpoint{reasons}")


# -- what is in it -----------------------------------------------------------------------------------------------------


def inspect_folder(folder: str | os.PathLike[str], values: bool = True) -> list[dict[str, Any]]:
    """What each checkpoint in a folder holds, the newest first; plain data, see `inspect_checkpoint`. Raises
    CheckpointError if there is no such folder, or no checkpoint in it."""
    checkpoints = find_checkpoints(folder)
    if not checkpoints:
        raise CheckpointError(
            f"{os.path.abspath(folder)} holds no checkpoint"
            ": name the folder that was given to save_checkpoint or save_parallelized"
        )
    return [
        inspect_checkpoint(checkpoint.path, values)
        if (fault := checkpoint.fault) is None
        else {"path": checkpoint.path, "step": checkpoint.step, "whole": False, "faults": [fault]}
        for checkpoint in checkpoints
    ]


def inspect_checkpoint(path: str, values: bool = True) -> dict[str, Any]:
    """What a checkpoint holds, as plain data. `values`: compare every value with its checksum, which reads all files.
    Otherwise only sizes are compared, and the checksum of the file that every rank reads whole."""
    manifest = whole_manifest(path)
    reader, compared = CheckpointReader(path, manifest, MODEL), manifest.files if values else ()
    faults = [fault for name in compared for fault in _faults_of(path, manifest, reader, name)]
    training: dict[str, Any] | None = None
    if any(entry.part == TRAINING for entry in manifest.files.values()):
        try:
            common = read_common(manifest, path)
        except CheckpointError as error:
            faults = list(dict.fromkeys([*faults, str(error)]))
        else:
            training = {
                "step": common.step,
                "objects": sorted(common.objects),
                "ranks": len(common.pipelines),
                "pipelines": len(set(common.pipelines)),
                "parameter_groups": len(common.groups or []),
            }
    return {
        "path": path,
        "step": None if training is None else training["step"],
        "whole": not faults,
        "faults": faults,
        "model_class": manifest.model_class,
        "pipeline_ranks": manifest.num_pipeline_ranks,
        "tensor_parallel_size": manifest.tensor_parallel_size,
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "bytes_of_weights": sum(entry.size for entry in manifest.files.values() if entry.part == MODEL),
        "training": training,
        "files": [
            {
                "name": name,
                "part": entry.part,
                "pipeline_rank": entry.pipeline_rank,
                "bytes": entry.size,
                "tensors": len(entry.tensors),
            }
            for name, entry in manifest.files.items()
        ],
        "parameters": list(_parameters(manifest, reader)),
    }


def _parameters(manifest: Manifest, reader: CheckpointReader) -> Iterator[dict[str, Any]]:
    """Each weight once, in its whole shape, with the states that an optimizer keeps of it."""
    states: dict[str, set[str]] = {}
    for entry in manifest.files.values():
        for key in entry.tensors if entry.part == TRAINING else ():
            name, _, state = key.partition(SEPARATOR)
            states.setdefault(name, set()).add(state)
    ties = {name: group for group in manifest.tied for name in group}
    seen = set[str]()
    for name, location in reader.locations.items():
        if name != location.name or seen & {name, *ties.get(name, ())}:
            continue
        seen.add(name)
        shape, dtype = reader.whole_shape(name), location.info.dtype
        kept = set[str]().union(*(states.get(alias, set()) for alias in {name, *ties.get(name, ())}))
        yield {
            "name": name,
            "shape": list(shape),
            "dtype": dtype,
            "bytes": math.prod(shape) * DTYPES[dtype].itemsize,
            "file": location.file_name,
            "sharded": reader.saved_sharding(name) is not None,
            "tied_to": [other for other in ties.get(name, ()) if other != name],
            "optimizer_states": sorted(kept),
        }


def _faults_of(path: str, manifest: Manifest, reader: CheckpointReader, name: str) -> Iterator[str]:
    """What is wrong with the values in a file: the first tensor that is not as it was saved."""
    entry = manifest.files[name]
    try:
        if entry.checksum is not None:
            read_common(manifest, path)
        for tensor_name, info in entry.tensors.items():
            reader.check(Location(name, entry.pipeline_rank, tensor_name, info))
    except Exception as error:
        yield describe(error)


# -- one ordinary folder -----------------------------------------------------------------------------------------------


def merge_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    safe_serialization: bool = True,
    max_shard_size: int | str = "5GB",
) -> list[str]:
    """Make of a parallel checkpoint, or of the newest one in a folder, the folder that `save_pretrained` would write;
    of a module of neither transformers nor diffusers the weights alone, with every name of its `state_dict()`. Returns
    the names of the files of weights. No more than one of them is in memory at a time.

    Raises CheckpointError: the checkpoint is damaged, its model's class is derived from one of transformers' and not
    known here, or `destination` cannot be written. If a checkpoint was there, a whole one is there then."""
    path, directory = newest_checkpoint(source), os.path.abspath(destination)
    manifest = whole_manifest(path)
    model, reader = _model_of(path, manifest), CheckpointReader(path, manifest, MODEL)
    sources = saved_sources(manifest, reader)
    if isinstance(model, PreTrainedModel):
        try:
            sources = match(model, manifest, reader, path)
        except CheckpointError as error:
            advice = "One with adapters is merged by merge_and_unload() in its run"
            raise CheckpointError(f"{error}. The model is what its config.json says. {advice}") from None
    options = SaveOptions(safe_serialization=safe_serialization, max_shard_size=max_shard_size)
    save_format = _MergedFormat(model, options, path, reader, sources)
    Save(save_format, directory, CheckpointRanks()).run()
    return save_format.files


@dataclass
class _MergedFormat(ModelFormat):
    """What `save_pretrained` would write, of the files of a parallel checkpoint."""

    source: str
    reader: CheckpointReader
    # For each name of the model that under which the checkpoint has it.
    names: Mapping[str, str]

    @property
    def diffusers(self) -> bool:
        return is_diffusers(self.source)

    def report(self, place: SavingRank, folder: str) -> SavingReport:
        self.sides = [name for name in sorted(os.listdir(self.source)) if is_configuration(name)]
        for name in self.sides:
            with open_plain(os.path.join(self.source, name)) as file:
                write_bytes(os.path.join(folder, name), file.read(MAX_SIDE_BYTES))
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} or self.names
        holdings = {
            name: HeldTensor(self.reader.whole_shape(key), self.reader.locations[key].info.dtype, name in parameters)
            for name, key in self.names.items()
        }
        return SavingReport(place, holdings=holdings)

    def get(self, name: str) -> torch.Tensor:
        """Read a tensor, and join it from its shards."""
        key = self.names[name]
        sharding = Resharding(self.reader.saved_sharding(key))
        self.reader.verify({key: sharding})
        return self.reader.read(key, sharding)


def _model_of(path: str, manifest: Manifest) -> nn.Module:
    """The model without its weights; an empty module that is tied alike if it is none of transformers'."""
    if is_diffusers(path) or not os.path.exists(os.path.join(path, CONFIG_NAME)):
        if hasattr(transformers, manifest.model_class):
            raise CheckpointError(
                f"{path} holds a {manifest.model_class} of transformers, but no {CONFIG_NAME}"
                ": put the saved model's there again"
            )
        empty = nn.Module()
        record_of(empty).aliases = [tuple(names) for names in manifest.tied]
        return empty
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model = meta_model(resolve_model_class(config), config)
    except ValueError as error:
        if hasattr(transformers, manifest.model_class):
            raise
        raise CheckpointError(
            f"{path} holds a {manifest.model_class}, which is no class of transformers: where it is defined, call "
            f"model.from_parallelized({path!r}), on any number of ranks, and model.save_pretrained(folder)"
        ) from error
    if type(model).__name__ != manifest.model_class:
        raise CheckpointError(
            f"{path} holds a {manifest.model_class}, but its config.json is of {type(model).__name__}"
            ": put the saved model's config.json there again"
        )
    without_weights: nn.Module = model
    return without_weights

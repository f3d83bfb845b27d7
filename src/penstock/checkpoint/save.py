"""Saving a model from all ranks at once: a file for each rank and a table of contents, or one merged checkpoint."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .comm import Comm, together
from .files import write_bytes, write_tensors
from .manifest import MODEL, TRAINING, FileEntry, Manifest, read_manifest
from .merge import Holding, MergePlan, describe_holdings, merged_operations, plan_merge, write_merged
from .names import STAGED_MANIFEST, common_file_name, manifest_name, rank_file_name
from .save_pretrained import SaveOptions, refuse_unsupported, write_side_files
from .staging import Operation, commit, discard, prepare
from .tensors import TensorInfo, held_state, shards_of, tensor_parallel_place, tied_groups, to_cpu
from .training_state import RankTrainingState, TrainingState, collect_training_state, common_content
from .untrusted import CheckpointError

logger = logging.getLogger(__name__)


# What a training state saved on its own has in its files' names.
TRAINING_VARIANT = "training"


@dataclass(frozen=True)
class SavingRank:
    """Where a rank that saves stands.

    Attributes:
        pipeline_rank: its index in its pipeline, which has `num_pipeline_ranks`; it may hold several stages.
        is_writer: whether this pipeline is the one that writes; replicas hold the same weights and only wait.
        tensor_parallel_rank: its index among the `tensor_parallel_size` ranks that hold shards of the same stages.
    """

    pipeline_rank: int
    num_pipeline_ranks: int
    is_writer: bool = True
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1

    @property
    def is_leader(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.is_writer and self.pipeline_rank == 0 and self.tensor_parallel_rank == 0


def save_parallelized(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    *,
    place: SavingRank,
    world_comm: Comm,
    pipeline_comm: Comm,
    merge_checkpoints: bool = False,
    training_state: TrainingState | None = None,
    **save_pretrained_kwargs: Any,
) -> None:
    """Save a split model. Every rank calls this, with the same arguments but for `place` and `pipeline_comm`.

    Without merging, each rank of one pipeline writes what it holds to `pytorch_model_tp_<t>_pp_<p>.bin`, and
    `parallel_checkpoint.json` says what is where. With merging, the folder is what `save_pretrained` would write,
    loadable by plain transformers; a rank gathers no more than one shard at a time.

    Atomic: see `staging`. If anything fails on any rank, every rank raises and the previous checkpoint is intact.

    Args:
        save_directory: on a file system that all ranks share.
        place: where this rank stands.
        world_comm: all ranks.
        pipeline_comm: this rank's pipeline, in order of `pipeline_rank`, then of `tensor_parallel_rank`.
        merge_checkpoints: write one ordinary checkpoint.
        training_state: saved in the same atomic step (not when merging).
        save_pretrained_kwargs: see `SaveOptions`.

    Raises:
        TypeError, ValueError: an argument cannot be honoured.
        CheckpointError: some rank could not write; names the rank and the path.
    """
    options = SaveOptions.parse(save_pretrained_kwargs)
    refuse_unsupported(model)
    if merge_checkpoints and training_state is not None:
        raise ValueError("a merged checkpoint has no place for training_state; save it without merge_checkpoints")
    _check_shards(model, place)
    directory = os.path.abspath(save_directory)
    _Save(model, directory, place, world_comm, pipeline_comm, merge_checkpoints, training_state, options).run()


def save_training_state(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    training_state: TrainingState,
    *,
    place: SavingRank,
    world_comm: Comm,
    pipeline_comm: Comm,
) -> None:
    """Save a training state without the model's weights, for `load_training_state(..., variant=TRAINING_VARIANT)`.

    Its files bear the variant in their names, so it may go to the folder of the model. Else as `save_parallelized`.
    """
    _check_shards(model, place)
    directory, options = os.path.abspath(save_directory), SaveOptions(variant=TRAINING_VARIANT)
    _Save(model, directory, place, world_comm, pipeline_comm, False, training_state, options, with_model=False).run()


def _check_shards(model: PreTrainedModel, place: SavingRank) -> None:
    """Files must not say something else than what the model holds."""
    index, size = tensor_parallel_place(model)
    if (index, size) != (place.tensor_parallel_rank, place.tensor_parallel_size):
        raise ValueError(
            f"the model holds slice {index} of {size} of its weights, but is to be saved with tensor_parallel_rank "
            f"{place.tensor_parallel_rank} of tensor_parallel_size {place.tensor_parallel_size}"
        )


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others before the writing starts."""

    place: SavingRank
    sides: list[str]
    holdings: dict[str, Holding]
    training: dict[str, Any] | None


class _Save:
    """One save on one rank. Each step ends with an exchange, so a fault anywhere ends it everywhere."""

    def __init__(
        self,
        model: PreTrainedModel,
        directory: str,
        place: SavingRank,
        world: Comm,
        pipeline: Comm,
        merge: bool,
        training_state: TrainingState | None,
        options: SaveOptions,
        with_model: bool = True,
    ) -> None:
        self._model, self._directory, self._place, self._options = model, directory, place, options
        self._world, self._pipeline = world, pipeline
        self._merge, self._training_state, self._with_model = merge, training_state, with_model
        self._call = (directory, merge, training_state is not None, options.safe_serialization, options.variant)
        self._state: dict[str, torch.Tensor] = {}
        self._training: RankTrainingState | None = None
        self._plan: MergePlan | None = None

    def run(self) -> None:
        doing = f"save to {self._directory}"
        intact = f"the checkpoint that was in {self._directory} before, if any, is intact"
        prepared = together(self._world, doing, "preparing the folder", self._prepare, unchanged=intact)
        staging = next(name for _, name in prepared if name is not None)
        folder = os.path.join(self._directory, staging)
        try:
            calls = [call for call, _ in prepared]
            reports = together(
                self._world, doing, "comparing what ranks hold", lambda: self._describe(folder, calls), unchanged=intact
            )
            written = together(
                self._world, doing, "writing the files", lambda: self._write(folder, reports), unchanged=intact
            )
            together(
                self._world,
                doing,
                "putting the files in place",
                lambda: self._commit(staging, reports, written),
                unchanged=f"{self._directory} holds a whole checkpoint: the previous one, or already this one",
            )
        except CheckpointError:
            # After the exchange nobody writes any more.
            if self._place.is_leader:
                discard(self._directory, staging)
            raise

    def _prepare(self) -> tuple[Any, str | None]:
        return self._call, prepare(self._directory) if self._place.is_leader else None

    def _describe(self, folder: str, calls: list[Any]) -> _Report:
        for rank, call in enumerate(calls):
            if call != self._call:
                raise CheckpointError(f"was asked for {self._call}, but rank {rank} for {call}")
        sides: list[str] = []
        if self._training_state is not None:
            self._training = collect_training_state(self._model, self._training_state)
        if self._place.is_writer and not os.path.isdir(folder):
            raise CheckpointError(f"{folder} is not visible here; all ranks must share the file system")
        if self._place.is_writer and self._with_model:
            self._state = held_state(self._model, self._options.state_dict)
            sides = write_side_files(self._model, folder) if self._place.is_leader else []
        holdings = describe_holdings(self._model, self._state) if self._merge else {}
        return _Report(self._place, sides, holdings, None if self._training is None else self._training.report)

    def _write(self, folder: str, reports: list[_Report]) -> dict[str, FileEntry]:
        if not self._place.is_writer:
            return {}
        writers = [report for report in reports if report.place.is_writer]
        writers.sort(key=lambda report: (report.place.pipeline_rank, report.place.tensor_parallel_rank))
        if self._merge:
            self._plan = plan_merge(self._model, [report.holdings for report in writers], self._options)
            write_merged(self._model, self._state, self._plan, folder, self._options, self._pipeline)
            return {}
        files = _write_model_file(self._state, folder, self._place, self._options) if self._with_model else {}
        if self._training is not None and self._training_state is not None:
            common = None
            if self._place.is_leader:
                every = [report.training or {} for report in reports]
                common = common_content(self._training_state, every, [report.training or {} for report in writers])
            files |= _write_training_files(self._training.tensors, common, folder, self._place, self._options)
        return files

    def _commit(self, staging: str, reports: list[_Report], written: list[dict[str, FileEntry]]) -> None:
        if not self._place.is_leader:
            return
        folder = os.path.join(self._directory, staging)
        sides = [name for report in reports for name in report.sides]
        if self._plan is not None:
            operations = merged_operations(self._directory, folder, self._plan, sides, self._options)
        else:
            manifest = Manifest(
                model_class=type(self._model).__name__,
                num_stages=self._place.num_pipeline_ranks,
                tensor_parallel_size=self._place.tensor_parallel_size,
                staging=staging,
                tied=tied_groups(self._model),
                files={name: entry for files in written for name, entry in files.items()},
                shards={name: (shard.dim, shard.blocks) for name, shard in shards_of(self._model).items()},
            )
            _warn_of_drift(manifest)
            operations = _parallel_operations(self._directory, folder, manifest, sides, self._options)
        commit(self._directory, staging, operations)


# ---------------------------------------------------------------- the files of a parallel checkpoint


def _write_model_file(
    state: Mapping[str, torch.Tensor], folder: str, place: SavingRank, options: SaveOptions
) -> dict[str, FileEntry]:
    """Write this rank's part of the model to `pytorch_model_tp_<t>_pp_<p>`. Returns the file's entry."""
    name = _file_name("pytorch_model", place, options)
    return {name: _write_tensors(state, os.path.join(folder, name), MODEL, place, options)}


def _write_training_files(
    tensors: Mapping[str, torch.Tensor], common: bytes | None, folder: str, place: SavingRank, options: SaveOptions
) -> dict[str, FileEntry]:
    """Write this rank's optimizer state to `optimizer_tp_<t>_pp_<p>`, and the common file if it is given here."""
    entries: dict[str, FileEntry] = {}
    if tensors:
        name = _file_name("optimizer", place, options)
        entries[name] = _write_tensors(tensors, os.path.join(folder, name), TRAINING, place, options)
    if common is not None:
        name = common_file_name(options.variant)
        write_bytes(os.path.join(folder, name), common)
        entry = FileEntry(
            TRAINING, place.pipeline_rank, place.tensor_parallel_rank, len(common), checksum=zlib.crc32(common)
        )
        entries[name] = entry
    return entries


def _file_name(stem: str, place: SavingRank, options: SaveOptions) -> str:
    return rank_file_name(stem, place.tensor_parallel_rank, place.pipeline_rank, options.extension, options.variant)


def _write_tensors(
    state: Mapping[str, torch.Tensor], path: str, part: str, place: SavingRank, options: SaveOptions
) -> FileEntry:
    tensors = to_cpu(state)
    first: dict[int, str] = {}
    stored = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    aliases = {name: stored_name for name, stored_name in stored.items() if stored_name != name}
    unique = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    # torch's format knows that two names are one tensor, so a .bin file is the whole state dict of its rank.
    write_tensors(path, unique if options.safe_serialization else tensors, options.save_function)
    infos = {name: TensorInfo.of(tensor) for name, tensor in unique.items()}
    return FileEntry(part, place.pipeline_rank, place.tensor_parallel_rank, os.path.getsize(path), infos, aliases)


def _parallel_operations(
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


def _warn_of_drift(manifest: Manifest) -> None:
    """Log a warning if holders of one weight have different values: the first one's will be loaded everywhere."""
    values: dict[tuple[int, str], TensorInfo] = {}
    representative = {name: group[0] for group in manifest.tied for name in group}
    for entry in sorted(manifest.files.values(), key=lambda entry: entry.stage):
        for name, info in entry.tensors.items() if entry.part == MODEL else ():
            key = (entry.tensor_parallel_rank, representative.get(name, name))
            if values.setdefault(key, info) != info:
                logger.warning("stage %d holds other values of %s than an earlier stage", entry.stage, name)

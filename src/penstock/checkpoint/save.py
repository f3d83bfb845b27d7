"""Saving a model from all ranks at once: a file for each rank and a table of contents, or one merged checkpoint."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .adapters import AdapterFolder
from .comm import Comm, together
from .files import write_bytes, write_tensors
from .manifest import MODEL, TRAINING, FileEntry, Manifest, read_manifest
from .merge import Holding, MergedFolder, MergePlan, ModelFolder, describe_holdings, write_merged
from .names import STAGED_MANIFEST, common_file_name, manifest_name, rank_file_name
from .save_pretrained import SaveOptions, refuse_unsupported
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
    form = ModelFolder(model, options) if merge_checkpoints else None
    _Save(model, directory, place, world_comm, pipeline_comm, form, training_state, options).run()


def save_adapter(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    adapter: AdapterFolder,
    *,
    place: SavingRank,
    world_comm: Comm,
    pipeline_comm: Comm,
) -> None:
    """Save one adapter of a split model as one ordinary folder. Else as `save_parallelized`."""
    refuse_unsupported(model)
    directory, options = os.path.abspath(save_directory), SaveOptions(variant=adapter.name)
    _Save(model, directory, place, world_comm, pipeline_comm, adapter, None, options).run()


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
    _Save(model, directory, place, world_comm, pipeline_comm, None, training_state, options, with_model=False).run()


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
    needed: list[str]
    holdings: dict[str, Holding]
    training: dict[str, Any] | None


@dataclass
class _Save:
    """One save on one rank. Each step ends with an exchange, so a fault anywhere ends it everywhere."""

    model: PreTrainedModel
    directory: str
    place: SavingRank
    world: Comm
    pipeline: Comm
    form: MergedFolder | None
    training_state: TrainingState | None
    options: SaveOptions
    with_model: bool = True
    # Known as the save goes on.
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    training: RankTrainingState | None = None
    plan: MergePlan | None = None

    def run(self) -> None:
        doing = f"save to {self.directory}"
        intact = f"the checkpoint that was in {self.directory} before, if any, is intact"
        prepared = together(self.world, doing, "preparing the folder", self._prepare, unchanged=intact)
        staging = next(name for _, name in prepared if name is not None)
        folder = os.path.join(self.directory, staging)
        try:
            calls = [call for call, _ in prepared]
            reports = together(
                self.world, doing, "comparing what ranks hold", lambda: self._describe(folder, calls), unchanged=intact
            )
            written = together(
                self.world, doing, "writing the files", lambda: self._write(folder, reports), unchanged=intact
            )
            together(
                self.world,
                doing,
                "putting the files in place",
                lambda: self._commit(staging, reports, written),
                unchanged=f"{self.directory} holds a whole checkpoint: the previous one, or already this one",
            )
        except CheckpointError:
            # After the exchange nobody writes any more.
            if self.place.is_leader:
                discard(self.directory, staging)
            raise

    @property
    def _call(self) -> tuple[Any, ...]:
        """What must be the same on all ranks."""
        options = self.options
        with_training_state = self.training_state is not None
        return (
            self.directory,
            type(self.form).__name__,
            with_training_state,
            options.safe_serialization,
            options.variant,
        )

    def _prepare(self) -> tuple[Any, str | None]:
        return self._call, prepare(self.directory) if self.place.is_leader else None

    def _describe(self, folder: str, calls: list[Any]) -> _Report:
        for rank, call in enumerate(calls):
            if call != self._call:
                raise CheckpointError(f"was asked for {self._call}, but rank {rank} for {call}")
        sides: list[str] = []
        needed: list[str] = []
        if self.training_state is not None:
            self.training = collect_training_state(self.model, self.training_state)
        if self.place.is_writer and not os.path.isdir(folder):
            raise CheckpointError(f"{folder} is not visible here; all ranks must share the file system")
        if self.place.is_writer and self.with_model:
            self.state = held_state(self.model, self.options.state_dict)
            if self.place.is_leader:
                sides, needed = (self.form or ModelFolder(self.model, self.options)).describe(folder)
        holdings = describe_holdings(self.model, self.state) if self.form else {}
        return _Report(self.place, sides, needed, holdings, None if self.training is None else self.training.report)

    def _write(self, folder: str, reports: list[_Report]) -> dict[str, FileEntry]:
        if not self.place.is_writer:
            return {}
        writers = [report for report in reports if report.place.is_writer]
        writers.sort(key=lambda report: (report.place.pipeline_rank, report.place.tensor_parallel_rank))
        if self.form is not None:
            needed = [name for report in writers for name in report.needed]
            self.plan = self.form.plan([report.holdings for report in writers], needed)
            write_merged(self.form, self.state, self.plan, folder, self.pipeline)
            return {}
        files = _write_model_file(self.state, folder, self.place, self.options) if self.with_model else {}
        if self.training is not None and self.training_state is not None:
            common = None
            if self.place.is_leader:
                every = [report.training or {} for report in reports]
                common = common_content(self.training_state, every, [report.training or {} for report in writers])
            files |= _write_training_files(self.training.tensors, common, folder, self.place, self.options)
        return files

    def _commit(self, staging: str, reports: list[_Report], written: list[dict[str, FileEntry]]) -> None:
        if not self.place.is_leader:
            return
        folder = os.path.join(self.directory, staging)
        sides = [name for report in reports for name in report.sides]
        if self.form is not None and self.plan is not None:
            operations = self.form.operations(self.directory, folder, self.plan, sides)
        else:
            manifest = Manifest(
                model_class=type(self.model).__name__,
                num_stages=self.place.num_pipeline_ranks,
                tensor_parallel_size=self.place.tensor_parallel_size,
                staging=staging,
                tied=tied_groups(self.model),
                files={name: entry for files in written for name, entry in files.items()},
                shards={name: (shard.dim, shard.blocks) for name, shard in shards_of(self.model).items()},
            )
            _warn_of_drift(manifest)
            operations = _parallel_operations(self.directory, folder, manifest, sides, self.options)
        commit(self.directory, staging, operations)


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

"""Saving a model from all ranks at once: a file for each rank and a table of contents, or one merged checkpoint.

All kinds of save are one sequence of phases over the same staging folder (`_Save`); that makes the file long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from .adapters import AdapterFolder
from .background import HostMemory, PendingSave, leaving_word, word_name, words_of
from .comm import Comm, together
from .files import write_bytes, write_tensors
from .gradients import is_part
from .manifest import MODEL, STEMS, TRAINING, FileEntry, Manifest, read_manifest
from .merge import Holding, MergedFolder, MergePlan, ModelFolder, describe_holdings, write_indices, write_merged
from .names import (
    FINAL_INDEX,
    STAGED_INDEX,
    STAGED_MANIFEST,
    common_file_name,
    manifest_name,
    rank_file_name,
    weight_file_names,
)
from .optimizer_state import SEPARATOR
from .safetensors_file import Behind
from .save_pretrained import SaveOptions, refuse_unsupported
from .staging import Operation, commit, discard, prepare
from .tensors import TensorInfo, held_state, shards_of, tensor_parallel_place, tied_groups, to_cpu
from .training_state import RankTrainingState, TrainingState, collect_training_state, common_content
from .untrusted import CheckpointError, kind_of

Result = TypeVar("Result")

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
        pipeline: the index of its pipeline.
    """

    pipeline_rank: int
    num_pipeline_ranks: int
    is_writer: bool = True
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline: int = 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.is_writer and self.pipeline_rank == 0 and self.tensor_parallel_rank == 0


def save_parallelized(
    model: nn.Module,
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
    model: nn.Module,
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
    model: nn.Module,
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


def save_checkpoint(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    training_state: TrainingState,
    *,
    place: SavingRank,
    world_comm: Comm,
    pipeline_comm: Comm,
    memory: HostMemory | None = None,
    given_up: Callable[[], str | None] = lambda: None,
    afterwards: Callable[[], None] = lambda: None,
) -> PendingSave | None:
    """Save the model and the training state in safetensors files, each weight and each state of it once.

    Plain transformers loads the folder as it is, unless tensor parallelism has cut the weights. Else as
    `save_parallelized`.

    Args:
        memory: return once everything is copied there; the files are written meanwhile.
        given_up: while they are: says why this can come to no end any more.
        afterwards: called on the rank that puts the files in place, once they are.

    Returns:
        With `memory` what is under way, to be finished by every rank together.
    """
    _check_shards(model, place)
    directory, options = os.path.abspath(save_directory), SaveOptions(safe_serialization=True)
    save = _Save(
        model, directory, place, world_comm, pipeline_comm, None, training_state, options, once=True, after=afterwards
    )
    if memory is not None:
        return save.run_in_background(memory, given_up)
    save.run()
    return None


def _check_shards(model: nn.Module, place: SavingRank) -> None:
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
    names: frozenset[str]


@dataclass
class _Save:
    """One save on one rank. Each step ends with an exchange, so a fault anywhere ends it everywhere."""

    model: nn.Module
    directory: str
    place: SavingRank
    world: Comm
    pipeline: Comm
    form: MergedFolder | None
    training_state: TrainingState | None
    options: SaveOptions
    with_model: bool = True
    # Whether what several ranks hold is written by the first of them only.
    once: bool = False
    after: Callable[[], None] = lambda: None
    # Known as the save goes on.
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    training: RankTrainingState | None = None
    common: bytes | None = None
    plan: MergePlan | None = None

    def run(self) -> None:
        with self._staged() as (staging, reports):
            folder = os.path.join(self.directory, staging)
            written = self._together("writing the files", lambda: self._write(folder, reports), self._intact)
            self._together(
                "putting the files in place",
                lambda: self._commit(staging, reports, written),
                f"{self.directory} holds a whole checkpoint: the previous one, or already this one",
            )

    def run_in_background(self, memory: HostMemory, given_up: Callable[[], str | None]) -> PendingSave:
        """Copy everything to host memory, and write it in a thread. No rank talks to another there: each leaves word of
        what it has written in the staging folder, and the one that puts the files in place waits for that."""

        def copy() -> None:
            self._collect(reports)
            self.state = memory.copy("model", self.state)
            if self.training is not None:
                self.training = replace(self.training, tensors=memory.copy("training", self.training.tensors))

        with self._staged() as (staging, reports):
            self._together("copying to host memory", copy, self._intact)
        return PendingSave(self.directory, partial(self._finish_alone, staging, reports, given_up))

    def _finish_alone(self, staging: str, reports: list[_Report], given_up: Callable[[], str | None]) -> None:
        places = _places_in_files(reports)
        if self.place not in places:
            return
        folder = os.path.join(self.directory, staging)
        words = {place: word_name(number, place.tensor_parallel_rank) for place, number in places.items()}
        try:
            own = words[self.place]
            with leaving_word(folder, own, self.world.rank) as word:
                word.update(self._write_files(folder, places[self.place]))
            if self.place.is_leader:
                self._commit(staging, reports, words_of(folder, list(words.values()), given_up))
        except BaseException:
            # The others may still write, so what they leave behind is removed by the next save.
            if self.place.is_leader:
                discard(self.directory, staging)
            raise
        finally:
            self.state, self.training, self.common = {}, None, None

    @contextlib.contextmanager
    def _staged(self) -> Iterator[tuple[str, list[_Report]]]:
        """A staging folder, and what every rank is going to save; the folder is removed if the save fails."""
        prepared = self._together("preparing the folder", self._prepare, self._intact)
        staging = next(name for _, name in prepared if name is not None)
        folder = os.path.join(self.directory, staging)
        try:
            calls = [call for call, _ in prepared]
            yield (
                staging,
                self._together("comparing what ranks hold", lambda: self._describe(folder, calls), self._intact),
            )
        except CheckpointError:
            # After the exchange nobody writes any more.
            if self.place.is_leader:
                discard(self.directory, staging)
            raise

    def _together(self, phase: str, work: Callable[[], Result], unchanged: str) -> list[Result]:
        return together(self.world, f"save to {self.directory}", phase, work, unchanged=unchanged)

    @property
    def _intact(self) -> str:
        return f"the checkpoint that was in {self.directory} before, if any, is intact"

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
            self.training = collect_training_state(self.model, self.training_state, self.place.pipeline)
        names = frozenset[str]()
        if self.once:
            tensors = frozenset(self.training.tensors if self.training is not None else ())
            names = tensors if self.place.is_writer else frozenset(filter(is_part, tensors))
        if (self.place.is_writer or names) and not os.path.isdir(folder):
            raise CheckpointError(f"{folder} is not visible here; all ranks must share the file system")
        if self.place.is_writer and self.with_model:
            self.state = held_state(self.model, self.options.state_dict)
            if self.place.is_leader:
                sides, needed = (self.form or ModelFolder(self.model, self.options)).describe(folder)
        holdings = describe_holdings(self.model, self.state) if self.form else {}
        names |= frozenset(self.state) if self.once else frozenset()
        training = None if self.training is None else self.training.report
        return _Report(self.place, sides, needed, holdings, training, names)

    def _collect(self, reports: list[_Report]) -> None:
        """Settle what this rank writes."""
        if self.once:
            earlier = _first_holders(self.model, reports, self.place)
            self.state = {name: tensor for name, tensor in self.state.items() if name not in earlier}
            if self.training is not None:
                mine = next(report.names for report in reports if report.place == self.place)
                tensors = self.training.tensors.items()
                own = {name: tensor for name, tensor in tensors if name in mine and name not in earlier}
                self.training = replace(self.training, tensors=own)
        if self.training_state is not None and self.place.is_leader:
            every = [report.training or {} for report in reports]
            pipeline = [report.training or {} for report in _writers(reports)]
            self.common = common_content(self.training_state, every, pipeline)

    def _write(self, folder: str, reports: list[_Report]) -> dict[str, FileEntry]:
        places = _places_in_files(reports)
        if self.place not in places:
            return {}
        if self.form is not None:
            writers = _writers(reports)
            needed = [name for report in writers for name in report.needed]
            self.plan = self.form.plan([report.holdings for report in writers], needed)
            write_merged(self.form, self.state, self.plan, folder, self.pipeline)
            return {}
        self._collect(reports)
        return self._write_files(folder, places[self.place])

    def _write_files(self, folder: str, number: int) -> dict[str, FileEntry]:
        """Write this rank's files, with this number as its pipeline rank."""
        place = replace(self.place, pipeline_rank=number)
        written: _Written = {}
        with Behind() as behind:
            write = partial(_write_tensors, folder=folder, place=place, options=self.options, behind=behind)
            if self.training is not None and self.common is not None:
                written |= _write_common(self.common, folder, place, self.options, behind)
            if self.with_model and place.is_writer:
                written |= write(self.state, part=MODEL)
            if self.training is not None and self.training.tensors:
                written |= write(self.training.tensors, part=TRAINING)
        return {name: entry() for name, entry in written.items()}

    def _commit(self, staging: str, reports: list[_Report], written: Sequence[Mapping[str, FileEntry]]) -> None:
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
            operations = _parallel_operations(self.directory, folder, manifest, sides, self.options, self.once)
        commit(self.directory, staging, operations)
        self.after()


def _writers(reports: Sequence[_Report]) -> list[_Report]:
    """The reports of the ranks that write, in order of pipeline rank, then of tensor-parallel rank."""
    writers = [report for report in reports if report.place.is_writer]
    return sorted(writers, key=lambda report: (report.place.pipeline_rank, report.place.tensor_parallel_rank))


def _places_in_files(reports: Sequence[_Report]) -> dict[SavingRank, int]:
    """The ranks that write files, and the number that each has in their names in the place of its pipeline rank.

    That is its pipeline rank in the pipeline that writes the model. Ranks of others, which have parts of gradients to
    write, are numbered on.
    """
    places = {report.place: report.place.pipeline_rank for report in _writers(reports)}
    others = [report.place for report in reports if report.names and report.place not in places]
    stages = sorted({(place.pipeline, place.pipeline_rank) for place in others})
    first = next((place.num_pipeline_ranks for place in places), 0)
    return places | {place: first + stages.index((place.pipeline, place.pipeline_rank)) for place in others}


def _first_holders(model: nn.Module, reports: Sequence[_Report], place: SavingRank) -> set[str]:
    """Names of the tensors and states that a rank before this one writes: the first of those that hold them.

    Of what is sharded, each tensor-parallel rank holds another part.
    """
    representative = {name: group[0] for group in tied_groups(model) for name in group}
    shards = {representative.get(name, name) for name in shards_of(model)}

    def key(name: str) -> tuple[str, str]:
        parameter, _, state = name.partition(SEPARATOR)
        return representative.get(parameter, parameter), state

    whole, sharded = set[tuple[str, str]](), set[tuple[str, str]]()
    others = [report for report in reports if not report.place.is_writer]
    for report in [*_writers(reports), *others]:
        if report.place == place:
            return {name for name in report.names if key(name) in (sharded if key(name)[0] in shards else whole)}
        keys = {key(name) for name in report.names}
        whole |= keys
        sharded |= keys if report.place.tensor_parallel_rank == place.tensor_parallel_rank else set()
    return set()


# ---------------------------------------------------------------- the files of a parallel checkpoint


# Of each file its name, and its entry once all are on disk.
_Written = dict[str, Callable[[], FileEntry]]


def _write_common(content: bytes, folder: str, place: SavingRank, options: SaveOptions, behind: Behind) -> _Written:
    """Write the file that every rank reads whole."""
    name = common_file_name(options.variant)
    write_bytes(os.path.join(folder, name), content, behind)
    ranks = place.pipeline_rank, place.tensor_parallel_rank
    return {name: partial(FileEntry, TRAINING, *ranks, len(content), checksum=zlib.crc32(content))}


def _write_tensors(
    state: Mapping[str, torch.Tensor],
    *,
    part: str,
    folder: str,
    place: SavingRank,
    options: SaveOptions,
    behind: Behind,
) -> _Written:
    """Write this rank's part of the model, or of the optimizer's state, to a file of its own."""
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

    return {name: entry}


def _parallel_operations(
    directory: str, folder: str, manifest: Manifest, sides: Sequence[str], options: SaveOptions, with_index: bool
) -> list[Operation]:
    """Stage the table of contents, and list the renames that make `manifest` the checkpoint in `directory`.

    Replacing the table of contents comes first and decides; files whose turn has not come are found where they were
    staged. Files of the previous parallel checkpoint that the new one has not are removed last.

    Args:
        with_index: plain transformers shall find the weights as well. For it an index leads first to the staged files,
            and to their final names only when they are there. A tensor-parallel model's files have none.
    """
    name, (_, index) = manifest_name(options.variant), weight_file_names(options.extension, options.variant)
    write_bytes(os.path.join(folder, STAGED_MANIFEST), manifest.dump())
    operations: list[Operation] = [("replace", STAGED_MANIFEST, name)]
    with_index = with_index and manifest.tensor_parallel_size == 1
    if with_index:
        weights = {
            name: file for file, entry in manifest.files.items() if entry.part == MODEL for name in entry.tensors
        }
        write_indices(weights, {}, folder)
        operations.append(("replace", STAGED_INDEX, index))
    elif kind_of(os.path.join(directory, index)) is not None and not options.variant:
        operations.append(("remove", "", index))
    operations += [("publish" if with_index else "replace", file_name, file_name) for file_name in manifest.files]
    operations += [("replace", file_name, file_name) for file_name in sides]
    operations += [("replace", FINAL_INDEX, index)] if with_index else []
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

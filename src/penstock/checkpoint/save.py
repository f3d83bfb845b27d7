"""Saving a model from all ranks at once: a file for each rank and a table of contents, or one merged checkpoint.

All kinds of save are one sequence of phases over the same staging folder (`_Save`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from .adapters import AdapterFolder
from .background import HostMemory, PendingSave, leaving_word, word_name, words_of
from .comm import CheckpointRanks
from .manifest import MODEL, TRAINING, FileEntry, Manifest
from .merge import MergedFolder, MergePlan, ModelFolder, describe_holdings, write_merged
from .rank_files import parallel_replacement, warn_of_drift, write_rank_files
from .save_pretrained import SaveOptions, refuse_unsupported
from .saving_ranks import SavingRank, SavingReport, names_to_write, tell_reports, writers_of
from .staging import commit, discard, prepare
from .tensors import held_state, shards_of, tensor_parallel_place, tied_groups
from .training_state import (
    RankTrainingState,
    TrainingState,
    collect_training_state,
    common_content,
    gather_random_states,
)
from .untrusted import CheckpointError, Field

Result = TypeVar("Result")

# What a training state saved on its own has in its files' names.
TRAINING_VARIANT = "training"


def save_parallelized(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    place: SavingRank,
    world_comm: CheckpointRanks,
    pipeline_comm: CheckpointRanks,
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
    world_comm: CheckpointRanks,
    pipeline_comm: CheckpointRanks,
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
    world_comm: CheckpointRanks,
    pipeline_comm: CheckpointRanks,
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
    world_comm: CheckpointRanks,
    pipeline_comm: CheckpointRanks,
    memory: HostMemory | None = None,
    given_up: Callable[[], str | None] = lambda: None,
    afterwards: Callable[[], None] = lambda: None,
) -> PendingSave | None:
    """Save the model and the training state in safetensors files, each weight and each state of it once.

    Plain transformers loads the folder as it is, unless tensor parallelism has sharded the weights. Else as
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
    """Check that the files will say what the model holds."""
    index, size = tensor_parallel_place(model)
    if (index, size) != (place.tensor_parallel_rank, place.tensor_parallel_size):
        raise ValueError(
            f"the model holds slice {index} of {size} of its weights, but is to be saved with tensor_parallel_rank "
            f"{place.tensor_parallel_rank} of tensor_parallel_size {place.tensor_parallel_size}"
        )


@dataclass
class _Save:
    """One save on one rank. Each step ends with an exchange, so a fault anywhere ends it everywhere."""

    model: nn.Module
    directory: str
    place: SavingRank
    world: CheckpointRanks
    pipeline: CheckpointRanks
    form: MergedFolder | None
    training_state: TrainingState | None
    options: SaveOptions
    with_model: bool = True
    # Whether what several ranks hold is written by the first of them only.
    once: bool = False
    after: Callable[[], None] = lambda: None
    # Known as the save goes on.
    sides: Sequence[str] = ()
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    training: RankTrainingState | None = None
    training_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    common: bytes | None = None
    plan: MergePlan | None = None

    def run(self) -> None:
        with self._staged() as (staging, reports):
            folder = os.path.join(self.directory, staging)
            said = self._together("writing the files", lambda: self._write(folder, reports), self._intact)
            written = [
                Field(one, f"what rank {rank} wrote").read(dict[str, FileEntry]) for rank, one in enumerate(said)
            ]
            self._together(
                "putting the files in place",
                lambda: self._commit(staging, written),
                f"{self.directory} holds a whole checkpoint: the previous one, or already this one",
            )

    def run_in_background(self, memory: HostMemory, given_up: Callable[[], str | None]) -> PendingSave:
        """Copy everything to host memory, and write it in a thread. No rank talks to another there: each leaves word of
        what it has written in the staging folder, and the one that puts the files in place waits for that."""

        def copy() -> None:
            self._collect(reports)
            self.state = memory.copy("model", self.state)
            self.training_tensors = memory.copy("training", self.training_tensors)

        with self._staged() as (staging, reports):
            self._together("copying to host memory", copy, self._intact)
        return PendingSave(self.directory, partial(self._finish_alone, staging, reports, given_up))

    def _finish_alone(self, staging: str, reports: list[SavingReport], given_up: Callable[[], str | None]) -> None:
        if not self.place.is_writer:
            return
        folder = os.path.join(self.directory, staging)
        words = {report.place: word_name(report.place) for report in writers_of(reports)}
        try:
            with leaving_word(folder, words[self.place], self.world.rank) as word:
                word.update(self._write_files(folder))
            if self.place.is_leader:
                self._commit(staging, words_of(folder, list(words.values()), given_up))
        except BaseException:
            # The others may still write, so what they leave behind is removed by the next save.
            if self.place.is_leader:
                discard(self.directory, staging)
            raise
        finally:
            self.state, self.training, self.training_tensors, self.common = {}, None, {}, None

    @contextlib.contextmanager
    def _staged(self) -> Iterator[tuple[str, list[SavingReport]]]:
        """A staging folder, and what every rank is going to save; the folder is removed if the save fails."""
        prepared = self._together("preparing the folder", self._prepare, self._intact)
        staging = next(name for _, name in prepared if name is not None)
        folder = os.path.join(self.directory, staging)
        calls = [call for call, _ in prepared]
        try:
            doing = f"comparing what ranks hold to save to {self.directory}"
            yield staging, tell_reports(self.world, doing, lambda: self._describe(folder, calls), self._intact)
        except CheckpointError:
            # After the exchange nobody writes any more.
            if self.place.is_leader:
                discard(self.directory, staging)
            raise

    def _together(self, phase: str, work: Callable[[], Result], unchanged: str) -> list[Result]:
        return self.world.together(f"{phase} to save to {self.directory}", work, unchanged)

    @property
    def _intact(self) -> str:
        return f"the checkpoint that was in {self.directory} before, if any, is intact"

    @property
    def _call(self) -> list[Any]:
        """What must be the same on all ranks."""
        form, with_training_state = type(self.form).__name__, self.training_state is not None
        return [self.directory, form, with_training_state, self.options.safe_serialization, self.options.variant]

    def _prepare(self) -> tuple[Any, str | None]:
        return self._call, prepare(self.directory) if self.place.is_leader else None

    def _describe(self, folder: str, calls: list[Any]) -> SavingReport:
        for rank, call in enumerate(calls):
            if call != self._call:
                raise CheckpointError(f"was asked for {self._call}, but rank {rank} for {call}")
        needed: list[str] = []
        if self.training_state is not None:
            place = self.place.pipeline, self.place.is_writer
            self.training = collect_training_state(self.model, self.training_state, *place)
            self.training_tensors = self.training.optimizer.tensors if self.place.is_writer else {}
        if self.place.is_writer and not os.path.isdir(folder):
            raise CheckpointError(f"{folder} is not visible here; all ranks must share the file system")
        if self.place.is_writer and self.with_model:
            self.state = held_state(self.model, self.options.state_dict)
            if self.place.is_leader:
                self.sides, needed = (self.form or ModelFolder(self.model, self.options)).describe(folder)
        holdings = describe_holdings(self.model, self.state) if self.form else {}
        training = None if self.training is None else self.training.report
        names = [*self.state, *self.training_tensors] if self.once else []
        return SavingReport(self.place, needed, holdings, training, names)

    def _collect(self, reports: list[SavingReport]) -> None:
        """Settle what this rank writes."""
        random: dict[str, torch.Tensor] = {}
        every = [report.training for report in reports if report.training is not None]
        if self.training is not None:  # first, as no rank may fail before it
            leader = next(rank for rank, report in enumerate(reports) if report.place.is_leader)
            random = gather_random_states(self.training, every, leader, self.world)
        if self.once:
            own = names_to_write(self.model, reports, self.place)
            self.state = {name: tensor for name, tensor in self.state.items() if name in own}
            self.training_tensors = {name: tensor for name, tensor in self.training_tensors.items() if name in own}
        if self.training_state is not None and self.training is not None and self.place.is_leader:
            self.training_tensors = {**self.training_tensors, **random}
            pipeline = [report.training for report in writers_of(reports) if report.training is not None]
            self.common = common_content(self.training_state, self.training.optimizer.groups, every, pipeline)

    def _write(self, folder: str, reports: list[SavingReport]) -> dict[str, Any]:
        """Write this rank's files; their entries as plain data."""
        if self.form is None:
            self._collect(reports)
        if not self.place.is_writer:
            return {}
        if self.form is not None:
            writers = writers_of(reports)
            needed = [name for report in writers for name in report.needed]
            self.plan = self.form.plan([report.holdings for report in writers], needed)
            write_merged(self.form, self.state, self.plan, folder, self.pipeline)
            return {}
        return {name: asdict(entry) for name, entry in self._write_files(folder).items()}

    def _write_files(self, folder: str) -> dict[str, FileEntry]:
        parts: dict[str, Mapping[str, torch.Tensor]] = {}
        if self.with_model:
            parts[MODEL] = self.state
        if self.training_tensors:
            parts[TRAINING] = self.training_tensors
        return write_rank_files(parts, self.common, folder, self.place, self.options)

    def _commit(self, staging: str, written: Sequence[Mapping[str, FileEntry]]) -> None:
        if not self.place.is_leader:
            return
        folder = os.path.join(self.directory, staging)
        if self.form is not None and self.plan is not None:
            what = self.form.replacement(self.directory, folder, self.plan, self.sides)
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
            warn_of_drift(manifest)
            what = parallel_replacement(self.directory, folder, manifest, self.sides, self.options, self.once)
        commit(self.directory, staging, what)
        self.after()

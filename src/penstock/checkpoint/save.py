"""Saving a model from all ranks at once: a file for each rank and a table of contents, or one merged checkpoint.

All kinds of save are one sequence over a plan of files (see `plan`): `Save`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from torch import nn

from .background import HostMemory, PendingSave, leaving_word, word_name, words_of
from .files import Behind
from .folders import ModelFolder
from .manifest import FileEntry
from .plan import (
    CheckpointRanks,
    Content,
    FilePlan,
    Folder,
    SaveOptions,
    SavingRank,
    SavingReport,
    each_file,
    refuse_unsupported,
    tell_reports,
    writers_of,
)
from .rank_files import RankFiles
from .staging import commit, discard, prepare
from .training_state import TrainingState
from .untrusted import CheckpointError, typed

Result = TypeVar("Result")
Write = Callable[[FilePlan, Content], object]


def save_parallelized(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    place: SavingRank,
    world_comm: CheckpointRanks,
    merge_checkpoints: bool = False,
    training_state: TrainingState | None = None,
    **save_pretrained_kwargs: Any,
) -> None:
    """Save a split model. Every rank calls this, with the same arguments but for `place`.

    Without merging, each rank of one pipeline writes what it holds to `pytorch_model_tp_<t>_pp_<p>.bin`, and
    `parallel_checkpoint.json` says what is where. With merging, the folder is what `save_pretrained` would write,
    loadable by plain transformers; a rank gathers no more than one shard at a time.

    Atomic: see `staging`. If anything fails on any rank, every rank raises and the previous checkpoint is intact.

    Args:
        save_directory: on a file system that all ranks share.
        place: where this rank stands.
        world_comm: all ranks.
        merge_checkpoints: write one ordinary checkpoint.
        training_state: saved in the same atomic step (not when merging).
        save_pretrained_kwargs: see `SaveOptions`.

    Raises:
        TypeError, ValueError: an argument cannot be honoured.
        CheckpointError: some rank could not write; names the rank and the path.
    """
    options = SaveOptions.parse(save_pretrained_kwargs)
    refuse_unsupported(model, options if merge_checkpoints else None)
    if merge_checkpoints and training_state is not None:
        raise ValueError("a merged checkpoint has no place for training_state; save it without merge_checkpoints")
    folder = ModelFolder(model, options) if merge_checkpoints else RankFiles(model, options, training_state)
    Save(folder, save_directory, place, world_comm).run()


def save_checkpoint(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    training_state: TrainingState,
    *,
    place: SavingRank,
    world_comm: CheckpointRanks,
    memory: HostMemory | None = None,
    given_up: Callable[[], str | None] = lambda: None,
    afterwards: Callable[[], None] = lambda: None,
) -> PendingSave | None:
    """Save the model and the training state in safetensors files, each weight and each state of it once.

    Plain transformers loads the folder as it is, unless tensor parallelism has sharded the weights.

    Args:
        memory: return once everything is copied there. What is under way is to be finished by every rank together.
        given_up: meanwhile: says why this can come to no end any more.
        afterwards: called on the rank that puts the files in place, once they are.
    """
    folder = RankFiles(model, SaveOptions(safe_serialization=True), training_state, once=True)
    save = Save(folder, save_directory, place, world_comm, afterwards)
    if memory is not None:
        return save.run_in_background(memory, given_up)
    save.run()
    return None


class Save:
    """One save on one rank: a staging folder is made; every rank says what it holds; each file is gathered on the rank
    that writes it, and written; the files are put in place. Each step ends with an exchange, so a fault anywhere ends
    it everywhere."""

    def __init__(
        self,
        folder: Folder,
        directory: str | os.PathLike[str],
        place: SavingRank,
        world_comm: CheckpointRanks,
        afterwards: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._directory = folder, os.path.abspath(directory)
        self._place, self._ranks, self._afterwards = place, world_comm, afterwards
        self._intact = f"the checkpoint that was in {self._directory} before, if any, is intact"

    def run(self) -> None:
        with self._staged() as (path, reports):
            said = self._together("writing the files", lambda: self._plain_entries(path, reports), self._intact)
            written = [typed(dict[str, FileEntry], one, f"what rank {rank} wrote") for rank, one in enumerate(said)]
            self._together(
                "putting the files in place",
                lambda: self._commit(path, written),
                f"{self._directory} holds a whole checkpoint: the previous one, or already this one",
            )

    def run_in_background(self, memory: HostMemory, given_up: Callable[[], str | None]) -> PendingSave:
        """Copy everything to host memory, and write it in a thread. No rank talks to another there: each leaves word of
        what it has written in the staging folder, and the one that puts the files in place waits for that."""
        copies: list[tuple[FilePlan, Content]] = []

        def copy(file: FilePlan, content: Content) -> None:
            copies.append((file, content if isinstance(content, bytes) else memory.copy(file.part, content)))

        with self._staged() as (path, reports):
            work = partial(each_file, self._folder, reports, self._ranks, copy)
            self._together("copying to host memory", work, self._intact)
        return PendingSave(self._directory, lambda: self._finish_alone(path, reports, copies, given_up))

    def _finish_alone(
        self,
        path: str,
        reports: list[SavingReport],
        copies: list[tuple[FilePlan, Content]],
        given_up: Callable[[], str | None],
    ) -> None:
        words = {report.place: word_name(report.place) for report in (reports[rank] for rank in writers_of(reports))}
        if self._place not in words:
            return
        try:
            with leaving_word(path, words[self._place], self._ranks.rank) as word:
                word.update(self._write(path, lambda write: [write(*one) for one in copies]))
            if self._place.is_leader:
                self._commit(path, words_of(path, list(words.values()), given_up))
        except BaseException:
            # The others may still write, so what they leave behind is removed by the next save.
            if self._place.is_leader:
                discard(self._directory, os.path.basename(path))
            raise

    @contextlib.contextmanager
    def _staged(self) -> Iterator[tuple[str, list[SavingReport]]]:
        """A staging folder, and what every rank is going to save; the folder is removed if the save fails."""
        own = [self._directory, *self._folder.call]  # what must be the same on all ranks

        def begin() -> tuple[Any, str | None]:
            return own, prepare(self._directory) if self._place.is_leader else None

        prepared = self._together("preparing the folder", begin, self._intact)
        path = os.path.join(self._directory, next(name for _, name in prepared if name is not None))

        def report() -> SavingReport:
            for rank, (call, _) in enumerate(prepared):
                if call != own:
                    raise CheckpointError(f"was asked for {own}, but rank {rank} for {call}")
            found = self._folder.report(self._place, path)
            if (self._place.is_writer or found.names) and not os.path.isdir(path):
                raise CheckpointError(f"{path} is not visible here; all ranks must share the file system")
            return found

        try:
            yield path, tell_reports(self._ranks, f"save to {self._directory}", report, self._intact)
        except (CheckpointError, KeyboardInterrupt):
            # After the exchange nobody writes any more.
            if self._place.is_leader:
                discard(self._directory, os.path.basename(path))
            raise

    def _together(self, phase: str, work: Callable[[], Result], unchanged: str) -> list[Result]:
        return self._ranks.together(f"{phase} to save to {self._directory}", work, unchanged)

    def _plain_entries(self, path: str, reports: list[SavingReport]) -> dict[str, Any]:
        entries = self._write(path, lambda write: each_file(self._folder, reports, self._ranks, write))
        return {name: asdict(entry) for name, entry in entries.items()}

    def _write(self, path: str, every: Callable[[Write], object]) -> dict[str, FileEntry]:
        """Write the files that `every` calls its argument with; what they hold, once all are on disk."""
        entries: dict[str, Callable[[], FileEntry] | None] = {}
        with Behind() as behind:
            every(lambda file, content: entries.update({file.name: self._folder.write(file, content, path, behind)}))
        return {name: entry() for name, entry in entries.items() if entry is not None}

    def _commit(self, path: str, written: Sequence[Mapping[str, FileEntry]]) -> None:
        if not self._place.is_leader:
            return
        entries = {name: entry for files in written for name, entry in files.items()}
        commit(self._directory, os.path.basename(path), self._folder.replacement(self._directory, path, entries))
        self._afterwards()

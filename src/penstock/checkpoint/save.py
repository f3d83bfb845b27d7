"""Saving from all ranks at once.

What is saved is a file for each rank and a table of contents, or a merged checkpoint of the model or of its adapters.

`Save` writes the files of a model's weights and of a run's states, in one sequence of steps, by a plan (see
`SaveFormat.plan`). A method of the model's own class, which is given what such a plan gathers, writes by itself (see
`model_methods.save_by_own_method`). Small files of a Trainer, and the state of one object alone, need no plan.

Files may be written while training goes on. Threads that talked to other ranks would need process groups of their own,
which end when a rank is lost or the program destroys its groups. So each rank that writes marks in the staging folder,
which all ranks see, that it is done: by a small file. The leader, which puts the files in place, waits for these.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from penstock.checkpoint.file_specs import (
    Content,
    FileSpec,
    SaveFormat,
    SaveOptions,
    SavingReport,
    each_file,
    refuse_unsupported,
    tell_reports,
    writers_of,
)
from penstock.checkpoint.files import BackgroundWork, write_bytes, writing
from penstock.checkpoint.formats import ModelFormat, ParallelFormat
from penstock.checkpoint.manifest import FileEntry
from penstock.checkpoint.ranks import CheckpointRanks, SavingRank
from penstock.checkpoint.staging import commit, discard, prepare
from penstock.checkpoint.tensors import once_for_tied
from penstock.checkpoint.training_state import TrainingState
from penstock.checkpoint.untrusted import CheckpointError, read_json, typed
from penstock.runtime.failures.keys import in_thread

Result = TypeVar("Result")
Write = Callable[[FileSpec, Content], object]
# What `FileEntry`s say, by the names of the files, as plain data.
Entries = dict[str, Any]


def save_parallelized(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    world_comm: CheckpointRanks,
    merge_checkpoints: bool = False,
    training_state: TrainingState | None = None,
    **save_pretrained_kwargs: Any,
) -> None:
    """Save a split model: a file for each rank of one pipeline, or with `merge_checkpoints` what `save_pretrained`
    would write. Every rank calls this, with the same arguments; the others are those of `SaveOptions`. Raises
    TypeError, ValueError, and on all ranks CheckpointError; there is a whole checkpoint then, if there was one before.
    """
    options = SaveOptions.parse(save_pretrained_kwargs)
    refuse_unsupported(model, options if merge_checkpoints else None)
    if merge_checkpoints and training_state is not None:
        raise ValueError("a merged checkpoint has no place for training_state; save it without merge_checkpoints")
    save_format = ModelFormat(model, options) if merge_checkpoints else ParallelFormat(model, options, training_state)
    Save(save_format, save_directory, world_comm).run()


def save_run_state(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    training_state: TrainingState,
    *,
    world_comm: CheckpointRanks,
    saver: Saver | None = None,
    given_up: Callable[[], str | None] = lambda: None,
    afterwards: Callable[[], None] = lambda: None,
) -> None:
    """Save the model and the training state, tensors as safetensors, each weight and each state of it once. With
    `saver` return once everything is copied to its memory; every rank is to `finish` it, and `given_up` says why it can
    come to no end any more. `afterwards` is called on the rank that puts the files in place."""
    save_format = ParallelFormat(model, SaveOptions(safe_serialization=True), training_state, once=True)
    save = Save(save_format, save_directory, world_comm, afterwards)
    if saver is None:
        save.run()
    else:
        save.run_in_background(saver, given_up)


class Save:
    """One save on one rank: a staging folder is made; every rank says what it holds; each file is gathered on the rank
    that writes it, and written; the files are put in place. Each step ends with an exchange, so a fault anywhere ends
    it everywhere (in the background with marks in the folder)."""

    def __init__(
        self,
        save_format: SaveFormat,
        directory: str | os.PathLike[str],
        ranks: CheckpointRanks,
        afterwards: Callable[[], None] = lambda: None,
    ) -> None:
        self._format, self._directory = save_format, os.path.abspath(directory)
        self._place, self._ranks, self._afterwards = ranks.place, ranks, afterwards
        self._made: list[str] = []  # folders that were not there before, on the leader
        self._intact = f"the checkpoint that was in {self._directory} before, if any, is intact"

    def run(self) -> None:
        with self._staged() as (path, reports):

            def write_files() -> Entries:
                with self._writing(path) as (write, entries):
                    each_file(self._format, reports, self._ranks, write)
                return entries

            entries = self._together("writing the files", write_files, self._intact)
            self._together(
                "putting the files in place",
                lambda: self._commit(path, entries),
                f"the checkpoint in {self._directory}, if any, is whole: the previous one, or already this one",
            )

    def run_in_background(self, saver: Saver, given_up: Callable[[], str | None]) -> None:
        """Copy everything to host memory, and write it in a thread. From that thread no rank talks to another: each
        marks in the staging folder what it has written, and the leader, which puts the files in place, waits for
        that."""
        copies: list[tuple[FileSpec, Content]] = []

        def copy(file: FileSpec, content: Content) -> None:
            copies.append((file, content if isinstance(content, bytes) else saver.copy(file.part, content)))

        with self._staged() as (path, reports):
            work = partial(each_file, self._format, reports, self._ranks, copy)
            self._together("copying to host memory", work, self._intact)
        marks = [done_name(reports[rank].place) for rank in writers_of(reports)]
        saver.start(self._directory, lambda: self._finish_alone(path, marks, copies, given_up))

    def _finish_alone(
        self,
        path: str,
        marks: Sequence[str],
        copies: Sequence[tuple[FileSpec, Content]],
        given_up: Callable[[], str | None],
    ) -> None:
        if (mark := done_name(self._place)) not in marks:
            return

        def write_copies() -> Entries:
            with self._writing(path) as (write, entries):
                for file, content in copies:
                    write(file, content)
            return entries

        try:
            mark_done(os.path.join(path, mark), write_copies)
            if self._place.is_leader:
                self._commit(path, wait_until_done(path, marks, given_up))
        except BaseException:
            # The others may still write: what they leave behind after this is removed by the next save.
            self._discard(path)
            raise

    def _discard(self, path: str) -> None:
        if self._place.is_leader:
            discard(self._directory, os.path.basename(path), self._made)

    @contextlib.contextmanager
    def _staged(self) -> Iterator[tuple[str, list[SavingReport]]]:
        """A staging folder, and what every rank is going to save. If a rank raises, all do, and the folder is removed;
        if one is lost, others may still write there, and the next save removes it."""
        asked = [self._directory, *self._format.must_be_equal]

        def begin() -> tuple[Any, str | None]:
            if not self._place.is_leader:
                return asked, None
            staging, self._made = prepare(self._directory)
            return asked, staging

        prepared = self._together("preparing the folder", begin, self._intact)
        path = os.path.join(self._directory, next(name for _, name in prepared if name is not None))

        def report() -> SavingReport:
            for rank, (theirs, _) in enumerate(prepared):
                if theirs != asked:
                    raise CheckpointError(
                        f"was asked for {asked}, but rank {rank} for {theirs}: give the same arguments on all ranks"
                    )
            own_report = self._format.report(self._place, path)
            if (self._place.in_first_pipeline or own_report.candidates) and not os.path.isdir(path):
                raise CheckpointError(f"{path} is not visible here; all ranks must share the file system")
            return own_report

        try:
            reports = tell_reports(self._ranks, f"save to {self._directory}", report, self._intact)
            yield path, reports
        except (CheckpointError, KeyboardInterrupt):
            self._discard(path)  # all ranks raise this, so none writes any more
            raise

    def _together(self, phase: str, work: Callable[[], Result], unchanged: str) -> list[Result]:
        return self._ranks.together(f"{phase} of the save to {self._directory}", work, unchanged)

    @contextlib.contextmanager
    def _writing(self, path: str) -> Iterator[tuple[Write, Entries]]:
        """What writes a file, and what the files hold, which is complete after the block: then all are on disk."""
        entries: Entries = {}
        with BackgroundWork() as background:

            def write(file: FileSpec, content: Content) -> None:
                entry = self._format.write(file, content, path, background)
                if entry is not None:
                    entries[file.name] = entry

            yield write, entries

    def _commit(self, path: str, entries_by_rank: Sequence[Entries]) -> None:
        """On the leader: put the files in place that all ranks have written."""
        if not self._place.is_leader:
            return
        entries_by_name = {name: entry for entries in entries_by_rank for name, entry in entries.items()}
        files = typed(dict[str, FileEntry], entries_by_name, f"what was written to {path}")
        commit(self._directory, os.path.basename(path), self._format.replacement(self._directory, path, files))
        self._afterwards()


# -- while training goes on --------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

# How often the staging folder is looked at, and how long nothing may happen there while it is waited for, in seconds.
PAUSE = 0.02
STANDSTILL = 600.0

# Ends the name of an empty file, for which there is always room, in the place of one that marks a rank as done.
_FAILED = ".failed"


class Saver:
    """A model's saves that go on beside its training: copies of tensors on the CPU, in memory that the next save uses
    again, pinned for those of a GPU (CUDA); and a thread that writes them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        self._pending: Future[None] | None = None

    def copy(self, part: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors, contiguous and each in memory of its own size; names of one tensor get one copy."""
        kept: dict[tuple[str, str], torch.Tensor] = {}

        def copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
            buffer = self._buffers.get((part, name))
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            kept[part, name] = buffer.copy_(tensor.detach(), non_blocking=True)
            return buffer

        copies = once_for_tied(tensors, copy)
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] != part} | kept
        for device in {tensor.device for tensor in tensors.values()}:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
        return copies

    def start(self, directory: str, write: Callable[[], None]) -> None:
        """Have files written to `directory` by a thread."""
        # A daemon: Python waits at its end for other threads, whatever they wait for.
        self._pending = in_thread(write, "penstock-save")
        _unfinished[self._pending] = directory

    def finish(self, ranks: CheckpointRanks) -> str | None:
        """Wait for the save under way on all ranks; raises on all of them, once, what went wrong on any. Returns its
        folder, None if there was none."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        directory = _unfinished[pending]
        ranks.together(f"writing the files of the save to {directory}", lambda: _finish(pending))
        return directory


# Saves that nobody has finished yet, each with its folder.
_unfinished: dict[Future[None], str] = {}


def _finish(save: Future[None]) -> None:
    wait([save])
    del _unfinished[save]
    save.result()


@atexit.register
def _finish_all() -> None:
    """Wait for what is being written. A failure that nobody was told of ends the program with status 1."""
    failed = False
    for save, directory in list(_unfinished.items()):
        try:
            _finish(save)
        except BaseException:
            failed = True
            print(f"the checkpoint {directory} could not be written:", file=sys.stderr)
            traceback.print_exc()
    if failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


# -- who is done, in the staging folder --------------------------------------------------------------------------------


def done_name(place: SavingRank) -> str:
    """The file in which a rank says that it has written its files."""
    return f"written_tp_{place.tensor_parallel_rank}_pp_{place.number}.json"


def mark_done(path: str, write: Callable[[], Entries]) -> None:
    """Write a rank's files, and say what they are in a file at `path`; or mark a failure there, which is raised."""
    try:
        entries = json.dumps(write()).encode()
        # Read by processes that live, so it need not be on disk.
        write_bytes(path + ".draft", entries)
        with writing(path, "a small file"):
            os.replace(path + ".draft", path)
    except Exception:
        with contextlib.suppress(OSError):
            os.close(os.open(path + _FAILED, os.O_CREAT | os.O_EXCL))
        raise


def wait_until_done(folder: str, names: Sequence[str], given_up: Callable[[], str | None]) -> list[Entries]:
    """Wait for the files of these names, with which ranks mark that they are done; returns what they say.

    Raises CheckpointError if a rank could not write, or will not: `given_up` says why, or nothing happens any more.
    """
    entries_by_rank: list[Entries] = []
    missing, since, seen = set(names), time.monotonic(), -1
    while True:
        for name in sorted(missing):
            path = os.path.join(folder, name)
            if os.path.exists(path):
                missing.remove(name)
                entries_by_rank.append(read_json(path))
            elif os.path.exists(path + _FAILED):
                raise CheckpointError(f"the rank that leaves {name} could not write; that rank raises why")
        if not missing:
            return entries_by_rank
        if (reason := given_up()) is not None:
            raise CheckpointError(f"{', '.join(missing)} will not be written to {folder}: {reason}")
        size = _size_of(folder)
        if size != seen:
            since, seen = time.monotonic(), size
        elif time.monotonic() - since > STANDSTILL:
            raise CheckpointError(
                f"{', '.join(missing)} was not written to {folder}, where nothing has changed for {STANDSTILL:g} s"
                ": look in the logs of the ranks that write it"
            )
        time.sleep(PAUSE)


def _size_of(folder: str) -> int:
    with contextlib.suppress(OSError):  # it, or a file in it, is gone
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
    return -1

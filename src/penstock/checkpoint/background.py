"""Writing a checkpoint while training goes on: the copy in host memory, the thread, and how ranks hear of each other.

A thread that wrote and talked to other ranks would need process groups of its own, which end when a rank is lost or the
program destroys its groups. So the ranks' threads leave word in the staging folder, which all of them see: a small file
each, which says what was written, or what went wrong. The rank that puts the files in place waits for them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from .files import write_bytes, writing
from .manifest import FileEntry
from .plan import SavingRank
from .tensors import once_for_tied
from .untrusted import CheckpointError, describe, read_json, typed

logger = logging.getLogger(__name__)

# How often the staging folder is looked at, and how long nothing may happen there while it is waited for, in seconds.
PAUSE = 0.02
STANDSTILL = 600.0

# Ends the name of an empty file in the place of a word that there was no room for.
_FAILED = ".failed"


class HostMemory:
    """Copies of tensors on the CPU, in memory that the next copy uses again. Pinned for those of an accelerator."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

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


class PendingSave:
    """A save whose files are being written to `directory` by a thread."""

    def __init__(self, directory: str, write: Callable[[], None]) -> None:
        self.directory = directory
        self._error: BaseException | None = None
        self._write: Callable[[], None] | None = write
        # Python waits at its end for threads that are no daemons, whatever they wait for.
        self._thread = threading.Thread(target=self._run, name="penstock-save", daemon=True)
        _pending.add(self)
        self._thread.start()

    def finish(self) -> None:
        """Wait for this rank's part; raises, once, what went wrong with it."""
        self._thread.join()
        _pending.discard(self)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        assert self._write is not None
        try:
            self._write()
        except BaseException as error:
            self._error = error
        finally:
            self._write = None


# What nobody has finished yet lives until the program ends.
_pending: set[PendingSave] = set()


@atexit.register
def _finish_all() -> None:
    """Wait for what is being written. A failure that nobody was told of ends the program with status 1."""
    failed = False
    for save in list(_pending):
        try:
            save.finish()
        except BaseException:
            failed = True
            print(f"the checkpoint {save.directory} could not be written:", file=sys.stderr)
            traceback.print_exc()
    if failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


# -- words in the staging folder ---------------------------------------------------------------------------------------


def word_name(place: SavingRank) -> str:
    """The file in which a rank says that it has written its files."""
    return f"written_tp_{place.tensor_parallel_rank}_pp_{place.number}.json"


@dataclass(frozen=True)
class _Word:
    """What a rank says: what it has written, or what went wrong."""

    rank: int
    files: dict[str, FileEntry] = field(default_factory=dict)
    error: str | None = None


@contextlib.contextmanager
def leaving_word(folder: str, name: str, rank: int) -> Iterator[dict[str, FileEntry]]:
    """Around the writing of a rank's files: put what was written into what this yields. The word says what went wrong
    if something does."""
    files: dict[str, FileEntry] = {}
    try:
        yield files
    except Exception as error:
        try:
            _leave(folder, name, _Word(rank, error=describe(error)))
        except Exception:  # there may be no room for it either, but for an empty file
            with contextlib.suppress(OSError):
                os.close(os.open(os.path.join(folder, name + _FAILED), os.O_CREAT | os.O_EXCL))
        raise
    _leave(folder, name, _Word(rank, files))


def _leave(folder: str, name: str, word: _Word) -> None:
    path = os.path.join(folder, name)
    # Read by processes that live, so it need not be on disk.
    write_bytes(path + ".draft", json.dumps(asdict(word)).encode())
    with writing(path, "a small file"):
        os.replace(path + ".draft", path)


def words_of(
    folder: str, names: Sequence[str], given_up: Callable[[], str | None] = lambda: None
) -> list[dict[str, FileEntry]]:
    """Wait for the words of these names, and return what each says.

    Raises CheckpointError if a rank could not write, or will not: `given_up` says why, or nothing happens any more.
    """
    found: dict[str, dict[str, FileEntry]] = {}
    since, seen = time.monotonic(), -1
    while True:
        for name in names:
            path = os.path.join(folder, name)
            if name not in found and os.path.exists(path):
                word: _Word = typed(_Word, read_json(path), path)
                if word.error is not None:
                    raise CheckpointError(f"rank {word.rank}: {word.error}")
                found[name] = word.files
            elif os.path.exists(path + _FAILED):
                raise CheckpointError(
                    f"the rank that leaves {name} could not write, not even the reason; that rank raises it"
                )
        if len(found) == len(names):
            return [found[name] for name in names]
        missing = ", ".join(sorted(set(names) - found.keys()))
        if (reason := given_up()) is not None:
            raise CheckpointError(f"{missing} will not be written to {folder}: {reason}")
        size = _size_of(folder)
        if size != seen:
            since, seen = time.monotonic(), size
        elif time.monotonic() - since > STANDSTILL:
            raise CheckpointError(
                f"{missing} was not written to {folder}, where nothing has changed for {STANDSTILL:g} s"
            )
        time.sleep(PAUSE)


def _size_of(folder: str) -> int:
    """Bytes in a folder's files; -1 if it is gone."""
    total = 0
    try:
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    except OSError:
        return -1
    return total

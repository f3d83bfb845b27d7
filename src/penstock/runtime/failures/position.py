"""Which call of this library a rank is in, for its watcher to read and for the other ranks to be told.

Ranks make the same calls in the same order: those of one pipeline all of them, the pipelines that take the same batch
those that concern it, all pipelines those that concern the whole world. So a call that differs at one place of two such
lists can never end.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from types import FrameType
from typing import Any, NamedTuple, Protocol

# How long a rank waits for others before it asks where they are.
PATIENCE_SECONDS = 10.0
# How many calls are remembered, to compare them with those of other ranks.
CALLS_KEPT = 64
# A rank whose innermost Python code is here waits for another one, unless it is in a module that computes: a backward,
# weight gradients.
WAITING_PACKAGES = ("penstock.runtime.",)
COMPUTING_MODULES = ("penstock.runtime.loss_proxy", "penstock.runtime.gradients.weight_gradients")
# Looked through: what others call in order to wait.
TRANSPARENT_PACKAGES = (
    "torch.distributed",
    "torch._compile",
    "threading",
    "concurrent.futures",
    "contextlib",
    "functools",
)


class Among(IntEnum):
    """Whose ranks make a call together: this pipeline's, those of the pipelines that take the same batch (as they share
    its sequences), or all pipelines'."""

    PIPELINE = 0
    BATCH = 1
    ALL = 2

    @property
    def in_words(self) -> str:
        """Who must make the same calls."""
        of_batch = "every rank of a pipeline, and of those that share its sequences,"
        return ("every rank of a pipeline", of_batch, "every rank")[self]


class CallRecord(NamedTuple):
    """A call of the library. `numbers`: its number among the calls that the ranks of a pipeline make alike, then among
    those of a batch, then among those of the world, as far as it is one of these."""

    name: str
    numbers: Sequence[int]

    @property
    def among(self) -> Among:
        """Whose ranks make it together."""
        return Among(len(self.numbers) - 1)


class Progress(Protocol):
    """Something that knows where in a call the main thread is, so that it need not report it all the time. `progress`
    changes when it makes progress; `place` is a text for a reader, to follow the call's name."""

    @property
    def progress(self) -> int: ...
    @property
    def place(self) -> str: ...


class Position:
    """What the main thread of this rank does. It writes, the watcher reads; both cost next to nothing."""

    def __init__(self) -> None:
        self._calls: deque[CallRecord] = deque(maxlen=CALLS_KEPT)
        # Of those of this pipeline, of its batch, and of the world, as in `CallRecord.numbers`.
        self._num_calls = [0 for _ in Among]
        self._detail: Progress | None = None
        self._inside = False
        self._name = ""
        # Which part of the call is being done, where that says more than the call's name.
        self._doing = ""
        self._thread = threading.get_ident()

    def enter(self, name: str, *, among: Among, detail: Progress | None = None) -> None:
        """A call begins in which the ranks of `among` must take part."""
        # In one piece, as the watcher may read at any moment.
        self._calls.append(CallRecord(name, self._num_calls[: among + 1]))
        self._num_calls = [number + (kind <= among) for kind, number in enumerate(self._num_calls)]
        self._detail, self._inside, self._name, self._doing = detail, True, name, ""
        self._thread = threading.get_ident()

    def retract(self) -> None:
        """The call that was entered last did not begin: not all ranks made it."""
        if self._calls:
            numbers = self._calls.pop().numbers
            self._num_calls[: len(numbers)] = numbers

    def follow(self) -> None:
        """From here on this thread is the one that does the call."""
        self._thread = threading.get_ident()

    def leave(self) -> None:
        """The call has ended, well or badly."""
        self._inside, self._detail = False, None

    @contextlib.contextmanager
    def call(self, name: str, *, among: Among, detail: Progress | None = None) -> Iterator[None]:
        """Around a whole call. One made inside another counts as a part of that one."""
        if self._inside:
            yield
            return
        self.enter(name, among=among, detail=detail)
        try:
            yield
        finally:
            self.leave()

    def begin_part(self, name: str) -> None:
        """A part of the call begins that this pipeline's ranks make alike, in one order: it is compared as a call."""
        self._calls.append(CallRecord(name, self._num_calls[:1]))
        self._num_calls[Among.PIPELINE] += 1

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around a part of a call; an error in it leaves the name behind, until the next call."""
        before, self._doing = self._doing, what
        yield
        self._doing = before

    # -- the watcher's side ----------------------------------------------------------------------------------------

    def words(self) -> str:
        """Where the main thread is, for a reader."""
        detail, inside, doing = self._detail, self._inside, self._doing
        if inside:
            place = f" {detail.place}" if detail is not None else ""
            return self._name + place + (f", while {doing}" if doing else "")
        return f"its own program{self._program_line()}"

    def mark(self) -> tuple[int, bool, int]:
        """A value that changes when the main thread makes progress."""
        detail = self._detail
        return self._num_calls[Among.PIPELINE], self._inside, detail.progress if detail is not None else 0

    def waits(self) -> bool:
        """Whether the main thread is in a wait for another rank at this moment."""
        frame = sys._current_frames().get(self._thread or 0)
        through = False
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.startswith(WAITING_PACKAGES):
                return module not in COMPUTING_MODULES
            if not module.startswith(TRANSPARENT_PACKAGES):
                return through
            through = through or module.startswith("torch.distributed")
            frame = frame.f_back
        return False

    def report(self) -> dict[str, Any]:
        """What other ranks are told."""
        return {"words": self.words(), "waits": self.waits(), "calls": list(self._calls)}

    def _program_line(self) -> str:
        """The innermost line of the main thread that is neither ours nor torch's."""
        frame: FrameType | None = sys._current_frames().get(self._thread or 0)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if not module.startswith(("penstock.", "torch.", "transformers.", *TRANSPARENT_PACKAGES)):
                return f" ({frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno})"
            frame = frame.f_back
        return ""


def differ(one: dict[str, Any], other: dict[str, Any], among: Among) -> bool:
    """Whether two ranks made different calls at one place, of those that both remember. `among`: the least that both
    are in; they must make its calls alike, and those of more ranks."""
    ours, theirs = _numbered(one, among), _numbered(other, among)
    return any(ours[number] != theirs[number] for number in ours.keys() & theirs.keys())


def _numbered(report: dict[str, Any], among: Among) -> dict[int, str]:
    """The names of the calls that are to be compared, by number. They have been through JSON."""
    calls = [CallRecord(*call) for call in report["calls"]]
    return {call.numbers[among]: call.name for call in calls if call.among >= among}

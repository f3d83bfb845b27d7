"""A failure on one rank becomes, within seconds, an error on every rank that names the rank and its cause.

The first rank that fails, or learns of a death, writes the cause in the job's store, tells the others' watchers, and
ends everything under way in its process groups. A watcher that hears of a failure, or sees a rank's process end, does
the same on its rank, so that a main thread that waits wakes with an error, whatever it waits for. Nobody waits for the
process group's timeout.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

import torch.distributed as dist

from penstock.runtime.failures.keys import Keys, StoreTimeout
from penstock.runtime.failures.position import PATIENCE_SECONDS, Among, Position
from penstock.runtime.failures.ring import Ring

# Seconds that a rank which learned of a failure waits to learn more: which rank was lost, what a failing rank's own
# interpreter says. It gives that rank the time to show its error first.
DETAIL_WAIT = 2.0
# How gloo's errors begin, with the path of its source file or without. NCCL's and the store's have classes.
TRANSPORT_ERROR = re.compile(
    r"\[[^\]]*\bgloo/|Gloo connectFullMesh failed|Application timeout caused pair closure|"
    r"Connection closed by peer|Socket (closed|unexpectedly closed)|Socket Timeout|"
    r"(readv?|writev?|sendmsg|recvmsg|connect) ?[\[(:]"
)
KILLED = "its process ended without a word, as one that is killed does (by hand, by the system when memory runs out)"
# Of a rank that left in order while others were in a call.
NEVER_MADE = (
    "so it does not make this call: every rank must make it (one inside `if rank == 0:` is made by one rank only)"
)

_num_failures = 0


class Account(NamedTuple):
    """What a rank tells of a failure. `suspects`: the ranks to blame: the one that tells it, or those of which one
    closed a connection; none if no single rank is to blame. `at`: seconds since the epoch."""

    suspects: list[int]
    cause: str
    seen_by: int
    at: float

    @property
    def is_own(self) -> bool:
        """Whether the rank that tells it has failed itself."""
        return self.suspects == [self.seen_by]


@dataclass
class Endings:
    """How ranks ended, as far as this process knows. `lost`: without taking leave. `words`: what they said of the
    exception that ended them."""

    lost: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    words: dict[int, str] = field(default_factory=dict)

    def is_confirmed(self, account: Account) -> bool:
        """Whether an account blames nobody, or is of an exception of the rank that tells it, or of a process's end."""
        return not account.suspects or account.is_own or any(rank in self.lost for rank in account.suspects)

    def is_explained(self, account: Account, rank: int) -> bool:
        """Whether `rank` can learn nothing more about a failure."""
        seen_by = account.seen_by
        if not account.suspects or account.suspects == [rank]:
            return True
        if account.is_own:
            # Its interpreter shows the exception before it says so.
            return seen_by in self.words or seen_by in self.lost or seen_by in self.left
        return bool(self.lost)

    def tell(self, account: Account) -> tuple[str, int | None]:
        """A failure in words, and the rank to blame, as far as known."""
        suspects, cause, seen_by, _ = account
        if not suspects:
            return cause, None
        if account.is_own:
            words = self.words.get(seen_by, "")
            # Its exception may have come up through the loop's body, which this library does not see.
            words = f"{words}; " if words and words not in cause else ""
            return f"rank {seen_by} failed: {words}{cause}", seen_by
        # A connection may also have been closed by one that lost another rank itself.
        certain = [rank for rank in suspects if rank in self.lost] or sorted(self.lost) or suspects
        if len(certain) > 1:
            return f"one of ranks {certain} was lost: rank {seen_by} {cause}", None
        return f"rank {certain[0]} was lost: {self._end_of(certain[0])}rank {seen_by} {cause}", certain[0]

    def _end_of(self, rank: int) -> str:
        if rank in self.words:
            return f"it ended with {self.words[rank]}; "
        if rank in self.lost:
            return f"{KILLED}; "
        return f"its program had ended, {NEVER_MADE}; " if rank in self.left else ""


class PipelineFailure(RuntimeError):
    """A rank of the job was lost or failed, or the ranks cannot go on together. `rank`: the first to blame, None if
    that is not known. `message`: the text."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class Watching(Protocol):
    """What a board, and the questions of a main thread that waits, ask of this process's `watcher.Watch`."""

    rank: int
    world_size: int
    endings: Endings
    keys: Keys
    ring: Ring

    def add(self, board: FailureBoard) -> None:
        """Tell `board` of failures from now on, and of those before."""

    def remove(self, board: FailureBoard) -> None:
        """Tell it no more."""

    def wait(self, known: Callable[[], bool], seconds: float) -> bool:
        """Wait up to `seconds` until `known()`."""


class FailureBoard:
    """What this rank knows about the first failure of a job, and how to end everything under way.

    Attributes:
        failed: the error to raise, once there is one. The watcher may set it at any moment.
        ranks: who is in this pipeline, and who takes its batch; empty until pipelines are formed.
        patience: how many seconds this rank waits for others before it asks where they are.
        detail_wait: how many seconds this rank waits to learn more of a failure before it raises.
        find_fault: finds a fault that no call raises, and the ranks to blame; the watcher asks.
        keys: of the job's store, those of this board; None if there is nobody to tell.
        resume: the calls that load what this run has saved last, by what they load: the checkpoint of a run, which is
            all of it and may also be loaded here, or its parts.

    Args:
        watch: this process's `watcher.Watch`, None if there is nobody to watch.
    """

    def __init__(self, rank: int, name: str, watch: Watching | None = None):
        self.name = name
        self.position = Position()
        self.patience = PATIENCE_SECONDS
        self.ranks: Mapping[Among, Sequence[int]] = {}
        self.resume: dict[str, str] = {}
        self.detail_wait = DETAIL_WAIT
        self.failed: PipelineFailure | None = None
        self.keys: Keys | None = None if watch is None else watch.keys.within(f"penstock/{name}")
        self._rank = rank
        self._watch = watch
        self._endings = Endings() if watch is None else watch.endings
        self._first: Account | None = None
        self._failed_at = 0.0
        self._on_failure: list[Callable[[], None]] = []
        self.find_fault: Callable[[], tuple[str, Sequence[int]] | None] = lambda: None
        self._on_close: list[Callable[[], None]] = []
        # The main thread and the watcher may both learn something.
        self._lock = threading.RLock()
        if watch is not None:
            watch.add(self)

    # -- what to end -----------------------------------------------------------------------------------------------

    def on_failure(self, end: Callable[[], None]) -> None:
        """Register what ends something under way as soon as a failure is known, on any thread and at any moment of the
        main thread."""
        self._on_failure.append(end)

    def on_close(self, close: Callable[[], None]) -> None:
        """Register what this rank's main thread gives up in `close`: after a failure, or when the pipeline is
        retired. What was registered last is given up first."""
        self._on_close.append(close)

    @contextlib.contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """`on_failure` for the duration."""
        self._on_failure.append(end)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                self._on_failure.remove(end)

    def close(self) -> None:
        """Give up what was registered, once. The main thread calls this."""
        closers, self._on_close = self._on_close, []
        for close in reversed(closers):
            # A group may be partly closed already; all that matters is that it closes.
            with contextlib.suppress(Exception):
                close()

    def retire(self) -> None:
        """Give up what was registered, and the watcher. The pipeline runs no more."""
        self.close()
        self._on_failure.clear()
        self.keys = None
        if self._watch is not None:
            self._watch.remove(self)

    # -- failing ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the job's failure if there is one. The main thread calls this after a wait that broke, during long
        waits, and after the loop's body."""
        if self.failed is not None:
            raise self._explained_failure()

    def refuse_if_failed(self) -> None:
        """`check` for any thread, which waits for nothing."""
        if self.failed is not None:
            raise self.failed

    def abort(self, cause: str, *, suspects: Sequence[int] | None = None) -> PipelineFailure:
        """Record `cause` unless an earlier failure is known, end it all on every rank, and return the error to raise.
        `suspects` are the ranks to blame when it is not this one; empty if no single rank is."""
        self.fail(cause, suspects=[self._rank] if suspects is None else suspects)
        return self._explained_failure()

    def fail(self, cause: str, *, suspects: Sequence[int]) -> None:
        """As `abort`, on any thread: the main thread is woken, and raises when it looks."""
        with self._lock:
            if self._first is None:
                self._first = self._record(Account(list(suspects), cause, self._rank, time.time()))
                self._compose()
                if self._watch is not None:
                    self._watch.ring.tell({"failure": self._first, "board": self.name})
        self._end()

    def hear(self, told: Sequence[Any]) -> None:
        """Another rank has told of a failure, by its `Account`."""
        account = Account(*told)
        with self._lock:
            if self._first is None or self._is_better(account):
                self._first = account
            self._compose()
        self._end()

    def hear_of_losses(self) -> None:
        """The watcher has learned something of the ranks."""
        if self._first is None and self.lost:
            self.fail("learned that its connection has closed", suspects=sorted(self.lost))
        elif self._first is not None:
            self._compose()

    def look_up(self) -> None:
        """Look for a failure in the store, where the watchers are not all connected."""
        if self.keys is None or self._first is not None:
            return
        with contextlib.suppress(Exception):
            if written := self.keys.get("failure"):
                self.hear(json.loads(written))

    @contextlib.contextmanager
    def guard(self, doing: str, peers: Sequence[int] = (), looks_after: bool = True) -> Iterator[None]:
        """Communication with `peers`, who wait for this rank: an error in here is an error on every rank. A transport's
        becomes a PipelineFailure that names who is gone. Any other is this rank's own. `looks_after`: raise a failure
        that is known by the end, though all went well here; else the next call raises it."""
        try:
            with self.position.doing(doing):
                if self.failed is not None:
                    self.check()
                yield
        except PipelineFailure:
            raise
        except Exception as error:
            self._raise_first(doing, peers, error)
        if looks_after and self.failed is not None:
            self.check()

    @contextlib.contextmanager
    def call(self, name: str, among: Among) -> Iterator[None]:
        """Around a call of the library in which all ranks of `among` take part.
        A transport's error becomes a PipelineFailure; what else is raised in here is left to the caller."""
        self.check()
        with self.position.call(name, among=among):
            try:
                yield
            except PipelineFailure:
                raise
            except Exception as error:
                if self.failed is None and not is_transport_error(error):
                    raise
                self._raise_first(f"in {name}", self.ranks_of(among), error)

    def ranks_of(self, among: Among) -> Sequence[int]:
        """The ranks of this pipeline, or of more, ascending."""
        return self.ranks.get(among, range(0 if self._watch is None else self._watch.world_size))

    def _raise_first(self, doing: str, peers: Sequence[int], error: Exception) -> NoReturn:
        """Raise what `lost_connection` says of an error that is being handled."""
        first = self.lost_connection(doing, peers, error)
        if first is error:
            raise  # as it is, with its own cause
        raise first from None

    def lost_connection(self, doing: str, peers: Sequence[int], error: Exception) -> Exception:
        """What to raise for an error in the middle of `doing` something with `peers`: a PipelineFailure if a transport
        broke or the job has failed, `error` itself if that is this rank's own."""
        if self.failed is not None:
            return error if self._is_own_failure and not is_transport_error(error) else self._explained_failure()
        if not is_transport_error(error):
            self.abort(f"{type(error).__name__}: {error}")
            return error
        if isinstance(error, StoreTimeout) and _launcher_has_store():
            return self.abort(f"while rank {self._rank} was {doing}, {error}", suspects=())
        if isinstance(error, dist.DistNetworkError) and not _launcher_has_store():
            peers = [0]  # without a launcher's, the store is in the first rank's process
        elif not peers and self._watch is not None:
            peers = range(self._watch.world_size)
        others = [peer for peer in peers if peer != self._rank]
        named = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {others}" if others else "another rank"
        # Without the path of its source file, and without its advice.
        text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip())
        message = text.splitlines()[0].split(". This is typically")[0][:200] if text else type(error).__name__
        return self.abort(f"lost the connection to {named} while {doing} ({message})", suspects=others)

    @property
    def _is_own_failure(self) -> bool:
        """Whether the failure is an error of this rank: what comes up through its calls is that error."""
        return self._first is not None and self._first.is_own and self._first.seen_by == self._rank

    @property
    def failed_at(self) -> float:
        """When this rank learned of the failure, seconds since the epoch; 0 if there is none."""
        return time.time() - (time.monotonic() - self._failed_at) if self._failed_at else 0.0

    @property
    def lost(self) -> frozenset[int]:
        """The ranks whose processes are known to have ended without leave."""
        return frozenset(self._endings.lost)

    # -- what is known ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """End everything under way, once."""
        global _num_failures
        with self._lock:
            ends, self._on_failure = self._on_failure, []
        _num_failures += bool(ends)
        for end in ends:
            with contextlib.suppress(Exception):
                end()

    def _explained_failure(self) -> PipelineFailure:
        """The error to raise, once this rank has given up what it held and as much is known as will be soon."""
        self.close()
        if self._watch is not None:
            self._watch.wait(self._explained, self._failed_at + self.detail_wait - time.monotonic())
            self._compose()
        assert self.failed is not None
        return self.failed

    def _record(self, mine: Account) -> Account:
        """The first failure on record, which is `mine` if there was none."""
        if self.keys is None:
            return mine
        try:
            return Account(*json.loads(self.keys.create("failure", json.dumps(mine))))
        except Exception:  # the store lives in the process that may be the one that died, or stands still
            return mine

    def _is_better(self, account: Account) -> bool:
        """Whether another rank's account is confirmed and the one known here is not, or of two alike the earlier one:
        there may be no store that decided which was first."""
        assert self._first is not None
        confirmed = self._endings.is_confirmed
        return (not confirmed(account), account.at) < (not confirmed(self._first), self._first.at)

    def _explained(self) -> bool:
        """Whether nothing more is to be learned about the failure."""
        assert self._first is not None
        return self._endings.is_explained(self._first, self._rank)

    def _compose(self) -> None:
        """Make the error from what is known now."""
        with self._lock:
            assert self._first is not None
            self._failed_at = self._failed_at or time.monotonic()
            message, rank = self._endings.tell(self._first)
            here = self.position.words() if rank != self._rank and self._first.suspects else ""
            place, _, doing = here.partition(", while ")
            if doing in self._first.cause:
                here = place
            if here and not here.startswith("its own"):
                message += f"; this was in {here} of rank {self._rank}"
            self.failed = PipelineFailure(f"{message}. {self.advice()}", rank)

    def advice(self) -> str:
        """The advice how to go on after the end of this job."""
        if self.resume:
            parts = dict(self.resume)
            whole = parts.pop("checkpoint", None) or parts.pop("trainer", None)
            # Weights alone do not take a run's place, but with the optimizer they do: both were saved after it then.
            calls = whole if whole and "optimizer" not in parts else " and ".join(parts.values())
            return f"To go on, start the job again and load the last checkpoint: {calls}"
        return (
            "To go on, start the job again; this run has saved no checkpoint, so load an earlier one if there is one "
            "(model.from_parallelized(folder), penstock.from_pretrained(folder, config=...))"
        )


@contextlib.contextmanager
def noting_on(error: BaseException) -> Iterator[None]:
    """Around what is still to be done after `error`, which is to be raised: what else fails in here is a note on it. A
    failure of the pipeline is no further fault: `error` is what failed first, or the board tells of another one."""
    try:
        yield
    except PipelineFailure:
        pass
    except Exception as another:
        if another is not error:
            error.add_note(f"(after that: {type(another).__name__}: {another})")


def ranks_in_words(ranks: Collection[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def num_failures() -> int:
    """How many times the failure of a job has ended something under way in this process."""
    return _num_failures


def is_transport_error(error: BaseException) -> bool:
    """Whether `error` says that a connection to another rank, or to the store, broke or timed out."""
    if isinstance(error, dist.DistError):
        return True
    # gloo's are plain RuntimeErrors out of C++; what Python raises in the middle of a wait (a signal's handler, a data
    # loader that lost a worker) is not.
    return type(error) is RuntimeError and TRANSPORT_ERROR.match(str(error).strip()) is not None


def _launcher_has_store() -> bool:
    """Whether the job's store is in a launcher's process, not in that of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

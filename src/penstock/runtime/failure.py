"""A failure on one rank becomes, within seconds, an error on every rank that names the rank and its cause.

The first rank to fail writes its cause in the job's store and destroys its process groups. That closes the connections
its neighbours wait on; each of them reads the store, raises an error naming the first cause, and closes its own, and
so on to the last rank. Nobody waits for the process group's timeout.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch.distributed as dist

# How long a rank that lost a connection looks for the cause another rank may still be writing.
DETAIL_WAIT = datetime.timedelta(seconds=1.0)
# How long ranks that left the training loop wait for the others to have left it at the same place.
AGREEMENT_WAIT = datetime.timedelta(seconds=3.0)


class PipelineFailure(RuntimeError):
    """A rank of the job was lost or failed; `rank` is the first that did, as far as can be known."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class FailureBoard:
    """The record of the job's first failure, in the job's key-value store."""

    def __init__(self, store: dist.Store | None, rank: int, name: str):
        self._store = store if store is None else dist.PrefixStore(f"penstock/{name}", store)
        self._rank = rank
        self._on_abort: list[Callable[[], None]] = []
        self.failed: PipelineFailure | None = None

    def on_abort(self, close: Callable[[], None]) -> None:
        """Register what must be closed for the neighbours to wake. What was registered last is closed first."""
        self._on_abort.append(close)

    def abort(self, cause: str, *, suspects: Sequence[int] = ()) -> PipelineFailure:
        """Record `cause` unless an earlier failure is on record, wake the neighbours, and return the error to raise.

        `suspects` are the ranks to blame when it is not this one: one of them closed a connection.
        """
        if self.failed is None:
            first = self._record(cause, list(suspects) or [self._rank])
            self.failed = PipelineFailure(cause)
            self._report_alive()
            self.close()
            # Last, because it may wait for what other ranks still have to say.
            lost = self._lost(first)
            self.failed = PipelineFailure(self._message(first, lost), lost[0] if len(lost) == 1 else None)
        return self.failed

    def close(self) -> None:
        """Close what was registered, once."""
        closers, self._on_abort = self._on_abort, []
        for close in reversed(closers):
            # A group may be half gone already; the point is only that it closes.
            with contextlib.suppress(Exception):
                close()

    @contextlib.contextmanager
    def guard(self, doing: str, peers: Sequence[int] = ()) -> Iterator[None]:
        """Turn a transport error met while `doing` something with `peers` into a PipelineFailure on every rank."""
        try:
            yield
        except PipelineFailure:
            raise
        except RuntimeError as error:
            raise self.lost_connection(doing, peers, error) from error

    @contextlib.contextmanager
    def aborting(self) -> Iterator[None]:
        """An error in here is an error on every rank."""
        try:
            yield
        except Exception as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    def lost_connection(self, doing: str, peers: Sequence[int], error: RuntimeError) -> PipelineFailure:
        """The error for a transport that broke while `doing` something with `peers`."""
        others = [peer for peer in peers if peer != self._rank]
        named = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {others}"
        reason = _first_sentence(error)
        # What the finished frames hold (a collective's work, its group) would keep this rank's connections open.
        traceback.clear_frames(error.__traceback__)
        return self.abort(f"lost the connection to {named} while {doing} ({reason})", suspects=others)

    def _record(self, cause: str, suspects: list[int]) -> dict:
        mine = {"suspects": suspects, "cause": cause, "seen_by": self._rank}
        if self._store is None:
            return mine
        try:
            written = self._store.compare_set("failure", "", json.dumps(mine))
            return json.loads(written) if written else mine
        except Exception:  # the store lives in the process that may be the one that died
            return {**mine, "cause": f"{cause}; the job's store is unreachable too"}

    def _report_alive(self) -> None:
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.set(f"alive/{self._rank}", "")

    def _lost(self, first: dict) -> list[int]:
        """Of several suspects those that do not report soon, as each live one does once its connections close."""
        suspects: list[int] = first["suspects"]
        if len(suspects) == 1 or self._store is None:
            return suspects
        deadline = time.monotonic() + DETAIL_WAIT.total_seconds()
        missing = [rank for rank in suspects if rank != self._rank]
        with contextlib.suppress(Exception):
            while len(missing) > 1 and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._store.check([f"alive/{rank}"])]
                time.sleep(0.01)
        return missing or suspects

    def _message(self, first: dict, lost: list[int]) -> str:
        seen_by, cause = first["seen_by"], first["cause"]
        if lost == [seen_by]:
            return f"rank {seen_by} failed: {cause}" + ("" if seen_by == self._rank else self._detail(seen_by))
        if len(lost) == 1:
            return f"rank {lost[0]} was lost: rank {seen_by} {cause}{self._detail(lost[0])}"
        return f"one of ranks {lost} was lost: rank {seen_by} {cause}"

    def _detail(self, rank: int) -> str:
        """What the failing rank's own interpreter said on its way out, when it had the time to say it."""
        if self._store is None:
            return ""
        try:
            self._store.wait([f"detail/{rank}"], DETAIL_WAIT)
            return f"; rank {rank} ended with {self._store.get(f'detail/{rank}').decode()}"
        except Exception:
            return ""

    def agree(self, key: str, position: str, ranks: Sequence[int], patience: float) -> bool:
        """True if every rank of `ranks` reports the same `position` under `key` within about `patience` seconds.

        For leaving a training loop early: only if all left at the same place is a clean drain possible.
        """
        if len(ranks) == 1:
            return True
        if self._store is None:
            return False
        wait = max(AGREEMENT_WAIT, datetime.timedelta(seconds=patience))
        try:
            self._store.set(f"{key}/{self._rank}", position)
            self._store.wait([f"{key}/{rank}" for rank in ranks], wait)
            return all(self._store.get(f"{key}/{rank}").decode() == position for rank in ranks)
        except Exception:
            return False

    def watch_interpreter(self) -> None:
        """Tell the others what exception ends this process, through `sys.excepthook`."""
        previous, store, key = sys.excepthook, self._store, f"detail/{self._rank}"

        # It outlives the pipeline, so it refers to nothing of it but the store.
        def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            if store is not None and not isinstance(value, PipelineFailure):
                text = "".join(traceback.format_exception_only(kind, value)).strip()
                with contextlib.suppress(Exception):
                    store.set(key, text[:500])
            previous(kind, value, trace)

        sys.excepthook = hook


def _first_sentence(error: RuntimeError) -> str:
    """A transport's error without the path of its source file and its advice."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip())
    return text.splitlines()[0].split(". This is typically")[0][:200] if text else type(error).__name__

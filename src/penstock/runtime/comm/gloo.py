"""Groups on gloo in which only the ranks are connected that talk to each other.

gloo connects all pairs of a group when it is made, each with two questions to the store, so all costs of forming grow
with the square of the world. In a group that is made `lazily` a pair is connected by the first message. The pairs that
collectives and pipelines use are connected while the ranks meet (`connect`). Nothing can end the wait for the first
message of a pair, and a thread that is left in it ends its process by an abort if others' ends wake it while the
interpreter goes: ranks say in the store that they are there, and call only those that are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from penstock.runtime.failures.board import num_failures
from penstock.runtime.failures.keys import in_thread

LAZY = "TORCH_GLOO_LAZY_INIT"
# How often a rank looks whether others are there, in seconds, at first and later.
FIRST_PAUSE, LAST_PAUSE = 0.001, 0.25
# Of up to so many ranks `in_trees` connects all pairs.
MOST_FULLY_CONNECTED = 5
# From so many bytes on the wait for a message is watched. Where one side was killed, sends and receives of 8 MB never
# ended in one of four runs, those of 800 kB in none of 60: this is well below, as how much a socket takes at once
# differs between systems.
WATCHED_FROM_BYTES = 1 << 17
# Of the first message of a pair, and of one that nobody sends.
_FIRST_TAG, _NO_TAG = (1 << 30) - 2, (1 << 30) - 1
_AT_ONCE = timedelta(milliseconds=1)


class Waitable(Protocol):
    """A transfer, or several."""

    def wait(self) -> object: ...


@dataclass
class _Connections:
    """The ranks of a lazy group that this one is connected to, by their numbers in it, and a receive that is over."""

    peers: set[int] = field(default_factory=set)
    received: dist.Work | None = None


_lazy: weakref.WeakKeyDictionary[dist.ProcessGroup, _Connections] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def lazily() -> Iterator[None]:
    """Around the making of groups: they connect no pair, where gloo's transport can do that."""
    if not sys.platform.startswith("linux") or os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") != "TCP":
        yield
        return
    before, os.environ[LAZY] = os.environ.get(LAZY), "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[LAZY]
        else:
            os.environ[LAZY] = before


def beside(rank: int, size: int) -> set[int]:
    """The ranks that one sends to or hears from where all pass something on in a ring: sums, and what all tell all."""
    return {(rank - 1) % size, (rank + 1) % size} - {rank}


def in_trees(rank: int, size: int) -> set[int]:
    """`beside`, and the ranks that one broadcasts to or hears from, whoever has the root."""
    steps = [1 << power for power in range((size - 1).bit_length())]
    return {(rank + sign * step) % size for step in steps for sign in (1, -1)} - {rank}


def note_new(group: dist.ProcessGroup) -> None:
    """A lazy group is to be connected, and nothing is under way in it until then: `abort` lets it be."""
    _lazy[group] = _Connections()


def await_ranks(
    store: dist.Store, key: str, rank: int, size: int, check: Callable[[], object], limit: timedelta | None
) -> None:
    """Say that this rank is there, and wait until `size` ranks have. Raises DistStoreError if they do not come."""
    store.set(f"{key}/{rank}", "here")
    store.add(f"{key}/count", 1)
    if not comes(lambda: store.add(f"{key}/count", 0) >= size, limit, check):
        late = [other for other in range(size) if not store.check([f"{key}/{other}"])]
        raise dist.DistStoreError(f"ranks {late} did not come within {limit}")


def comes(it: Callable[[], bool], limit: timedelta | None, check: Callable[[], object] = lambda: None) -> bool:
    """Whether something comes within a limit; `check` ends the wait by what it raises. The longer it takes, the less
    often it is looked for: each time is a question to the store."""
    begun, pause = time.monotonic(), FIRST_PAUSE
    while not it():
        check()
        if limit is not None and time.monotonic() - begun > limit.total_seconds():
            return False
        time.sleep(pause)
        pause = min(LAST_PAUSE, 2 * pause)
    return True


def connect(group: dist.ProcessGroup, peers: set[int]) -> None:
    """Exchange a first message with some ranks of a `note_new` group, by their numbers in it, which do it too."""
    _lazy[group] = _Connections(peers, _meet(group, peers))


def _meet(group: dist.ProcessGroup, peers: set[int]) -> dist.Work | None:
    rank, received = group.rank(), None

    def turn(peer: int) -> tuple[int, int, int]:
        """All ranks come to their pairs in one order, in which neighbours need not wait for each other's neighbours."""
        first, step = min(rank, peer), abs(rank - peer)
        return step, first // step % 2, first

    for peer in sorted(peers, key=turn):
        sent, received = group.send([torch.zeros(1)], peer, _FIRST_TAG), group.recv([torch.zeros(1)], peer, _FIRST_TAG)
        sent.wait()
        received.wait()
    return received


def contact(group: dist.ProcessGroup | None, peer: int) -> None:
    """Be connected to a rank of a group, which calls this too, before both send or receive. Raises RuntimeError if a
    job of this process has failed meanwhile."""
    connected = None if group is None else _lazy.get(group)
    if group is None or connected is None or peer in connected.peers:
        return
    check = raises_after_a_failure()
    key = f"penstock/contact/{group.group_name}/{min(group.rank(), peer)}/{max(group.rank(), peer)}"
    await_ranks(dist.distributed_c10d._get_default_store(), key, group.rank(), 2, check, None)
    outcome = in_thread(partial(_meet, group, {peer}), "penstock-connecting")
    while not wait([outcome], LAST_PAUSE).done:
        check()
    outcome.result()
    connected.peers.add(peer)


def raises_after_a_failure() -> Callable[[], None]:
    """A check for a wait that knows no board: it raises as a transport does, once a job of this process has failed."""
    before = num_failures()

    def check() -> None:
        if num_failures() != before:
            raise RuntimeError("Connection closed by peer")

    return check


def wait_for_all(
    work: dist.Work, group: dist.ProcessGroup | None, device: torch.device, check: Callable[[], object]
) -> None:
    """Wait for a collective in `group` of tensors on `device`; `check` ends the wait by what it raises. On an
    accelerator a stream waits, not this thread.

    After an `abort` a collective of large tensors may stay without an end: gloo tells nobody of a message that breaks
    in its own thread, as a neighbour's connection closes.
    """
    while device.type == "cpu" and not work.is_completed():
        with contextlib.suppress(RuntimeError):  # the time is over; an error of the work is raised below
            work.wait(timedelta(seconds=LAST_PAUSE))
        if not work.is_completed():
            try:
                check()
            except BaseException:
                if not work.is_completed():
                    leave_behind(group)
                raise
    work.wait()


def leave_behind(group: dist.ProcessGroup | None) -> None:
    """Keep a group, None for torch's default one, until the process ends. To destroy it would wait for its collective,
    which may never end, and any thread may be the one that destroys it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD if group is None else group))


def wait_for_transfer(work: Waitable, num_bytes: int, check: Callable[[], object]) -> None:
    """Wait for a send or a receive of so many bytes; `check` ends the wait by what it raises. If the other side dies in
    the middle of a message, gloo tells nobody and nothing wakes who waits: the wait for a large one is left behind."""
    if num_bytes < WATCHED_FROM_BYTES:
        work.wait()
        return
    outcome = in_thread(work.wait, "penstock-transfer")
    while not wait([outcome], LAST_PAUSE).done:
        check()
    outcome.result()


def abort(group: dist.ProcessGroup) -> None:
    """gloo has no abort, but a wait that times out closes all of its group's connections."""
    if (lazy := _lazy.get(group)) is not None:
        # Wait again for a receive that is over: it never comes again, so the wait times out. A new receive might have
        # to connect first, and wait for that.
        with contextlib.suppress(Exception):
            if lazy.received is not None:
                lazy.received.wait(_AT_ONCE)
        return
    for peer in range(group.size()):
        with contextlib.suppress(Exception):
            if peer != group.rank():
                group.recv([torch.empty(1)], peer, _NO_TAG).wait(_AT_ONCE)

"""Groups on gloo in which only the ranks are connected that talk to each other.

gloo connects all pairs of a group when it is made, each with two questions to the store, so all costs of forming grow
with the square of the world. In a group that is made `lazily` a pair is connected by the first message. Those pairs
that collectives and pipelines use are connected while the ranks meet (`connect`), by messages: a collective waits for a
rank that has died in a thread of gloo's own, which nothing can end, and with it its process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from functools import partial

import torch
import torch.distributed as dist

from penstock.runtime.failures.board import num_failures
from penstock.runtime.failures.keys import in_thread

LAZY = "TORCH_GLOO_LAZY_INIT"
PAUSE = 0.02
# Of the first message of a pair, and of one that nobody sends.
_FIRST_TAG, _NO_TAG = (1 << 30) - 2, (1 << 30) - 1
_AT_ONCE = datetime.timedelta(milliseconds=1)

# The ranks of each lazy group that this one is connected to, by their numbers in the group.
_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]] = weakref.WeakKeyDictionary()
# Those in which `connect` is not done: one that waits in it for a rank that does not come has locked its group.
_unconnected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


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
    _unconnected.add(group)


def connect(group: dist.ProcessGroup, peers: Iterable[int]) -> None:
    """Exchange a first message with some ranks of a new group, by their numbers in it. They do the same."""
    note_new(group)
    _meet(group, peers := {*peers})
    _connected[group] = peers
    _unconnected.discard(group)


def _meet(group: dist.ProcessGroup, peers: set[int]) -> None:
    rank = group.rank()

    def turn(peer: int) -> tuple[int, int, int]:
        """All ranks come to their pairs in one order, in which neighbours need not wait for each other's neighbours."""
        first, step = min(rank, peer), abs(rank - peer)
        return step, first // step % 2, first

    for peer in sorted(peers, key=turn):
        here, there = torch.zeros(1), torch.zeros(1)
        for work in (group.send([here], peer, _FIRST_TAG), group.recv([there], peer, _FIRST_TAG)):
            work.wait()


def contact(group: dist.ProcessGroup | None, peer: int) -> None:
    """Be connected to a rank of a group, which calls this too, before both send or receive.

    Raises:
        RuntimeError: a job of this process has failed meanwhile.
    """
    connected = None if group is None else _connected.get(group)
    if group is None or connected is None or peer in connected:
        return
    before, outcome = num_failures(), in_thread(partial(_meet, group, {peer}), "penstock-connecting")
    while not wait([outcome], PAUSE).done:
        if num_failures() != before:
            raise RuntimeError("Connection closed by peer")
    outcome.result()
    connected.add(peer)


def abort(group: dist.ProcessGroup) -> None:
    """gloo has no abort, but a wait that times out closes all of its group's connections. To a rank that is not
    connected it would connect."""
    if group in _unconnected:
        return
    for peer in [*_connected.get(group, {*range(group.size())} - {group.rank()})]:
        with contextlib.suppress(Exception):
            group.recv([torch.empty(1)], peer, _NO_TAG).wait(_AT_ONCE)

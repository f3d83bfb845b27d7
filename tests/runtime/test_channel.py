"""A channel's messages of one and of several tensors, over a group that fails."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.runtime.boundary.p2p import SENDS_AHEAD, Message, P2PChannel, P2PChannels
from penstock.runtime.comm.gloo import WATCHED_FROM_BYTES
from penstock.runtime.failures.position import Position
from penstock.runtime.gradients.weight_gradients import DeferredGradient, WeightGradientQueues
from penstock.runtime.loss_proxy import run_backward


class Lost(Exception):
    """What the board makes of a lost connection."""


class Board:
    """Gives up the channels, as the real one does."""

    channels: P2PChannels
    failed = False

    def check(self) -> None:
        if self.failed:
            raise RuntimeError("rank 7 was lost")

    def lost_connection(self, doing: str, peers: Sequence[int], error: RuntimeError) -> Exception:
        self.channels.clear()
        return Lost(f"{doing} {peers}: {error}")


class Work:
    def __init__(self, fails: bool):
        self.fails, self.waits = fails, 0

    def wait(self) -> None:
        self.waits += 1
        if self.fails:
            raise RuntimeError("Connection closed by peer")


class Group:
    """The transfer of a tensor that holds `refused` fails, the wait for that of `bad` does.

    `tags` and `works` are those of the transfers so far.
    """

    def __init__(self, refused: float | None = None, bad: float | None = None):
        self.refused, self.bad = refused, bad
        self.tags: list[int] = []
        self.works: list[weakref.ref[Work]] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        number = float(tensor)
        if number == self.refused:
            raise RuntimeError("Connection closed by peer")
        work = Work(number == self.bad)
        self.tags.append(tag)
        self.works.append(weakref.ref(work))
        return work

    recv = send


class StuckGroup:
    """Transfers never end, as those on gloo whose other side died in the middle of them."""

    def __init__(self) -> None:
        self.waiting, self.ends = threading.Event(), threading.Event()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> StuckGroup:
        return self

    recv = send

    def wait(self) -> None:
        self.waiting.set()
        self.ends.wait()


@pytest.fixture
def channel_over(monkeypatch: pytest.MonkeyPatch) -> Callable[[Group], P2PChannel]:
    """Makes a channel to rank 7 over a `Group`, and nothing else that refers to that."""
    monkeypatch.setattr(dist, "get_group_rank", lambda group, peer: 0)

    def make(group: Any) -> P2PChannel:
        board: Any = Board()
        groups = [group]
        board.channels = P2PChannels(lambda boundary, kind: groups.pop(), lambda stage: 7, torch.device("cpu"), board)
        return board.channels.channel(2, Message.GRADIENT, downstream=False)

    return make


@pytest.mark.parametrize("sends", [True, False])
def test_a_transfer_that_never_ends_holds_no_rank_whose_job_has_failed(
    channel_over: Callable[[Any], P2PChannel], sends: bool
) -> None:
    group, tensor = StuckGroup(), torch.zeros(WATCHED_FROM_BYTES)
    channel = channel_over(group)
    channel.send([tensor]) if sends else channel.post_receive([tensor])
    board: Any = channel._channels.board
    position, seen = Position(), list[bool]()

    def fail() -> None:
        group.waiting.wait()
        for _ in range(20):
            time.sleep(0.01)
            seen.append(position.waits())
        board.failed = True

    watcher = threading.Thread(target=fail)
    watcher.start()
    with pytest.raises(Lost, match="rank 7 was lost"):
        channel.release() if sends else channel.receive()
    watcher.join()
    group.ends.set()
    assert sum(seen) > 10, "the watcher does not see that the host waits for another rank, and asks nobody"


def test_a_rank_that_computes_gradients_does_not_wait() -> None:
    """In a backward that no user sees, and in an action W."""
    size, ends = 256, threading.Event()
    value, product = torch.ones(size, size, requires_grad=True), torch.empty(size, size)
    output = value
    for _ in range(40):
        output = output @ torch.eye(size)
    queues, position, seen = WeightGradientQueues(), Position(), list[bool]()
    queues.open(0, 0)
    for _ in range(40):
        queues.defer(DeferredGradient((value,), partial(torch.mm, torch.eye(size), torch.eye(size), out=product)))
    queues.close()

    def sample() -> None:
        while not ends.is_set():
            seen.append(position.waits())
            time.sleep(0.001)

    watcher = threading.Thread(target=sample)
    watcher.start()
    run_backward([output], [torch.ones(size, size)])
    with torch.no_grad():
        queues.run(0, 0, None)
    ends.set()
    watcher.join()
    assert seen and not any(seen)


def message(size: int, first: int = 0) -> list[torch.Tensor]:
    return [torch.tensor(float(number)) for number in range(first, first + size)]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_each_tensor_of_a_message_has_a_tag_and_is_waited_for(channel_over: Any, size: int) -> None:
    group = Group()
    channel = channel_over(group)
    channel.post_receive(message(size))
    channel.send(message(size))
    assert len(group.tags) == 2 * size and len(set(group.tags)) == size
    works: list[Any] = [work() for work in group.works]
    assert [work.waits for work in works] == [0] * 2 * size
    assert len(channel.receive()) == size
    channel.release()
    assert [work.waits for work in works] == [1] * 2 * size


@pytest.mark.parametrize("ahead", [SENDS_AHEAD, 3])
def test_so_many_sends_are_waited_for_that_the_newest_are_left(channel_over: Any, ahead: int) -> None:
    group = Group()
    channel = channel_over(group)
    channel._channels.sends_ahead = ahead
    for number in range(2 * ahead):
        channel.send(message(1, number))
    works: list[Any] = [work() for work in group.works]
    assert all(work.waits == 0 for work in works)
    channel.send(message(1))
    assert [work.waits for work in works] == [1] * (ahead + 1) + [0] * (ahead - 1)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("doing", ["posting", "receiving", "sending", "sending again", "waiting for a send"])
def test_a_lost_connection_is_reported_and_the_group_let_go(channel_over: Any, size: int, doing: str) -> None:
    at = float(size // 2)
    group = Group(refused=at) if doing in ("posting", "sending") else Group(bad=at)
    channel, works = channel_over(group), group.works
    with pytest.raises(Lost, match=r"gradients between stages 2 and 3 \[7\]: Connection closed") as caught:
        if doing in ("posting", "receiving"):
            channel.post_receive(message(size))
            channel.receive()
        else:
            for _ in range(2 * SENDS_AHEAD + 1 if doing == "sending again" else 1):
                channel.send(message(size))
            channel.release()
    # The transport's own words are in the message; its traceback would only hide them.
    assert caught.value.__suppress_context__ and caught.value.__context__ is not None
    alive = weakref.ref(group)
    del group, caught
    gc.collect()
    assert [work() for work in works] == [None] * len(works)
    assert alive() is None

"""A line's messages of several tensors, over a group that fails."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.runtime.channel import Channel, Kind, Line


class Lost(Exception):
    """What the board makes of a lost connection."""


class Board:
    """Clears the frames that are over, as the real one does."""

    def lost_connection(self, doing: str, peers: list[int], error: RuntimeError) -> Exception:
        traceback.clear_frames(error.__traceback__)
        return Lost(f"{doing} {peers}: {error}")


class Work:
    """Of a transfer of the tensor `number`; its wait fails if it is `bad`."""

    def __init__(self, number: float, bad: float | None):
        self.fails, self.waits = number == bad, 0

    def wait(self) -> None:
        self.waits += 1
        if self.fails:
            raise RuntimeError("Connection closed by peer")


class Group:
    """Notes what is transferred; the transfer of a tensor that holds `refused` fails, the wait for `bad` does."""

    def __init__(self, refused: float | None = None, bad: float | None = None):
        self.refused, self.bad = refused, bad
        self.tags: list[int] = []
        self.works: list[weakref.ref[Work]] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        number = float(tensor)
        if number == self.refused:
            raise RuntimeError("Connection closed by peer")
        work = Work(number, self.bad)
        self.tags.append(tag)
        self.works.append(weakref.ref(work))
        return work

    recv = send


@pytest.fixture
def line_over(monkeypatch: pytest.MonkeyPatch) -> Callable[[Group], Line]:
    """Makes a line over a `Group`, to rank 7."""
    monkeypatch.setattr(dist, "get_group_rank", lambda group, peer: 0)

    def make(group: Any) -> Line:
        board: Any = Board()
        channel = Channel(lambda cut, kind: group, lambda stage: 7, torch.device("cpu"), board)
        return channel.line(2, Kind.GRADIENT, upper=False)

    return make


def message(size: int) -> list[torch.Tensor]:
    return [torch.tensor(float(number)) for number in range(size)]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_each_tensor_of_a_message_has_a_tag_and_is_waited_for(line_over: Any, size: int) -> None:
    group = Group()
    line = line_over(group)
    line.post_receive(message(size))
    line.send(message(size))
    assert len(group.tags) == 2 * size and len(set(group.tags)) == size
    works = [work() for work in group.works]
    assert [work.waits for work in works] == [0] * 2 * size
    assert len(line.receive()) == size
    line.release()
    assert [work.waits for work in works] == [1] * 2 * size


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("doing", ["posting", "receiving", "sending", "waiting for a send"])
def test_a_lost_connection_is_reported_and_leaves_no_work_referred_to(line_over: Any, size: int, doing: str) -> None:
    at = float(size // 2)
    begins = doing in ("posting", "sending")
    group = Group(refused=at) if begins else Group(bad=at)
    line = line_over(group)
    with pytest.raises(Lost, match=r"gradients between stages 2 and 3 \[7\]: Connection closed") as caught:
        if doing in ("posting", "receiving"):
            line.post_receive(message(size))
            line.receive()
        else:
            line.send(message(size))
            line.release()
    assert caught.value.__cause__ is not None  # and with it the frames in which it was raised
    assert len(group.works) == (size // 2 if begins else size)
    assert [work() for work in group.works] == [None] * len(group.works)

"""Messages between the ranks of one pipeline: asynchronous, tagged, received into buffers posted ahead.

A *line* is one kind of message over one cut: `Line(cut, kind)`. Messages of a line arrive in the order they were sent.
On gloo a payload moves only once its receive is posted, and each line has its own tag. On NCCL the order of all
messages between two ranks counts, so each direction has a group of its own and the executor keeps one order for each
direction.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from .failure import FailureBoard


class Kind(IntEnum):
    """What a message carries. Activations, headers and step notices go down the pipeline, the others up."""

    STEP = 0
    HEADER = 1
    ACTIVATION = 2
    LOSS = 3
    GRADIENT = 4

    @property
    def downstream(self) -> bool:
        return self <= Kind.ACTIVATION


class Line(NamedTuple):
    """One kind of message over the cut between stage `cut` and stage `cut + 1`."""

    cut: int
    kind: Kind


class Receive(NamedTuple):
    """Receives that were posted and not waited for yet."""

    buffers: list[torch.Tensor]
    works: list[dist.Work]
    peer: int


# Several tensors of one message get tags of their own.
TAGS_PER_LINE = 64
# Sent tensors kept alive on one line before the oldest send is waited for.
SENDS_IN_FLIGHT = 16


class Channel:
    """Posts receives, sends without waiting, waits for receives.

    `group_for(line)` gives the process group of a line, `peer_of(stage)` the global rank that holds a stage.
    """

    def __init__(
        self,
        group_for: Callable[[Line], dist.ProcessGroup],
        peer_of: Callable[[int], int],
        device: torch.device,
        board: FailureBoard,
    ):
        self._group_for = group_for
        self._peer_of = peer_of
        self._device = device
        self._board = board
        self._posted: dict[Line, deque[Receive]] = {}
        self._in_flight: dict[Line, deque[tuple[list[dist.Work], Sequence[torch.Tensor]]]] = {}
        self._routes: dict[tuple[Line, bool], tuple[dist.ProcessGroup, int, int, int]] = {}
        self.seconds_waited = 0.0
        self.on_wait: Callable[[Line, float, float], None] | None = None

    def post_receive(self, line: Line, buffers: list[torch.Tensor]) -> None:
        """Post receives for the next message of `line`, into `buffers`."""
        group, group_rank, peer, tag = self._route(line, receiving=True)
        try:
            works = [group.recv([buffer], group_rank, tag + i) for i, buffer in enumerate(buffers)]
        except RuntimeError as error:
            raise self._board.lost_connection(f"posting a receive of {_name(line)}", [peer], error) from error
        self._posted.setdefault(line, deque()).append(Receive(buffers, works, peer))

    def warm_up(self, cuts: Iterable[int], stages: Collection[int]) -> None:
        """Send one number over each of `cuts`, down and up again, in one order on all ranks.

        Every rank of the pipeline calls this with the cuts between stages of different ranks, and its own stages.
        """
        for cut in cuts:
            down, up = Line(cut, Kind.ACTIVATION), Line(cut, Kind.GRADIENT)
            if cut in stages:
                self.send(down, [torch.zeros(1, device=self._device)])
                self.post_receive(up, [torch.zeros(1, device=self._device)])
                self.receive(up)
            elif cut + 1 in stages:
                self.post_receive(down, [torch.zeros(1, device=self._device)])
                self.send(up, self.receive(down))
        self.flush()

    def num_posted(self, line: Line) -> int:
        posted = self._posted.get(line)
        return len(posted) if posted else 0

    def receive(self, line: Line) -> list[torch.Tensor]:
        """Wait for the oldest posted receive of `line`. On an accelerator only the stream waits."""
        buffers, works, peer = self._posted[line].popleft()
        start = time.perf_counter()
        self._wait(works, peer, "receiving", line)
        end = time.perf_counter()
        self.seconds_waited += end - start
        if self.on_wait is not None:
            self.on_wait(line, start, end)
        return buffers

    def send(self, line: Line, tensors: Sequence[torch.Tensor]) -> None:
        """Send `tensors` as the next message of `line` without waiting; they are kept alive until they have left."""
        group, group_rank, peer, tag = self._route(line, receiving=False)
        try:
            works = [group.send([tensor], group_rank, tag + i) for i, tensor in enumerate(tensors)]
        except RuntimeError as error:
            raise self._board.lost_connection(f"sending {_name(line)}", [peer], error) from error
        flight = self._in_flight.setdefault(line, deque())
        flight.append((works, tensors))
        if len(flight) > SENDS_IN_FLIGHT:
            self._finish_oldest_send(line, flight)

    def release(self, line: Line, keep: int = 0) -> None:
        """Wait for sends of `line` that must have arrived, all but the newest `keep`, and let go of their tensors."""
        flight = self._in_flight.get(line)
        while flight and len(flight) > keep:
            self._finish_oldest_send(line, flight)

    def flush(self) -> None:
        """Wait until every send has left."""
        for line, flight in self._in_flight.items():
            while flight:
                self._finish_oldest_send(line, flight)

    def clear(self) -> None:
        """Forget everything under way, so that nothing keeps a dead group's connections open."""
        self._posted.clear()
        self._in_flight.clear()
        self._routes.clear()

    def _finish_oldest_send(self, line: Line, flight: deque[tuple[list[dist.Work], Sequence[torch.Tensor]]]) -> None:
        works, _ = flight.popleft()
        self._wait(works, self._route(line, receiving=False)[2], "sending", line)

    def _wait(self, works: list[dist.Work], peer: int, doing: str, line: Line) -> None:
        try:
            while works:
                works[-1].wait()
                works.pop()
        except RuntimeError as error:
            # A work that is referred to keeps its group's connections open, and the neighbours waiting on them.
            works.clear()
            raise self._board.lost_connection(f"{doing} {_name(line)}", [peer], error) from error

    def _route(self, line: Line, receiving: bool) -> tuple[dist.ProcessGroup, int, int, int]:
        """(group, peer's rank in it, peer's global rank, first tag) of a line, looked up once."""
        route = self._routes.get((line, receiving))
        if route is None:
            group = self._group_for(line)
            to_upper_stage = line.kind.downstream != receiving
            peer = self._peer_of(line.cut + 1 if to_upper_stage else line.cut)
            tag = (line.cut * len(Kind) + line.kind) * TAGS_PER_LINE
            route = (group, dist.get_group_rank(group, peer), peer, tag)
            self._routes[(line, receiving)] = route
        return route


def _name(line: Line) -> str:
    return f"{line.kind.name.lower()}s between stages {line.cut} and {line.cut + 1}"

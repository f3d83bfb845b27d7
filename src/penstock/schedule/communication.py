"""From compute to compute and communication: where each rank sends and receives.

The model of communication, which the executor follows:

- A message carries the result of an F to the next stage, or of a B to the stage below. Stages of one rank hand over
  locally, with no message.
- A rank posts its receives ahead, in the order given here, and waits for one only at the action that uses it. A rank
  sends right after the action that made the value.
- Whenever a sender makes progress, the send is appended to its list *and* the receive to the receiver's list. All the
  lists are thus cuts of one common order of events, so any two ranks see their common messages in one order, and no
  rank waits forever even if every send and receive blocks until the other side has reached it (rendezvous). The naive
  placement, a receive right before its use, deadlocks there for 1F1B: two neighbours send to each other and wait.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

from penstock.schedule.actions import Action, Kind, Schedule


class Direction(StrEnum):
    SEND = "SEND"
    RECEIVE = "RECV"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One side of a message: the result of `source` goes to the rank of `destination`, which uses it.

    Prints in torch's form: ``0SEND_F1`` at the sender, ``1RECV_F1`` at the receiver.
    """

    direction: Direction
    source: Action
    destination: Action
    peer: int

    def __str__(self) -> str:
        here = self.source if self.direction is Direction.SEND else self.destination
        return f"{here.stage}{self.direction.value}_{here.kind.value}{here.microbatch}"


Operation = Action | Transfer


def insert_communication(schedule: Schedule, window: int | None = None) -> tuple[tuple[Operation, ...], ...]:
    """Per rank, its actions with the sends and receives among them, in an order that is valid under rendezvous.

    Args:
        schedule: compute only, free of dependency cycles.
        window: the most messages of one channel (one cut, one direction) that a receiver holds or awaits before
            their use; ``None`` is no bound. A sender waits while its receiver's window is full.

    Raises:
        Blocked: the schedule cannot run to its end within this window.
    """
    run = _Run(schedule, window)
    while not run.finished():
        ready = [rank for rank in range(schedule.num_ranks) if run.is_ready(rank)]
        if not ready:
            raise Blocked(tuple(run.heads()))
        for rank in ready:
            run.advance(rank)
    return tuple(tuple(operations) for operations in run.operations)


class Blocked(Exception):
    """No rank can go on. `heads` holds, per rank, what it is stuck at; ``None`` for a rank that is done."""

    def __init__(self, heads: tuple[Operation | None, ...]) -> None:
        super().__init__(", ".join(f"rank {rank}: {head or 'done'}" for rank, head in enumerate(heads)))
        self.heads = heads


class _Run:
    """A schedule under way, one operation of every ready rank at a time."""

    def __init__(self, schedule: Schedule, window: int | None) -> None:
        self.schedule = schedule
        self.window = window
        self.operations: list[list[Operation]] = [[] for _ in schedule.actions]
        self._to_do: list[deque[Operation]] = [deque(actions) for actions in schedule.actions]
        # Actions whose input from another action is on their rank. A B has had its own F by then: the stages above
        # could not have run without.
        self._has_input = {Action(Kind.F, 0, microbatch) for microbatch in range(schedule.num_microbatches)}
        self._in_window: Counter[tuple[Kind, int]] = Counter()

    def finished(self) -> bool:
        return not any(self._to_do)

    def heads(self) -> list[Operation | None]:
        return [to_do[0] if to_do else None for to_do in self._to_do]

    def is_ready(self, rank: int) -> bool:
        if not self._to_do[rank]:
            return False
        head = self._to_do[rank][0]
        if isinstance(head, Action):
            return head in self._has_input
        return self.window is None or self._in_window[_channel(head.destination)] < self.window

    def advance(self, rank: int) -> None:
        head = self._to_do[rank].popleft()
        self.operations[rank].append(head)
        if isinstance(head, Transfer):
            self.operations[head.peer].append(Transfer(Direction.RECEIVE, head.source, head.destination, rank))
            if self.window is not None:
                self._in_window[_channel(head.destination)] += 1
            self._has_input.add(head.destination)
            return
        if self.window is not None:
            self._in_window[_channel(head)] -= 1
        if head.kind is Kind.B:
            self._has_input.add(Action(Kind.W, head.stage, head.microbatch))
        elif head.kind is Kind.F and head.stage == self.schedule.num_stages - 1:
            self._has_input.add(Action(Kind.B, head.stage, head.microbatch))
        user = head.feeds(self.schedule.num_stages)
        if user is None:
            return
        peer = self.schedule.stage_to_rank[user.stage]
        if peer == rank:
            self._has_input.add(user)
        else:
            self._to_do[rank].appendleft(Transfer(Direction.SEND, head, user, peer))


def _channel(user: Action) -> tuple[Kind, int]:
    return user.kind, user.stage


def sufficient_window(schedule: Schedule, window: int) -> int:
    """`window`, doubled until `schedule`, which is valid, runs with it (see `insert_communication`)."""
    while window < schedule.num_microbatches:
        try:
            insert_communication(schedule, window)
        except Blocked:
            window *= 2
        else:
            break
    return window

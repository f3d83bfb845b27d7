"""What happened when: the timed events that a simulation predicts and a run records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby


class EventKind(StrEnum):
    """What a rank is busy with. F, B and W are the kinds of action."""

    F = "F"
    B = "B"
    W = "W"
    WAIT = "wait"
    REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """`kind` on `rank` from `start` to `end`, in seconds since the step began.

    `stage` and `microbatch` are ``None`` where they say nothing (a wait, the reduction of a whole rank), `step` where
    there is only one.
    """

    rank: int
    kind: EventKind
    start: float
    end: float
    stage: int | None = None
    microbatch: int | None = None
    step: int | None = None

    @property
    def duration(self) -> float:
        return self.end - self.start


def with_waits(events: Iterable[TimedEvent], shortest: float = 0.0) -> list[TimedEvent]:
    """`events` by rank and time, with a wait wherever a rank has nothing to do until its next or the last event of all.

    Args:
        events: any order. A reduction runs beside the compute, so it does not end a wait.
        shortest: seconds; shorter gaps are no wait but the cost of going from one action to the next.
    """
    everything = sorted(events, key=lambda event: (event.rank, event.start, event.end))
    if not everything:
        return []
    finish = max(event.end for event in everything)
    begin = min(0.0, min(event.start for event in everything))
    result = []
    for rank, own in groupby(everything, key=lambda event: event.rank):
        free_from = begin
        for event in own:
            if event.kind is not EventKind.REDUCTION:
                if event.start - free_from > shortest:
                    result.append(TimedEvent(rank, EventKind.WAIT, free_from, event.start))
                free_from = max(free_from, event.end)
            result.append(event)
        if finish - free_from > shortest:
            result.append(TimedEvent(rank, EventKind.WAIT, free_from, finish))
    return result


def busy_seconds(events: Iterable[TimedEvent], num_ranks: int) -> list[float]:
    """Per rank, the seconds spent in F, B and W."""
    busy = [0.0] * num_ranks
    for event in events:
        if event.kind in (EventKind.F, EventKind.B, EventKind.W):
            busy[event.rank] += event.duration
    return busy


def bubble_fractions(events: Sequence[TimedEvent], num_ranks: int) -> list[float]:
    """Per rank, the share of the step, from its first event on any rank to its last, without F, B or W."""
    if not events:
        return [0.0] * num_ranks
    span = max(event.end for event in events) - min(event.start for event in events)
    return [1 - busy / span if span > 0 else 0.0 for busy in busy_seconds(events, num_ranks)]

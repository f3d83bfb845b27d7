"""The protocol by which the members of a run agree on the next generation. Pure: no clock, no store, no torch.

A generation ends for a member with its report: it votes in it no more. The lowest member that is not lost decides,
once every other one that is not lost has reported; who reported and lives goes on. A decision is created in the store
once and for all, so that of two members that both take themselves for the lowest one wins, and the other follows. A
member that finds itself left out ends, or asks again if it was new.

An update is voted on before it is made. The vote passes on any member only if all had their gradients; so if one
survivor has made update n, every survivor has what it takes to make it now, and does; otherwise nobody has, and the
step is run again. `Generation.step` says which, to all alike. `tests/elastic/test_protocol.py` goes through all
interleavings of a few members.

After a loss a member repeats the calls since the last update whose results are lost, or that others have not completed
(`Log`). Gradients are lost with each change. Ranks make the same calls in the same order, but one may be ahead: it has
completed a call, and dropped gradients, and is in the next call, while another has only begun the first. No further: a
call that all take part in ends on none before all have begun it; see `tests/elastic/test_log.py`. A load is repeated
only until it has ended on some member: a loss in the moments until it has ended on all may end the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Self


@dataclass(frozen=True)
class MemberMessage:
    """What members tell each other, as JSON. It consists of numbers, strings and tuples of them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**{name: _in_tuples(value) for name, value in json.loads(text).items()})


def _in_tuples(value: Any) -> Any:
    """JSON has lists for tuples."""
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class MemberReport(MemberMessage):
    """A member's last report in a generation.

    Attributes:
        committed: how many updates it has made.
        calls: how many calls it has completed since the last of these.
        dropped: of how many of them it has dropped the gradients.
        leaving: whether it is about to leave: then it is not in the next generation, unless all leave, and must hand
            over to those who join (`Generation.handing_over`).
        suspects: the members that it takes to be lost.
        held: the names of the units whose values it has.
        ready: whether it is between two steps, where others can join.
        new: whether it was to come in with this generation, which did not come about.
        going_back: whether it was loading a checkpoint that the run goes back to.
        owned: with a sharded optimizer, the names of the parameters whose state it has.
    """

    member: int
    committed: int
    calls: int = 0
    dropped: int = 0
    leaving: bool = False
    suspects: tuple[int, ...] = ()
    held: tuple[str, ...] = ()
    ready: bool = False
    new: bool = False
    going_back: bool = False
    owned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation(MemberMessage):
    """A generation, as its members decide on it: the run from one change of its members to the next.

    Attributes:
        number: counted from the run's first generation on.
        members, joining: their numbers, in the order of ranks; those of them that come new.
        step: how many updates all of them have made when it begins.
        calls: of the calls since then, how many all of them have completed.
        dropped: of how many of these all of them have dropped the gradients.
        pipelines: for each pipeline its stages (lists of units) and its microbatches.
        reason_to_stop: why the run cannot go on; empty if it can.
        lost, left: the members of the generation before that are not in this one, except those that are to ask again.
        seconds: how long planning its layout took.
        restore: the checkpoint that values come from, empty if they come from the members.
        fresh: whether all of them are between two steps.
        requests: how many requests to change the members were looked at; 0 if they are left for a later generation.
        handing_over: whether all that came before are about to leave: they are here once more, so that those who join
            get what they have.
    """

    number: int
    members: tuple[int, ...]
    joining: tuple[int, ...] = ()
    step: int = 0
    calls: int = 0
    dropped: int = 0
    pipelines: tuple[tuple[tuple[tuple[str, ...], ...], int], ...] = ()
    reason_to_stop: str = ""
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    seconds: float = 0.0
    restore: str = ""
    fresh: bool = False
    requests: int = 0
    handing_over: bool = False

    @property
    def is_first(self) -> bool:
        """Whether it begins the run."""
        return len(self.joining) == len(self.members)


class Move(Enum):
    """What a member does next to get to the next generation."""

    REPORT = "report"
    WAIT = "wait"
    DECIDE = "decide"
    ENTER = "enter"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class View:
    """What a member sees."""

    me: int
    members: tuple[int, ...]
    reports: Mapping[int, MemberReport] = field(default_factory=dict)
    lost: Collection[int] = ()
    decided: Generation | None = None


def next_move(view: View) -> Move:
    """What the member does. It decides on `successor(view)`."""
    if view.decided is not None:
        return Move.ENTER if view.me in view.decided.members else Move.LEFT_OUT
    if view.me not in view.reports:
        return Move.REPORT
    alive = [member for member in view.members if member == view.me or member not in view.lost]
    if view.me != min(alive) or any(member not in view.reports for member in alive):
        return Move.WAIT
    return Move.DECIDE


def successor(view: View) -> tuple[list[MemberReport], int, int, int]:
    """Who goes on, by their reports, and what all of them have in common then: the updates that they will have made,
    how many calls since then they have completed, and of how many of these they have dropped the gradients."""
    going_on = [
        report
        for member, report in sorted(view.reports.items())
        if member in view.members and not report.leaving and (member == view.me or member not in view.lost)
    ]
    step = max((report.committed for report in going_on), default=0)
    # A member that is still to make the last update has completed no call since.
    since = [(report.calls, report.dropped) if report.committed == step else (0, 0) for report in going_on]
    return (
        going_on,
        step,
        min((calls for calls, _ in since), default=0),
        min((dropped for _, dropped in since), default=0),
    )


@dataclass
class LoggedCall:
    """Something that all ranks do. `trains`: whether it makes or changes gradients, which are lost with the layout.
    `local`: whether a rank does it without the others; otherwise it ends on none before all have begun it. `stale`:
    whether the run went back to a checkpoint before it was done, so that it is not done any more."""

    run: Callable[[], Any]
    trains: bool
    local: bool = False
    stale: bool = False


class Log:
    """The calls since the last update, as far as they may have to be repeated. `calls`: those that may have to be
    repeated, by their numbers: the last one, which others may not have completed, and those whose gradients are not
    dropped everywhere."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.calls: dict[int, LoggedCall] = {}
        # When gradients were dropped here that others may still have: how many calls there had been, and the number of
        # the next training step. The first is where all ranks have been.
        self._drops = [(0, 0)]

    def begin(self, next_step: int) -> None:
        """An update was made, or nothing has to be repeated: no gradients, and no calls."""
        self.num_calls, self._drops = 0, [(0, next_step)]
        self.calls.clear()

    @property
    def dropped(self) -> int:
        """How many calls' gradients were dropped here."""
        return self._drops[-1][0]

    @property
    def training(self) -> list[LoggedCall]:
        """The calls that made the gradients that are here, and changed them."""
        return [call for number, call in self.calls.items() if call.trains and number >= self.dropped]

    def add(self, call: LoggedCall) -> None:
        """A call is completed."""
        if not call.local:  # so all ranks have completed those before it, and dropped what was dropped before it
            self._drops = self._drops[-1:]
            self.calls = {n: call for n, call in self.calls.items() if call.trains and n >= self.dropped}
        self.calls[self.num_calls] = call
        self.num_calls += 1

    def drop(self, next_step: int) -> None:
        """Gradients are dropped."""
        self._drops = [*(drop for drop in self._drops if drop[0] < self.num_calls), (self.num_calls, next_step)]

    def go_back(self, next_step: int) -> None:
        """The run goes back to a checkpoint: what makes the gradients that were not dropped is done there."""
        kept = self.training
        self.num_calls, self.calls, self._drops = len(kept), dict(enumerate(kept)), [(0, next_step)]

    def to_repeat(self, calls: int, dropped: int, drop: Callable[[], None]) -> tuple[list[LoggedCall], int]:
        """What this rank repeats, and the number of the training step with which it begins. `calls`, `dropped`: how
        many calls all ranks have completed, and of how many they have dropped the gradients."""
        # Gradients of calls before `self.dropped` are dropped here, but not yet on all ranks: those calls are repeated,
        # as others need this rank for them, and their gradients dropped once more.
        kept = {n: call for n, call in self.calls.items() if n >= calls or (call.trains and n >= dropped)}
        before = [call for number, call in kept.items() if number < self.dropped]
        after = [call for number, call in kept.items() if number >= self.dropped]
        if before:
            before.append(LoggedCall(drop, trains=False, local=True))
        return before + after, dict(self._drops)[dropped]

"""The protocol by which the members of a run agree on the next generation. Pure: no clock, no store, no torch.

A generation ends for a member with its report, after which it neither votes nor updates in it. The lowest member that
is not lost decides, once every other one that is not lost has reported; who reported and lives goes on. A decision is
created in the store once and for all, so that of two members that both take themselves for the lowest one wins, and
the other follows. A member that finds itself left out ends.

An update is voted on before it is made. The vote passes on any member only if all had their gradients; so if one
survivor has made update n, every survivor has what it takes to make it now, and does; otherwise nobody has, and the
step is run again. `Decision.step` says which, to all alike. `tests/test_elastic_protocol.py` goes through all
interleavings of a few members.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Self


@dataclass(frozen=True)
class Told:
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
class MemberReport(Told):
    """A member's last report in a generation.

    Attributes:
        calls: how many calls it has completed since the last one.
        dropped: of how many of them it has dropped the gradients.
        leaving: whether it will not be part of the next generation.
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
class Decision(Told):
    """A generation.

    Attributes:
        step: how many updates all of them have made when it begins.
        calls: of the calls since then, how many all of them have completed.
        dropped: of how many of these all of them have dropped the gradients.
        pipelines: for each pipeline its stages (lists of units) and its microbatches.
        end: why the run cannot go on; empty if it can.
        lost, left: the members of the generation before that are not in this one.
        restore: the checkpoint that values come from, empty if they come from the members.
        fresh: whether all of them are between two steps.
        requests: how many requests to change the members have been looked at.
    """

    generation: int
    members: tuple[int, ...]
    joining: tuple[int, ...] = ()
    step: int = 0
    calls: int = 0
    dropped: int = 0
    pipelines: tuple[tuple[tuple[tuple[str, ...], ...], int], ...] = ()
    end: str = ""
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    seconds: float = 0.0
    restore: str = ""
    fresh: bool = False
    requests: int = 0

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
    END = "end"  # left out


@dataclass(frozen=True)
class View:
    """What a member sees."""

    me: int
    members: tuple[int, ...]
    reports: Mapping[int, MemberReport] = field(default_factory=dict)
    lost: Collection[int] = ()
    decided: Decision | None = None


def next_move(view: View) -> Move:
    """What the member does. It decides on `successor(view)`."""
    if view.decided is not None:
        return Move.ENTER if view.me in view.decided.members else Move.END
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

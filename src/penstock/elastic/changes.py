"""What a member records of the changes of a run's members, with the seconds of each phase."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import torch.distributed as dist

from penstock.elastic.protocol import Generation

logger = logging.getLogger("penstock")

PHASES = ("detect", "agree", "plan", "form", "move", "redo")


@dataclass
class Change:
    """A change of a run's members, as one of them saw it.

    Attributes:
        generation: that it led to.
        cause: the failure, or why it was planned.
        lost, left, joined: numbers of members.
        pipelines: stages and microbatches of each, as `2x4`.
        restored: the checkpoint that the run went back to, empty if it did not.
        step: updates made before it.
        at: when this member noticed, seconds since the epoch.
        seconds: of each phase. detect: from when this member learned of the failure to the beginning of the change.
            agree: until all members that are left had reported, and one decided. plan: that it took to choose the
            layout. form: process groups and stages. move: weights, optimizer state and objects. redo: what was
            repeated, until as much was computed as before.
        num_bytes: of weights and buffers that this member holds newly; 0 after going back to a checkpoint.
    """

    generation: int
    cause: str
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    pipelines: tuple[str, ...] = ()
    restored: str = ""
    step: int = 0
    at: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        names = {"lost": self.lost, "left": self.left, "joined": self.joined}
        who = "; ".join(
            f"member{'s' if len(members) > 1 else ''} {', '.join(map(str, members))} {what}"
            for what, members in names.items()
            if members
        )
        phases = ", ".join(f"{name} {self.seconds.get(name, 0.0):.2f}" for name in PHASES)
        back = f", back to {self.restored}" if self.restored else ""
        return (
            f"generation {self.generation} at step {self.step}: {who or self.cause}; now {' + '.join(self.pipelines)} "
            f"(stages x microbatches){back}; {self.total:.2f} s: {phases}"
        )


class ChangeRecords:
    """One change after the other: each begins, its generation forms, and what was lost is done again.

    Attributes:
        complete: the changes after which all that was lost was done again.
    """

    def __init__(self) -> None:
        self.complete: list[Change] = []
        # The change under way, until what was lost is done again.
        self._change: Change | None = None
        # Whether the generation to which it led came about.
        self._has_formed = True
        # Those before it that formed, and were hit by a loss before all was done again.
        self._interrupted: list[Change] = []
        self._redo_from = 0.0

    def begin(self, following: Generation, cause: str, step: int, started: float, failed_at: float) -> Change:
        """The record of a change that has begun, in which the phases to come are still to be entered.

        Args:
            following: the generation that it leads to.
            step: updates made until now.
            started, failed_at: when it began, and when this member learned of the failure (0 if there is none), seconds
                since the epoch.
        """
        lost, left, joined = tuple(following.lost), tuple(following.left), tuple(following.joining)
        if self._change is not None and self._has_formed:  # it was hit while what it lost was done again
            self._interrupted.append(self._change)
        elif self._change is not None:  # its generation was lost before it formed here: this one has followed instead
            lost, left = (*self._change.lost, *lost), (*self._change.left, *left)
            joined = tuple(dict.fromkeys(each for each in (*self._change.joined, *joined) if each in following.members))
        seconds = {
            "detect": max(0.0, started - failed_at) if failed_at else 0.0,
            "agree": time.time() - started - following.seconds,
            "plan": following.seconds,
        }
        pipelines = tuple(f"{len(stages)}x{count}" for stages, count in following.pipelines)
        at = failed_at or started
        self._change = Change(
            following.number, cause, lost, left, joined, pipelines, following.restore, step, at, seconds
        )
        self._has_formed = False
        return self._change

    def formed(self) -> None:
        """The generation has come about here."""
        self._redo_from, self._has_formed = time.perf_counter(), True

    def redone(self) -> None:
        """All that was lost is done again. Without a change under way nothing happens."""
        if self._change is None:
            return
        self._change.seconds["redo"] = time.perf_counter() - self._redo_from
        finished, self._change, self._interrupted = [*self._interrupted, self._change], None, []
        self.complete += finished
        for change in finished if dist.get_rank() == 0 else ():
            logger.warning("%s", change)

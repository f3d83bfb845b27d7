"""A host that waits for long for others: all ranks are asked where they are, and it says so once, or ends the run where
that shows that the wait can never end."""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass
from typing import Any

from penstock.runtime.failures.account import Watching
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.failures.position import difference

logger = logging.getLogger("penstock")

# How long the others have to say where they are.
ANSWER_SECONDS = 1.0


@dataclass
class _Wait:
    """What was last seen of a board's host: where it was, since when, and whether it was said that it waits there."""

    mark: Any = None
    since: float = 0.0
    reported: bool = False


class Inquiries:
    """The questions of this rank's watcher, one at a time."""

    def __init__(self, watch: Watching):
        self._watch = watch
        self._waits: weakref.WeakKeyDictionary[FailureBoard, _Wait] = weakref.WeakKeyDictionary()
        # Of the latest question: its number, who asked, when, and what each rank answered.
        self._question = 0
        self._asking: FailureBoard | None = None
        self._asked_at = 0.0
        self._answers: dict[int, dict[str, Any]] = {}

    def look_after(self, board: FailureBoard) -> None:
        """Report a host that has waited for long in one place."""
        wait = self._waits.setdefault(board, _Wait())
        mark, now = board.position.mark(), time.monotonic()
        if mark != wait.mark or not board.position.waits():
            wait.mark, wait.since, wait.reported = mark, now, False
            if self._asking is board:
                self._asking = None
        elif self._asking is board and now - self._asked_at >= ANSWER_SECONDS:
            self._asking, wait.reported = None, True
            self._conclude(board, now - wait.since)
        elif self._asking is None and not wait.reported and now - wait.since >= board.patience:
            self._answers = {}
            self._asking, self._asked_at = board, now
            self._question += 1
            self._watch.tell({"where": self._question, "board": board.name})

    def answer(self, board: FailureBoard, origin: int, question: int) -> None:
        """Tell the rank that asked where this one is."""
        self._watch.tell({"at": board.position.report(), "to": origin, "question": question})

    def hear(self, origin: int, news: dict[str, Any]) -> None:
        """A rank has answered somebody's question."""
        if news["to"] == self._watch.rank and news["question"] == self._question:
            self._answers[origin] = news["at"]

    def _conclude(self, board: FailureBoard, waited: float) -> None:
        """The others have said where they are."""
        rank, everyone = self._watch.rank, range(self._watch.world_size)
        mine = board.position.report()
        others = {other: self._answers[other] for other in everyone if other in self._answers}
        impossible = [
            other for other, theirs in others.items() if difference(mine, theirs, other in board.mates) is not None
        ]
        gone = [other for other in sorted(self._watch.endings.left) if other not in others]
        here = [f"rank {rank} has waited {waited:.0f} s in {mine['words']}"]
        there = [
            f"rank {other} is in {theirs['words']}" for other, theirs in others.items()
            if other in impossible or not (theirs["waits"] and theirs["words"] == mine["words"])
        ]  # fmt: skip
        there += [f"rank {other} has ended its program" for other in gone]
        silent = [other for other in everyone if other not in others and other not in gone and other != rank]
        there += [f"rank {other} does not answer" for other in silent]
        if not there:
            there = ["all other ranks wait there too"]
        said = "; ".join([*here, *there[:8]]) + ": every rank of a pipeline must make the same calls"
        needed = [other for other in gone if other in board.mates or mine["calls"][-1][2] is not None]
        if impossible or needed:
            board.fail(f"{said}; this can never end", suspects=())
        else:
            logger.warning(said)

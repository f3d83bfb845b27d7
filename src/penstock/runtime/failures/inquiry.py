"""A rank whose main thread waits for long for others: its watcher asks all ranks where they are.

It logs the answers once, or ends the run where they show that the wait can never end.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from dataclasses import dataclass
from typing import Any

from penstock.runtime.failures.board import FailureBoard, Watching
from penstock.runtime.failures.position import Among, CallRecord, differ
from penstock.runtime.threads import start_thread

logger = logging.getLogger("penstock")

# How long the others have to say where they are, and how much longer for each of them.
ANSWER_SECONDS, SECONDS_EACH = 1.0, 0.002
# Delay per doubling of the rank number, so that the lowest rank that waits asks for all.
TURN_SECONDS = 1.0
# A rank whose question was asked by another one, or was not answered, waits so many times its patience.
ASK_AGAIN_FACTOR = 10


@dataclass
class _Wait:
    """What was last seen of the main thread that uses a board: where it was, since when, when to ask for it, and
    whether this wait was reported."""

    mark: Any = None
    since: float = 0.0
    ask_at: float = math.inf
    reported: bool = False


class Inquiries:
    """The questions of this rank's watcher, one at a time.

    One rank asks for all that wait in a call, the lowest of them: the others give it the time to, and take its question
    for theirs. It is answered directly, by those that take part in the call. If one does not answer, all are told. The
    rank before one that has been stopped asks at once.
    """

    def __init__(self, watch: Watching):
        self._watch = watch
        self._waits: weakref.WeakKeyDictionary[FailureBoard, _Wait] = weakref.WeakKeyDictionary()
        # Of the latest question: its number, who asked, when, and what each rank answered.
        self._question = 0
        self._asking: FailureBoard | None = None
        self._asked_at = 0.0
        self._answers: dict[int, dict[str, Any]] = {}

    def look_after(self, board: FailureBoard) -> None:
        """Report a main thread that has waited for long in one place."""
        wait = self._waits.setdefault(board, _Wait())
        mark, now = board.position.mark(), time.monotonic()
        if mark != wait.mark or not board.position.waits():
            wait.reported = False
            wait.mark, wait.since, wait.ask_at = mark, now, now + board.patience + self._turn(board)
            if self._asking is board:
                self._asking = None
        elif self._asking is board and now - self._asked_at >= ANSWER_SECONDS + SECONDS_EACH * self._watch.world_size:
            self._asking, waited = None, now - wait.since
            silent = self._conclude(board, waited, wait.reported)
            if silent or waited >= board.patience:
                wait.reported, wait.ask_at = True, now + ASK_AGAIN_FACTOR * board.patience if silent else math.inf
        elif self._asking is None and (now >= wait.ask_at or (self._watch.ring.next_is_stopped and not wait.reported)):
            self._answers = {}
            self._asking, self._asked_at = board, now
            self._question += 1
            question = {
                "where": self._question, "board": board.name, "to": self._watch.ring.address,
                "call": _call(board.position.report()),
            }  # fmt: skip
            self._watch.ring.tell(question, lasting=False)

    def answer(self, board: FailureBoard, origin: int, question: dict[str, Any]) -> None:
        """Tell a rank that asks where this one is, if that is of use to it."""
        mine, call = board.position.report(), CallRecord(*question["call"])
        if origin not in board.ranks_of(call.among):
            return
        mine["pipeline"] = min(board.ranks_of(Among.PIPELINE))
        answer = {"at": mine, "question": question["where"]}
        start_thread(self._watch.ring.tell_one, question["to"], answer, name="penstock-answer")
        if mine["waits"] and _is_same(call, _call(mine)):
            self._waits.setdefault(board, _Wait()).ask_at = time.monotonic() + ASK_AGAIN_FACTOR * board.patience
            if self._asking is board and origin < self._watch.rank:
                self._asking = None

    def hear(self, origin: int, news: dict[str, Any]) -> None:
        """A rank has answered a question of this one."""
        if news["question"] == self._question:
            self._answers[origin] = news["at"]

    def _turn(self, board: FailureBoard) -> float:
        """How many seconds others have to ask first."""
        asked = board.ranks_of(_call(board.position.report()).among)
        return TURN_SECONDS * sum(rank < self._watch.rank for rank in asked).bit_length()

    def _conclude(self, board: FailureBoard, waited: float, reported: bool) -> bool:
        """Say where the others are, unless that was `reported`; returns whether to ask again: some gave no answer."""
        rank, mine = self._watch.rank, board.position.report()
        asked = board.ranks_of(_call(mine).among)
        others = {other: self._answers[other] for other in asked if other in self._answers}
        # Ranks of other pipelines are compared among themselves, too: nobody else asks them.
        first = {theirs["pipeline"]: theirs for theirs in reversed(others.values())}
        impossible = [
            other for other, theirs in others.items()
            if differ(mine, theirs, next(among for among in Among if other in board.ranks_of(among)))
            or differ(first[theirs["pipeline"]], theirs, Among.PIPELINE)
        ]  # fmt: skip
        gone = [other for other in sorted(self._watch.endings.left) if other in asked and other not in others]
        here = [f"rank {rank} has waited {waited:.0f} s in {mine['words']}"]
        silent = [other for other in asked if other not in others and other not in gone and other != rank]
        there = [f"rank {other} does not answer" for other in silent]
        there += [f"rank {other} has ended its program" for other in gone]
        there += [
            f"rank {other} is in {theirs['words']}" for other, theirs in others.items()
            if other in impossible or not (theirs["waits"] and theirs["words"] == mine["words"])
        ]  # fmt: skip
        if not there:
            there = ["all other ranks wait there too"]
        message = "; ".join([*here, *there[:8]])
        if impossible or gone:
            among = Among.ALL if len(asked) == self._watch.world_size else _call(mine).among
            board.fail(f"{message}: {among.in_words} must make the same calls; this can never end", suspects=())
        elif not reported and (silent or waited >= board.patience):
            message += ": still waiting"
            logger.warning(message)
            if silent:
                self._watch.ring.tell({"board": board.name, "said": message}, lasting=False)
        return bool(silent)


def _call(report: dict[str, Any]) -> CallRecord:
    """The call that a rank is in, or was in last."""
    return CallRecord(*report["calls"][-1]) if report["calls"] else CallRecord("", [-1 for _ in Among])


def _is_same(one: CallRecord, other: CallRecord) -> bool:
    """Whether two ranks, which both take part in the calls of `one.among`, are in one call."""
    return (one.name, one.among, one.numbers[one.among]) == (other.name, other.among, other.numbers[other.among])

"""What a member repeats after a loss: the calls since the last update whose results are lost, or that others have not
completed. Gradients are lost with every layout. Pure: no clock, no store, no torch.

Ranks make the same calls in the same order, but one may be ahead: it has completed a call, and dropped gradients, and
is in the next call, while another has only begun the first. No further: a call that all take part in ends on none
before all have begun it. `tests/test_elastic_log.py` goes through such programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class LoggedCall:
    """Something that all ranks do. `trains`: whether it makes gradients, which are lost with the layout. `local`:
    whether a rank does it without the others; otherwise it ends on none before all have begun it. `stale`: whether the
    run went back to a checkpoint before it was done, so that it is not done any more."""

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
    def trains(self) -> bool:
        """Whether there are gradients."""
        return bool(self.training)

    @property
    def training(self) -> list[LoggedCall]:
        """The calls that made the gradients that are here."""
        return [call for number, call in self.calls.items() if call.trains and number >= self.dropped]

    def add(self, call: LoggedCall) -> None:
        """A call is completed."""
        if not call.local:  # so all ranks have completed those before it, and dropped what was dropped before it
            self._drops = self._drops[-1:]
            self.calls = {n: one for n, one in self.calls.items() if one.trains and n >= self.dropped}
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
        kept = {n: one for n, one in self.calls.items() if n >= calls or (one.trains and n >= dropped)}
        before = [one for number, one in kept.items() if number < self.dropped]
        after = [one for number, one in kept.items() if number >= self.dropped]
        if before:
            before.append(LoggedCall(drop, trains=False, local=True))
        return before + after, dict(self._drops)[dropped]

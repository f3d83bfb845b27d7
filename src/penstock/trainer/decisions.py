"""What callbacks decide: stopping, logging, evaluating and saving are made alike on all ranks, as rank 0 has them.

A callback with a time limit may ask for something on rank 0 alone, or at another step than on another rank. All ranks
do together what it asks for, so they exchange their decisions after each event that leads to one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerControl
from transformers.trainer_callback import CallbackHandler

from penstock.runtime.comm.settings import in_words

# What the Trainer asks its control for.
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
# The events after which it does, and that all ranks have. Its logs are not among them: a script may log on one rank.
EVENTS = frozenset({"on_step_end", "on_substep_end", "on_epoch_end", "on_evaluate", "on_save"})

# Hands numbers of this rank to all others. Gives those of each rank, or, if all are alike, of some.
Exchange = Callable[[Sequence[int]], Mapping[int, Sequence[int]]]


class CommonDecisions(CallbackHandler):  # type: ignore[misc]  # a library without types
    """A Trainer's callbacks, whose decisions are those of rank 0. `own`: its own handler, whose place this takes."""

    def __init__(self, own: CallbackHandler, exchange: Exchange) -> None:
        self.__dict__.update(own.__dict__)
        self._exchange = exchange

    def call_event(self, event: str, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        control = super().call_event(event, args, state, control, **kwargs)
        if event in EVENTS:
            self.agree(control)
        return control

    def agree(self, control: TrainerControl) -> None:
        """Set `control` to what rank 0 has. Every rank calls this."""
        mine = sum(getattr(control, name) << place for place, name in enumerate(FLAGS))
        by_rank = {rank: theirs[0] for rank, theirs in self._exchange([mine]).items()}
        first = by_rank[min(by_rank)]
        for place, name in enumerate(FLAGS):
            setattr(control, name, bool(first >> place & 1))
        ignored = {rank: theirs & ~first for rank, theirs in by_rank.items() if theirs & ~first}
        if ignored and mine == first:
            asked = in_words(ignored, _names, " asked for ")
            warnings.warn(f"{asked}, but rank 0 did not: decisions of callbacks are rank 0's", stacklevel=2)


def _names(flags: int) -> str:
    return ", ".join(name for place, name in enumerate(FLAGS) if flags >> place & 1)

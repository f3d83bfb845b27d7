"""What one rank executes steps with, and how it opens a stage at the start of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from penstock.modeling.split import SplitModel
from penstock.schedule.actions import Action, Kind

from .channel import Channel
from .exchange import Exchange
from .failure import FailureBoard
from .inputs import StepInputs
from .notice import Notice, check_notice
from .precision import ScaleWatch
from .reduction import GradientReducer
from .totals import Totals
from .weight_gradients import WeightGradientQueues


@dataclass(frozen=True)
class Station:
    """What one rank executes steps with."""

    split: SplitModel
    parameters: Sequence[torch.nn.Parameter]
    exchange: Exchange
    channel: Channel
    reducer: GradientReducer
    queues: WeightGradientQueues
    board: FailureBoard
    device: torch.device
    everyone: Sequence[int]
    seed: int
    totals: Totals
    scaling: ScaleWatch
    # Makes an overflow on one rank an overflow on all, after the gradients are reduced.
    share_overflow: Callable[[], None]


class StageOpener:
    """Before a stage's first forward of a step: compares notes with the stage below, passes them on, posts receives."""

    def __init__(self, station: Station, actions: Iterable[Action], inputs: StepInputs):
        self._exchange = station.exchange
        num_values = [len(cut) for cut in inputs.plans[0].cuts] if inputs.plans else []
        self._exchange.begin(microbatch_orders(actions), inputs.signatures, num_values)
        self._notice = Notice.of(inputs, station.parameters, station.device)
        # By stage: the state (see Notice) of all stages below it, and of all up to and with it.
        self._below: dict[int, int] = {}
        self._upto: dict[int, int] = {}

    def open(self, stage: int) -> int:
        """Open `stage` unless it is open; return the state of the stages below it."""
        if stage not in self._below:
            theirs = self._exchange.take_notice(stage, len(self._notice))
            if theirs is not None:
                check_notice(Notice(*theirs), self._notice, stage)
                self._below[stage] = theirs[-1]
            else:
                # The first stage, or the stage below sits on this rank.
                self._below[stage] = self._upto[stage - 1] if stage else 0
            notice = self._notice.after(self._below[stage])
            self._upto[stage] = notice.state
            self._exchange.give_notice(stage, notice)
            self._exchange.post_activations(stage, self._below[stage])
        return self._below[stage]


def microbatch_orders(actions: Iterable[Action]) -> dict[int, tuple[list[int], list[int]]]:
    """For each stage of `actions`, its microbatches in forward and in backward order."""
    orders: dict[int, tuple[list[int], list[int]]] = {}
    for action in actions:
        forward, backward = orders.setdefault(action.stage, ([], []))
        if action.kind is not Kind.W:
            (forward if action.kind is Kind.F else backward).append(action.microbatch)
    return orders

"""What one rank executes steps with, and how it opens a stage at the start of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from penstock.modeling.stage.split import SplitModel
from penstock.schedule.communication import Step

from .channel import Channel
from .exchange import Exchange
from .failure import FailureBoard
from .inputs import StepInputs
from .interrupts import Interrupts
from .notice import Notice
from .precision import ScaleWatch
from .program import Orders
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
    interrupts: Interrupts = field(default_factory=Interrupts)
    # The ranks that share this rank's stages compute each microbatch together, so none may leave a step alone.
    computes_together: bool = False


class StageOpener:
    """Before a stage's first forward of a step: takes the notice of the stage below, passes it on, posts receives.

    Attributes:
        states: for each stage that was opened, the state (see `Notice`) of all stages up to and with it.
    """

    def __init__(self, station: Station, orders: Orders, inputs: StepInputs):
        self._exchange = station.exchange
        num_values = [len(cut) for cut in inputs.plans[0].boundaries] if inputs.plans else []
        self._exchange.begin(orders, inputs.signatures, num_values)
        self._notice = Notice.of(station.parameters, station.device)
        self.states: dict[int, int] = {}

    def open(self, stage: int) -> None:
        """Open `stage`, whose first forward is due."""
        below, above = self._exchange.below[stage], self._exchange.above.get(stage)
        theirs = below.take_notice(len(self._notice))
        if theirs is not None:
            state = theirs[-1]
        else:
            # The first stage, or the stage below sits on this rank.
            state = self.states[stage - 1] if stage else 0
        below.open(state)
        notice = self._notice.after(state)
        self.states[stage] = notice.state
        if above is not None:
            above.give_notice(notice)
            above.open(notice.state)

    def post(self, users: Iterable[Step]) -> None:
        """Post the receives of the messages that `users` will use, after opening their stages."""
        for user in users:
            if user.stage not in self.states:
                self.open(user.stage)
            self._exchange.post(user)

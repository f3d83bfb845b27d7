"""What one rank does in a step of a schedule, with everything that can be said of it before the step."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from penstock.runtime.boundary.boundaries import Boundaries, Orders
from penstock.runtime.boundary.p2p import SENDS_AHEAD
from penstock.runtime.inputs import StepInputs
from penstock.schedule.actions import Action, Kind, Schedule
from penstock.schedule.communication import Posts, posts_of, within_window

_boundaries = attrgetter("boundaries")


@dataclass(frozen=True)
class Program:
    """One rank's part of a schedule.

    Attributes:
        actions: what the rank computes, in order.
        orders: the microbatches of each of its stages in forward and in backward order.
        last: the pipeline's last stage, on whatever rank.
        top: the highest of the rank's stages, whose backward is the caller's.
        splits_backward: whether weight gradients have actions of their own.
        final_backward: the position of the last backward, -1 if there is none.
        whole_backwards: positions of backwards on stage 0 whose weight gradients follow at once: they compute them,
            too; see `Schedule.whole_backwards`.
        final_weights: positions at which a stage's last weight gradients are computed.
        sends_ahead: `SENDS_AHEAD`, or more if the schedule needs more messages under way, lest it gets stuck.
        posts: for each action, which receives are posted there. Empty where they are posted as far ahead as there is
            room, see `P2PChannels.receives_ahead`.
    """

    actions: Sequence[Action]
    orders: Orders
    top: int
    last: int
    splits_backward: bool
    final_backward: int
    whole_backwards: Collection[int]
    final_weights: Collection[int]
    sends_ahead: int
    posts: Sequence[Posts]

    def prepare(self, boundaries: Boundaries, inputs: StepInputs, states: Sequence[Hashable]) -> None:
        """Make ready for the messages of a step or an evaluation; `states`: see `Boundaries.prepare`."""
        boundaries.channels.sends_ahead = self.sends_ahead
        crossing = list(zip(*map(_boundaries, inputs.plans), strict=True))
        boundaries.prepare(self.orders, inputs.signatures, crossing, states)

    @classmethod
    def of(cls, schedule: Schedule, rank: int, far_ahead: bool) -> Program:
        """The program of `rank`, a rank in the pipeline. `far_ahead`: see `posts`."""
        actions = schedule.actions[rank]
        orders: dict[int, tuple[list[int], list[int]]] = {}
        for action in actions:
            if action.kind is not Kind.W:
                forward, backward = orders.setdefault(action.stage, ([], []))
                (backward if action.kind is Kind.B else forward).append(action.microbatch)
        backwards = [i for i, action in enumerate(actions) if action.kind is Kind.B]
        final_weights = {action.stage: i for i, action in enumerate(actions) if action.kind is Kind.W}
        # What runs within a window runs within any larger one: mostly one imagined run is enough.
        window, posts = (SENDS_AHEAD + 1, ()) if far_ahead else posts_of(schedule, rank)
        if window > SENDS_AHEAD:
            window, _ = within_window(schedule, SENDS_AHEAD)
        return cls(
            actions=actions,
            orders=orders,
            top=schedule.top_stage(rank),
            last=schedule.num_stages - 1,
            splits_backward=schedule.splits_backward,
            final_backward=backwards[-1] if backwards else -1,
            whole_backwards=schedule.whole_backwards(rank),
            final_weights=frozenset(final_weights.values()),
            sends_ahead=max(window, SENDS_AHEAD),
            posts=posts,
        )

"""What runs when, as data: actions, and per pipeline rank the ordered list of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


class Kind(StrEnum):
    """What an action computes.

    ``B`` leaves weight gradients that can be deferred, those of most linear layers, to a later ``W`` where the schedule
    has ``splits_backward``, and is the whole backward otherwise.
    """

    F = "F"
    B = "B"
    W = "W"

    # Actions are keys of large sets; Enum's own hash is a Python function and costs as much as all the rest.
    __hash__ = str.__hash__


class Action(NamedTuple):
    """One piece of compute: `kind` on `stage` for `microbatch`. Prints as ``0F1``: stage, kind, microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    def prerequisites(self, num_stages: int) -> tuple[Action, ...]:
        """The actions that must be over before this one starts, if there are `num_stages`."""
        if self.kind is Kind.F:
            return (Action(Kind.F, self.stage - 1, self.microbatch),) if self.stage > 0 else ()
        if self.kind is Kind.W:
            return (Action(Kind.B, self.stage, self.microbatch),)
        own_forward = Action(Kind.F, self.stage, self.microbatch)
        if self.stage == num_stages - 1:
            return (own_forward,)
        return (own_forward, Action(Kind.B, self.stage + 1, self.microbatch))

    def feeds(self, num_stages: int) -> Action | None:
        """The action on another of `num_stages` stages that uses this one's result: the next F, or the previous B."""
        stage = self.stage + 1 if self.kind is Kind.F else self.stage - 1
        if self.kind is Kind.W or not 0 <= stage < num_stages:
            return None
        return Action(self.kind, stage, self.microbatch)


class ScheduleError(ValueError):
    """A schedule that cannot run, or would not compute the whole step."""


@dataclass(frozen=True)
class Schedule:
    """The compute of one training step of one pipeline. Communication and reduction follow from it and are not in it.

    Attributes:
        name: the name that `build` knows it by, or a label for a user's own schedule.
        num_stages: length of the chain of stages, over all ranks.
        num_microbatches: microbatches per step.
        stage_to_rank: the pipeline rank that holds each stage.
        actions: per rank, its actions in execution order.
        splits_backward: whether ``B`` leaves weight gradients of linear layers to a later ``W``.
    """

    name: str
    num_stages: int
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    splits_backward: bool

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in the order of the chain."""
        return tuple(stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank)

    def top_stage(self, rank: int) -> int:
        """The highest stage of `rank`: the first of its stages to run the backward of a microbatch."""
        return self.stages_of(rank)[-1]

    def whole_backwards(self, rank: int) -> frozenset[int]:
        """Positions, in the actions of `rank`, of each B that may as well compute its W.

        Those of the first stage, which owes nobody a gradient, whose W follows at once.
        """
        if not self.splits_backward or 0 not in self.stages_of(rank):
            return frozenset()
        weight = Kind.W
        return frozenset(
            position
            for position, (action, following) in enumerate(pairwise(self.actions[rank]))
            if following[0] is weight and action == (Kind.B, 0, following[2]) and following[1] == 0
        )

    def is_local(self, stage: int, neighbour: int) -> bool:
        """Whether `stage` and `neighbour` sit on one rank, so that values pass between them without a message."""
        return self.stage_to_rank[stage] == self.stage_to_rank[neighbour]

    def forwards(self) -> Schedule:
        """The forwards alone, as evaluation runs them."""
        actions = tuple(tuple(action for action in row if action.kind is Kind.F) for row in self.actions)
        return replace(self, actions=actions, splits_backward=False)

    @property
    def last_kind(self) -> Kind:
        """The action after which a microbatch's activations on a stage are no longer needed."""
        return Kind.W if self.splits_backward else Kind.B

    def peaks(self, of_stage: Sequence[float]) -> tuple[float, ...]:
        """Per rank, the most that is held at once over its stages, each of which holds `of_stage` for a microbatch from
        its F to the end of its backward."""
        peaks = []
        for actions in self.actions:
            held = peak = 0.0
            for action in actions:
                if action.kind is Kind.F:
                    held += of_stage[action.stage]
                    peak = max(peak, held)
                elif action.kind is self.last_kind:
                    held -= of_stage[action.stage]
            peaks.append(peak)
        return tuple(peaks)


def check_trains(schedule: Schedule, whose: str = "a step") -> None:
    """Check that `schedule` has backwards: one that was written out has them for its own number of microbatches only.

    Args:
        whose: for the message.

    Raises:
        ScheduleError: it can only evaluate.
    """
    if not any(action.kind is Kind.B for action in schedule.actions[0]):
        number = schedule.num_microbatches
        raise ScheduleError(
            f"schedule {schedule.name!r} is not written for {number} microbatches, as {whose} has: it can only "
            f"evaluate with them. Train with the number that it is written for, or write one for {number}"
        )

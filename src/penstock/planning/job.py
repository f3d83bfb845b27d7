"""What is to be planned: a model's costs, devices, microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.planning.cluster import Cluster
from penstock.planning.memory import Held
from penstock.planning.profile import Profile, UnitCost
from penstock.schedule import schedule_names

# GPipe takes as long as 1F1B and holds more.
SCHEDULES = tuple(name for name in schedule_names() if name != "gpipe")


@dataclass(frozen=True)
class Job:
    """What is to be planned.

    Attributes:
        profile: the model's costs; its microbatch is the run's.
        cluster: the devices.
        num_microbatches: of a step, over all pipelines.
        copies: the least number of pipelines, and of nodes where there are several, that hold each unit.
        checkpointing: whether activations are recomputed in the backward.
        schedules: that may be chosen; the same for all pipelines of a layout.
    """

    profile: Profile
    cluster: Cluster
    num_microbatches: int
    copies: int = 1
    checkpointing: bool = False
    schedules: tuple[str, ...] = SCHEDULES

    def __post_init__(self) -> None:
        if self.copies < 1 or self.num_microbatches < 1:
            raise ValueError(
                f"copies and microbatches must be at least 1, but are {self.copies} and {self.num_microbatches}"
            )

    @cached_property
    def parts(self) -> tuple[tuple[UnitCost, ...], ...]:
        return self.profile.parts(self.checkpointing)

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """What each part holds."""
        return tuple(Held.together(unit.held for unit in part) for part in self.parts)

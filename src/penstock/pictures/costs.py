"""What the actions and messages of a pipeline cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.schedule.actions import Schedule

Number = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Costs of one pipeline. Each is one number for all stages or boundaries, or one per stage or boundary.

    A message takes ``message_bytes / bandwidth + latency`` seconds (the alpha-beta model). It occupies its link, one
    per ordered pair of ranks, for the first part only: latency delays a message and not those behind it.

    Attributes:
        forward: seconds of an F, per stage.
        backward: seconds of the input gradient, per stage.
        weight: seconds of the weight gradient, per stage. A schedule that does not split the backward spends
            ``backward + weight`` on its B, so the same costs serve every schedule.
        latency: seconds, per boundary.
        bandwidth: bytes per second, per boundary.
        message_bytes: size of an activation, and of its gradient, per boundary.
        activation_bytes: what a stage holds for one microbatch from its F to the end of its backward, per stage.
    """

    forward: Number = 1.0
    backward: Number = 1.0
    weight: Number = 1.0
    latency: Number = 0.0
    bandwidth: Number = math.inf
    message_bytes: Number = 0.0
    activation_bytes: Number = 0.0

    @classmethod
    def of_stages(cls, seconds: Iterable[Sequence[float]]) -> Costs:
        """Costs without messages, from the seconds of F, B and W of each stage."""
        forward, backward, weight = (tuple(column) for column in zip(*seconds, strict=True))
        return cls(forward, backward, weight)

    def per_stage(self, num_stages: int) -> StageCosts:
        """These costs written out for every stage and boundary of a pipeline of `num_stages`.

        Raises:
            ValueError: a sequence of another length, a negative or undefined number, or a bandwidth of 0.
        """
        num_boundaries = num_stages - 1
        bandwidth = _spread("bandwidth", self.bandwidth, num_boundaries, "boundaries")
        if 0 in bandwidth:
            raise ValueError("bandwidth must be above 0 bytes per second")
        message_bytes = _spread("message_bytes", self.message_bytes, num_boundaries, "boundaries")
        return StageCosts(
            forward=_spread("forward", self.forward, num_stages, "stages"),
            backward=_spread("backward", self.backward, num_stages, "stages"),
            weight=_spread("weight", self.weight, num_stages, "stages"),
            latency=_spread("latency", self.latency, num_boundaries, "boundaries"),
            occupancy=tuple(size / rate for size, rate in zip(message_bytes, bandwidth, strict=True)),
            activation_bytes=_spread("activation_bytes", self.activation_bytes, num_stages, "stages"),
        )


@dataclass(frozen=True)
class StageCosts:
    """`Costs` for a given number of stages; `occupancy` is how long a message over a boundary keeps its link."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    latency: tuple[float, ...]
    occupancy: tuple[float, ...]
    activation_bytes: tuple[float, ...]


def divide_over_stages(per_rank: Sequence[float], schedule: Schedule) -> list[float]:
    """Costs of one stage each, from costs `per_rank` of everything a rank holds: its stages in `schedule` share them
    equally.

    Compares schedules with a different number of stages per rank on the same work.

    Raises:
        ValueError: not one number per rank.
    """
    if len(per_rank) != schedule.num_ranks:
        raise ValueError(
            f"schedule {schedule.name!r} has {schedule.num_ranks} ranks but {len(per_rank)} costs were given"
        )
    return [per_rank[rank] / len(schedule.stages_of(rank)) for rank in schedule.stage_to_rank]


def _spread(name: str, value: Number, length: int, of_what: str) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * length
    if len(values) != length:
        raise ValueError(f"{name} has {len(values)} numbers for {length} {of_what}")
    if any(math.isnan(number) or number < 0 for number in values):
        raise ValueError(f"{name} must not be negative, but is {value}")
    return values

"""How much memory a stage needs: the one model of it, for the planner and for the benchmark's refusal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.schedule import Kind, Schedule

_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer", "activations")
        return ", ".join(f"{name} {readable(getattr(self, name))}" for name in parts)


@dataclass(frozen=True)
class Held:
    """What units hold, in bytes.

    Attributes:
        weights, gradients, optimizer: for as long as the run lasts.
        kept: for each microbatch, from its forward to the end of its backward.
        working: besides, while an action is under way.
        deferred: for each microbatch in place of `kept`, from its input gradient to its weight gradient, where a
            schedule splits the backward: inputs and gradients of the layers.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    kept: float = 0.0
    working: float = 0.0
    deferred: float = 0.0

    @property
    def state(self) -> float:
        """What is held without any microbatch."""
        return self.weights + self.gradients + self.optimizer

    def with_live(self, microbatches: int) -> float:
        """Bytes with so many microbatches between their forward and the end of their backward."""
        return self.state + microbatches * self.kept + self.working

    @staticmethod
    def together(parts: Iterable[Held]) -> Held:
        """What units hold on one stage: only one of them works at a time."""
        weights = gradients = optimizer = kept = working = deferred = 0.0
        for part in parts:
            weights += part.weights
            gradients += part.gradients
            optimizer += part.optimizer
            kept += part.kept
            working = max(working, part.working)
            deferred += part.deferred
        return Held(weights, gradients, optimizer, kept, working, deferred)


def memory_of_ranks(schedule: Schedule, stages: Sequence[Held]) -> list[MemoryEstimate]:
    """The most that each rank of a pipeline holds at once in a step.

    Activations are followed action by action, as the stages of a rank need not peak together.

    Args:
        stages: for each stage of the schedule.
    """
    found = []
    for rank, actions in enumerate(schedule.actions):
        held = peak = 0.0
        for action in actions:
            stage = stages[action.stage]
            if action.kind is Kind.F:
                held += stage.kept
            peak = max(peak, held + stage.working)
            if action.kind is Kind.B:
                held -= stage.kept
                if schedule.splits_backward:
                    held += stage.deferred
                    peak = max(peak, held)
            elif action.kind is Kind.W:
                held -= stage.deferred
        own = Held.together(stages[stage] for stage in schedule.stages_of(rank))
        found.append(MemoryEstimate(own.weights, own.gradients, own.optimizer, peak))
    return found


def readable(num_bytes: float) -> str:
    """A number of bytes as people write it."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    power = 0
    while num_bytes >= 1000 and power < len(units) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{num_bytes:.3g} {units[power]}"


def parse_bytes(text: str) -> float:
    """Bytes from `24GB`, `512 MiB` or `8e9`.

    Raises:
        ValueError: it is not written so, or not positive.
    """
    number = text.strip().lower().removesuffix("b").rstrip()
    power = next((suffix for suffix in sorted(_POWERS, key=len, reverse=True) if number.endswith(suffix)), "")
    try:
        value = float(number.removesuffix(power)) * _POWERS[power]
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"memory is written like 24GB or 512MiB, but is {text!r}")
    return value

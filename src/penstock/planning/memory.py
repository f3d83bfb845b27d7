"""How much memory a stage needs: the one model of it, for the planner and for the benchmark's refusal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from penstock.runtime.boundary.boundaries import BYTES_AHEAD
from penstock.runtime.boundary.p2p import RECEIVES_AHEAD, SENDS_AHEAD
from penstock.schedule.actions import Kind, Schedule

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


# Marks the numbers of units, here and in `UnitCost`, that do not depend on the microbatch; all others do.
OF_WEIGHTS = {"of weights": True}


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """What units hold, in bytes. Of a microbatch, by time:

    ============================  ======================================================================================
    its input comes               `received`, a part of `kept` from then on
    in its forward                `forwarding` besides what is kept
    until its backward            `kept`, with what went to the next stage (`sent`) and the model's `output`
    in its backward               `working` besides, or `splitting` if the schedule splits it; `sent` once more, as the
                                  gradient of what was sent has come
    until its weight gradient     `deferred`, if the schedule splits the backward: inputs and gradients of the layers
    meanwhile, on its way back    `received` once more: the gradient of what was received
    until the next loss is given  `output`, which the caller holds
    ============================  ======================================================================================
    """

    weights: float = field(default=0.0, metadata=OF_WEIGHTS)
    gradients: float = field(default=0.0, metadata=OF_WEIGHTS)
    optimizer: float = field(default=0.0, metadata=OF_WEIGHTS)
    kept: float = 0.0
    working: float = 0.0
    deferred: float | None = None  # None: as much as `kept`
    splitting: float | None = None  # None: as much as `working`
    received: float = 0.0
    sent: float = 0.0
    output: float = 0.0
    forwarding: float | None = None  # None: as much as `working`
    tied: tuple[tuple[str, float, float], ...] = ()  # weights that other units have, too: name, bytes, and of gradients

    @property
    def state(self) -> float:
        """What is held without any microbatch."""
        return self.weights + self.gradients + self.optimizer

    def with_live(self, microbatches: int) -> float:
        """Bytes with so many microbatches between their forward and the end of their backward."""
        return self.state + microbatches * self.kept + self.working

    def tied_state(self) -> dict[str, tuple[float, float, float]]:
        """Of each tied weight, what is held for it in weights, gradients and optimizer."""
        states = self.optimizer / self.gradients if self.gradients else 0.0
        return {name: (size, trained, trained * states) for name, size, trained in self.tied}

    def weights_alone(self) -> Self:
        """Without all that grows with the microbatch."""
        grows = (each.name for each in fields(HeldBytes) if not each.metadata and each.name != "tied")
        nothing: dict[str, Any] = dict.fromkeys(grows, 0.0)
        return replace(self, **nothing)

    @staticmethod
    def summed(parts: Iterable[HeldBytes]) -> HeldBytes:
        """What units hold on one stage, given in forward order: only one of them works at a time. In a backward the
        units above it have let go of `kept`, or hold `deferred` in its place."""
        weights = gradients = optimizer = kept = working = deferred = splitting = output = forwarding = 0.0
        tied: dict[str, tuple[str, float, float]] = {}
        for part in parts:
            weights += part.weights
            gradients += part.gradients
            optimizer += part.optimizer
            if part.tied:
                for name, state in part.tied_state().items():
                    if name in tied:  # one weight, held once
                        weights, gradients, optimizer = weights - state[0], gradients - state[1], optimizer - state[2]
                tied |= {weight[0]: weight for weight in part.tied}
            split_working = part.working if part.splitting is None else part.splitting
            put_off = part.kept if part.deferred is None else part.deferred
            working = max(working - part.kept, part.working)
            forwarding = max(forwarding - part.kept, part.working if part.forwarding is None else part.forwarding)
            splitting = max(splitting + put_off - part.kept, split_working)
            kept += part.kept
            deferred += put_off
            output = part.output
        return HeldBytes(
            weights=weights, gradients=gradients, optimizer=optimizer, kept=kept, working=working, deferred=deferred,
            splitting=splitting, output=output, forwarding=forwarding, tied=tuple(tied.values()),
        )  # fmt: skip


def memory_of_ranks(schedule: Schedule, stages: Sequence[HeldBytes]) -> list[MemoryEstimate]:
    """The most that each rank of a pipeline holds at once in a step, followed action by action, as the stages of a rank
    need not peak together:

    - what `HeldBytes` says of microbatches, and of the stage whose forward or backward is under way;
    - messages around it, see `_StageMemory`, and the gradient that came for it or waits for the backward of the stage
      below;
    - what the caller's loop holds until it is given the next loss: the output, and through the loss's graph the value
      that the rank's top stage received, with its gradient.

    Where two neighbouring stages are on one rank, what crosses is handed over and not copied.
    """
    estimates = []
    count, forward, weight = schedule.num_microbatches, Kind.F, Kind.W
    for rank, actions in enumerate(schedule.actions):
        on_rank = schedule.stages_of(rank)
        top = on_rank[-1]
        around = {s: _StageMemory(stages[s], count, s - 1 in on_rank, s + 1 in on_rank) for s in on_rank}
        # Backwards whose weight gradients follow at once are not split.
        whole = schedule.whole_backwards(rank)
        deferred: set[tuple[int, int]] = set()
        of_loop = stages[top].output + stages[top].received * (2 if top - 1 in on_rank else 1)
        held = peak = of_caller = 0.0
        under_way = sum(tensor.num_bytes for tensor in around.values())
        for position, action in enumerate(actions):
            kind, index, microbatch = action
            here = around[index]
            if kind is weight:
                if (index, microbatch) in deferred:
                    held -= here.deferred
                continue
            if kind is forward:
                held += here.kept
                under_way += here.forward()
                peak = max(peak, held + under_way + of_caller + here.forwarding)
                continue
            splits = schedule.splits_backward and position not in whole
            under_way += here.backward()
            if index == top:
                of_caller = 0.0
            peak = max(peak, held + under_way + of_caller + (here.splitting if splits else here.backing))
            held += here.handed_over - here.kept
            if splits:
                held += here.deferred
                deferred.add((index, microbatch))
            if index == top:
                of_caller = of_loop
            under_way += here.answer()
            peak = max(peak, held + under_way + of_caller)
        state = HeldBytes.summed(stages[stage] for stage in on_rank)
        estimates.append(MemoryEstimate(state.weights, state.gradients, state.optimizer, peak))
    return estimates


def messages_at_most(received: float, sent: float, num_microbatches: int) -> float:
    """A bound of the bytes of messages under way around one stage, and of the gradient it works on."""
    posted = min(num_microbatches, _ahead(received) + 2 * SENDS_AHEAD) * received
    return posted + min(num_microbatches, _ahead(sent) + 1) * sent


class _StageMemory:
    """What one stage holds, and the bytes of messages around it that its microbatches do not hold themselves.

    Receives are posted ahead, of activations as of gradients, for the microbatches that are left. An activation that
    was sent is held by its microbatch anyway, as its gradient is awaited. A gradient that was sent is held by its
    sender until so many were sent that it looks which have left. `from_here`, `to_here`: whether the previous stage,
    and the next one, is on the same rank.
    """

    def __init__(self, held: HeldBytes, count: int, from_here: bool, to_here: bool) -> None:
        self.kept = held.kept - (held.received if from_here else 0.0)
        self.deferred = held.kept if held.deferred is None else held.deferred
        self.forwarding = held.working if held.forwarding is None else held.forwarding
        self.backing = held.working + held.sent
        self.splitting = (held.working if held.splitting is None else held.splitting) + held.sent
        # What a backward leaves for the previous stage, less what the next one left for it.
        self.handed_over = (held.received if from_here else 0.0) - (held.sent if to_here else 0.0)
        self._received, self._sent = (0.0 if from_here else held.received), (0.0 if to_here else held.sent)
        self._activations, self._gradients = _ahead(self._received), _ahead(self._sent)
        self._to_receive = self._to_come_back = count
        self._answered = 0
        self.num_bytes = self._received * min(count, self._activations) + self._sent * min(count, self._gradients)

    def forward(self) -> float:
        """By how much the messages grow when a microbatch is received."""
        self._to_receive -= 1
        return -self._received if self._to_receive < self._activations else 0.0

    def backward(self) -> float:
        """As `forward`, when the gradient of what was sent has come back."""
        self._to_come_back -= 1
        return -self._sent if self._to_come_back < self._gradients else 0.0

    def answer(self) -> float:
        """As `forward`, when the gradient of what was received is on its way."""
        before = self._answered
        self._answered = before + 1 if before < 2 * SENDS_AHEAD else SENDS_AHEAD
        return self._received * (self._answered - before)


def _ahead(num_bytes: float) -> int:
    """Receives posted ahead, of messages of so many bytes."""
    return max(RECEIVES_AHEAD, int(BYTES_AHEAD // max(1.0, num_bytes)))


def unit_of(num_bytes: float) -> tuple[str, float]:
    """The unit to write a number of bytes in, and its size."""
    power = next((power for power in range(4) if num_bytes < 1000 ** (power + 1)), 4)
    return ("bytes", "kB", "MB", "GB", "TB")[power], 1000.0**power


def readable(num_bytes: float) -> str:
    unit, size = unit_of(num_bytes)
    return f"{num_bytes / size:.3g} {unit}"


def parse_bytes(text: str) -> float:
    """Bytes from `24GB`, `512 MiB` or `8e9`."""
    number = text.strip().lower().removesuffix("b").rstrip()
    power = next((suffix for suffix in sorted(_POWERS, key=len, reverse=True) if number.endswith(suffix)), "")
    try:
        value = float(number.removesuffix(power)) * _POWERS[power]
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"memory is written like 24GB or 512MiB, but is {text!r}")
    return value

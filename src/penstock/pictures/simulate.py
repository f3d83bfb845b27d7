"""When everything happens: an event simulation of one pipeline, in time proportional to its number of actions."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import cached_property

from penstock.pictures.costs import Costs, StageCosts
from penstock.pictures.events import EventKind, TimedEvent
from penstock.schedule.actions import Kind, Schedule, ScheduleError
from penstock.schedule.validation import validate


@dataclass(frozen=True)
class Simulation:
    """How a schedule runs at given costs.

    Attributes:
        schedule: what was run.
        durations: seconds of an action, per kind and stage.
        starts: seconds from the beginning of the step to the start of each action, per rank, in the schedule's order.
        makespan: seconds until the last action ends.
        activation_bytes: what each stage holds for a microbatch.
    """

    schedule: Schedule
    durations: dict[Kind, tuple[float, ...]]
    starts: tuple[tuple[float, ...], ...]
    makespan: float
    activation_bytes: tuple[float, ...]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of compute, per rank."""
        numbers = [Counter(action[:2] for action in actions) for actions in self.schedule.actions]
        return tuple(
            sum(self.durations[kind][stage] * number for (kind, stage), number in own.items()) for own in numbers
        )

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Most bytes of activations held at once, per rank."""
        return self.schedule.peaks(self.activation_bytes)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds without compute, per rank."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Idle share of the step, per rank."""
        return tuple(idle / self.makespan if self.makespan > 0 else 0.0 for idle in self.idle)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the step over all ranks."""
        return sum(self.bubble) / len(self.busy)

    @cached_property
    def events(self) -> tuple[TimedEvent, ...]:
        """Every action with its start and end, rank by rank, in the order of execution."""
        kinds = {kind: EventKind(kind.value) for kind in Kind}
        return tuple(
            TimedEvent(
                rank,
                kinds[action.kind],
                start,
                start + self.durations[action.kind][action.stage],
                action.stage,
                action.microbatch,
            )
            for rank, (actions, starts) in enumerate(zip(self.schedule.actions, self.starts, strict=True))
            for action, start in zip(actions, starts, strict=True)
        )


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Run `schedule` at `costs`: every action starts when its rank is free and its inputs are there.

    Sends never block and receives are posted ahead; messages between two ranks in one direction share one link, in
    the order of sending.

    Raises:
        ScheduleError: the schedule cannot run to its end; see `validate`.
        ValueError: costs that do not fit the schedule.
    """
    stage_costs = costs.per_stage(schedule.num_stages)
    backward = stage_costs.backward
    if not schedule.splits_backward:
        backward = tuple(b + w for b, w in zip(stage_costs.backward, stage_costs.weight, strict=True))
    durations = {Kind.F: stage_costs.forward, Kind.B: backward, Kind.W: stage_costs.weight}
    starts = _start_times(schedule, durations, stage_costs)
    ends = (
        own_starts[-1] + durations[actions[-1].kind][actions[-1].stage]
        for own_starts, actions in zip(starts, schedule.actions, strict=True)
    )
    return Simulation(
        schedule=schedule,
        durations=durations,
        starts=tuple(tuple(own_starts) for own_starts in starts),
        makespan=max(ends),
        activation_bytes=stage_costs.activation_bytes,
    )


@dataclass(slots=True)
class _Link:
    """One direction between two ranks."""

    free_from: float = 0.0


@dataclass(slots=True)
class _Route:
    """Where the result of an action goes: into `arrivals`, one time per microbatch, on the rank `peer`."""

    arrivals: list[float | None]
    peer: int
    link: _Link | None
    occupancy: float
    latency: float


def _start_times(schedule: Schedule, durations: dict[Kind, tuple[float, ...]], costs: StageCosts) -> list[list[float]]:
    """Let each rank run as far as it can, and go back to it when what it waits for arrives."""
    arrivals = _nothing_arrived(schedule)
    routes = _routes(schedule, arrivals, costs)
    # By kind and stage: when inputs arrive, how long it takes, where the result goes, and for a B its W's arrivals.
    table = {
        kind: [
            (arrivals[kind][stage], durations[kind][stage], routes[kind][stage], arrivals[Kind.W][stage])
            for stage in range(schedule.num_stages)
        ]
        for kind in Kind
    }
    backward = Kind.B
    starts: list[list[float]] = [[] for _ in schedule.actions]
    free_from = [0.0] * schedule.num_ranks
    waits_for: list[tuple[list[float | None], int] | None] = [None] * schedule.num_ranks
    movable = deque(range(schedule.num_ranks))
    while movable:
        rank = movable.popleft()
        actions, own_starts, now = schedule.actions[rank], starts[rank], free_from[rank]
        for position in range(len(own_starts), len(actions)):
            kind, stage, microbatch = actions[position]
            inputs, duration, route, weights = table[kind][stage]
            arrival = inputs[microbatch]
            if arrival is None:
                waits_for[rank] = inputs, microbatch
                break
            start = arrival if arrival > now else now
            own_starts.append(start)
            now = start + duration
            if kind is backward:
                weights[microbatch] = now
            if route is None:
                continue
            arrival = now
            link = route.link
            if link is not None:
                sent = (now if now > link.free_from else link.free_from) + route.occupancy
                link.free_from = sent
                arrival = sent + route.latency
            route.arrivals[microbatch] = arrival
            awaited = waits_for[route.peer]
            if awaited is not None and awaited[0] is route.arrivals and awaited[1] == microbatch:
                waits_for[route.peer] = None
                movable.append(route.peer)
        free_from[rank] = now
    if any(len(own_starts) < len(actions) for own_starts, actions in zip(starts, schedule.actions, strict=True)):
        validate(schedule)  # says which action is blocked on each rank
        raise ScheduleError(f"schedule {schedule.name!r} cannot run to its end")
    return starts


def _nothing_arrived(schedule: Schedule) -> dict[Kind, list[list[float | None]]]:
    """By kind, stage and microbatch, when the input of an action is on its rank; ``None`` is not yet.

    An F waits for the F below it and a B for the B above it, or on the last stage for its own F; a W for its B. A B
    has had its own F wherever it has its gradient, since the stages above could not have run without.
    """
    arrivals: dict[Kind, list[list[float | None]]] = {
        kind: [[None] * schedule.num_microbatches for _ in range(schedule.num_stages)] for kind in Kind
    }
    arrivals[Kind.F][0] = [0.0] * schedule.num_microbatches
    return arrivals


def _routes(
    schedule: Schedule, arrivals: dict[Kind, list[list[float | None]]], costs: StageCosts
) -> dict[Kind, list[_Route | None]]:
    links: dict[tuple[int, int], _Link] = {}

    def route(kind: Kind, source: int, target: int) -> _Route:
        peer = schedule.stage_to_rank[target]
        if schedule.is_local(source, target):
            return _Route(arrivals[kind][target], peer, None, 0.0, 0.0)
        link = links.setdefault((schedule.stage_to_rank[source], peer), _Link())
        boundary = min(source, target)
        return _Route(arrivals[kind][target], peer, link, costs.occupancy[boundary], costs.latency[boundary])

    last = schedule.num_stages - 1
    return {
        Kind.F: [*(route(Kind.F, stage, stage + 1) for stage in range(last)), route(Kind.B, last, last)],
        Kind.B: [None, *(route(Kind.B, stage, stage - 1) for stage in range(1, last + 1))],
        Kind.W: [None] * schedule.num_stages,
    }

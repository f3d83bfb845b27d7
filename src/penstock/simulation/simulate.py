"""When everything happens in a pipeline and in a layout, simulated; and how fast a step could be at best."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from penstock.schedule.actions import Kind, Schedule
from penstock.schedule.registry import build, default_stages_per_rank
from penstock.schedule.validation import validate
from penstock.simulation.timeline import EventKind, TimedEvent

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
            raise ValueError(f"bandwidth must be above 0 bytes per second, but is {self.bandwidth}")
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
            sum(self.durations[kind][stage] * number for (kind, stage), number in counts.items()) for counts in numbers
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
            TimedEvent(rank, kinds[kind], start, start + self.durations[kind][stage], stage, microbatch)
            for rank, (actions, starts) in enumerate(zip(self.schedule.actions, self.starts, strict=True))
            for (kind, stage, microbatch), start in zip(actions, starts, strict=True)
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
    lasts = [(own_starts[-1], actions[-1]) for own_starts, actions in zip(starts, schedule.actions, strict=True)]
    makespan = max(start + durations[action.kind][action.stage] for start, action in lasts)
    return Simulation(schedule, durations, tuple(map(tuple, starts)), makespan, stage_costs.activation_bytes)


@dataclass(slots=True)
class _Link:
    """One direction between two ranks."""

    free_from: float = 0.0


@dataclass(slots=True)
class _Route:
    """Where the result of an action goes: into `arrivals`, one time per microbatch, on the rank `peer`."""

    arrivals: list[float | None]
    peer: int
    link: _Link | None = None
    occupancy: float = 0.0
    latency: float = 0.0


def _start_times(schedule: Schedule, durations: dict[Kind, tuple[float, ...]], costs: StageCosts) -> list[list[float]]:
    """Let each rank run as far as it can, and go back to it when what it waits for arrives."""
    # By kind, stage and microbatch, when the input of an action is on its rank; None is not yet. An F waits for
    # that of the previous stage, a B for that of the next one, or on the last stage for its own F; a W for its B. A B
    # has had its own F wherever it has its gradient, since the stages after it could not have run without.
    arrivals: dict[Kind, list[list[float | None]]] = {
        kind: [[None] * schedule.num_microbatches for _ in range(schedule.num_stages)] for kind in Kind
    }
    arrivals[Kind.F][0] = [0.0] * schedule.num_microbatches
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
                link.free_from = sent = max(now, link.free_from) + route.occupancy
                arrival = sent + route.latency
            route.arrivals[microbatch] = arrival
            awaited = waits_for[route.peer]
            if awaited is not None and awaited[0] is route.arrivals and awaited[1] == microbatch:
                waits_for[route.peer] = None
                movable.append(route.peer)
        free_from[rank] = now
    if any(len(own_starts) < len(actions) for own_starts, actions in zip(starts, schedule.actions, strict=True)):
        validate(schedule)  # says which action is blocked on each rank
    return starts


def _routes(
    schedule: Schedule, arrivals: dict[Kind, list[list[float | None]]], costs: StageCosts
) -> dict[Kind, list[_Route | None]]:
    links: dict[tuple[int, int], _Link] = {}

    def route(kind: Kind, source: int, target: int) -> _Route:
        peer = schedule.stage_to_rank[target]
        if schedule.is_local(source, target):
            return _Route(arrivals[kind][target], peer)
        link = links.setdefault((schedule.stage_to_rank[source], peer), _Link())
        boundary = min(source, target)
        return _Route(arrivals[kind][target], peer, link, costs.occupancy[boundary], costs.latency[boundary])

    last = schedule.num_stages - 1
    return {
        Kind.F: [*(route(Kind.F, stage, stage + 1) for stage in range(last)), route(Kind.B, last, last)],
        Kind.B: [None, *(route(Kind.B, stage, stage - 1) for stage in range(1, last + 1))],
        Kind.W: [None] * schedule.num_stages,
    }


@dataclass(frozen=True)
class Reduction:
    """One sum of gradients between pipelines.

    Attributes:
        seconds: how long it takes once all holders have their gradients.
        holders: (pipeline, stage) of all who take part.
    """

    seconds: float
    holders: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LayoutSimulation:
    """How the pipelines of a layout run.

    Attributes:
        pipelines: each on its own, its ranks counted from 0.
        first_ranks: the rank, in the whole layout, of each pipeline's rank 0.
        reduction_spans: start and end of each reduction, in seconds, in the order given.
        reductions: what was reduced.
    """

    pipelines: tuple[Simulation, ...]
    first_ranks: tuple[int, ...]
    reduction_spans: tuple[tuple[float, float], ...]
    reductions: tuple[Reduction, ...]

    @property
    def makespan(self) -> float:
        """Seconds until every pipeline and reduction has ended."""
        return max(*(pipeline.makespan for pipeline in self.pipelines), *(end for _, end in self.reduction_spans), 0.0)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Share of the step without compute, per rank of the layout."""
        makespan = self.makespan
        return tuple(
            1 - busy / makespan if makespan > 0 else 0.0 for pipeline in self.pipelines for busy in pipeline.busy
        )

    @cached_property
    def events(self) -> tuple[TimedEvent, ...]:
        """Actions and reductions, with the ranks of the layout."""
        events = [
            TimedEvent(first + event.rank, event.kind, event.start, event.end, event.stage, event.microbatch)
            for pipeline, first in zip(self.pipelines, self.first_ranks, strict=True)
            for event in pipeline.events
        ]
        for reduction, (start, end) in zip(self.reductions, self.reduction_spans, strict=True):
            for pipeline_index, stage in reduction.holders:
                rank = self.first_ranks[pipeline_index] + self.pipelines[pipeline_index].schedule.stage_to_rank[stage]
                events.append(TimedEvent(rank, EventKind.REDUCTION, start, end, stage))
        return tuple(events)


def simulate_layout(
    pipelines: Sequence[tuple[Schedule, Costs]], reductions: Sequence[Reduction] = ()
) -> LayoutSimulation:
    """Run all `pipelines` at once, and each reduction when its holders have their gradients.

    A rank takes part in one reduction at a time, in the order of `reductions`, beside its compute.

    Raises:
        ScheduleError: a schedule cannot run to its end.
        ValueError: no pipeline, or costs that do not fit a schedule.
    """
    if not pipelines:
        raise ValueError("a layout has at least 1 pipeline")
    # Equal pipelines, which are the same objects, are simulated once.
    once = {(id(schedule), id(costs)): (schedule, costs) for schedule, costs in pipelines}
    simulated = {key: simulate(*pair) for key, pair in once.items()}
    simulations = tuple(simulated[id(schedule), id(costs)] for schedule, costs in pipelines)
    sizes = (schedule.num_ranks for schedule, _ in pipelines)
    first_ranks = tuple(accumulate(sizes, initial=0))[:-1]
    ready_of = {key: gradients_ready(simulation) for key, simulation in simulated.items()} if reductions else {}
    ready = [ready_of.get((id(schedule), id(costs)), {}) for schedule, costs in pipelines]
    network_free: dict[int, float] = {}
    spans = []
    for reduction in reductions:
        ranks = [first_ranks[p] + simulations[p].schedule.stage_to_rank[stage] for p, stage in reduction.holders]
        start = max(
            *(ready[p][stage] for p, stage in reduction.holders), *(network_free.get(rank, 0.0) for rank in ranks)
        )
        end = start + reduction.seconds
        network_free.update(dict.fromkeys(ranks, end))
        spans.append((start, end))
    return LayoutSimulation(simulations, first_ranks, tuple(spans), tuple(reductions))


def gradients_ready(simulation: Simulation) -> dict[int, float]:
    """For each stage, when its last gradient is complete."""
    schedule = simulation.schedule
    ready: dict[int, float] = {}
    for rank, (actions, starts) in enumerate(zip(schedule.actions, simulation.starts, strict=True)):
        missing = set(schedule.stages_of(rank))
        for action, start in zip(reversed(actions), reversed(starts), strict=True):
            if action.kind is not Kind.F and action.stage in missing:
                missing.remove(action.stage)
                ready[action.stage] = start + simulation.durations[action.kind][action.stage]
                if not missing:
                    break
    return ready


def lower_bound(
    stage_to_rank: Sequence[int], num_microbatches: int, costs: Costs, *, splits_backward: bool = True
) -> float:
    """Seconds below which no schedule of this problem ends, with any memory and any order.

    The largest of: the way of one microbatch up and down the stages; for each rank, the way to its first stage, all
    its work, and what must follow its last action; for each link, the same of its messages. For equal stages, one per
    rank, and microbatches enough it is m t + (p - 1) F, or (m + p - 1) t where the backward is not split: ZB-H2 (if
    B <= 2 min(F, W) and m >= 2p - 1) and 1F1B reach these.

    Args:
        stage_to_rank: the rank that holds each stage.
        num_microbatches: microbatches per step.
        costs: of actions and messages.
        splits_backward: whether weight gradients may be put off.

    Raises:
        ValueError: costs that do not fit the number of stages.
    """
    num_stages = len(stage_to_rank)
    given = costs.per_stage(num_stages)
    backward, weight = given.backward, given.weight
    if not splits_backward:
        backward, weight = tuple(b + w for b, w in zip(backward, weight, strict=True)), (0.0,) * num_stages
    # The actions of one microbatch, F up the stages and B down: their stages and seconds, and between each and the next
    # the link, the seconds for which a message keeps it, and the latency.
    stages = [*range(num_stages), *reversed(range(num_stages))]
    seconds = [*given.forward, *reversed(backward)]
    hops: list[tuple[tuple[int, int], float, float]] = []
    for source, target in pairwise(stages):
        link, boundary = (stage_to_rank[source], stage_to_rank[target]), min(source, target)
        goes = link[0] != link[1]
        hops.append((link, given.occupancy[boundary], given.latency[boundary]) if goes else (link, 0.0, 0.0))
    # The earliest start of each action, and what must follow its end: the W of its own, and the action after it.
    starts = list(accumulate((time + hop[1] + hop[2] for time, hop in zip(seconds, hops, strict=False)), initial=0.0))
    rests = [weight[0]]
    for place in reversed(range(len(hops))):
        own_weight = weight[stages[place]] if place >= num_stages else 0.0
        rests.insert(0, max(own_weight, hops[place][1] + hops[place][2] + seconds[place + 1] + rests[0]))
    bounds = [seconds[0] + rests[0]]
    for rank in set(stage_to_rank):
        held = [stage for stage in range(num_stages) if stage_to_rank[stage] == rank]
        work = sum(given.forward[stage] + backward[stage] + weight[stage] for stage in held)
        # A rank that splits its backward may end with a W, which nothing waits for.
        after = 0.0 if splits_backward else rests[-1 - held[0]]
        bounds.append(starts[held[0]] + num_microbatches * work + after)
    for link in {hop[0] for hop in hops if hop[0][0] != hop[0][1]}:
        places = [place for place, hop in enumerate(hops) if hop[0] == link]
        before = min(starts[place] + seconds[place] for place in places)
        after = min(hops[place][2] + seconds[place + 1] + rests[place + 1] for place in places)
        bounds.append(before + num_microbatches * sum(hops[place][1] for place in places) + after)
    return max(bounds)


@lru_cache
def predicted_steps(name: str, num_ranks: int, num_microbatches: int) -> float:
    """The time of a step under a named schedule, over that of a microbatch on a rank, if F = B = W on all ranks.
    A microbatch that finds the pipeline full and leaves it full adds as long as it takes on one rank."""
    simulated = min(num_microbatches, 2 * num_ranks)
    seconds = 1 / (3 * default_stages_per_rank(name))
    makespan = simulate(build(name, num_ranks, simulated), Costs(seconds, seconds, seconds)).makespan
    return makespan + num_microbatches - simulated

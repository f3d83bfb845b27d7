"""When everything happens in a layout: several pipelines side by side, then the reduction of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from penstock.pictures.costs import Costs
from penstock.pictures.events import EventKind, TimedEvent
from penstock.pictures.simulate import Simulation, simulate
from penstock.schedule.actions import Kind, Schedule


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
            *(ready[p][stage] for p, stage in reduction.holders),
            *(network_free.get(rank, 0.0) for rank in ranks),
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

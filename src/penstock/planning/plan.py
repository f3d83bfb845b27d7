"""A job to plan for, and a plan: pipelines on given devices, and what a step is predicted to cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby, islice, pairwise
from typing import Literal

from penstock.planning.cluster import Cluster
from penstock.planning.memory import HeldBytes, MemoryEstimate, memory_of_ranks
from penstock.planning.profile import Profile, UnitCost, held_by_stages, seconds_of, sums
from penstock.schedule.actions import Schedule
from penstock.schedule.registry import PLAIN, build, planned_schedules
from penstock.sharded_optimizer.owners import BYTES_KEPT, OwnershipGroup, choose_owners
from penstock.simulation.simulate import Costs, LayoutSimulation, Reduction, simulate_layout


@dataclass(frozen=True)
class Job:
    profile: Profile  # its microbatch is the run's
    cluster: Cluster
    num_microbatches: int  # of a step, over all pipelines
    copies: int = 1  # the least number of pipelines, and of nodes where there are several, that hold each unit
    # Whether activations are recomputed: on all stages, or with "stages" on those of ranks whose memory is short.
    checkpointing: bool | Literal["stages"] = False
    # That may be chosen; the same for all pipelines of a layout.
    schedules: tuple[str, ...] = field(default_factory=planned_schedules)
    # Not 0 if the holders of each parameter divide its optimizer's state: then the least number of pipelines, and the
    # search assumes that each of their devices keeps as much. What is found has the owners of the run.
    sharded: int = 0
    # Of how many devices each of the cluster's stands for a group that shares every sequence; the profile is then that
    # of a part. See `share_sequences`.
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.copies < 1 or self.num_microbatches < 1:
            raise ValueError(
                f"copies and microbatches must be at least 1, but are {self.copies} and {self.num_microbatches}"
            )

    @property
    def least_pipelines(self) -> int:
        return max(self.copies, self.sharded)

    @cached_property
    def parts(self) -> tuple[tuple[UnitCost, ...], ...]:
        return self._parts(self.checkpointing is True)

    @cached_property
    def recomputed(self) -> tuple[tuple[UnitCost, ...], ...] | None:
        """The parts of stages whose memory is short, if these may be recomputed alone."""
        return self._parts(True) if self.checkpointing == "stages" else None

    def _parts(self, checkpointing: bool) -> tuple[tuple[UnitCost, ...], ...]:
        parts = self.profile.recomputed_parts if checkpointing else self.profile.parts
        if not self.sharded:
            return parts
        owners = self.sharded * self.context_parallel_size
        return tuple(tuple(replace(unit, optimizer=unit.optimizer / owners) for unit in stage) for stage in parts)

    @cached_property
    def seconds(self) -> list[float]:
        return seconds_of(self.parts)

    @cached_property
    def held(self) -> tuple[HeldBytes, ...]:
        """The memory that each part needs; at least, if it may be recomputed."""
        return tuple(HeldBytes.summed(part) for part in self.recomputed or self.parts)


@dataclass(frozen=True)
class PlannedPipeline:
    """One pipeline: its devices in the order of its ranks, the units of each stage, and its schedule of a step."""

    devices: tuple[int, ...]
    stages: tuple[tuple[UnitCost, ...], ...]
    schedule: Schedule

    @property
    def stage_names(self) -> list[list[str]]:
        return [[unit.name for unit in stage] for stage in self.stages]


@dataclass(frozen=True)
class Plan:
    job: Job
    pipelines: tuple[PlannedPipeline, ...]
    simulation: LayoutSimulation

    @property
    def seconds(self) -> float:
        return self.simulation.makespan

    @property
    def schedule_names(self) -> str:
        """The schedules of pipelines of several ranks; a single rank has nothing to overlap, whatever its schedule."""
        names = [pipeline.schedule.name for pipeline in self.pipelines if len(pipeline.devices) > 1]
        return ", ".join(dict.fromkeys(names or [pipeline.schedule.name for pipeline in self.pipelines]))

    @property
    def has_equal_pipelines(self) -> bool:
        """Whether all pipelines have the same stages and as many microbatches, as `initialize` makes them."""
        first = self.pipelines[0]
        return all(
            pipeline.stage_names == first.stage_names
            and pipeline.schedule.num_microbatches == first.schedule.num_microbatches
            for pipeline in self.pipelines
        )

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for pipeline in self.pipelines for device in pipeline.devices)

    @property
    def bubble(self) -> float:
        """Share of the step in which the devices in use do not compute, on average."""
        return sum(self.simulation.bubble) / len(self.simulation.bubble)

    @cached_property
    def memory(self) -> tuple[MemoryEstimate, ...]:
        return memory_of_layout(self.job, self.pipelines)

    @cached_property
    def recomputing(self) -> tuple[bool, ...]:
        kept = {unit.name: unit.kept for unit in self.job.profile.units}
        return tuple(
            any(unit.kept < kept[unit.name] for stage in stages for unit in pipeline.stages[stage])
            for pipeline in self.pipelines
            for stages in map(pipeline.schedule.stages_of, range(len(pipeline.devices)))
        )

    @property
    def fullest(self) -> tuple[int, MemoryEstimate]:
        """The rank whose device has the smallest part of its memory left, and what it needs."""
        limits = [self.job.cluster.kind_of(device).memory for device in self.devices]
        return max(enumerate(self.memory), key=lambda item: (item[1].total / limits[item[0]], item[1].total))

    @property
    def bytes_on_links(self) -> float:
        """What a step sends: activations, their gradients, and gradients of weights between pipelines."""
        crossing = sum(
            2 * pipeline.schedule.num_microbatches * pipeline.stages[stage][-1].crossing
            for pipeline in self.pipelines
            for stage in range(pipeline.schedule.num_stages - 1)
            if not pipeline.schedule.is_local(stage, stage + 1)
        )
        parts = self.job.context_parallel_size
        reduced = 2 * (len(self.pipelines) * parts - 1) * sum(unit.gradients for unit in self.job.profile.units)
        return crossing * parts + reduced


def evaluate(job: Job, pipelines: Sequence[PlannedPipeline]) -> Plan | None:
    """The plan of given pipelines, simulated; None if one does not fit its devices."""
    cluster = job.cluster
    kinds = [[cluster.kind_of(device) for device in pipeline.devices] for pipeline in pipelines]
    costs: dict[tuple[object, ...], Costs] = {}
    simulated = []
    for pipeline, kind in zip(pipelines, kinds, strict=True):
        mapping = pipeline.schedule.stage_to_rank
        links = tuple(cluster.link(pipeline.devices[a], pipeline.devices[b]) for a, b in pairwise(mapping))
        key = (id(pipeline.stages), pipeline.schedule.name, pipeline.schedule.num_microbatches, tuple(kind), links)
        if key not in costs:
            made = costs_of(pipeline.stages, [kind[rank].speed for rank in mapping])
            costs[key] = replace(
                made,
                latency=tuple(link.latency for link in links),
                bandwidth=tuple(link.bandwidth for link in links),
                message_bytes=tuple(stage[-1].crossing for stage in pipeline.stages[:-1]),
            )
        simulated.append((pipeline.schedule, costs[key]))
    limits = [device.memory for kind in kinds for device in kind]
    if any(memory.total > limit for memory, limit in zip(memory_of_layout(job, pipelines), limits, strict=True)):
        return None
    return Plan(job, tuple(pipelines), simulate_layout(simulated, reductions_of(job, pipelines)))


def reductions_of(job: Job, pipelines: Sequence[PlannedPipeline]) -> list[Reduction]:
    """The sums of gradients between pipelines, last segment first, each as a ring: 2 (n - 1) / n of its bytes. Devices
    that share sequences take part in it one by one."""
    if len(pipelines) * job.context_parallel_size < 2 or not any(link.seconds(1) for link in job.cluster.links):
        return []
    stage_of = [[stage for stage, units in enumerate(pipeline.stages) for _ in units] for pipeline in pipelines]
    reductions = []
    for stages, run in groupby(enumerate(job.profile.units), key=lambda item: tuple(of[item[0]] for of in stage_of)):
        size = sum(unit.gradients for _, unit in run)
        holders = tuple(enumerate(stages))
        devices = [pipelines[p].devices[pipelines[p].schedule.stage_to_rank[stage]] for p, stage in holders]
        links = [job.cluster.link(a, b) for a, b in pairwise(devices)] or [job.cluster.inside]
        slowest = max(links, key=lambda link: link.seconds(size))
        count = len(holders) * job.context_parallel_size
        reductions.append(Reduction(2 * (count - 1) * slowest.seconds(size / count), holders))
    return reductions[::-1]


def place(cluster: Cluster, pipelines: Sequence[Sequence[int]], copies: int = 1) -> list[list[int]] | None:
    """Devices for pipelines given as the device class of each rank, neighbours on one node where it can be: nodes are
    filled one after another, the largest pipelines first. None if devices are too few, or if fewer than `copies`
    pipelines stand on nodes of their own."""
    num_nodes = max(cluster.node_of_device) + 1
    free: list[dict[int, list[int]]] = [{} for _ in range(num_nodes)]
    for device in reversed(range(cluster.size)):
        free[cluster.node_of_device[device]].setdefault(cluster.class_of_device[device], []).append(device)
    found: dict[int, list[int]] = {}
    for index in sorted(range(len(pipelines)), key=lambda index: -len(pipelines[index])):
        needed = {kind: pipelines[index].count(kind) for kind in set(pipelines[index])}
        whole = [n for n in range(num_nodes) if all(len(free[n].get(k, ())) >= c for k, c in needed.items())]
        # The node that is left with the fewest devices, or else the next one with any.
        node = min(whole, key=lambda n: (sum(map(len, free[n].values())), n), default=None)
        devices = []
        for kind in pipelines[index]:
            if node is None or not free[node].get(kind):
                node = next((n for n in range(num_nodes) if free[n].get(kind)), None)
            if node is None:
                return None
            devices.append(free[node][kind].pop())
        found[index] = devices
    placed = [found[index] for index in range(len(pipelines))]
    return placed if are_apart(cluster, placed, copies) else None


def are_apart(cluster: Cluster, pipelines: Sequence[Sequence[int]], copies: int) -> bool:
    """Whether `copies` of the pipelines, given as their devices, stand on nodes of their own, if there are several."""
    if copies == 1 or len(set(cluster.node_of_device)) == 1:
        return True
    apart, on_their_own = set[int](), 0
    for nodes in sorted(({cluster.node_of_device[device] for device in devices} for devices in pipelines), key=len):
        if not nodes & apart:
            apart |= nodes
            on_their_own += 1
    return on_their_own >= copies


@lru_cache(maxsize=512)
def schedule_of(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """On a single rank there is nothing to overlap, and nothing to split."""
    return build(PLAIN if num_ranks == 1 else name, num_ranks, num_microbatches)


def costs_of(stages: Sequence[Sequence[UnitCost]], speeds: Sequence[float]) -> Costs:
    """The costs of stages on devices of these speeds, without messages between stages."""
    pairs = zip(stages, speeds, strict=True)
    return Costs.of_stages([sums(stage, speed) for stage, speed in pairs])


def memory_of_layout(job: Job, pipelines: Sequence[PlannedPipeline]) -> tuple[MemoryEstimate, ...]:
    known: dict[tuple[object, ...], list[MemoryEstimate]] = {}
    estimates: list[list[MemoryEstimate]] = []
    for pipeline in pipelines:
        key = id(pipeline.stages), pipeline.schedule.name, pipeline.schedule.num_microbatches
        if key not in known:
            known[key] = memory_of_ranks(pipeline.schedule, held_by_stages(pipeline.stages))
        estimates.append(known[key])
    if job.sharded:
        # To the owners the parts of a sequence are pipelines; a device stands for the one that keeps most.
        parts = range(job.context_parallel_size)
        every = [pipeline for pipeline in pipelines for _ in parts]
        states = iter(_states_owned(job, every, [estimate for ranks in estimates for _ in parts for estimate in ranks]))
        for number, ranks in enumerate(estimates):
            of_parts = [list(islice(states, len(ranks))) for _ in parts]
            estimates[number] = [
                replace(estimate, optimizer=max(sizes)) for estimate, *sizes in zip(ranks, *of_parts, strict=True)
            ]
    return tuple(chain(*estimates))


def _states_owned(job: Job, pipelines: Sequence[PlannedPipeline], memory: Sequence[MemoryEstimate]) -> list[float]:
    """The bytes of optimizer state on each rank, if one holder keeps that of each parameter: the run's choice."""
    firsts = accumulate((len(pipeline.devices) for pipeline in pipelines), initial=0)
    holders: list[list[int]] = [[] for _ in job.profile.units]
    for first, pipeline in zip(firsts, pipelines, strict=False):
        ranks = (
            rank for rank, stage in zip(pipeline.schedule.stage_to_rank, pipeline.stages, strict=True) for _ in stage
        )
        for of_unit, rank in zip(holders, ranks, strict=True):
            of_unit.append(first + rank)
    groups, states = list[OwnershipGroup](), list[float]()
    known: dict[str, tuple[int, list[int]]] = {}
    for of_unit, unit in zip(holders, job.profile.units, strict=True):
        sizes = list(unit.sizes or (unit.gradients,))
        for name, _, trained in unit.tied:
            if trained and name in known:  # one weight, which more ranks hold
                index, under_first_name = known[name]
                every = tuple(sorted({*groups[index].holders[0], *of_unit}))
                preferred = tuple(map(every.index, under_first_name))
                groups[index] = groups[index]._replace(holders=(every,), preferred=preferred)
                sizes.remove(trained)
            elif trained:
                known[name] = len(groups) + sizes.index(trained), of_unit
        for size in sizes:
            groups.append(OwnershipGroup((tuple(of_unit),), BYTES_KEPT * size))
            states.append(unit.optimizer * size / unit.gradients if unit.gradients else 0.0)
    limits = [job.cluster.kind_of(device).memory for pipeline in pipelines for device in pipeline.devices]
    used = [
        estimate.weights - (0.0 if math.isinf(limit) else limit) for estimate, limit in zip(memory, limits, strict=True)
    ]
    kept = [0.0] * len(limits)
    for group, state, places in zip(groups, states, choose_owners(groups, used), strict=True):
        for place in places:
            kept[group.holders[0][place]] += state
    return kept

"""Plans: pipelines on a cluster, with what they are predicted to cost; the best ones of all that the search finds."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from heapq import heappop, heappush
from itertools import accumulate, groupby, pairwise

from penstock.planning.cluster import Cluster, DeviceClass
from penstock.planning.memory import Held, MemoryEstimate, memory_of_ranks, readable
from penstock.planning.partition import partition, split_microbatches
from penstock.planning.profile import Profile, UnitCost, held_by_stages, sums
from penstock.planning.search import Cut, Template, find_cuts, layouts
from penstock.planning.simulate import LayoutSimulation, Reduction, simulate_layout
from penstock.schedule import Costs, Schedule, build, schedule_names, simulate

# GPipe takes as long as 1F1B and holds more.
SCHEDULES = tuple(name for name in schedule_names() if name != "gpipe")
# With so many microbatches for each rank a step is as much later than by formula as with any more.
STEADY = 2
# A simulated step has at most so many actions on all ranks of a pipeline; longer ones are ranked by formula.
MOST_ACTIONS = 60_000


class Infeasible(ValueError):
    """No layout exists; the message says which quantity is short, and by how much."""


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
    """Pipelines and what a step of them is predicted to cost."""

    job: Job
    pipelines: tuple[PlannedPipeline, ...]
    simulation: LayoutSimulation

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.simulation.makespan

    @property
    def schedule_names(self) -> str:
        return ", ".join(dict.fromkeys(pipeline.schedule.name for pipeline in self.pipelines))

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each rank."""
        return tuple(device for pipeline in self.pipelines for device in pipeline.devices)

    @property
    def bubble(self) -> float:
        """Share of the step in which the devices in use do not compute, on average."""
        return sum(self.simulation.bubble) / len(self.simulation.bubble)

    @cached_property
    def memory(self) -> tuple[MemoryEstimate, ...]:
        """Of each rank."""
        return tuple(memory for pipeline in self.pipelines for memory in _memory_of(pipeline))

    @property
    def fullest(self) -> tuple[int, MemoryEstimate]:
        """The rank whose device has the smallest part of its memory left, and what it needs."""
        limits = [self._class_of(device).memory for device in self.devices]
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
        reduced = 2 * (len(self.pipelines) - 1) * sum(unit.gradients for unit in self.job.profile.units)
        return crossing + reduced

    def _class_of(self, device: int) -> DeviceClass:
        return self.job.cluster.classes[self.job.cluster.class_of_device[device]]


def make_plans(job: Job, most: int = 5) -> list[Plan]:
    """The best plans, fastest first.

    Layouts that are good by formula are looked at under every schedule, by rising bounds; the pipelines of those that
    may be among the best are simulated alone, and the best of them all together on their nodes, with the reduction of
    gradients.

    Raises:
        Infeasible: there is none.
    """
    planner = _Planner(job)
    plans: list[Plan] = []
    # What is estimated and not simulated as a whole yet, the most promising first. An estimate is no bound, but the
    # bounds of what is not estimated yet are, so both queues end where they can give nothing better than `plans`.
    estimated: list[tuple[float, int, list[_Line], list[int]]] = []
    waiting = planner.under_schedules()[::-1]

    def worst() -> float:
        return plans[most - 1].seconds if len(plans) >= most else math.inf

    while waiting or estimated:
        if waiting and (not estimated or waiting[-1][0] <= estimated[0][0]):
            bound, lines, counts = waiting.pop()
            if bound >= worst():
                waiting.clear()
                continue
            heappush(estimated, (planner.estimate(lines, counts), len(waiting), lines, counts))
            continue
        seconds, _, lines, counts = heappop(estimated)
        if seconds >= worst():
            break
        plan = planner.realise(lines, counts)
        if plan is not None:
            insort(plans, plan, key=lambda plan: (plan.seconds, len(plan.devices)))
    if not plans:
        raise explain(job)
    return plans[:most]


@dataclass(frozen=True, eq=False)
class _Line:
    """A pipeline of a layout that is looked at: its devices' classes, its stages, its schedule, and bounds for them."""

    name: str
    classes: tuple[int, ...]
    sizes: tuple[int, ...]
    units: tuple[tuple[UnitCost, ...], ...]
    splits_backward: bool
    costs: Costs
    limits: tuple[tuple[float, float], ...]
    slowest: float
    total: float

    def bound(self, microbatches: int) -> float:
        """Seconds below which no order of the actions ends a step."""
        return max([entry + microbatches * work for entry, work in self.limits])

    def seconds(self, microbatches: int) -> float:
        """An estimate, from below for most schedules."""
        if self.splits_backward or len(self.sizes) > len(self.classes):
            return self.bound(microbatches)
        return self.total + (microbatches - 1) * self.slowest


class _Planner:
    """Candidates by formula, and their simulations."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._lines: dict[tuple, _Line | None] = {}
        self._tidy: dict[tuple, Cut] = {}
        self._partitions: dict[tuple, tuple[int, ...] | None] = {}
        self._simulated: dict[tuple[_Line, int], float] = {}

    def candidates(self) -> list[list[Cut]]:
        """Layouts that may be the best, fastest first by formula: the last ones found on the way to the best, with
        pipelines of any depth and of at least so many stages."""
        found: dict[tuple, tuple[float, list[Cut]]] = {}
        for templates in self.templates():
            deepest = max((sum(template.counts) for template in templates), default=0)
            for depth in (1 << power for power in range(deepest.bit_length())):
                deep = [template for template in templates if sum(template.counts) >= depth]
                limits, tolerance = self.job.cluster.counts, 0.0 if depth == 1 else 0.01
                ways = layouts(deep, limits, self.job.num_microbatches, self.job.copies, tolerance)
                for seconds, cuts in list(ways)[-2:]:
                    cuts = sorted(cuts, key=lambda cut: (-len(cut.sizes), cut.classes, cut.sizes))
                    found.setdefault(tuple((cut.classes, cut.sizes) for cut in cuts), (seconds, cuts))
        best = [cuts for _, cuts in sorted(found.values(), key=lambda entry: entry[0])]
        # The formula does not know which of equally good orders of devices and stages is best: the simulation decides.
        tidied = [[self._tidied(cut, reverse) for cut in cuts] for cuts in best[:3] for reverse in (False, True)]
        return best[:1] + [cuts for cuts in tidied if cuts not in best] + best[1:]

    def _tidied(self, cut: Cut, reverse: bool) -> Cut:
        """The same devices class by class, with the most even of the best stages; the cut itself if that is better."""
        key = (cut.classes, cut.sizes, reverse)
        if key not in self._tidy:
            classes = tuple(sorted(cut.classes, reverse=reverse))
            kinds = [self.job.cluster.classes[index] for index in classes]
            seconds = [sum(unit.seconds for unit in part) for part in self.job.parts]
            found = partition(seconds, [kind.speed for kind in kinds])
            ends = pairwise(accumulate(found.sizes, initial=0))
            times = [sum(seconds[a:b]) / kind.speed for (a, b), kind in zip(ends, kinds, strict=True)]
            tidy = Cut(classes, found.sizes, found.time, sum(times))
            self._tidy[key] = tidy if tidy.slowest <= cut.slowest * 1.1 else cut
        return self._tidy[key]

    def templates(self) -> list[list[Template]]:
        """The cuts for each set of devices that fit under 1F1B; and under v-half, which holds least, where memory may
        be short: without mixtures, unless nothing else fits, and for some depths."""
        parts, cluster, most = self.job.parts, self.job.cluster, self.job.num_microbatches
        under_1f1b = find_cuts(parts, cluster, most) if set(self.job.schedules) - {"v-half"} else []
        under_v_half: list[Template] = []
        # A pipeline holds about as much on each device as one device would of a model so many times smaller.
        whole = Held.together(self.job.held).with_live(1)
        if "v-half" in self.job.schedules and any(kind.memory < whole for kind in cluster.classes):
            for depth in _some_depths(min(len(parts) // 2, cluster.size)):
                live = partial(_same, live_microbatches("v-half", depth, 0, most))
                cuts = find_cuts(parts, cluster, most, live, depth, mixtures=not under_1f1b)
                under_v_half += [template for template in cuts if sum(template.counts) == depth]
        return [under_1f1b, under_v_half]

    def line(self, cut: Cut, name: str) -> _Line | None:
        """A cut under a schedule; None if its devices cannot hold that."""
        key = (cut.classes, cut.sizes, name)
        if key not in self._lines:
            self._lines[key] = self._make_line(cut, name)
        return self._lines[key]

    def _make_line(self, cut: Cut, name: str) -> _Line | None:
        mapping = _schedule(name, len(cut.classes), 1).stage_to_rank
        sizes = self._sizes(cut, name, mapping)
        if sizes is None:
            return None
        units = tuple(
            tuple(unit for part in self.job.parts[a:b] for unit in part)
            for a, b in pairwise(accumulate(sizes, initial=0))
        )
        splits = _schedule(name, len(cut.classes), 1).splits_backward
        speeds = [self.job.cluster.classes[cut.classes[rank]].speed for rank in mapping]
        costs = _costs(units, speeds)
        triples = list(zip(costs.forward, costs.backward, costs.weight, strict=True))  # type: ignore[arg-type]  # tuples
        seconds = [sum(times) for times in triples]
        work, entry = [0.0] * len(cut.classes), [0.0] * len(cut.classes)
        for stage, rank in reversed(list(enumerate(mapping))):
            work[rank] += seconds[stage]
            # Without a split backward the gradients of the last microbatch still pass the stages below.
            entry[rank] = sum(forward for forward, _, _ in triples[:stage]) if splits else sum(seconds[:stage])
        # Of ranks with as much work, or less, only those with a later entry can be the ones that limit the step.
        limits: list[tuple[float, float]] = []
        for pair in sorted(zip(entry, work, strict=True), key=lambda pair: (-pair[1], -pair[0])):
            if not limits or pair[0] > limits[-1][0]:
                limits.append(pair)
        return _Line(name, cut.classes, sizes, units, splits, costs, tuple(limits), max(work), sum(seconds))

    def _sizes(self, cut: Cut, name: str, mapping: Sequence[int]) -> tuple[int, ...] | None:
        """Parts on each stage: the cut's own, or, where the schedule has more stages or holds more, the best for it."""
        parts, num_ranks = self.job.parts, len(cut.classes)
        kinds = [self.job.cluster.classes[index] for index in cut.classes]
        live = [live_microbatches(name, num_ranks, rank, self.job.num_microbatches) for rank in range(num_ranks)]
        per_rank = len(mapping) // num_ranks

        def fits(sizes: Sequence[int]) -> bool:
            of_ranks: list[list[Held]] = [[] for _ in kinds]
            for rank, (a, b) in zip(mapping, pairwise(accumulate(sizes, initial=0)), strict=True):
                of_ranks[rank] += self.job.held[a:b]
            return all(
                Held.together(held).with_live(count) <= kind.memory
                for held, count, kind in zip(of_ranks, live, kinds, strict=True)
            )

        if len(mapping) > len(parts):
            return None
        if per_rank == 1 and fits(cut.sizes):
            return cut.sizes
        speeds = tuple(kinds[rank].speed for rank in mapping)
        sizes = self._partition(speeds, 0, ())
        if sizes is not None and fits(sizes):
            return sizes
        working = max(one.working for one in self.job.held)
        limits = tuple(max(0.0, kinds[rank].memory - working) / per_rank for rank in mapping)
        return self._partition(speeds, max(live), limits)

    def _partition(self, speeds: tuple[float, ...], live: int, limits: tuple[float, ...]) -> tuple[int, ...] | None:
        key = (speeds, live, limits)
        if key not in self._partitions:
            seconds = [sum(unit.seconds for unit in part) for part in self.job.parts]
            needs = [one.state + live * one.kept for one in self.job.held]
            try:
                self._partitions[key] = partition(seconds, speeds, *((needs, limits) if limits else ())).sizes
            except ValueError:
                self._partitions[key] = None
        return self._partitions[key]

    def under_schedules(self) -> list[tuple[float, list[_Line], list[int]]]:
        """Every candidate under every schedule that it fits: a bound of its step, its pipelines, their microbatches."""
        found: dict[tuple, tuple[float, list[_Line], list[int]]] = {}
        for cuts in self.candidates():
            names = self.job.schedules if any(len(cut.sizes) > 1 for cut in cuts) else self.job.schedules[:1]
            for name in names:
                lines = [line for cut in cuts if (line := self.line(cut, name)) is not None]
                key = (name, *sorted((line.classes, line.sizes) for line in lines))
                if key not in found and len(lines) == len(cuts) and self._is_short(lines):
                    counts = split_microbatches([line.seconds for line in lines], self.job.num_microbatches)
                    bound = max(line.bound(count) for line, count in zip(lines, counts, strict=True))
                    found[key] = (bound, lines, counts)
        return sorted(found.values(), key=lambda entry: entry[0])

    def _is_short(self, lines: Sequence[_Line]) -> bool:
        each = self.job.num_microbatches / len(lines)
        return 3 * each * max(len(line.sizes) for line in lines) <= MOST_ACTIONS

    def estimate(self, lines: Sequence[_Line], counts: list[int]) -> float:
        """The step of pipelines that are simulated alone, without their nodes and the reduction.

        Microbatches are given out once more by what the simulation says; `counts` has the better numbers afterwards.
        """

        def late(line: _Line, count: int) -> float:
            enough = min(count, STEADY * len(line.classes))
            return self._alone(line, enough) - line.seconds(enough)

        extra = {line: late(line, count) for line, count in zip(lines, counts, strict=True)}

        def seconds(line: _Line, count: int) -> float:
            return line.seconds(count) + extra[line]

        again = split_microbatches([partial(seconds, line) for line in lines], self.job.num_microbatches)
        steps = [max(seconds(line, count) for line, count in zip(lines, each, strict=True)) for each in (counts, again)]
        if steps[1] < steps[0]:
            counts[:] = again
        return min(steps)

    def _alone(self, line: _Line, count: int) -> float:
        if (line, count) not in self._simulated:
            schedule = _schedule(line.name, len(line.classes), count)
            link = self.job.cluster.inside
            crossing = tuple(stage[-1].crossing for stage in line.units[:-1])
            costs = replace(line.costs, latency=link.latency, bandwidth=link.bandwidth, message_bytes=crossing)
            self._simulated[line, count] = simulate(schedule, costs).makespan
        return self._simulated[line, count]

    def realise(self, lines: Sequence[_Line], counts: Sequence[int]) -> Plan | None:
        """The layout on the cluster's devices, simulated; None if it cannot be placed as asked."""
        devices = place(self.job.cluster, [line.classes for line in lines], self.job.copies)
        if devices is None:
            return None
        pipelines = [
            PlannedPipeline(tuple(own), line.units, _schedule(line.name, len(line.classes), count))
            for own, line, count in zip(devices, lines, counts, strict=True)
        ]
        return evaluate(self.job, pipelines)


def live_microbatches(name: str, num_ranks: int, rank: int, num_microbatches: int) -> int:
    """Microbatches that a rank holds at most under a schedule; see the table of docs/schedules.md."""
    most = {
        "gpipe": num_microbatches,
        "1f1b": num_ranks - rank,
        "zb-h1": num_ranks,
        "zb-h2": 2 * num_ranks - 1,
        "interleaved-1f1b": (7 * num_ranks + 3) // 4,  # with its largest groups
        "zb-v": num_ranks,
        "v-half": (num_ranks + 2) // 2,
    }
    return min(most[name], num_microbatches)


def _same(live: int, stages_after: int) -> int:
    return live


def _some_depths(most: int) -> list[int]:
    """2, 3, 4, 6, 9, ... and the most."""
    depths, depth = [], 2
    while depth < most:
        depths.append(depth)
        depth += max(1, depth // 2)
    return [*depths, most] if most >= 2 else []


def evaluate(job: Job, pipelines: Sequence[PlannedPipeline]) -> Plan | None:
    """The plan of given pipelines, simulated; None if one does not fit its devices."""
    cluster = job.cluster
    kinds = [[cluster.classes[cluster.class_of_device[device]] for device in line.devices] for line in pipelines]
    memories: dict[tuple, list[MemoryEstimate]] = {}
    costs: dict[tuple, Costs] = {}
    simulated = []
    for line, kind in zip(pipelines, kinds, strict=True):
        mapping = line.schedule.stage_to_rank
        links = tuple(cluster.link(line.devices[a], line.devices[b]) for a, b in pairwise(mapping))
        key = (id(line.stages), line.schedule.name, line.schedule.num_microbatches, tuple(kind), links)
        if key not in costs:
            memories[key] = _memory_of(line)
            made = _costs(line.stages, [kind[rank].speed for rank in mapping])
            costs[key] = replace(
                made,
                latency=tuple(link.latency for link in links),
                bandwidth=tuple(link.bandwidth for link in links),
                message_bytes=tuple(stage[-1].crossing for stage in line.stages[:-1]),
            )
        if any(memory.total > one.memory for memory, one in zip(memories[key], kind, strict=True)):
            return None
        simulated.append((line.schedule, costs[key]))
    return Plan(job, tuple(pipelines), simulate_layout(simulated, reductions_of(job, pipelines)))


def reductions_of(job: Job, pipelines: Sequence[PlannedPipeline]) -> list[Reduction]:
    """The sums of gradients between pipelines, last segment first, each as a ring: 2 (n - 1) / n of its bytes."""
    if len(pipelines) < 2 or job.cluster.inside.seconds(1) == job.cluster.between.seconds(1) == 0:
        return []
    stage_of = [[stage for stage, units in enumerate(pipeline.stages) for _ in units] for pipeline in pipelines]
    found = []
    for stages, run in groupby(enumerate(job.profile.units), key=lambda item: tuple(of[item[0]] for of in stage_of)):
        size = sum(unit.gradients for _, unit in run)
        holders = tuple(enumerate(stages))
        devices = [pipelines[p].devices[pipelines[p].schedule.stage_to_rank[stage]] for p, stage in holders]
        slowest = max((job.cluster.link(a, b) for a, b in pairwise(devices)), key=lambda link: link.seconds(size))
        count = len(holders)
        found.append(Reduction(2 * (count - 1) * slowest.seconds(size / count), holders))
    return found[::-1]


def place(cluster: Cluster, pipelines: Sequence[Sequence[int]], copies: int = 1) -> list[list[int]] | None:
    """Devices for pipelines given as the device class of each rank, neighbours on one node where it can be.

    Nodes are filled one after another, the largest pipelines first.

    Returns:
        for each pipeline its devices; None if fewer than `copies` pipelines stand on nodes of their own.
    """
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
    if copies > 1 and num_nodes > 1:
        apart: set[int] = set()
        on_their_own = 0
        for devices in sorted(placed, key=lambda own: len({cluster.node_of_device[device] for device in own})):
            nodes = {cluster.node_of_device[device] for device in devices}
            if not nodes & apart:
                apart |= nodes
                on_their_own += 1
        if on_their_own < copies:
            return None
    return placed


def explain(job: Job) -> Infeasible:
    """Why no layout exists."""
    classes, parts, held = job.cluster.classes, job.parts, job.held
    for part, one in zip(parts, held, strict=True):
        least = one.with_live(1)
        if all(least > kind.memory for kind in classes):
            name = part[0].name if len(part) == 1 else f"{part[0].name} to {part[-1].name}"
            where = " and ".join(
                f"every device of class {kind.name}, which has {readable(kind.memory)} "
                f"({readable(least - kind.memory)} short)"
                for kind in classes
            )
            return Infeasible(f"no plan: {name} alone needs {readable(least)} on {where}")
    whole = Held.together(held)
    most = sorted((kind.memory for kind in classes for _ in range(kind.count)), reverse=True)[: len(parts)]
    if whole.with_live(1) > sum(most):
        return Infeasible(
            f"no plan: the model needs at least {readable(whole.with_live(1))} ({readable(whole.state)} of weights, "
            f"gradients and optimizer), but all devices together have {readable(sum(most))}: "
            f"{readable(whole.with_live(1) - sum(most))} short"
        )
    templates = [template for some in _Planner(job).templates() for template in some]
    if not templates:
        factor = _missing_memory(job)
        sizes = ", ".join(f"{readable(factor * kind.memory)} instead of {readable(kind.memory)}" for kind in classes)
        return Infeasible(
            f"no plan: no cut of {len(parts)} parts over {job.cluster.size} devices fits; it would with "
            f"{factor:.3g} times the memory on each device ({sizes}), more devices, or --checkpointing"
        )
    if job.num_microbatches < job.copies:
        return Infeasible(
            f"no plan: {job.copies} copies need as many pipelines, and each at least 1 microbatch, but the global "
            f"batch has {job.num_microbatches}"
        )
    fewest = min(sum(template.counts) for template in templates)
    if fewest * job.copies > job.cluster.size:
        return Infeasible(
            f"no plan: a pipeline needs at least {fewest} of these devices, so {job.copies} copies need "
            f"{fewest * job.copies}, but there are {job.cluster.size}: {fewest * job.copies - job.cluster.size} short"
        )
    return Infeasible(
        f"no plan: {job.copies} pipelines fit one by one, but not together under {', '.join(job.schedules)}: "
        f"ask for fewer copies, add devices, or allow more schedules"
    )


def _missing_memory(job: Job) -> float:
    """The least factor for all devices' memory, to a thousandth, with which some cut fits."""
    low, high = 1.0, 2.0

    def fits(factor: float) -> bool:
        classes = tuple(replace(kind, memory=kind.memory * factor) for kind in job.cluster.classes)
        return any(_Planner(replace(job, cluster=replace(job.cluster, classes=classes))).templates())

    while not fits(high):
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


@lru_cache(maxsize=512)
def _schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule of a pipeline; on a single rank there is nothing to overlap, and nothing to cut."""
    return build("1f1b" if num_ranks == 1 else name, num_ranks, num_microbatches)


def _costs(stages: Sequence[Sequence[UnitCost]], speeds: Sequence[float]) -> Costs:
    triples = [[seconds / speed for seconds in sums(stage)] for stage, speed in zip(stages, speeds, strict=True)]
    forward, backward, weight = (tuple(triple[kind] for triple in triples) for kind in range(3))
    return Costs(forward=forward, backward=backward, weight=weight)


def _memory_of(pipeline: PlannedPipeline) -> list[MemoryEstimate]:
    return memory_of_ranks(pipeline.schedule, held_by_stages(pipeline.stages))

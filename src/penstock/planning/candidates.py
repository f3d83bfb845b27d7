"""Layouts that may be the best: found by formula, bounded under every schedule, simulated one pipeline at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from penstock.layout.partition import partition, split_into
from penstock.planning.cluster import Link
from penstock.planning.memory import HeldBytes, memory_of_ranks
from penstock.planning.microbatches import split_microbatches
from penstock.planning.plan import Job, Plan, PlannedPipeline, costs_of, evaluate, place, schedule_of
from penstock.planning.profile import UnitCost, held_by_stages, stages_of, sums
from penstock.planning.search import Chain, StageSplit, Template, find_splits, layouts
from penstock.schedule.actions import Schedule
from penstock.schedule.registry import DEEP, default_stages_per_rank, live_microbatches
from penstock.simulation.simulate import Costs, gradients_ready, simulate

# With so many microbatches for each rank a step is as much later than by formula as with any more.
STEADY = 2
# In pipelines of more ranks a lean schedule is skipped if an earlier one fits that has the same stages on each rank and
# splits the backward alike: the earlier one holds more for less of a bubble.
SHALLOW = 8
# A simulated step has at most so many actions on all ranks of a pipeline; candidates with longer ones are left out.
MOST_ACTIONS = 60_000


Stages = tuple[tuple[UnitCost, ...], ...]


@dataclass(frozen=True, eq=False)
class CandidatePipeline:
    name: str
    classes: tuple[int, ...]
    sizes: tuple[int, ...]
    units: Stages
    splits_backward: bool
    costs: Costs
    # Of the ranks that may limit a step, seconds before their work or behind it, those of their work for a microbatch,
    # and bytes of gradients to reduce after the last of it: if the backward is not split those of the first stage,
    # which has its gradients last.
    limiting: tuple[tuple[float, float, float], ...]
    slowest: float  # seconds of a microbatch on the device that has most to do
    total: float  # and on all

    def schedule(self, microbatches: int) -> Schedule:
        return schedule_of(self.name, len(self.classes), microbatches)

    def bound(self, microbatches: int, seconds_per_byte: float = 0.0) -> float:
        """A lower bound of a step's seconds under any order of actions; its reduction takes so many seconds a byte."""
        return max([entry + microbatches * work + size * seconds_per_byte for entry, work, size in self.limiting])

    def seconds(self, microbatches: int) -> float:
        """An estimate of a step, from below for most schedules."""
        if self.splits_backward or len(self.sizes) > len(self.classes):
            return self.bound(microbatches)
        return self.total + (microbatches - 1) * self.slowest


# The pipelines of a layout, and the microbatches of each.
Candidate = list[tuple[CandidatePipeline, int]]


class LayoutSearch:
    """The layouts that are looked at for a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._chain = Chain(job.parts, job.cluster, job.num_microbatches, job.recomputed)
        self.pipeline = cache(self._pipeline)
        self._tidied = cache(self._tidy)
        self._partition = cache(partial(partition, tuple(job.seconds)))
        self.simulated = cache(self._simulate)

    def split_layouts(self) -> list[list[StageSplit]]:
        """Layouts that may be the best, as splits without a schedule, fastest first by formula: those found last, with
        pipelines of any depth."""
        found: dict[tuple[StageSplit, ...], tuple[float, list[StageSplit]]] = {}
        for templates in self.templates():
            deepest = max((sum(template.counts) for template in templates), default=0)
            for depth in (1 << power for power in range(deepest.bit_length())):
                deep = [template for template in templates if sum(template.counts) >= depth]
                ways = layouts(
                    deep,
                    self.job.cluster.counts,
                    self.job.num_microbatches,
                    self.job.least_pipelines,
                    tolerance=0.0 if depth == 1 else 0.01,
                )
                for seconds, splits in list(ways)[-2:]:
                    splits = sorted(splits, key=lambda split: (-len(split.sizes), split.classes, split.sizes))
                    found.setdefault(tuple(splits), (seconds, splits))
        best = [splits for _, splits in sorted(found.values(), key=lambda entry: entry[0])]
        # The formula does not know which of equally good orders of devices and stages is best: the simulation decides.
        tidied = [
            [self._tidied(split, reverse) for split in splits] for splits in best[:3] for reverse in (False, True)
        ]
        return best[:1] + [splits for splits in tidied if splits not in best] + best[1:]

    def _tidy(self, split: StageSplit, reverse: bool) -> StageSplit:
        """The same devices class by class, with the most even of the best stages; the split if over a tenth faster."""
        classes = tuple(sorted(split.classes, reverse=reverse))
        speeds = [self.job.cluster.classes[index].speed for index in classes]
        sizes = partition(self.job.seconds, speeds).sizes
        stages = zip(stages_of(self.job.parts, sizes), speeds, strict=True)
        times = [sum(sums(stage, speed)) for stage, speed in stages]
        slowest = max(times)
        return StageSplit(classes, sizes, slowest, sum(times)) if slowest <= split.slowest * 1.1 else split

    def templates(self) -> list[list[Template]]:
        """The splits for each set of devices that fit under 1F1B; and under the lean schedules, which hold less, where
        memory may be short, or no others are allowed: without mixtures, unless nothing else fits, and for some depths.
        """
        job = self.job
        lean = [name for name in job.schedules if is_lean(name)]
        only_lean = len(lean) == len(job.schedules)
        under_1f1b = [] if only_lean else find_splits(self._chain)
        under_lean = find_splits(self._chain, deepest=1) if only_lean else []  # one device has the same under any
        # A pipeline holds about as much on each device as one device would of a model so many times smaller.
        whole = HeldBytes.summed(job.held).with_live(1)
        for name in lean if only_lean or any(kind.memory < whole for kind in job.cluster.classes) else ():
            for depth in some_depths(min(len(job.parts) // default_stages_per_rank(name), job.cluster.size)):
                live = max(live_microbatches(name, depth, rank, job.num_microbatches) for rank in range(depth))
                splits = find_splits(self._chain, live, depth, mixtures=not under_1f1b)
                under_lean += [template for template in splits if sum(template.counts) == depth]
        return [under_1f1b, under_lean]

    def pipeline_of(self, classes: tuple[int, ...], sizes: tuple[int, ...], name: str) -> CandidatePipeline:
        schedule = schedule_of(name, len(classes), 1)
        mapping, splits = schedule.stage_to_rank, schedule.splits_backward
        units = self._relieved(stages_of(self.job.parts, sizes), sizes, classes, schedule)
        costs = costs_of(units, [self.job.cluster.classes[classes[rank]].speed for rank in mapping])
        triples = list(zip(costs.forward, costs.backward, costs.weight, strict=True))  # type: ignore[arg-type]  # tuples
        seconds = [sum(times) for times in triples]
        gradients = [sum(unit.gradients for unit in stage) for stage in units]
        ranks = []
        for rank in range(len(classes)):
            stages = schedule.stages_of(rank)
            # Without a split backward the gradients of the last microbatch still pass the earlier stages.
            entry = sum(forward for forward, _, _ in triples[: stages[0]]) if splits else sum(seconds[: stages[0]])
            work = sum(seconds[stage] for stage in reversed(stages))
            ranks.append((entry, work, min(gradients[stage] for stage in stages) if splits else gradients[0]))
        # Of ranks with as much work, or less, only those with a later entry or more to reduce can limit the step.
        limiting: list[tuple[float, float, float]] = []
        for entry, work, size in sorted(ranks, key=lambda rank: (-rank[1], -rank[0], -rank[2])):
            if not any(entry <= other_entry and size <= other_size for other_entry, _, other_size in limiting):
                limiting.append((entry, work, size))
        slowest = max(work for _, work, _ in ranks)
        return CandidatePipeline(name, classes, sizes, units, splits, costs, tuple(limiting), slowest, sum(seconds))

    def _relieved(self, units: Stages, sizes: tuple[int, ...], classes: tuple[int, ...], schedule: Schedule) -> Stages:
        """The stages, those of ranks whose memory is short recomputed, if that may be chosen by stage."""
        job = self.job
        if job.recomputed is None:
            return units
        name, size = schedule.name, len(classes)
        deep = min(job.num_microbatches, DEEP * size)
        if any(live_microbatches(name, size, rank, deep) == deep for rank in range(size)):
            deep = job.num_microbatches  # one that holds all of so many, as GPipe, holds all of any number
        memory = memory_of_ranks(schedule_of(name, size, deep), held_by_stages(units))
        short = [
            estimate.total > job.cluster.classes[kind].memory for estimate, kind in zip(memory, classes, strict=True)
        ]
        pairs = zip(units, stages_of(job.recomputed, sizes), schedule.stage_to_rank, strict=True)
        return tuple(recomputed if short[rank] else plain for plain, recomputed, rank in pairs)

    def _pipeline(self, split: StageSplit, name: str) -> CandidatePipeline | None:
        """A split under a schedule, or other stages on its devices; None if these cannot hold that."""
        mapping = schedule_of(name, len(split.classes), 1).stage_to_rank
        parts, num_ranks = self.job.parts, len(split.classes)
        kinds = [self.job.cluster.classes[index] for index in split.classes]
        live = [live_microbatches(name, num_ranks, rank, self.job.num_microbatches) for rank in range(num_ranks)]
        per_rank = len(mapping) // num_ranks

        def fits(sizes: Sequence[int]) -> bool:
            of_ranks: list[list[HeldBytes]] = [[] for _ in kinds]
            for rank, held in zip(mapping, split_into(self.job.held, sizes), strict=True):
                of_ranks[rank] += held
            return all(
                HeldBytes.summed(held).with_live(count) <= kind.memory
                for held, count, kind in zip(of_ranks, live, kinds, strict=True)
            )

        whole = HeldBytes.summed(self.job.held)
        if len(mapping) > len(parts) or whole.state + min(live) * whole.kept > sum(kind.memory for kind in kinds):
            return None
        speeds = tuple(kinds[rank].speed for rank in mapping)
        sizes = split.sizes
        if per_rank > 1 or not fits(sizes):
            sizes = self._partition(speeds).sizes
        if not fits(sizes):
            working = max(unit.working for unit in self.job.held)
            needs = tuple(unit.state + max(live) * unit.kept for unit in self.job.held)
            memory_limits = tuple(max(0.0, kinds[rank].memory - working) / per_rank for rank in mapping)
            try:
                sizes = self._partition(speeds, needs, memory_limits).sizes
            except ValueError:
                return None
        return self.pipeline_of(split.classes, sizes, name)

    def under_schedules(self) -> list[tuple[float, Candidate]]:
        """Every candidate under every schedule that it fits, by rising bounds of its step."""
        found: dict[tuple[object, ...], tuple[float, Candidate]] = {}
        for splits in self.split_layouts():
            names = self.job.schedules if any(len(split.sizes) > 1 for split in splits) else self.job.schedules[:1]
            deepest = max(len(split.sizes) for split in splits)
            fitting = set[tuple[tuple[int, ...], bool]]()
            for name in names:
                schedule = schedule_of(name, deepest, 1)
                kind = schedule.stage_to_rank, schedule.splits_backward
                if is_lean(name) and kind in fitting and deepest > SHALLOW:
                    continue
                pipelines = [pipeline for split in splits if (pipeline := self.pipeline(split, name)) is not None]
                if len(pipelines) == len(splits):
                    fitting.add(kind)
                key = (name, *sorted((pipeline.classes, pipeline.sizes) for pipeline in pipelines))
                stages = max((len(pipeline.sizes) for pipeline in pipelines), default=0)
                is_short = 3 * self.job.num_microbatches / len(splits) * stages <= MOST_ACTIONS
                if key not in found and len(pipelines) == len(splits) and is_short:
                    counts = split_microbatches([pipeline.seconds for pipeline in pipelines], self.job.num_microbatches)
                    candidate = list(zip(pipelines, counts, strict=True))
                    found[key] = self.bound(candidate), candidate
        return sorted(found.values(), key=lambda entry: entry[0])

    def bound(self, candidate: Candidate) -> float:
        """A lower bound of its step, with the least seconds a byte of the reduction; see `plan.reductions_of`."""
        fastest = max(link.bandwidth for link in self.job.cluster.links)
        reduction = 2 * (len(candidate) - 1) / len(candidate) / fastest
        return max(pipeline.bound(count, reduction) for pipeline, count in set(candidate))

    def estimate(self, candidate: Candidate) -> tuple[float, Candidate]:
        """The step of pipelines that are simulated alone, without their nodes, and with a reduction of their own; and
        the candidate, in which microbatches are given out once more by what the simulation says if that is better."""
        link = self.job.cluster.link_among(sum(len(pipeline.classes) for pipeline, _ in candidate))
        late = {}
        for pipeline, count in candidate:
            enough = min(count, STEADY * len(pipeline.classes))
            late[pipeline] = self._with_reduction(pipeline, enough, len(candidate), link) - pipeline.seconds(enough)

        def seconds(pipeline: CandidatePipeline, count: int) -> float:
            return pipeline.seconds(count) + late[pipeline]

        pipelines = [pipeline for pipeline, _ in candidate]
        counts = split_microbatches([partial(seconds, pipeline) for pipeline in pipelines], self.job.num_microbatches)
        again = list(zip(pipelines, counts, strict=True))
        estimates = [(max(seconds(pipeline, count) for pipeline, count in each), each) for each in (candidate, again)]
        return min(estimates, key=lambda estimate: estimate[0])

    def _with_reduction(self, pipeline: CandidatePipeline, count: int, num_pipelines: int, link: Link) -> float:
        """The step of a pipeline that is simulated alone, and then reduces what it has in common with the others."""
        end, ready = self.simulated(pipeline, count)
        holders = num_pipelines * self.job.context_parallel_size
        if holders > 1 and link.seconds(1):
            free_from = [0.0] * len(pipeline.classes)
            for stage, rank in reversed(list(enumerate(pipeline.schedule(count).stage_to_rank))):
                size = sum(unit.gradients for unit in pipeline.units[stage]) / holders
                start = max(ready[stage], free_from[rank])
                free_from[rank] = start + 2 * (holders - 1) * link.seconds(size)
            end = max(end, *free_from)
        return end

    def _simulate(self, pipeline: CandidatePipeline, count: int) -> tuple[float, dict[int, float]]:
        """Seconds of a step without reduction, and until each stage has its gradients."""
        inside = self.job.cluster.inside
        crossing = tuple(stage[-1].crossing for stage in pipeline.units[:-1])
        costs = replace(pipeline.costs, latency=inside.latency, bandwidth=inside.bandwidth, message_bytes=crossing)
        simulation = simulate(pipeline.schedule(count), costs)
        return simulation.makespan, gradients_ready(simulation)

    def realise(self, candidate: Candidate) -> Plan | None:
        """The candidate on the cluster's devices, simulated; None if it cannot be placed as asked, or does not fit."""
        devices = place(self.job.cluster, [pipeline.classes for pipeline, _ in candidate], self.job.copies)
        return None if devices is None else self.realise_on(devices, candidate)

    def realise_on(self, devices: Sequence[Sequence[int]], candidate: Candidate) -> Plan | None:
        """The candidate on these devices of its pipelines; None if one does not fit."""
        pairs = zip(devices, candidate, strict=True)
        placed = [
            PlannedPipeline(tuple(ids), pipeline.units, pipeline.schedule(count)) for ids, (pipeline, count) in pairs
        ]
        return evaluate(self.job, placed)


@cache
def is_lean(name: str) -> bool:
    """Whether every rank holds fewer microbatches than there are ranks. Looked at for eight ranks; in shorter pipelines
    the difference is small."""
    return all(live_microbatches(name, 8, rank, 8 * DEEP) < 8 for rank in range(8))


def some_depths(most: int) -> list[int]:
    """The numbers 2, 3, 4, 6, 9, ... up to the most, which is included."""
    depths, depth = [], 2
    while depth < most:
        depths.append(depth)
        depth += max(1, depth // 2)
    return [*depths, most] if most >= 2 else []

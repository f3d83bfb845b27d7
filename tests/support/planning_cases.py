"""Random planning problems, and their optimum by formula from brute force over all layouts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product

from penstock.planning.cluster import Cluster, DeviceClass, Link
from penstock.planning.memory import memory_of_ranks
from penstock.planning.plan import Job, PlannedPipeline, costs_of, evaluate, schedule_of
from penstock.planning.profile import Profile, UnitCost, held_by_stages, stages_of
from penstock.simulation.simulate import simulate

Counts = tuple[int, ...]


def random_case(seed: int, most_devices: int = 7, most_units: int = 10) -> tuple[Profile, Cluster, int, int]:
    """A model, a cluster of one or two classes, a number of microbatches, and one of copies."""
    draw = random.Random(seed)
    num_units = draw.choice([draw.randint(2, most_units), most_units])
    units = tuple(
        UnitCost(
            f"unit{index}",  # none is a repeated block, so each may be placed alone
            draw.choice([0.01, draw.random(), 1.0]),
            *(draw.choice([0.0, draw.random(), 1.0]) for _ in range(2)),
            weights=draw.randint(0, 4),
            optimizer=draw.randint(0, 4),
            kept=draw.randint(0, 3),
            working=draw.choice([0, 0, 2]),
        )
        for index in range(num_units)
    )
    num_devices = draw.choice([draw.randint(1, most_devices), most_devices])
    first = draw.randint(1, num_devices)
    classes = [
        DeviceClass(name, count, draw.choice([0.5, 1.0, 1.3, 2.0]), draw.choice([14, 25, 40, 80, math.inf]))
        for name, count in (("a", first), ("b", num_devices - first))
        if count
    ]
    return Profile("random", units), Cluster(tuple(classes)), draw.randint(1, 8), draw.choice([1, 1, 2])


def linked_encoder_decoder(seed: int) -> Job:
    """A small encoder-decoder on three devices with slow links, under zb-v: gradients that pipelines sum, and messages
    of two values behind the encoder, count."""
    draw = random.Random(seed)
    size = draw.choice([1e5, 1e6, 4e6])
    shapes = [
        ("embed", 0.05, size),
        *[("encode", 1.0, size)] * 2,
        *[("decode", 1.5, 2 * size)] * 2,
        ("head", 1.0, size),
    ]
    units = []
    for index, (name, cost, crossing) in enumerate(shapes):
        times = [0.01 * cost * draw.uniform(0.6, 1.2) for _ in range(3)]
        weights = draw.choice([3e6, 1e7])
        units.append(UnitCost(f"{name}{index}", *times, crossing=crossing, weights=weights, gradients=weights))
    speeds = draw.choice([{"a": (3, 1.0)}, {"a": (2, 1.0), "b": (1, 0.5)}])
    classes = tuple(DeviceClass(name, count, speed, math.inf) for name, (count, speed) in speeds.items())
    cluster = Cluster(classes, inside=draw.choice([Link(1e-4, 1e9), Link(1e-3, 1e8)]))
    return Job(Profile("encoder-decoder", tuple(units)), cluster, draw.choice([2, 3, 4]), schedules=("zb-v",))


def best_as_a_whole_by_brute_force(job: Job) -> float:
    """The least seconds over all groups of devices, orders, shares of the microbatches and splits, each simulated with
    its links and the reduction of gradients; for jobs in which everything fits."""
    (name,), best, tried = job.schedules, math.inf, set()
    for devices in (
        order for used in range(job.cluster.size) for order in permutations(range(job.cluster.size), used + 1)
    ):
        for cuts in (cuts for n in range(len(devices)) for cuts in combinations(range(1, len(devices)), n)):
            groups = [devices[a:b] for a, b in pairwise((0, *cuts, len(devices)))]
            classes = tuple(sorted(tuple(job.cluster.class_of_device[device] for device in group) for group in groups))
            if classes in tried:
                continue
            tried.add(classes)
            for counts in product(range(1, job.num_microbatches + 1), repeat=len(groups)):
                if sum(counts) == job.num_microbatches:
                    ways = [_pipelines(job, group, name, count) for group, count in zip(groups, counts, strict=True)]
                    plans = (evaluate(job, pipelines) for pipelines in product(*ways))
                    best = min([best, *(plan.seconds for plan in plans if plan is not None)])
    return best


def _pipelines(job: Job, devices: tuple[int, ...], name: str, count: int) -> list[PlannedPipeline]:
    schedule, num_parts = schedule_of(name, len(devices), count), len(job.parts)
    ends = combinations(range(1, num_parts), schedule.num_stages - 1)
    sizes = [tuple(b - a for a, b in pairwise((0, *inner, num_parts))) for inner in ends]
    return [PlannedPipeline(devices, stages_of(job.parts, each), schedule) for each in sizes]


def best_by_brute_force(profile: Profile, cluster: Cluster, microbatches: int, copies: int) -> float | None:
    """The least seconds of a step by formula over all sets of pipelines, orders of devices, splits and microbatches."""
    tables = {}
    for counts in product(*(range(count + 1) for count in cluster.counts)):
        if 0 < sum(counts) <= len(profile.units):
            table = _times(profile.units, cluster, counts, microbatches)
            if table is not None:
                tables[counts] = table
    best = math.inf
    for layout in _sets_of(sorted(tables), cluster.counts, microbatches):
        if len(layout) >= copies:
            best = min(best, _least(tuple(tables[counts] for counts in layout), microbatches))
    return None if math.isinf(best) else best


def best_simulated_by_brute_force(
    profile: Profile, cluster: Cluster, microbatches: int, copies: int, schedules: Sequence[str] = ("1f1b",)
) -> float | None:
    """The same, but each pipeline's step is simulated and its memory is followed action by action."""
    best = math.inf
    for name in schedules:
        tables = {}
        for counts in product(*(range(count + 1) for count in cluster.counts)):
            if 0 < sum(counts) <= len(profile.units):
                table = _simulated_times(profile.units, cluster, counts, microbatches, name)
                if min(table[1:]) < math.inf:
                    tables[counts] = table
        for layout in _sets_of(sorted(tables), cluster.counts, microbatches):
            if len(layout) >= copies:
                best = min(best, _least(tuple(tables[counts] for counts in layout), microbatches))
    return None if math.isinf(best) else best


def _simulated_times(
    units: Sequence[UnitCost], cluster: Cluster, counts: Counts, microbatches: int, name: str
) -> tuple[float, ...]:
    """As `_times`; what cannot be faster than the best so far, by the work of its busiest rank, is not simulated."""
    depth = sum(counts)
    orders = {order for order in product(range(len(counts)), repeat=depth) if _count(order, len(counts)) == counts}
    mapping = schedule_of(name, depth, 1).stage_to_rank
    if len(mapping) > len(units):
        return (math.inf,) * (microbatches + 1)
    pipelines = []
    for boundaries in combinations(range(1, len(units)), len(mapping) - 1):
        stages = [units[a:b] for a, b in pairwise((0, *boundaries, len(units)))]
        held = held_by_stages(stages)
        for order in orders:
            kinds = [cluster.classes[kind] for kind in order]
            costs = costs_of(stages, [kinds[rank].speed for rank in mapping])
            work = [0.0] * depth
            for rank, *times in zip(mapping, costs.forward, costs.backward, costs.weight, strict=True):
                work[rank] += sum(times)
            pipelines.append((max(work), kinds, held, costs))
    pipelines.sort(key=lambda one: one[0])
    best = [math.inf] * (microbatches + 1)
    for count in range(1, microbatches + 1):
        schedule = schedule_of(name, depth, count)
        for work, kinds, held, costs in pipelines:
            if count * work >= best[count]:
                break
            seconds = simulate(schedule, costs).makespan
            if seconds < best[count]:
                memories = memory_of_ranks(schedule, held)
                if all(one.total <= kind.memory for one, kind in zip(memories, kinds, strict=True)):
                    best[count] = seconds
    return tuple(best)


def _times(units: Sequence[UnitCost], cluster: Cluster, counts: Counts, microbatches: int) -> tuple[float, ...] | None:
    """The fastest pipeline of these devices for 0, 1, 2, ... microbatches, over all orders and splits."""
    depth = sum(counts)
    orders = {order for order in product(range(len(counts)), repeat=depth) if _count(order, len(counts)) == counts}
    best = [math.inf] * (microbatches + 1)
    for boundaries in combinations(range(1, len(units)), depth - 1):
        runs = [units[a:b] for a, b in pairwise((0, *boundaries, len(units)))]
        seconds = [sum(unit.forward + unit.backward + unit.weight for unit in run) for run in runs]
        needs = [
            sum(unit.weights + unit.gradients + unit.optimizer for unit in run)
            + (min(depth - stage, microbatches) - 1) * sum(unit.kept for unit in run)
            # A backward: the unit at work and those below it hold what they kept, those above do not any more.
            + max(sum(below.kept for below in run[: place + 1]) + unit.working for place, unit in enumerate(run))
            for stage, run in enumerate(runs)
        ]
        for order in orders:
            kinds = [cluster.classes[kind] for kind in order]
            if all(need <= kind.memory for need, kind in zip(needs, kinds, strict=True)):
                times = [time / kind.speed for time, kind in zip(seconds, kinds, strict=True)]
                total, slowest = sum(times), max(times)
                for count in range(1, microbatches + 1):
                    best[count] = min(best[count], total + (count - 1) * slowest)
    return None if math.isinf(best[1]) else tuple(best)


def _count(order: Sequence[int], num_classes: int) -> Counts:
    return tuple(order.count(kind) for kind in range(num_classes))


def _sets_of(templates: Sequence[Counts], free: Counts, most: int) -> Iterator[tuple[Counts, ...]]:
    """All multisets of at most so many templates within the free devices."""
    for index, counts in enumerate(templates):
        left = tuple(have - need for have, need in zip(free, counts, strict=True))
        if min(left) >= 0 and most:
            yield (counts,)
            for rest in _sets_of(templates[index:], left, most - 1):
                yield (counts, *rest)


def _least(tables: Sequence[Sequence[float]], microbatches: int) -> float:
    """Over all ways to give out the microbatches, at least one to each pipeline."""
    first, *others = tables
    if not others:
        return first[microbatches]
    most = microbatches - len(others)
    return min(
        (max(first[count], _least(others, microbatches - count)) for count in range(1, most + 1)), default=math.inf
    )

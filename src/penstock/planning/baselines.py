"""What other systems would do with the same devices, to compare plans with. Devices are taken in order.

- Equal pipelines, as Megatron and Alpa (Zheng et al. 2022) make them: the same number of devices and microbatches for
  each, units balanced by cost whatever the devices' speeds, every depth tried.
- By speed, after Metis (Um et al. 2024): equal depths, but stages balanced by their devices' speeds, and microbatches
  by the pipelines' speeds.
- Oobleck's rule (Jang et al. 2023): the fewest devices n0 that hold the model, as many such pipelines as there are
  devices for, those left over given to the first ones; microbatches by the pipelines' speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from penstock.planning.candidates import live_microbatches
from penstock.planning.job import Job
from penstock.planning.partition import partition
from penstock.planning.planned import Plan, PlannedPipeline, evaluate
from penstock.schedule import build

Devices = tuple[int, ...]


def equal_pipelines(job: Job, schedule: str = "1f1b", depth: int | None = None) -> Plan | None:
    """The fastest of all equal pipelines, or of those of `depth` devices; None if none fits."""
    return _best(job, schedule, _every_depth(job, depth), by_speed=False)


def pipelines_by_speed(job: Job, schedule: str = "1f1b") -> Plan | None:
    """The fastest pipelines of equal depth that follow the devices' speeds; None if none fits."""
    return _best(job, schedule, _every_depth(job), by_speed=True)


def oobleck_rule(job: Job, schedule: str = "1f1b") -> Plan | None:
    """Oobleck's templates and instantiation; None if no number of devices holds the model."""
    size = job.cluster.size
    for fewest in range(1, min(size // job.copies, len(job.parts)) + 1):
        count = min(size // fewest, job.num_microbatches)
        extra = min(size, count * len(job.parts)) - count * fewest
        sizes = [fewest + extra // count + (index < extra % count) for index in range(count)]
        if (plan := _best(job, schedule, [_consecutive(sizes)], by_speed=True)) is not None:
            return plan
    return None


BASELINES: dict[str, Callable[[Job, str], Plan | None]] = {
    "equal pipelines (Megatron, Alpa)": equal_pipelines,
    "by speed, equal depth (Metis)": pipelines_by_speed,
    "Oobleck's rule": oobleck_rule,
}


def _every_depth(job: Job, only: int | None = None) -> list[list[Devices]]:
    size = job.cluster.size
    layouts = []
    for depth in range(1, min(size, len(job.parts)) + 1):
        count = min(size // depth, job.num_microbatches)
        if count >= job.copies and only in (None, depth):
            layouts.append(_consecutive([depth] * count))
    return layouts


def _consecutive(sizes: Sequence[int]) -> list[Devices]:
    return [tuple(range(a, b)) for a, b in pairwise(accumulate(sizes, initial=0))]


def _best(job: Job, schedule: str, layouts: Sequence[Sequence[Devices]], by_speed: bool) -> Plan | None:
    best = None
    for devices in layouts:
        stages_of_all = [_stages(job, own, schedule, by_speed) for own in devices]
        if None in stages_of_all:
            continue
        rates = [1.0] * len(stages_of_all)
        if by_speed:
            rates = [
                1 / _slowest(job, own, stages) for own, stages in zip(devices, stages_of_all, strict=True) if stages
            ]
        counts = _shares(rates, job.num_microbatches)
        if (
            best is not None
            and max(
                count * _slowest(job, own, stages)
                for own, stages, count in zip(devices, stages_of_all, counts, strict=True)
                if stages
            )
            >= best.seconds
        ):
            continue  # not even without a bubble
        pipelines = [
            PlannedPipeline(own, stages, build("1f1b" if len(own) == 1 else schedule, len(own), count))
            for own, stages, count in zip(devices, stages_of_all, counts, strict=True)
            if stages is not None
        ]
        plan = evaluate(job, pipelines)
        if plan is not None and (best is None or plan.seconds < best.seconds):
            best = plan
    return best


def _stages(job: Job, devices: Devices, schedule: str, by_speed: bool) -> tuple | None:
    """The units of each stage: balanced, within the devices' memory where that is known to the system; None if the
    units are too few or do not fit."""
    kinds = [job.cluster.classes[job.cluster.class_of_device[device]] for device in devices]
    depth = len(devices)
    mapping = build("1f1b" if depth == 1 else schedule, depth, 1).stage_to_rank
    if len(mapping) > len(job.parts):
        return None
    speeds = [kinds[rank].speed if by_speed else 1.0 for rank in mapping]
    live = max(live_microbatches(schedule, depth, rank, job.num_microbatches) for rank in range(depth))
    needs = [held.state + live * held.kept + held.working for held in job.held]
    limits = [kinds[rank].memory * depth / len(mapping) for rank in mapping]
    seconds = [sum(unit.seconds for unit in part) for part in job.parts]
    try:
        sizes = partition(seconds, speeds, needs, limits).sizes if by_speed else partition(seconds, speeds).sizes
    except ValueError:
        sizes = partition(seconds, speeds).sizes
    return tuple(
        tuple(unit for part in job.parts[a:b] for unit in part) for a, b in pairwise(accumulate(sizes, initial=0))
    )


def _slowest(job: Job, devices: Devices, stages: Sequence) -> float:
    """Seconds of the slowest device for a microbatch."""
    per_rank = len(stages) // len(devices)
    speeds = [job.cluster.classes[job.cluster.class_of_device[device]].speed for device in devices]
    if per_rank > 1:
        return sum(unit.seconds for stage in stages for unit in stage) / sum(speeds)
    return max(sum(unit.seconds for unit in stage) / speed for stage, speed in zip(stages, speeds, strict=True))


def _shares(rates: Sequence[float], total: int) -> list[int]:
    """Whole shares in proportion to `rates`, at least one each; what rounding leaves goes to the largest remainders."""
    whole = total - len(rates)
    exact = [whole * rate / sum(rates) for rate in rates]
    counts = [int(share) for share in exact]
    order = sorted(range(len(rates)), key=lambda index: counts[index] - exact[index])
    for index in order[: whole - sum(counts)]:
        counts[index] += 1
    return [count + 1 for count in counts]

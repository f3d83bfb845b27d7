"""What other systems' rules make of the same devices, beside the planner. Devices are taken in order.

- Equal pipelines, as Megatron and Alpa make them: `penstock.planning.planner.equal_pipelines`.
- By speed, after Metis (Um et al. 2024): equal depths, but stages balanced by their devices' speeds, and microbatches
  by the pipelines' speeds.
- Oobleck's rule (Jang et al. 2023): the fewest devices n0 that hold the model, as many such pipelines as there are
  devices for, those left over given to the first ones; microbatches by the pipelines' speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.layout.partition import partition, split_into
from penstock.planning.plan import Job, Plan, PlannedPipeline, evaluate, schedule_of
from penstock.planning.planner import equal_pipelines
from penstock.planning.profile import UnitCost, seconds_of, stages_of
from penstock.schedule import live_microbatches

Devices = tuple[int, ...]


def pipelines_by_speed(job: Job, schedule: str = "1f1b") -> Plan | None:
    """The fastest pipelines of equal depth that follow the devices' speeds; None if none fits."""
    size, layouts = job.cluster.size, []
    for depth in range(1, min(size, len(job.parts)) + 1):
        count = min(size // depth, job.num_microbatches)
        if count >= job.copies:
            layouts.append(_consecutive([depth] * count))
    return _best(job, schedule, layouts)


def oobleck_rule(job: Job, schedule: str = "1f1b") -> Plan | None:
    """Oobleck's templates and instantiation; None if no number of devices holds the model."""
    size = job.cluster.size
    for fewest in range(1, min(size // job.copies, len(job.parts)) + 1):
        count = min(size // fewest, job.num_microbatches)
        extra = min(size, count * len(job.parts)) - count * fewest
        sizes = [fewest + extra // count + (index < extra % count) for index in range(count)]
        if (plan := _best(job, schedule, [_consecutive(sizes)])) is not None:
            return plan
    return None


RULES: dict[str, Callable[[Job, str], Plan | None]] = {
    "equal pipelines (Megatron, Alpa)": equal_pipelines,
    "by speed, equal depth (Metis)": pipelines_by_speed,
    "Oobleck's rule": oobleck_rule,
}


def _consecutive(sizes: Sequence[int]) -> list[Devices]:
    return [tuple(run) for run in split_into(range(sum(sizes)), sizes)]


def _best(job: Job, schedule: str, layouts: Sequence[Sequence[Devices]]) -> Plan | None:
    best = None
    for devices in layouts:
        if any(schedule_of(schedule, len(own), 1).num_stages > len(job.parts) for own in devices):
            continue
        stages = [_stages(job, own, schedule) for own in devices]
        slowest = [_slowest(job, own, each) for own, each in zip(devices, stages, strict=True)]
        counts = _shares([1 / seconds for seconds in slowest], job.num_microbatches)
        without_bubble = max(count * seconds for count, seconds in zip(counts, slowest, strict=True))
        if best is not None and without_bubble >= best.seconds:
            continue
        pipelines = [
            PlannedPipeline(own, each, schedule_of(schedule, len(own), count))
            for own, each, count in zip(devices, stages, counts, strict=True)
        ]
        plan = evaluate(job, pipelines)
        if plan is not None and (best is None or plan.seconds < best.seconds):
            best = plan
    return best


def _stages(job: Job, devices: Devices, schedule: str) -> tuple[tuple[UnitCost, ...], ...]:
    """The units of each stage, balanced by the devices' speeds, and within their memory where that can be."""
    kinds = [job.cluster.kind_of(device) for device in devices]
    depth = len(devices)
    mapping = schedule_of(schedule, depth, 1).stage_to_rank
    speeds = [kinds[rank].speed for rank in mapping]
    live = max(live_microbatches(schedule, depth, rank, job.num_microbatches) for rank in range(depth))
    needs = [held.state + live * held.kept + held.working for held in job.held]
    limits = [kinds[rank].memory * depth / len(mapping) for rank in mapping]
    try:
        sizes = partition(job.seconds, speeds, needs, limits).sizes
    except ValueError:
        sizes = partition(job.seconds, speeds).sizes
    return stages_of(job.parts, sizes)


def _slowest(job: Job, devices: Devices, stages: Sequence[Sequence[UnitCost]]) -> float:
    """Seconds of the slowest device for a microbatch."""
    seconds = seconds_of(stages)
    speeds = [job.cluster.kind_of(device).speed for device in devices]
    if len(stages) > len(devices):
        return sum(seconds) / sum(speeds)
    return max(time / speed for time, speed in zip(seconds, speeds, strict=True))


def _shares(rates: Sequence[float], total: int) -> list[int]:
    """Whole shares in proportion to `rates`, at least one each; what rounding leaves goes to the largest remainders."""
    whole = total - len(rates)
    exact = [whole * rate / sum(rates) for rate in rates]
    counts = [int(share) for share in exact]
    order = sorted(range(len(rates)), key=lambda index: counts[index] - exact[index])
    for index in order[: whole - sum(counts)]:
        counts[index] += 1
    return [count + 1 for count in counts]

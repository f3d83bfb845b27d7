"""The best plans for a job, or why there is none; and the best equal pipelines, to compare them with."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

from penstock.layout.partition import partition, split_into
from penstock.planning.candidates import Candidate, LayoutSearch, some_depths
from penstock.planning.exact import exact_layouts
from penstock.planning.memory import HeldBytes, readable
from penstock.planning.plan import Job, Plan, are_apart, schedule_of
from penstock.schedule.registry import PLAIN


class Infeasible(ValueError):
    """There is no plan; the message says what is in the way, and where it can by how much."""


def make_plans(job: Job, most: int = 5) -> list[Plan]:
    """The best plans, fastest first. For a small job they are the best of all layouts, but for what `exact` leaves out.
    Besides, layouts that are good by formula are looked at under every schedule, by rising bounds; the pipelines of
    those that may be among the best are simulated alone, and the best of them all together on their nodes, with the
    reduction of gradients."""
    search = LayoutSearch(job)
    plans: list[Plan] = []
    seen = set()

    def add(candidate: Candidate) -> None:
        key = frozenset(
            Counter((pipeline.name, pipeline.classes, pipeline.sizes, count) for pipeline, count in candidate).items()
        )
        plan = None if key in seen else search.realise(candidate)
        seen.add(key)
        if plan is not None:
            insort(plans, plan, key=lambda plan: (plan.seconds, len(plan.devices)))

    for candidate in exact_layouts(search, most):
        add(candidate)
    # Bounds, and estimates of what is not simulated as a whole yet, the most promising first; the third breaks ties. An
    # estimate is no bound, but the bounds of what is not estimated yet are: the search ends where both are no better.
    queue = [(bound, False, place, candidate) for place, (bound, candidate) in enumerate(search.under_schedules())]
    while queue:
        seconds, is_estimate, place, candidate = heappop(queue)
        if len(plans) >= most and seconds >= plans[most - 1].seconds:
            break
        if is_estimate:
            add(candidate)
        else:
            seconds, candidate = search.estimate(candidate)
            heappush(queue, (seconds, True, -place, candidate))
    if not plans:
        raise explain(job)
    return plans[:most]


def best_of(jobs: Sequence[Job], most: int = 5) -> tuple[list[Plan], list[str]]:
    """The plans of the fastest of some jobs, which differ in what is switched on; and what they would be without."""
    plans_by_job: list[list[Plan]] = []
    failures: list[tuple[Job, Infeasible]] = []
    for job in jobs:
        try:
            plans_by_job.append(make_plans(job, most))
        except Infeasible as error:
            failures.append((job, error))
    if not plans_by_job:
        raise failures[-1][1]
    plans = min(plans_by_job, key=lambda some: some[0].seconds)
    words = []
    for switch, name in (("checkpointing", "recomputed activations"), ("sharded", "a sharded optimizer")):
        if not getattr(plans[0].job, switch) or all(getattr(job, switch) for job in jobs):
            continue
        others = [some[0] for some in plans_by_job if not getattr(some[0].job, switch)]
        if others:
            best = min(others, key=lambda plan: plan.seconds)
            needs = readable(best.fullest[1].total)
            words.append(f"Without {name}: {best.seconds:.4g} s a step, and {needs} on the fullest device.")
        else:
            why = next(error for job, error in failures if not getattr(job, switch))
            words.append(f"It fits with {name} only. Without, {why}.")
    return plans, words


def shares_of(job: Job) -> list[int]:
    """Over how many pipelines the optimizer's state may be divided: also over one whose devices share sequences, as all
    of them have its weights. Nothing if nothing can be divided."""
    alone = [1] if job.context_parallel_size > 1 else []
    return alone + some_depths(min(job.cluster.size, job.num_microbatches))


def equal_pipelines(job: Job, schedule: str = PLAIN, depth: int | None = None) -> Plan | None:
    """The fastest of all equal pipelines, or of those of `depth` devices; None if none fits.

    As Megatron and Alpa (Zheng et al. 2022) make them, to compare plans with: each has as many devices, taken in order,
    and as many microbatches, or one more where these cannot be divided, and units are balanced by cost whatever the
    devices' speeds.
    """
    cluster, search = job.cluster, LayoutSearch(job)
    ways: list[tuple[float, int, list[Sequence[int]], Candidate]] = []
    for ranks in range(1, min(cluster.size, len(job.parts)) + 1) if depth is None else [depth]:
        count = min(cluster.size // ranks, job.num_microbatches)
        num_stages = schedule_of(schedule, ranks, 1).num_stages
        if count < job.least_pipelines or num_stages > len(job.parts):
            continue
        devices = split_into(range(count * ranks), [ranks] * count)
        if not are_apart(cluster, devices, job.copies):
            continue
        sizes = partition(job.seconds, [1.0] * num_stages).sizes
        classes = [tuple(cluster.class_of_device[device] for device in of_pipeline) for of_pipeline in devices]
        alike = {kinds: search.pipeline_of(kinds, sizes, schedule) for kinds in set(classes)}
        each, more = divmod(job.num_microbatches, count)
        candidate = [(alike[kinds], each + (index < more)) for index, kinds in enumerate(classes)]
        ways.append((search.bound(candidate), ranks, devices, candidate))
    best: Plan | None = None
    for bound, _, devices, candidate in sorted(ways, key=lambda way: way[:2]):
        if best is not None and bound >= best.seconds:
            break
        plan = search.realise_on(devices, candidate)
        if plan is not None and (best is None or plan.seconds < best.seconds):
            best = plan
    return best


def with_equal_pipelines(plans: Sequence[Plan], job: Job) -> tuple[list[Plan], Plan | None]:
    """The plans, and the best equal pipelines under their schedules, to compare with; these are among the plans, as the
    formula of a large job leaves out the reduction of gradients and can miss them."""
    used = {plan.schedule_names for plan in plans}  # single ranks have no other than the plain one
    names = [name for name in job.schedules if name in used] or job.schedules[:1]
    bests = [equal_pipelines(job, name) for name in names]
    equal = min((best for best in bests if best is not None), key=lambda best: best.seconds, default=None)
    if equal is None or any(_layout_of(plan) == _layout_of(equal) and plan.seconds <= equal.seconds for plan in plans):
        return list(plans), equal
    others = [plan for plan in plans if _layout_of(plan) != _layout_of(equal)]
    return sorted([*others, equal], key=lambda plan: (plan.seconds, len(plan.devices))), equal


def _layout_of(plan: Plan) -> Counter[tuple[object, ...]]:
    """What its pipelines are, and how many of each, wherever they are placed."""
    return Counter(
        (
            pipeline.schedule.name,
            tuple(plan.job.cluster.class_of_device[device] for device in pipeline.devices),
            tuple(map(len, pipeline.stages)),
            pipeline.schedule.num_microbatches,
        )
        for pipeline in plan.pipelines
    )


def explain(job: Job) -> Infeasible:
    classes, parts, held = job.cluster.classes, job.parts, job.held
    for part, needed in zip(parts, held, strict=True):
        least = needed.with_live(1)
        if all(least > kind.memory for kind in classes):
            name = part[0].name if len(part) == 1 else f"{part[0].name} to {part[-1].name}"
            where = " and ".join(
                f"every device of class {kind.name}, which has {readable(kind.memory)} "
                f"({readable(least - kind.memory)} short)"
                for kind in classes
            )
            return Infeasible(f"no plan: {name} alone needs {readable(least)} on {where}")
    whole = HeldBytes.summed(held)
    most = sorted((kind.memory for kind in classes for _ in range(kind.count)), reverse=True)[: len(parts)]
    if whole.with_live(1) > sum(most):
        return Infeasible(
            f"no plan: the model needs at least {readable(whole.with_live(1))} ({readable(whole.state)} of weights, "
            f"gradients and optimizer), but all devices together have {readable(sum(most))}: "
            f"{readable(whole.with_live(1) - sum(most))} short"
        )
    templates = [template for some in LayoutSearch(job).templates() for template in some]
    if not templates:
        factor = _missing_memory(job)
        sizes = ", ".join(f"{readable(factor * kind.memory)} instead of {readable(kind.memory)}" for kind in classes)
        return Infeasible(
            f"no plan: no split of {len(parts)} parts over {job.cluster.size} devices fits; it would with "
            f"{factor:.3g} times the memory on each device ({sizes}), more devices, or recomputed activations"
        )
    if job.num_microbatches < (copies := job.least_pipelines):
        return Infeasible(
            f"no plan: {copies} copies need as many pipelines, and each at least 1 microbatch, but the global "
            f"batch has {job.num_microbatches}"
        )
    fewest = min(sum(template.counts) for template in templates)
    if fewest * copies > job.cluster.size:
        return Infeasible(
            f"no plan: a pipeline needs at least {fewest} of these devices, so {copies} copies need "
            f"{fewest * copies}, but there are {job.cluster.size}: {fewest * copies - job.cluster.size} short"
        )
    return Infeasible(
        f"no plan: {copies} pipelines fit one by one, but not together under {', '.join(job.schedules)}: "
        f"ask for fewer copies, add devices, or allow more schedules"
    )


def _missing_memory(job: Job) -> float:
    """The least factor for all devices' memory, to a thousandth, with which some split fits. With the highest one the
    largest device holds the whole model."""
    whole = HeldBytes.summed(job.held).with_live(1)
    low, high = 1.0, whole / max(kind.memory for kind in job.cluster.classes)

    def fits(factor: float) -> bool:
        classes = tuple(replace(kind, memory=kind.memory * factor) for kind in job.cluster.classes)
        return any(LayoutSearch(replace(job, cluster=replace(job.cluster, classes=classes))).templates())

    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high

"""The best layouts of a small job: every one is bounded, and simulated if it may win.

These are all splits over all orders of devices. A local search in place of this and of the large jobs' search was
tried: benchmarks/results/planner_one_solver.md.

The formula of `penstock.planning.search` is off where a pipeline has few microbatches, or its slowest stage has faster
ones before it. The pipeline of given devices that is the fastest alone is taken for the best one beside others, too,
though these change its reduction of gradients a little. Groups of devices are compared with the reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import combinations, islice, product

import numpy as np

from penstock.layout.partition import ROUNDING
from penstock.planning.candidates import Candidate, CandidatePipeline, LayoutSearch
from penstock.planning.memory import memory_of_ranks
from penstock.planning.microbatches import split_microbatches
from penstock.planning.plan import schedule_of
from penstock.planning.profile import held_by_stages, sums
from penstock.schedule.registry import live_microbatches

Counts = tuple[int, ...]
# A job is small if it has at most so many devices, splits over orders of devices, and sets of pipelines.
MOST_DEVICES, MOST_SPLITS, MOST_LAYOUTS = 10, 20_000, 2_000
# Jobs of more microbatches than this follow the formula.
MOST_MICROBATCHES = 32
# Of one set of devices and number of microbatches no more are simulated; seldom reached.
MOST_SIMULATED = 200
# Of layouts whose pipelines are fast alone so many are simulated together: with slow links the reduction of gradients
# decides, which their bounds do not count.
MOST_TOGETHER = 64


def exact_layouts(search: LayoutSearch, most: int) -> Iterator[Candidate]:
    """The best candidates, one for each of the best `most` ways to group devices; none for a job that is not small."""
    job = search.job
    if job.num_microbatches > MOST_MICROBATCHES or job.cluster.size > MOST_DEVICES:
        return
    sets = product(*(range(count + 1) for count in job.cluster.counts))
    possible = [counts for counts in sets if 0 < sum(counts) <= len(job.parts)]
    names = [n for n in job.schedules if sum(_num_splits(search, counts, n) for counts in possible) <= MOST_SPLITS]
    if not names:
        return
    layouts = list(islice(_sets_of(possible, job.cluster.counts, job.num_microbatches), MOST_LAYOUTS + 1))
    if len(layouts) > MOST_LAYOUTS:
        return
    queue: list[tuple[float, int, tuple[_Pipelines, ...], list[int]]] = []  # the second breaks ties
    for name in names:
        pipelines_of = {counts: _Pipelines(search, counts, name) for counts in possible}
        for layout in layouts:
            # On single ranks there is only one schedule.
            if len(layout) >= job.least_pipelines and (name == names[0] or any(sum(counts) > 1 for counts in layout)):
                chosen = tuple(pipelines_of[counts] for counts in layout)
                bound, shares = _bound(chosen, job.num_microbatches)
                queue.append((bound, len(queue), chosen, shares))
    heapify(queue)
    together: list[tuple[float, int, Candidate]] = []  # simulated with the reduction of gradients
    left = most + MOST_TOGETHER
    while most and (queue or together):
        if together and (not queue or not left or together[0][0] <= queue[0][0]):
            yield heappop(together)[2]
            most -= 1
            continue
        if not left:
            return
        before, place, chosen, _ = heappop(queue)
        # Others may have been simulated since.
        bound, shares = _bound(chosen, job.num_microbatches)
        if math.isinf(bound):
            continue
        if bound > before:
            heappush(queue, (bound, place, chosen, shares))
            continue
        pairs = list(zip(chosen, shares, strict=True))
        if all(count in pipelines.found for pipelines, count in pairs):
            candidate = [(best, count) for pipelines, count in pairs if (best := pipelines.found[count][1]) is not None]
            plan = search.realise(candidate)
            left -= 1
            if plan is not None:
                heappush(together, (plan.seconds, place, candidate))
            continue
        for pipelines, count in pairs:
            pipelines.simulate(count)
        heappush(queue, (bound, place, chosen, shares))


class _Pipelines:
    """All pipelines of certain devices under a schedule."""

    def __init__(self, search: LayoutSearch, counts: Counts, name: str) -> None:
        # By number of microbatches, the seconds of the fastest that was simulated, and it.
        self.found: dict[int, tuple[float, CandidatePipeline | None]] = {}
        self._search, self._name, self._depth = search, name, sum(counts)
        self._bounds: dict[int, np.ndarray] = {}
        job = search.job
        schedule = schedule_of(name, self._depth, 1)
        mapping, splits = schedule.stage_to_rank, schedule.splits_backward
        orders = product(range(len(counts)), repeat=self._depth) if len(mapping) <= len(job.parts) else ()
        self._orders = [o for o in orders if all(o.count(kind) == number for kind, number in enumerate(counts))]
        inner = list(combinations(range(1, len(job.parts)), len(mapping) - 1))
        self._ends = np.array([(0, *ends, len(job.parts)) for ends in inner], int).reshape(-1, len(mapping) + 1)
        whole = (self._of_stages(column) for column in zip(*map(sums, job.parts), strict=True))
        messages = (self._of_stages(column) for column in zip(*(sums(p, math.inf) for p in job.parts), strict=True))
        state, kept = (
            self._of_stages([unit.state for unit in job.held]),
            self._of_stages([unit.kept for unit in job.held]),
        )
        ranks = [list(schedule.stages_of(rank)) for rank in range(self._depth)]
        classes = [[job.cluster.classes[kind] for kind in order] for order in self._orders]
        speeds = np.array([[kinds[rank].speed for rank in mapping] for kinds in classes]).reshape(-1, 1, len(mapping))
        # By order, split, and stage or rank.
        f, b, w = ((total - message) / speeds + message for total, message in zip(whole, messages, strict=True))
        every = f + b + w
        first = np.cumsum(f if splits else every, -1) - (f if splits else every)
        # Messages between ranks on the way to each stage, and back if the backward is not split.
        inside, sent = job.cluster.inside, np.array([part[-1].crossing for part in job.parts])
        goes = [not schedule.is_local(stage, stage + 1) for stage in range(len(mapping) - 1)]
        hops = (inside.latency + sent[self._ends[:, 1:-1] - 1] / inside.bandwidth) * np.array(goes, bool)
        reached = np.concatenate([np.zeros((len(hops), 1)), np.cumsum(hops, -1)], -1)
        first = first + reached * (1 if splits else 2)
        self._work = np.stack([every[..., stages].sum(-1) for stages in ranks], -1)
        self._before = first[..., [stages[0] for stages in ranks]]
        self._path = (f + b).sum(-1) + (w[..., 0] if splits else w.sum(-1)) + 2 * reached[:, -1]
        self._squares = (every**2).sum(-1)
        self._state, self._kept = (np.stack([n[:, stages].sum(1) for stages in ranks], 1) for n in (state, kept))
        self._state -= self._held_twice(np.array(mapping))
        self._limits = np.array([[kind.memory for kind in kinds] for kinds in classes]).reshape(-1, 1, self._depth)

    def _of_stages(self, values: Sequence[float]) -> np.ndarray:
        before = np.concatenate([[0.0], np.cumsum(values)])
        of_stages: np.ndarray = before[self._ends[:, 1:]] - before[self._ends[:, :-1]]
        return of_stages

    def _held_twice(self, rank_of_stage: np.ndarray) -> np.ndarray:
        """By split and rank, what several parts on it count for the weights that they share, and it holds once."""
        users: dict[str, list[tuple[int, float]]] = {}
        for number, part in enumerate(self._search.job.held):
            for name, sizes in part.tied_state().items():
                users.setdefault(name, []).append((number, sum(sizes)))
        twice = np.zeros((len(self._ends), self._depth))
        for each in users.values():
            ranks = [rank_of_stage[(self._ends[:, 1:] <= number).sum(1)] for number, _ in each]
            count = sum(np.eye(self._depth)[on] for on in ranks)
            twice += np.maximum(count - 1, 0) * each[0][1]
        return twice

    def seconds(self, microbatches: int) -> float:
        """The seconds of the fastest pipeline, or a lower bound of them: more microbatches take no less."""
        least = max((seconds for count, (seconds, _) in self.found.items() if count <= microbatches), default=0.0)
        bounds = self._all(microbatches)
        return max(least, float(bounds.min()) if bounds.size else math.inf)

    def _all(self, microbatches: int) -> np.ndarray:
        """A lower bound of the step of each order and split; infinite if it fits in no case."""
        if microbatches not in self._bounds:
            one_stage_each = self._ends.shape[1] - 1 == self._depth
            # Those between F and B: what waits for its W holds less, and some schedules hold fewer than 1F1B.
            of_rank = partial(live_microbatches, self._name, self._depth)
            most = [min(of_rank(rank, microbatches), self._depth - rank) for rank in range(self._depth)]
            live = most if one_stage_each else [1] * self._depth
            fits = (self._state + self._kept * np.array(live) <= self._limits * (1 + ROUNDING)).all(-1)
            bound = np.maximum((self._before + microbatches * self._work).max(-1), self._path)
            self._bounds[microbatches] = np.where(fits, bound, np.inf)
        return self._bounds[microbatches]

    def simulate(self, microbatches: int) -> None:
        """Find the fastest that fits."""
        if microbatches in self.found:
            return
        best: tuple[float, CandidatePipeline | None] = math.inf, None
        bounds = self._all(microbatches)
        schedule = schedule_of(self._name, self._depth, microbatches)
        # Of equal bounds the most even stages come first.
        finite = bounds[np.isfinite(bounds)]
        rounded = np.round(bounds / finite.min(), 9) if finite.size and finite.min() > 0 else bounds
        for place in np.lexsort((self._squares.ravel(), rounded.ravel()))[:MOST_SIMULATED]:
            order, row = np.unravel_index(place, bounds.shape)
            if bounds[order, row] >= best[0] * (1 - ROUNDING):
                break
            sizes = tuple(np.diff(self._ends[row]).tolist())
            pipeline = self._search.pipeline_of(self._orders[order], sizes, self._name)
            seconds, _ = self._search.simulated(pipeline, microbatches)
            if seconds < best[0]:
                memories = memory_of_ranks(schedule, held_by_stages(pipeline.units))
                if all(memory.total <= limit for memory, limit in zip(memories, self._limits[order, 0], strict=True)):
                    best = seconds, pipeline
        self.found[microbatches] = best


def _bound(chosen: Sequence[_Pipelines], microbatches: int) -> tuple[float, list[int]]:
    counts = split_microbatches([pipeline.seconds for pipeline in chosen], microbatches)
    return max(pipeline.seconds(count) for pipeline, count in zip(chosen, counts, strict=True)), counts


def _num_splits(search: LayoutSearch, counts: Counts, name: str) -> int:
    stages = len(schedule_of(name, sum(counts), 1).stage_to_rank)
    orders = math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
    return orders * math.comb(len(search.job.parts) - 1, stages - 1)


def _sets_of(templates: Sequence[Counts], free: Counts, deepest: int) -> Iterator[tuple[Counts, ...]]:
    """The multisets of at most `deepest` templates within the free devices."""
    for index, counts in enumerate(templates):
        left = tuple(have - need for have, need in zip(free, counts, strict=True))
        if min(left) >= 0 and deepest:
            yield (counts,)
            yield from ((counts, *rest) for rest in _sets_of(templates[index:], left, deepest - 1))

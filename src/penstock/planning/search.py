"""Which pipelines, by formula: the best splits for every set of devices, and the best sets of pipelines for a cluster.

The formula: a pipeline whose stages take t_1, ..., t_p seconds for F, B and W of a microbatch needs at least
sum(t) + (m - 1) max(t) for m of them (1F1B and GPipe reach it without communication). Exact, where not said otherwise:

- `find_splits`: dynamic programming over (devices used of each class, first unit of the remaining stages), from the
  last stage to the first, since a stage holds as many microbatches under 1F1B as stages follow it, and its own.
- `layouts`: a step of T seconds, which is searched, is possible if some set of pipelines has room for all microbatches
  within T: a knapsack, of pipelines that weigh devices of each class and are worth the microbatches they finish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product

import numpy as np

from penstock.layout.partition import ROUNDING
from penstock.planning.cluster import Cluster, Link
from penstock.planning.memory import HeldBytes, messages_at_most
from penstock.planning.microbatches import split_microbatches
from penstock.planning.profile import UnitCost, seconds_of

Counts = tuple[int, ...]
# Mixed pipelines are looked at up to the depth at which there are so many multisets of device classes.
MOST_MIXTURES = 600
# Of splits where none is better in both numbers so many are kept, and fewer for models of many units.
MOST_ALTERNATIVES = 32
ALTERNATIVES_BUDGET = 20_000
# States of the exact knapsack; larger ones are solved as a linear program and rounded.
MOST_STATES = 500


@dataclass(frozen=True)
class StageSplit:
    """A model's parts split into stages for devices of certain classes. Equal ones have the same classes and sizes."""

    classes: Counts
    sizes: Counts
    slowest: float = field(compare=False)  # seconds of the slowest stage for a microbatch
    total: float = field(compare=False)  # seconds of all stages for a microbatch, and of its messages


@dataclass(frozen=True, eq=False)
class Template:
    """The best splits for a number of devices of each class. It is no user's `PipelineTemplate`, which is one split."""

    counts: Counts
    times: tuple[tuple[float, float], ...]  # `slowest` and `total` of each; none is better than another in both
    follow: Callable[[int], tuple[Counts, Counts]]  # on demand: most are never used

    def seconds(self, microbatches: int) -> float:
        return min([total + (microbatches - 1) * slowest for slowest, total in self.times])

    def split_for(self, microbatches: int) -> StageSplit:
        label = min(range(len(self.times)), key=lambda i: self.times[i][1] + (microbatches - 1) * self.times[i][0])
        return StageSplit(*self.follow(label), *self.times[label])


def find_splits(
    chain: Chain, live: int | None = None, deepest: int | None = None, mixtures: bool = True
) -> list[Template]:
    """The best splits for every number of devices of each class that some split within their memory exists for.

    Args:
        live: the microbatches that a stage holds; None: as under 1F1B, one for itself and for each stage after it.
        mixtures: whether a pipeline may have devices of several classes.
    """
    cluster, num_parts = chain.cluster, chain.num_parts
    num_classes = len(cluster.classes)
    width = max(1, min(MOST_ALTERNATIVES, ALTERNATIVES_BUDGET // (num_classes * num_parts**2)))
    deepest = min(num_parts, cluster.size, deepest or num_parts)
    deepest_mixture = _deepest_mixture(num_classes) if mixtures else 1
    nothing = (0,) * num_classes
    # Per devices used: (slowest, total) of the best splits of the parts from each first part on; and what they came
    # from: the class, the end and the alternative of the rest.
    ended = np.where(np.arange(num_parts + 1) == num_parts, 0.0, np.inf)[:, None]
    best, origin = {nothing: (ended, ended)}, dict[Counts, np.ndarray]()
    templates = []
    level = [nothing]
    for depth in range(1, deepest + 1):
        if not level:
            break
        held = min(depth if live is None else live, chain.most_microbatches)
        stages = [chain.stage_times(k, held, depth) for k in range(num_classes)]
        successors: dict[Counts, list[int]] = {}
        for counts in level:
            for k in range(num_classes):
                more = (*counts[:k], counts[k] + 1, *counts[k + 1 :])
                if more[k] <= cluster.counts[k] and (depth <= deepest_mixture or max(more) == depth):
                    successors.setdefault(more, []).append(k)
        level = []
        for counts, added in successors.items():
            rests = [(*counts[:k], counts[k] - 1, *counts[k + 1 :]) for k in added]
            alternatives = [(*stages[k], *best[rest]) for k, rest in zip(added, rests, strict=True)]
            splits = (_single_best if width == 1 else _several_best)(added, alternatives, width)
            if splits is None:
                continue
            slowest, total, origin[counts] = splits
            level.append(counts)
            closed = np.full((1, slowest.shape[1]), np.inf)
            best[counts] = np.concatenate([slowest, closed]), np.concatenate([total, closed])
            pairs = zip(slowest[0].tolist(), total[0].tolist(), strict=True)
            if times := tuple(pair for pair in pairs if pair[0] < math.inf):
                templates.append(Template(counts, times, cache(partial(_follow, origin, counts))))
    return templates


class Chain:
    """Times and memory of every run of parts as a stage."""

    def __init__(
        self,
        parts: Sequence[Sequence[UnitCost]],
        cluster: Cluster,
        most_microbatches: int,
        recomputed: Sequence[Sequence[UnitCost]] | None = None,
    ) -> None:
        """`recomputed` are the parts of a stage that does not fit otherwise."""
        self.cluster, self.num_parts, self.most_microbatches = cluster, len(parts), most_microbatches
        # What crosses before each end; nothing at the model's own ends.
        self._crossing = np.array([0.0, *(part[-1].crossing for part in parts[:-1]), 0.0])
        self._ways = [self._runs(some) for some in (parts, recomputed) if some is not None]
        self._times: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}

    def _runs(self, parts: Sequence[Sequence[UnitCost]]) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """For every run of parts: its seconds on each class of devices, its memory for each microbatch, and besides."""
        held = [HeldBytes.summed(part) for part in parts]
        state = _run_sums([unit.state for unit in held])
        before_it: dict[str, int] = {}
        for end, unit in enumerate(held):
            for name, sizes in unit.tied_state().items():
                if name in before_it:  # runs that have both parts hold it once
                    state[: before_it[name] + 1, end + 1 :] -= sum(sizes)
                before_it[name] = end
        kept = _run_sums([unit.kept for unit in held])
        # See `HeldBytes.summed`: what a part works with, when those above it have let go of what they kept.
        before = np.cumsum([unit.kept for unit in held])
        need = before + np.array([unit.working for unit in held])
        working = np.zeros_like(state)
        for start in range(len(parts)):
            working[start, start + 1 :] = np.maximum.accumulate(need[start:]) - before[start:]
        below = np.array([messages_at_most(size, 0.0, self.most_microbatches) for size in self._crossing[:-1]])
        above = np.array([messages_at_most(0.0, size, self.most_microbatches) for size in self._crossing])
        seconds = [_run_sums(seconds_of(parts, kind.speed)) for kind in self.cluster.classes]
        return seconds, kept + self._crossing, state + working + below[:, None] + above

    def stage_times(self, device_class: int, live: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """For every run of parts on a device: its seconds or its message's, if they are longer; and both together."""
        link = self.cluster.link_among(depth)
        key = device_class, live, link
        if key not in self._times:
            kind = self.cluster.classes[device_class]
            times = np.minimum.reduce(
                [
                    np.where(always + live * each <= kind.memory, seconds[device_class], np.inf)
                    for seconds, each, always in self._ways
                ]
            )
            self._times[key] = times, times
            if link != Link():
                occupied = self._crossing / link.bandwidth
                message = np.where(self._crossing > 0, occupied + link.latency, 0.0)
                # An activation passes one way and its gradient the other; each direction has its own bandwidth.
                self._times[key] = np.maximum(times, occupied), times + 2 * message
        return self._times[key]


def _run_sums(values: Sequence[float]) -> np.ndarray:
    """[start, end]: the sum of values from start up to end; infinite for empty runs. Shape (n, n + 1)."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    sums = before[None, :] - before[:-1, None]
    sums[np.arange(sums.shape[1]) <= np.arange(sums.shape[0])[:, None]] = np.inf
    found: np.ndarray = sums
    return found


def _single_best(
    added: Sequence[int], alternatives: Sequence[tuple[np.ndarray, ...]], width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """For each first part, the split with the fastest slowest stage, and among equal ones the least total."""
    best: list[np.ndarray] = []
    rows = np.arange(len(alternatives[0][0]))
    for k, (bottleneck, seconds, slowest, total) in zip(added, alternatives, strict=True):
        scores = np.maximum(bottleneck, slowest[:, 0])
        together = seconds + total[:, 0]
        together *= ROUNDING
        scores += together
        ends = scores.argmin(1)
        added_here = [
            scores[rows, ends], np.maximum(bottleneck[rows, ends], slowest[ends, 0]),
            seconds[rows, ends] + total[ends, 0], np.full_like(ends, k), ends,
        ]  # fmt: skip
        if best:
            better = added_here[0] < best[0]
            added_here = [np.where(better, new, old) for new, old in zip(added_here, best, strict=True)]
        best = added_here
    _, front, latest, classes, ends = best
    if not np.isfinite(front).any():
        return None
    return front[:, None], latest[:, None], np.stack([classes, ends, np.zeros_like(ends)])[:, :, None]


def _several_best(
    added: Sequence[int], alternatives: Sequence[tuple[np.ndarray, ...]], width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """For each first part, the splits that no other beats in both numbers, at most `width`: fastest stages first.
    Numbers are infinite where there are fewer.

    Alternatives are times of stages, and of the best splits of the parts after them.
    """
    num_parts = len(alternatives[0][0])
    fronts, latests, sources = [], [], []
    for k, (bottleneck, seconds, slowest, total) in zip(added, alternatives, strict=True):
        fronts.append(np.maximum(bottleneck[:, :, None], slowest[None]).reshape(num_parts, -1))
        latests.append((seconds[:, :, None] + total[None]).reshape(num_parts, -1))
        ends, labels = np.divmod(np.arange(slowest.size), slowest.shape[1])
        sources.append(np.stack([np.full_like(ends, k), ends, labels]))
    front, latest = np.concatenate(fronts, 1), np.concatenate(latests, 1)
    if not np.isfinite(front).any():
        return None
    rows = np.arange(num_parts)[:, None]
    order = np.lexsort((latest, front), axis=1)
    sorted_latest = latest[rows, order]
    best_before = np.minimum.accumulate(sorted_latest, 1)
    better = np.isfinite(sorted_latest)
    better[:, 1:] &= sorted_latest[:, 1:] < best_before[:, :-1] * (1 - ROUNDING)
    place = np.cumsum(better, 1) - 1
    num_kept = int(min(width, max(1, better.sum(1).max())))
    chosen = np.zeros((num_parts, num_kept), int)
    kept = np.zeros((num_parts, num_kept), bool)
    row, column = np.nonzero(better & (place < num_kept))
    chosen[row, place[row, column]] = order[row, column]
    kept[row, place[row, column]] = True
    first, both = (np.where(kept, numbers[rows, chosen], np.inf) for numbers in (front, latest))
    return first, both, np.concatenate(sources, 1)[:, chosen]


def _follow(origin: dict[Counts, np.ndarray], counts: Counts, label: int) -> tuple[Counts, Counts]:
    """Device classes and sizes of the stages of a split."""
    classes, sizes, start = [], [], 0
    while any(counts):
        device_class, end, label = (int(number) for number in origin[counts][:, start, label])
        classes.append(device_class)
        sizes.append(end - start)
        counts = (*counts[:device_class], counts[device_class] - 1, *counts[device_class + 1 :])
        start = end
    return tuple(classes), tuple(sizes)


def _deepest_mixture(num_classes: int) -> int:
    depth = 1
    while math.comb(depth + 1 + num_classes, num_classes) <= MOST_MIXTURES:
        depth += 1
    return depth


# ---------------------------------------------------------------- which pipelines


def layouts(
    templates: Sequence[Template], limits: Counts, microbatches: int, fewest: int, tolerance: float = 0.0
) -> Iterator[tuple[float, list[StageSplit]]]:
    """Layouts by falling time of a step, by formula; the last is the best, or slower by at most the share `tolerance`.
    Nothing if there is none. Each of the pipelines, `fewest` or more, gets at least one of the microbatches."""
    if not templates or microbatches < fewest:
        return
    # By template and alternative: `slowest` and `total`, infinite where there are fewer.
    times = np.full((2, len(templates), max(len(template.times) for template in templates)), np.inf)
    for row, template in enumerate(templates):
        times[:, row, : len(template.times)] = np.transpose(template.times)
    slowest, total = np.maximum(times, 1e-300)
    weights = np.array([template.counts for template in templates])
    # Device seconds that no pipeline undercuts, even without a bubble.
    least = float((weights.sum(1) * slowest.min(1)).min())
    low = microbatches * least / sum(limits) * (1 - ROUNDING)
    high = max(template.seconds(microbatches) for template in templates) + float(total[np.isfinite(total)].max())
    best: float | None = None
    while True:
        # First halve the interval; at its end ask for anything faster than what was found.
        is_last = best is not None and high - low <= max(tolerance, 1e-6) * high
        if is_last and tolerance:
            return
        time = high * (1 - 1e-12) if is_last or best is None else (low + high) / 2
        within = time * (1 - ROUNDING) if is_last else time
        with np.errstate(invalid="ignore"):
            room = np.where(total <= within * (1 + ROUNDING), (within - total) / slowest + ROUNDING + 1, 0.0).max(1)
        worth = np.minimum(np.floor(room), microbatches).astype(int)
        picked = _fill(worth, weights, np.array(limits), microbatches, fewest)
        if picked is None:
            if is_last or best is None:
                return
            low = time
            continue
        chosen = [templates[index] for index in picked]
        counts = split_microbatches([template.seconds for template in chosen], microbatches)
        best = max(template.seconds(count) for template, count in zip(chosen, counts, strict=True))
        high = min(best, high)
        yield best, [template.split_for(count) for template, count in zip(chosen, counts, strict=True)]


def _fill(worth: np.ndarray, weights: np.ndarray, limits: np.ndarray, enough: int, fewest: int) -> list[int] | None:
    """A knapsack: templates that are worth so many microbatches together; None if there are none."""
    able = np.nonzero(worth > 0)[0]
    solve = _exactly if math.prod(map(int, limits + 1)) * (fewest + 1) <= MOST_STATES else _rounded
    picked = solve(worth[able], weights[able], limits, enough, fewest) if len(able) else None
    if picked is None:
        return None
    chosen = [int(able[index]) for index in picked]
    # Pipelines without a microbatch are none.
    for index in sorted(chosen, key=lambda index: worth[index]):
        if len(chosen) > enough and worth[chosen].sum() - worth[index] >= enough:
            chosen.remove(index)
    return chosen if worth[chosen].sum() >= enough and fewest <= len(chosen) <= enough else None


def _exactly(worth: np.ndarray, weights: np.ndarray, limits: np.ndarray, enough: int, fewest: int) -> list[int] | None:
    """Dynamic programming over the devices used of each class, and the number of pipelines up to `fewest`."""
    strides = np.concatenate([np.cumprod((limits + 1)[::-1])[-2::-1], [1]]).astype(int)
    offsets = weights @ strides
    states = list(product(*(range(limit + 1) for limit in limits)))
    best = np.full((fewest + 1, len(states)), -(10**12))
    source = np.full((fewest + 1, len(states), 2), -1)
    best[0, 0] = 0
    for place, used in enumerate(states):
        able = np.nonzero((weights <= used).all(1))[0]
        if len(able):
            values = best[:, place - offsets[able]] + worth[able]
            choice = values.argmax(1)
            for have, index in enumerate(choice):
                then = min(have + 1, fewest)
                if values[have, index] > best[then, place]:
                    best[then, place] = values[have, index]
                    source[then, place] = able[index], have
    place, have = int(best[fewest].argmax()), fewest
    if best[have, place] < enough:
        return None
    chosen = []
    while place:
        index, have = (int(number) for number in source[have, place])
        chosen.append(index)
        place -= int(offsets[index])
    return chosen


def _rounded(worth: np.ndarray, weights: np.ndarray, limits: np.ndarray, enough: int, fewest: int) -> list[int] | None:
    """The linear program's pipelines, rounded down, and the devices left over filled one pipeline at a time."""
    amounts = _linear_program(worth.astype(float), weights.T.astype(float), limits.astype(float))
    if worth @ amounts < enough - 0.5:  # nothing whole does better
        return None
    whole = np.floor(amounts + ROUNDING).astype(int)
    chosen = [int(index) for index in np.nonzero(whole)[0] for _ in range(whole[index])]
    left = limits - whole @ weights
    while len(fitting := np.nonzero((weights <= left).all(1))[0]):
        if math.prod(left + 1) * (fewest + 1) <= MOST_STATES and len(chosen) >= fewest:
            return chosen + (_exactly(worth, weights, left, 0, 0) or [])
        index = int(fitting[np.argmax(worth[fitting] / weights[fitting].sum(1))])
        chosen.append(index)
        left = left - weights[index]
    return chosen


def _linear_program(values: np.ndarray, columns: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Nonnegative x with columns @ x <= limits that makes values @ x largest: the simplex method on a dense table."""
    rows, count = columns.shape
    table = np.zeros((rows + 1, count + rows + 1))
    table[:rows, :count], table[:rows, count:-1], table[:rows, -1] = columns, np.eye(rows), limits
    table[-1, :count] = -values
    basis = list(range(count, count + rows))
    for _ in range(50 * (rows + 1)):
        entering = int(table[-1, :-1].argmin())
        if table[-1, entering] > -ROUNDING:
            break
        column = table[:rows, entering]
        ratios = np.full(rows, np.inf)
        np.divide(table[:rows, -1], column, out=ratios, where=column > ROUNDING)
        leaving = int(ratios.argmin())
        table[leaving] /= table[leaving, entering]
        others = np.arange(rows + 1) != leaving
        table[others] -= np.outer(table[others, entering], table[leaving])
        basis[leaving] = entering
    solution = np.zeros(count + rows)
    solution[basis] = table[:rows, -1]
    return solution[:count]

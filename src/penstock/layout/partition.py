"""Partitions: units over the stages of a pipeline, and microbatches over pipelines. Both exact."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

T = TypeVar("T")

# Times that differ by rounding alone count as equal, or the most even of equally fast splits would be missed.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Partition:
    """Units over stages: `sizes[k]` consecutive units on stage k; the slowest stage takes `time`."""

    sizes: tuple[int, ...]
    time: float


def partition(
    unit_costs: Sequence[float],
    speeds: Sequence[float],
    unit_memory: Sequence[float] | None = None,
    memory_limits: Sequence[float] | None = None,
) -> Partition:
    """The contiguous split of units over devices, at least one unit each, whose slowest stage is fastest.

    Dynamic programming from the last stage to the first over the unit at which a stage begins. Of all splits with the
    best time the one with the least sum of squared stage times is returned.

    Args:
        unit_costs: cost per unit, in forward order, at least 0.
        speeds: per device, in the order of the stages, above 0; a stage takes (sum of its costs) / speed.
        unit_memory: per unit; with `memory_limits` only.
        memory_limits: per device, the most that its units may hold in sum.

    Raises:
        ValueError: more devices than units, numbers out of range, or no split within the memory limits.
    """
    num_units, num_stages = len(unit_costs), len(speeds)
    if num_stages < 1 or num_units < num_stages:
        raise ValueError(f"{num_units} units cannot give {num_stages} stages at least one unit each")
    if (unit_memory is None) != (memory_limits is None):
        raise ValueError("unit_memory and memory_limits belong together: give both or neither")
    memory = [0.0] * num_units if unit_memory is None else list(unit_memory)
    limits = [math.inf] * num_stages if memory_limits is None else list(memory_limits)
    if len(memory) != num_units or len(limits) != num_stages:
        raise ValueError(
            f"{num_units} units and {num_stages} devices, but {len(memory)} numbers in unit_memory and {len(limits)} "
            "in memory_limits"
        )
    if min(unit_costs) < 0 or min(memory) < 0 or min(speeds) <= 0:
        raise ValueError("costs and memory must not be negative, and speeds must be above 0")
    # Without memory limits each device can take more than its share less one unit, so no stage needs to be longer than:
    share = (sum(unit_costs) + num_stages * max(unit_costs)) / sum(speeds)
    bound = max(share, max(unit_costs) / min(speeds)) * max(speeds) * (1 + ROUNDING)
    before = np.concatenate([[0.0], np.cumsum(unit_costs)])
    longest = num_units - num_stages + 1
    enough = int((np.searchsorted(before, before[:-1] + bound, "right") - np.arange(num_units)).max())
    for most in dict.fromkeys((min(enough, longest), longest)):
        runs = _Runs(before, memory, speeds, limits, most)
        slowest = runs.slowest()
        if math.isfinite(slowest):
            return Partition(runs.most_even(slowest * (1 + ROUNDING)), slowest)
    raise ValueError(
        f"no split of {num_units} units over {num_stages} devices stays within the memory limits: the units need "
        f"{sum(memory):g} in all, the limits are {limits}"
    )


def split_into(items: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    """`items` in consecutive runs of these sizes."""
    return [items[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


class _Runs:
    """Seconds of every run of at most `most` units on each device: from a first unit on, by their number less 1."""

    def __init__(
        self, before: np.ndarray, memory: Sequence[float], speeds: Sequence[float], limits: Sequence[float], most: int
    ) -> None:
        self._num_units = num_units = len(memory)
        ends = np.arange(num_units)[:, None] + np.arange(1, most + 1)
        beyond = ends > num_units
        self._ends = ends = np.minimum(ends, num_units)
        costs = before[ends] - before[:-1, None]
        costs[beyond] = np.inf
        needs_before = np.concatenate([[0.0], np.cumsum(memory)])
        needs = needs_before[ends] - needs_before[:-1, None]
        devices = list(zip(speeds, limits, strict=True))
        times_of = {
            (speed, limit): np.where(needs <= limit * (1 + ROUNDING), costs / speed, np.inf)
            for speed, limit in set(devices)
        }
        self._times = [times_of[device] for device in devices]

    def slowest(self) -> float:
        """The seconds of the best split's slowest stage; infinite if there is no split."""
        slowest = np.full(self._num_units + 1, np.inf)
        slowest[-1] = 0.0
        for times in reversed(self._times):
            slowest[:-1] = np.maximum(times, slowest[self._ends]).min(1)
            slowest[-1] = np.inf
        return float(slowest[0])

    def most_even(self, limit: float) -> tuple[int, ...]:
        """The split within `limit` that has the least sum of squared stage times."""
        squared = {id(times): np.where(times <= limit, times, np.inf) ** 2 for times in self._times}
        squares = np.full(self._num_units + 1, np.inf)
        squares[-1] = 0.0
        rows = np.arange(self._num_units)
        best = []
        for times in reversed(self._times):
            totals = squared[id(times)] + squares[self._ends]
            best.append(totals.argmin(1))
            squares[:-1] = totals[rows, best[-1]]
            squares[-1] = np.inf
        sizes, start = [], 0
        for number in reversed(best):
            sizes.append(int(number[start]) + 1)
            start += sizes[-1]
        return tuple(sizes)


def run_sums(values: Sequence[float]) -> np.ndarray:
    """[start, end]: the sum of values from start up to end; infinite for empty runs. Shape (n, n + 1)."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    sums = before[None, :] - before[:-1, None]
    sums[np.arange(sums.shape[1]) <= np.arange(sums.shape[0])[:, None]] = np.inf
    return sums


def split_microbatches(times: Sequence[Callable[[int], float]], total: int) -> list[int]:
    """How many of `total` microbatches each pipeline gets, so that the slowest pipeline is fastest.

    One at a time, to the pipeline whose time after it is least. That is optimal for any nondecreasing times: say the
    slowest pipeline k ends with n microbatches and time T. If n is 1, every split takes T. Else, when k got its n-th,
    one more would have brought every pipeline to at least T. A split faster than T thus gives nobody more than they had
    then, and k less: it does not get all microbatches out.

    Args:
        times: per pipeline, its time for a step with that many microbatches; nondecreasing.
        total: microbatches of the global batch.

    Raises:
        ValueError: fewer microbatches than pipelines.
    """
    if not times or total < len(times):
        raise ValueError(f"{total} microbatches cannot give {len(times)} pipelines at least 1 each")
    counts = [1] * len(times)
    after_one_more = [(time(2), pipeline) for pipeline, time in enumerate(times)]
    heapq.heapify(after_one_more)
    for _ in range(total - len(times)):
        _, pipeline = after_one_more[0]
        counts[pipeline] += 1
        heapq.heapreplace(after_one_more, (times[pipeline](counts[pipeline] + 1), pipeline))
    return counts

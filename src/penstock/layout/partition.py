"""Partitions of units over the stages of a pipeline. Exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        raise ValueError(
            f"{num_units} units cannot give {num_stages} stages at least one unit each: take 1 to {num_units} stages"
        )
    if (unit_memory is None) != (memory_limits is None):
        raise ValueError("unit_memory and memory_limits belong together: give both or neither")
    memory = [0.0] * num_units if unit_memory is None else list(unit_memory)
    limits = [math.inf] * num_stages if memory_limits is None else list(memory_limits)
    if len(memory) != num_units or len(limits) != num_stages:
        raise ValueError(
            f"{num_units} units and {num_stages} devices, but {len(memory)} numbers in unit_memory and {len(limits)} "
            "in memory_limits"
        )
    if min(unit_costs) < 0:
        raise ValueError(f"costs must not be negative, but are {list(unit_costs)}")
    if min(memory) < 0:
        raise ValueError(f"memory must not be negative, but is {memory}")
    if min(speeds) <= 0:
        raise ValueError(f"speeds must be above 0, but are {list(speeds)}")
    if memory_limits is None:
        # The best split is not slower than this: if each device in turn takes units for so many seconds, it takes at
        # least one, and misses less than one unit's cost, so no unit is left over.
        share = (sum(unit_costs) + num_stages * max(unit_costs)) / sum(speeds)
        longest = _longest_run(unit_costs, max(share, max(unit_costs) / min(speeds)) * max(speeds))
    else:
        longest = _longest_run(memory, max(limits))
    runs = _Runs(unit_costs, memory, speeds, limits, min(longest, num_units - num_stages + 1))
    slowest = runs.slowest()
    if math.isfinite(slowest):
        return Partition(runs.most_even(slowest * (1 + ROUNDING)), slowest)
    raise ValueError(
        f"no split of {num_units} units over {num_stages} devices stays within the memory limits: the units need "
        f"{sum(memory):g} in all, the limits are {limits}"
        ": take more devices, or ones with more memory"
    )


def split_into(items: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    """`items` in consecutive runs of these sizes."""
    return [items[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def _longest_run(values: Sequence[float], most: float) -> int:
    """The number of units in the longest run whose values are at most `most` in sum."""
    before = _sums_before(values)
    ends = np.searchsorted(before, before[:-1] + most * (1 + 2 * ROUNDING), "right") - 1
    return max(1, int((ends - np.arange(len(values))).max()))


def _sums_before(values: Sequence[float]) -> np.ndarray:
    """The sum of the values before each, and of all."""
    return np.concatenate([[0.0], np.cumsum(values)])


class _Runs:
    """Seconds of every run of at most `most` units on each device: row by first unit, column by number of units - 1."""

    def __init__(
        self,
        unit_costs: Sequence[float],
        memory: Sequence[float],
        speeds: Sequence[float],
        limits: Sequence[float],
        most: int,
    ) -> None:
        self._num_units = num_units = len(memory)
        ends = np.arange(num_units)[:, None] + np.arange(1, most + 1)
        beyond = ends > num_units
        self._ends = ends = np.minimum(ends, num_units)
        before = _sums_before(unit_costs)
        costs = before[ends] - before[:-1, None]
        costs[beyond] = np.inf
        needs_before = _sums_before(memory)
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

"""Who gets what: units over the stages of a pipeline, and microbatches over pipelines. Both exact."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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

    The time of a stage is a sum of consecutive costs over one device's speed, so the best time is one of these: a
    binary search over them, with a probe that extends every reachable prefix as far as the next device allows. (Taking
    just the furthest prefix is exact too while stages may be empty; with a unit for every stage and unlike memory
    limits it is not.) Of all splits with that time the one with the least sum of squared stage times is returned.

    Args:
        unit_costs: cost per unit, in forward order, at least 0.
        speeds: per device, in the order of the stages, above 0; a stage takes (sum of its costs) / speed.
        unit_memory: per unit; with `memory_limits` only.
        memory_limits: per device, the most that its units may hold in sum.

    Raises:
        ValueError: more devices than units, numbers out of range, or no split within the memory limits.
    """
    # Times that differ by rounding alone count as equal, or the most even of equally fast splits would be missed.
    problem = _PartitionProblem(unit_costs, speeds, unit_memory, memory_limits)
    candidates = problem.candidate_times()
    low, high = 0, len(candidates) - 1
    if not problem.fits(candidates[high]):
        raise ValueError(
            f"no split of {len(unit_costs)} units over {len(speeds)} devices stays within the memory limits: "
            f"the units need {sum(problem.unit_memory):g} in all, the limits are {list(problem.memory_limits)}"
        )
    while low < high:
        middle = (low + high) // 2
        if problem.fits(candidates[middle]):
            high = middle
        else:
            low = middle + 1
    sizes = problem.most_even_sizes(candidates[low] * (1 + ROUNDING))
    return Partition(sizes, problem.slowest(sizes))


class _PartitionProblem:
    def __init__(
        self,
        unit_costs: Sequence[float],
        speeds: Sequence[float],
        unit_memory: Sequence[float] | None,
        memory_limits: Sequence[float] | None,
    ) -> None:
        self.num_units, self.num_stages = len(unit_costs), len(speeds)
        if self.num_stages < 1 or self.num_units < self.num_stages:
            raise ValueError(f"{self.num_units} units cannot give {self.num_stages} stages at least one unit each")
        if (unit_memory is None) != (memory_limits is None):
            raise ValueError("unit_memory and memory_limits belong together: give both or neither")
        self.unit_memory = [0.0] * self.num_units if unit_memory is None else list(unit_memory)
        self.memory_limits = [math.inf] * self.num_stages if memory_limits is None else list(memory_limits)
        if len(self.unit_memory) != self.num_units or len(self.memory_limits) != self.num_stages:
            raise ValueError(
                f"{self.num_units} units and {self.num_stages} devices, but {len(self.unit_memory)} numbers in "
                f"unit_memory and {len(self.memory_limits)} in memory_limits"
            )
        if min(unit_costs) < 0 or min(self.unit_memory) < 0 or min(speeds) <= 0:
            raise ValueError("costs and memory must not be negative, and speeds must be above 0")
        self.speeds = list(speeds)
        self.cost_before = [0.0, *accumulate(unit_costs)]
        self.memory_before = [0.0, *accumulate(self.unit_memory)]

    def stage_time(self, stage: int, start: int, end: int) -> float:
        return (self.cost_before[end] - self.cost_before[start]) / self.speeds[stage]

    def candidate_times(self) -> list[float]:
        """Every time that some stage can take and that all stages may need, ascending."""
        stage_of_speed = {speed: stage for stage, speed in enumerate(self.speeds)}
        at_least = self.cost_before[-1] / sum(self.speeds) * (1 - ROUNDING)
        times = {
            time
            for stage in stage_of_speed.values()
            for start in range(self.num_units)
            for end in range(start + 1, self.num_units + 1)
            if (time := self.stage_time(stage, start, end)) >= at_least
        }
        return sorted(times)

    def slowest(self, sizes: Sequence[int]) -> float:
        """The time of the slowest stage."""
        ends = accumulate(sizes, initial=0)
        return max(self.stage_time(stage, start, end) for stage, (start, end) in enumerate(pairwise(ends)))

    def furthest_end(self, stage: int, time: float) -> list[int]:
        """Per start, the furthest end of this stage within `time` and its memory limit. The start itself: no unit."""
        ends = []
        end = 0
        for start in range(self.num_units):
            end = max(end, start)
            while (
                end < self.num_units
                and self.stage_time(stage, start, end + 1) <= time
                and self.memory_before[end + 1] - self.memory_before[start] <= self.memory_limits[stage]
            ):
                end += 1
            ends.append(end)
        return ends

    def fits(self, time: float) -> bool:
        reachable = {0}
        for stage in range(self.num_stages):
            furthest = self.furthest_end(stage, time)
            next_reachable: set[int] = set()
            covered = 0
            for start in sorted(reachable):
                if start < self.num_units:
                    next_reachable.update(range(max(start, covered) + 1, furthest[start] + 1))
                    covered = max(covered, furthest[start])
            reachable = next_reachable
        return self.num_units in reachable

    def most_even_sizes(self, time: float) -> tuple[int, ...]:
        """Of the splits within `time`, the one with the least sum of squared stage times."""
        best: dict[int, float] = {0: 0.0}
        came_from: list[dict[int, int]] = []
        for stage in range(self.num_stages):
            furthest = self.furthest_end(stage, time)
            next_best: dict[int, float] = {}
            origin: dict[int, int] = {}
            for start, so_far in best.items():
                if start == self.num_units:
                    continue
                for end in range(start + 1, furthest[start] + 1):
                    total = so_far + self.stage_time(stage, start, end) ** 2
                    if total < next_best.get(end, math.inf):
                        next_best[end] = total
                        origin[end] = start
            best = next_best
            came_from.append(origin)
        sizes = []
        end = self.num_units
        for origin in reversed(came_from):
            sizes.append(end - origin[end])
            end = origin[end]
        return tuple(reversed(sizes))


def split_microbatches(times: Sequence[Callable[[int], float]], total: int, minimum: int = 1) -> list[int]:
    """How many of `total` microbatches each pipeline gets, so that the slowest pipeline is fastest.

    One at a time, to the pipeline whose time after it is least. That is optimal for any nondecreasing times: say the
    slowest pipeline k ends with n microbatches and time T. If n is the minimum, every split takes T. Else, when k got
    its n-th, one more would have brought every pipeline to at least T. A split faster than T thus gives nobody more
    than they had then, and k less: it does not get all microbatches out.

    Args:
        times: per pipeline, its time for a step with that many microbatches; nondecreasing.
        total: microbatches of the global batch.
        minimum: the least that a pipeline gets.

    Raises:
        ValueError: fewer microbatches than `minimum` for each pipeline.
    """
    if not times or minimum < 0 or total < minimum * len(times):
        raise ValueError(f"{total} microbatches cannot give {len(times)} pipelines at least {minimum} each")
    counts = [minimum] * len(times)
    after_one_more = [(time(minimum + 1), pipeline) for pipeline, time in enumerate(times)]
    heapq.heapify(after_one_more)
    for _ in range(total - minimum * len(times)):
        _, pipeline = after_one_more[0]
        counts[pipeline] += 1
        heapq.heapreplace(after_one_more, (times[pipeline](counts[pipeline] + 1), pipeline))
    return counts

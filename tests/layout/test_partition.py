"""Partitions and microbatch splits against exhaustive search."""

from itertools import combinations, pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.planning import partition, split_microbatches
from penstock.schedule import build, simulate
from penstock.simulation.simulate import Costs

COST = st.integers(0, 9)


@st.composite
def partition_problems(draw: st.DrawFn) -> tuple[list[int], list[float], list[int], list[int]]:
    num_stages = draw(st.integers(1, 4))
    num_units = draw(st.integers(num_stages, 9) | st.integers(10, 24 if num_stages < 4 else 14))
    return (
        draw(st.lists(COST | st.just(1), min_size=num_units, max_size=num_units)),
        draw(st.lists(st.sampled_from([0.5, 1.0, 1.3, 2.0]), min_size=num_stages, max_size=num_stages)),
        draw(st.lists(st.integers(0, 4) | st.just(0), min_size=num_units, max_size=num_units)),
        draw(st.lists(st.integers(0, 14), min_size=num_stages, max_size=num_stages)),
    )


def all_splits(num_units: int, num_stages: int) -> list[list[tuple[int, int]]]:
    splits = []
    for boundaries in combinations(range(1, num_units), num_stages - 1):
        ends = (0, *boundaries, num_units)
        splits.append(list(pairwise(ends)))
    return splits


@settings(deadline=None, max_examples=400)
@given(partition_problems())
@example(([2] * 18 + [9] * 4, [1.0] * 3, [0] * 17 + [1] + [0] * 4, [1, 0, 1]))  # the best has a long first stage
def test_partition_is_the_best_of_all_that_fit(
    problem: tuple[list[int], list[float], list[int], list[int]],
) -> None:
    costs, speeds, memory, limits = problem

    def times(split: list[tuple[int, int]]) -> list[float]:
        return [sum(costs[a:b]) / speed for (a, b), speed in zip(split, speeds, strict=True)]

    fitting = [
        split
        for split in all_splits(len(costs), len(speeds))
        if all(sum(memory[a:b]) <= limit for (a, b), limit in zip(split, limits, strict=True))
    ]
    if not fitting:
        with pytest.raises(ValueError, match="stays within the memory limits"):
            partition(costs, speeds, memory, limits)
        return
    found = partition(costs, speeds, memory, limits)
    best = min((max(times(split)), sum(time**2 for time in times(split))) for split in fitting)
    ends = [sum(found.sizes[:stage]) for stage in range(len(speeds) + 1)]
    split = list(pairwise(ends))
    assert split in fitting
    assert found.time == pytest.approx(best[0]) == max(times(split))
    assert sum(time**2 for time in times(split)) == pytest.approx(best[1]), "and the most even of them"


def test_equal_units_are_spread_evenly() -> None:
    assert sorted(partition([1.0] * 12, [1.0] * 5).sizes) == [2, 2, 2, 3, 3]
    assert partition([1.0] * 12, [1.0, 2.0]).sizes == (4, 8)
    assert sorted(partition([0.1] * 30, [1.0] * 4).sizes) == [7, 7, 8, 8], "although sums of 0.1 differ by rounding"


def test_a_hundred_layers_over_64_devices_of_eight_speeds_are_quick() -> None:
    found = partition([1.0] * 100, [1.0 + 0.1 * (device % 8) for device in range(64)])
    assert sum(found.sizes) == 100 and min(found.sizes) >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1.0, 1.0]), "1 units cannot give 2 stages at least one unit each"),
        (([1.0], []), "1 units cannot give 0 stages"),
        (([1.0, -1.0], [1.0]), r"costs must not be negative, but are \[1.0, -1.0\]"),
        (([1.0], [0.0]), r"speeds must be above 0, but are \[0.0\]"),
        (([1.0], [1.0], [-2.0], [3.0]), r"memory must not be negative, but is \[-2.0\]"),
        (([1.0], [1.0], [1.0]), "give both or neither"),
        (([1.0], [1.0], [1.0, 2.0], [3.0]), "2 numbers in unit_memory"),
        (([1.0], [1.0], [5.0], [3.0]), r"the units need 5 in all, the limits are \[3.0\]"),
    ],
)
def test_impossible_partitions_are_named(arguments: tuple[list[float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(*arguments)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_split_of_microbatches_is_the_best_of_all(data: st.DataObject) -> None:
    num_pipelines = data.draw(st.integers(1, 3))
    total = data.draw(st.integers(num_pipelines, 9))
    tables = [sorted(data.draw(st.lists(st.integers(0, 20), min_size=11, max_size=11))) for _ in range(num_pipelines)]
    counts = split_microbatches([table.__getitem__ for table in tables], total)
    assert sum(counts) == total and min(counts) >= 1

    def slowest(split: tuple[int, ...] | list[int]) -> int:
        return max(table[count] for table, count in zip(tables, split, strict=True))

    options = [s for s in product(range(1, total + 1), repeat=num_pipelines) if sum(s) == total]
    assert slowest(counts) == min(slowest(split) for split in options)


def test_a_single_device_and_two_stages_share_by_their_simulated_times() -> None:
    def time_of(num_stages: int, speed: float) -> list[float]:
        costs = Costs(1 / num_stages / speed, 1 / num_stages / speed, 1 / num_stages / speed)
        return [0.0] + [simulate(build("1f1b", num_stages, m), costs).makespan for m in range(1, 14)]

    tables = [time_of(1, 1.0), time_of(2, 1.0)]
    # One device takes 3 n, two take 1.5 (n + 1).
    assert split_microbatches([table.__getitem__ for table in tables], 12) == [4, 8]


def test_too_few_microbatches_are_named() -> None:
    with pytest.raises(ValueError, match="2 microbatches cannot give 3 pipelines at least 1 each"):
        split_microbatches([float] * 3, 2)

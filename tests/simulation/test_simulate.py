"""The simulator against a recursive definition of start times, closed forms, and exhaustive search."""

import math
import time
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planning import Reduction, simulate_layout
from penstock.schedule import (
    Action,
    Costs,
    EventKind,
    Kind,
    Schedule,
    ScheduleError,
    build,
    divide_over_stages,
    lower_bound,
    schedule_names,
    simulate,
)
from penstock.simulation.timeline import TimedEvent, bubble_fractions, with_waits


def recursive_ends(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """End of each action, straight from the definition: after the one before it, and after its inputs."""
    per_stage = costs.per_stage(schedule.num_stages)
    seconds = {Kind.F: per_stage.forward, Kind.B: per_stage.backward, Kind.W: per_stage.weight}
    row_of = {action: row for row in schedule.actions for action in row}

    @cache
    def end(action: Action) -> float:
        row = row_of[action]
        position = row.index(action)
        start = end(row[position - 1]) if position else 0.0
        for needed in action.prerequisites(schedule.num_stages):
            start = max(start, end(needed) if row_of[needed] is row else arrival(needed))
        duration = seconds[action.kind][action.stage]
        if action.kind is Kind.B and not schedule.splits_backward:
            duration += per_stage.weight[action.stage]
        return start + duration

    @cache
    def sent(message: Action) -> float:
        """When the link between two ranks has sent the result of `message`, after those of earlier actions."""
        row = row_of[message]
        target = row_of[user(message)]
        earlier = [a for a in row[: row.index(message)] if user(a) and row_of[user(a)] is target]
        free_from = sent(earlier[-1]) if earlier else 0.0
        return max(end(message), free_from) + per_stage.occupancy[boundary(message)]

    def arrival(message: Action) -> float:
        return sent(message) + per_stage.latency[boundary(message)]

    def boundary(message: Action) -> int:
        return message.stage if message.kind is Kind.F else message.stage - 1

    def user(action: Action) -> Action | None:
        return action.feeds(schedule.num_stages)

    return {action: end(action) for action in row_of}


NUMBER = st.floats(0.0, 5.0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    schedule = build(draw(st.sampled_from(schedule_names())), draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    stages, boundaries = schedule.num_stages, schedule.num_stages - 1

    def numbers(count: int) -> st.SearchStrategy[list[float]]:
        return st.lists(NUMBER, min_size=count, max_size=count)

    costs = Costs(
        forward=draw(numbers(stages)),
        backward=draw(numbers(stages)),
        weight=draw(numbers(stages)),
        latency=draw(numbers(boundaries)),
        bandwidth=draw(st.floats(0.5, 4.0)),
        message_bytes=draw(numbers(boundaries)),
        activation_bytes=draw(numbers(stages)),
    )
    return schedule, costs


@settings(deadline=None, max_examples=150)
@given(problems())
def test_every_action_ends_when_the_definition_says(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    result = simulate(schedule, costs)
    ends = recursive_ends(schedule, costs)
    simulated = {Action(Kind(e.kind.value), e.stage, e.microbatch): e.end for e in result.events}
    assert simulated == pytest.approx(ends)
    assert result.makespan == pytest.approx(max(ends.values()))


@settings(deadline=None, max_examples=100)
@given(problems())
def test_busy_idle_and_memory_add_up(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    result = simulate(schedule, costs)
    for rank in range(schedule.num_ranks):
        own = [event for event in result.events if event.rank == rank]
        assert result.busy[rank] == pytest.approx(sum(event.duration for event in own))
        assert result.busy[rank] + result.idle[rank] == pytest.approx(result.makespan)
        waits = [e for e in with_waits(result.events) if e.rank == rank and e.kind is EventKind.WAIT]
        assert sum(event.duration for event in waits) == pytest.approx(result.idle[rank], abs=1e-9)
    assert bubble_fractions(result.events, schedule.num_ranks) == pytest.approx(result.bubble, abs=1e-9)
    one_byte = simulate(schedule, Costs(activation_bytes=1.0))
    for actions, peak in zip(schedule.actions, one_byte.peak_bytes, strict=True):
        steps = [(action.kind is Kind.F) - (action.kind is schedule.last_kind) for action in actions]
        assert peak == max(accumulate(steps))


@settings(deadline=None, max_examples=100)
@given(problems())
def test_no_schedule_beats_the_lower_bound(problem: tuple[Schedule, Costs]) -> None:
    schedule, costs = problem
    for splits_backward in {True, schedule.splits_backward}:
        bound = lower_bound(schedule.stage_to_rank, schedule.num_microbatches, costs, splits_backward=splits_backward)
        assert bound <= simulate(schedule, costs).makespan * (1 + 1e-9)


def all_rows(stage: int, num_microbatches: int, kinds: tuple[Kind, ...]) -> Iterator[tuple[Action, ...]]:
    """Every order of one stage's actions that keeps F before B before W for each microbatch, microbatches in order."""
    labels = [microbatch for microbatch in range(num_microbatches) for _ in kinds]
    for order in set(permutations(labels)):
        counts = [0] * num_microbatches
        row = []
        for microbatch in order:
            row.append(Action(kinds[counts[microbatch]], stage, microbatch))
            counts[microbatch] += 1
        yield tuple(row)


@pytest.mark.parametrize("kinds", [(Kind.F, Kind.B), (Kind.F, Kind.B, Kind.W)], ids=["fused", "split"])
@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        Costs(forward=[1, 2], backward=[1.5, 1], weight=[0.5, 2]),
        Costs(forward=[2, 1], backward=[1, 1], weight=[1, 1], latency=0.5),
        Costs(latency=0.25, bandwidth=1.0, message_bytes=4.0),
    ],
    ids=["equal", "unequal", "latency", "slow link"],
)
def test_the_lower_bound_is_below_the_best_of_all_schedules(kinds: tuple[Kind, ...], costs: Costs) -> None:
    split = len(kinds) == 3
    best = math.inf
    for rows in product(*[all_rows(stage, 2, kinds) for stage in range(2)]):
        try:
            best = min(best, simulate(Schedule("any", 2, 2, (0, 1), rows, split), costs).makespan)
        except ScheduleError:
            continue
    bound = lower_bound((0, 1), 2, costs, splits_backward=split)
    assert bound <= best
    if costs == Costs():
        assert bound == best == 2 * 3 + (1 if split else 3)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1, 2, 3]), "forward has 3 numbers for 2 stages"),
        (Costs(latency=[1, 2]), "latency has 2 numbers for 1 boundaries"),
        (Costs(weight=-1), "weight must not be negative"),
        (Costs(bandwidth=0), "bandwidth must be above 0 bytes per second, but is 0"),
    ],
)
def test_costs_that_do_not_fit_are_named(costs: Costs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(build("1f1b", 2, 2), costs)


def test_stages_of_a_rank_share_its_costs() -> None:
    assert divide_over_stages([6.0, 4.0], build("zb-v", 2, 2)) == [3.0, 2.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="2 ranks but 3 costs"):
        divide_over_stages([1.0, 2.0, 3.0], build("1f1b", 2, 2))


def test_a_reduction_starts_when_all_its_holders_have_their_gradients() -> None:
    one = build("1f1b", 1, 4), Costs(3.0, 3.0, 3.0)  # ends at 36
    two = build("1f1b", 2, 4), Costs(1.0, 1.0, 1.0)  # the last stage ends at 13, the first at 15
    late, early = Reduction(5.0, ((0, 0), (1, 1))), Reduction(2.0, ((1, 0),))
    result = simulate_layout([one, two], [late, early])
    assert result.reduction_spans == ((36.0, 41.0), (15.0, 17.0))
    assert result.makespan == 41.0
    assert result.first_ranks == (0, 1)
    reductions = [(e.rank, e.start, e.end) for e in result.events if e.kind is EventKind.REDUCTION]
    assert reductions == [(0, 36.0, 41.0), (2, 36.0, 41.0), (1, 15.0, 17.0)]
    assert result.bubble == pytest.approx([1 - 36 / 41, 1 - 12 / 41, 1 - 12 / 41])


def test_reductions_of_one_rank_go_one_after_the_other() -> None:
    pipeline = build("1f1b", 1, 1), Costs()
    both = Reduction(2.0, ((0, 0), (1, 0)))
    assert simulate_layout([pipeline, pipeline], [both, both]).reduction_spans == ((3.0, 5.0), (5.0, 7.0))
    assert simulate_layout([pipeline, pipeline]).makespan == 3.0
    with pytest.raises(ValueError, match="at least 1 pipeline"):
        simulate_layout([])


def test_waits_are_the_gaps_between_actions() -> None:
    events = [
        TimedEvent(0, EventKind.F, 1.0, 2.0, 0, 0),
        TimedEvent(0, EventKind.B, 2.1, 3.0, 0, 0),
        TimedEvent(0, EventKind.REDUCTION, 3.0, 6.0),
    ]
    waits = [(e.start, e.end) for e in with_waits(events, shortest=0.5) if e.kind is EventKind.WAIT]
    assert waits == [(0.0, 1.0), (3.0, 6.0)], "a reduction runs beside the compute, so the rank waits"
    assert with_waits([]) == []


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_64_stages_of_512_microbatches_take_under_2_seconds(name: str) -> None:
    started = time.process_time()
    schedule = build(name, 32 if name == "v-half" else 64, 512)
    assert schedule.num_stages == 64
    simulate(schedule, Costs(latency=0.01, bandwidth=1e9, message_bytes=1e6, activation_bytes=1.0))
    assert time.process_time() - started < 2.0


def test_a_layout_of_250_devices_takes_under_5_seconds() -> None:
    started = time.process_time()
    pipelines = []
    while sum(schedule.num_ranks for schedule, _ in pipelines) < 250:
        p = 4 + 2 * (len(pipelines) % 5)  # 4 to 12 stages, 8 on average
        pipelines.append((build("1f1b", p, 8 * p), Costs([1 + 0.01 * stage for stage in range(p)], latency=0.01)))
    reductions = [Reduction(0.5, tuple((index, stage) for index in range(len(pipelines)))) for stage in range(4)]
    result = simulate_layout(pipelines, reductions)
    assert len(result.bubble) >= 250
    assert len(result.events) > 25_000
    assert time.process_time() - started < 5.0

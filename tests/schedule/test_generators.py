"""The named schedules against the closed forms of their papers."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import (
    Action,
    Costs,
    Kind,
    Schedule,
    build,
    live_microbatches,
    lower_bound,
    parse_schedule,
    schedule_names,
    simulate,
    validate,
)
from penstock.schedule.communication import insert_communication
from penstock.schedule.registry import named_schedule

SIZES = st.tuples(st.integers(1, 16), st.integers(1, 64))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_every_size_up_to_16_ranks_and_64_microbatches_is_valid(name: str) -> None:
    """More microbatches than those of the loop, of which there is one size, only repeat the steady state."""
    for num_ranks in range(1, 17):
        for num_microbatches in (*range(1, 2 * num_ranks + 2), 64):
            validate(build(name, num_ranks, num_microbatches))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(schedule_names()), SIZES, st.integers(1, 4))
def test_sampled_sizes_are_valid(name: str, size: tuple[int, int], stages_per_rank: int) -> None:
    """With any number of stages on a rank where the schedule has that."""
    validate(build(name, *size, stages_per_rank if named_schedule(name).any_stages_per_rank else None))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(schedule_names()), st.integers(1, 12), st.integers(1, 26))
def test_one_message_per_channel_is_room_enough_even_if_sends_block(name: str, p: int, m: int) -> None:
    """Except where interleaving has groups of more than p microbatches: those beyond p pile up between the ranks."""
    large_groups = name == "interleaved-1f1b" and m > p and m % p != 0
    schedule = build(name, p, m)
    # It raises Deadlock if it gets stuck.
    operations = insert_communication(schedule, window=1 + p // 2 if large_groups else 1)
    done = [tuple(operation for operation in row if isinstance(operation, Action)) for row in operations]
    assert tuple(done) == schedule.actions


def per_rank_peak(schedule: Schedule) -> list[float]:
    return list(schedule.peaks([1.0] * schedule.num_stages))


@settings(deadline=None, max_examples=50)
@given(SIZES)
def test_live_microbatches_are_those_of_the_papers(size: tuple[int, int]) -> None:
    p, m = size
    assert per_rank_peak(build("gpipe", p, m)) == [m] * p
    assert per_rank_peak(build("1f1b", p, m)) == [min(m, p - rank) for rank in range(p)]
    assert per_rank_peak(build("zb-h1", p, m)) == [min(m, p)] * p
    assert per_rank_peak(build("zb-h2", p, m)) == [2 * p - 1 if m >= 2 * p - 1 else min(m, p)] * p
    for name in schedule_names():  # what the planner reckons with, which counts microbatches on all stages of a rank
        schedule = build(name, p, m)
        for rank, peak in enumerate(per_rank_peak(schedule)):
            held, live = peak / len(schedule.stages_of(rank)), live_microbatches(name, p, rank, m)
            assert held == live if name in ("gpipe", "1f1b", "zb-h1", "zb-h2") else held <= live
    # A microbatch of the whole model is two stages' worth on each rank of a V.
    assert max(per_rank_peak(build("zb-v", p, m))) <= 2 * min(m, p)
    assert max(per_rank_peak(build("v-half", p, m))) <= 2 * min(m, (p + 2) // 2)


@settings(deadline=None, max_examples=60)
@given(SIZES)
def test_zb_h1_puts_off_the_weight_gradients_of_the_first_microbatches_only(size: tuple[int, int]) -> None:
    p, m = size
    for stage, row in enumerate(build("zb-h1", p, m).actions):
        weights = [action.microbatch for action in row if action.kind is Kind.W]
        assert weights == [*range(stage, m), *range(min(m, stage))]
        for before, action in pairwise(row):
            if action.kind is Kind.W and action.microbatch >= stage:
                assert before == Action(Kind.B, stage, action.microbatch)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_interleaved_holds_p_and_p_minus_1_over_v_microbatches(num_ranks: int, stages_per_rank: int) -> None:
    p, v = num_ranks, stages_per_rank
    for rounds in (2, 3, 5):
        peak = per_rank_peak(build("interleaved-1f1b", p, rounds * p, v))
        # In stages: v * (p + (p - 1) / v). With one stage per rank this is 1F1B with twice its warm-up, less one.
        assert max(peak) <= v * p + p - 1
    assert per_rank_peak(build("interleaved-1f1b", p, 2 * p, v))[0] == min(v * p + p - 1, 2 * p * v)


COSTS = st.floats(0.1, 10.0)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 8), st.integers(1, 24), COSTS, COSTS, COSTS)
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_times_t(p: int, m: int, f: float, b: float, w: float) -> None:
    for name in ("gpipe", "1f1b"):
        result = simulate(build(name, p, m), Costs(f, b, w))
        assert result.makespan == pytest.approx((m + p - 1) * (f + b + w))
        assert result.idle == pytest.approx([(p - 1) * (f + b + w)] * p)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 8), st.integers(0, 16), COSTS, COSTS, COSTS)
def test_zb_h1_is_late_by_p_minus_1_times_the_longest_of_f_b_and_f_plus_b_minus_w(
    p: int, extra: int, f: float, b: float, w: float
) -> None:
    m = p + extra
    result = simulate(build("zb-h1", p, m), Costs(f, b, w))
    assert result.makespan == pytest.approx(m * (f + b + w) + (p - 1) * max(f, b, f + b - w))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 8), st.integers(0, 16), COSTS, COSTS, COSTS, COSTS)
def test_zb_h2_waits_for_nothing_but_the_entry_unless_b_is_over_twice_f_or_w(
    p: int, extra: int, f: float, b: float, w: float, latency: float
) -> None:
    m = 2 * p - 1 + extra
    schedule, costs = build("zb-h2", p, m), Costs(f, b, w)
    makespan = simulate(schedule, costs).makespan
    assert makespan == pytest.approx(m * (f + b + w) + (p - 1) * max(f, b - f, f + b - 2 * w))
    if b <= 2 * min(f, w):
        assert makespan == pytest.approx(lower_bound(schedule.stage_to_rank, m, costs))
    # Stages that wait for nothing are not slowed by slow links either, up to the slack of the warm-up.
    late = simulate(build("zb-h2", p, m), Costs(f, b, w, latency=min(latency, f, w) / 2)).makespan
    assert late <= simulate(build("zb-h1", p, m), Costs(f, b, w, latency=min(latency, f, w) / 2)).makespan + 1e-9


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(0, 16), st.integers(1, 4), COSTS, COSTS)
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(p: int, extra: int, v: int, f: float, b: float) -> None:
    m = p + extra  # not only the multiples of p that the paper asks for
    result = simulate(build("interleaved-1f1b", p, m, v), Costs(f / v, b / v, 0.0))
    assert result.makespan == pytest.approx(m * (f + b) + (p - 1) * (f + b) / v)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 13])
def test_zb_v_has_no_bubble_but_the_entry_and_v_half_half_of_that_of_1f1b(p: int) -> None:
    """Where all actions take one unit."""
    for m in (p, p + 1, 2 * p + 1, 4 * p):
        assert simulate(build("zb-v", p, m), Costs()).makespan == 6 * m + p - 1
        assert simulate(build("v-half", p, m), Costs()).makespan - 6 * m <= (p - 1) * 6 / 2


@pytest.mark.parametrize(
    ("p", "m", "f", "b", "w", "latency"),
    [(2, 8, 1.0, 1.3, 0.8, 0.0), (4, 8, 1.0, 1.0, 0.7, 0.0), (4, 16, 1.0, 1.1, 0.9, 0.05), (8, 32, 1.0, 1.3, 0.8, 0.0)],
)
def test_zb_v_is_as_fast_as_torchs_where_costs_are_not_equal(
    p: int, m: int, f: float, b: float, w: float, latency: float
) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    theirs = parse_schedule([[str(a) for a in row if a is not None] for row in get_schedule_ops("ZBVZeroBubble", p, m)])
    costs = Costs(f, b, w, latency=latency)
    assert simulate(build("zb-v", p, m), costs).makespan <= 1.01 * simulate(theirs, costs).makespan


def test_placement_of_several_stages_per_rank() -> None:
    assert build("interleaved-1f1b", 3, 4).stage_to_rank == (0, 1, 2, 0, 1, 2)
    v_shape = build("zb-v", 3, 4)
    assert v_shape.stage_to_rank == (0, 1, 2, 2, 1, 0)
    assert [v_shape.top_stage(rank) for rank in range(3)] == [5, 4, 3]
    assert v_shape.stages_of(1) == (1, 4)
    assert v_shape.is_local(2, 3) and not v_shape.is_local(1, 2)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(schedule_names()), SIZES)
def test_the_caller_gets_microbatches_in_order_at_every_rank(name: str, size: tuple[int, int]) -> None:
    schedule = build(name, *size)
    for rank, actions in enumerate(schedule.actions):
        top = schedule.top_stage(rank)
        assert [a.microbatch for a in actions if a.kind is Kind.B and a.stage == top] == list(range(size[1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 2, 4), "unknown schedule '1f2b': known are gpipe, 1f1b"),
        (("1f1b", 0, 4), "num_ranks is 0"),
        (("1f1b", 2, 0), "num_microbatches is 0"),
        (("1f1b", 2, 4, 2), "'1f1b' has 1 stages per rank, but stages_per_rank is 2"),
        (("zb-v", 2, 4, 3), "'zb-v' has 2 stages per rank, but stages_per_rank is 3"),
        (("interleaved-1f1b", 2, 4, 0), "has at least 1 stages per rank, but stages_per_rank is 0"),
    ],
)
def test_impossible_requests_are_named(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(*arguments)

"""What `validate` accepts and refuses, against a plain search for a run of the schedule."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.schedule import Action, Kind, Schedule, ScheduleError, build, parse_schedule, schedule_names, validate
from penstock.schedule.communication import (
    Deadlock,
    Direction,
    Operation,
    Transfer,
    insert_communication,
    within_window,
)

SMALL = st.builds(
    build, st.sampled_from(schedule_names()), num_ranks=st.integers(1, 5), num_microbatches=st.integers(1, 6)
)


def with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]))


def runs_to_the_end(schedule: Schedule) -> bool:
    """Sweep over the ranks until nothing moves."""
    done: set[Action] = set()
    rows = [list(row) for row in schedule.actions]
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and all(needed in done for needed in row[0].prerequisites(schedule.num_stages)):
                done.add(row.pop(0))
                moved = True
    return not any(rows)


def keeps_its_orders(schedule: Schedule) -> bool:
    """The caller's order, and one order at both ends of each boundary and direction."""

    def order(kind: Kind, stage: int) -> list[int]:
        row = schedule.actions[schedule.stage_to_rank[stage]]
        return [action.microbatch for action in row if (action.kind, action.stage) == (kind, stage)]

    tops = [schedule.top_stage(rank) for rank in range(schedule.num_ranks)]
    if any(order(Kind.B, top) != sorted(order(Kind.B, top)) for top in tops):
        return False
    return all(
        order(kind, boundary) == order(kind, boundary + 1)
        for boundary in range(schedule.num_stages - 1)
        if not schedule.is_local(boundary, boundary + 1)
        for kind in (Kind.F, Kind.B)
    )


@settings(deadline=None, max_examples=300)
@given(SMALL, st.data())
def test_a_swap_is_refused_exactly_if_it_blocks_or_breaks_an_order(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    first, second = data.draw(st.tuples(*[st.integers(0, len(row) - 1)] * 2))
    assume(first != second)
    row[first], row[second] = row[second], row[first]
    swapped = with_row(schedule, rank, row)
    if runs_to_the_end(swapped) and keeps_its_orders(swapped):
        validate(swapped)
    else:
        with pytest.raises(ScheduleError):
            validate(swapped)


@settings(deadline=None, max_examples=100)
@given(SMALL, st.data())
def test_a_dropped_a_repeated_and_a_foreign_action_are_refused_by_name(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    position = data.draw(st.integers(0, len(row) - 1))
    with pytest.raises(ScheduleError, match=f"rank {rank} is missing {row[position]}$"):
        validate(with_row(schedule, rank, row[:position] + row[position + 1 :]))
    with pytest.raises(ScheduleError, match=f"rank {rank} has more than once {row[position]}$"):
        validate(with_row(schedule, rank, row + [row[position]]))
    foreign = row[position]._replace(microbatch=schedule.num_microbatches)
    with pytest.raises(ScheduleError, match=f"rank {rank} must not have {foreign}$"):
        validate(with_row(schedule, rank, [*row, foreign]))


def test_stages_without_a_rank_and_ranks_without_a_stage_are_refused() -> None:
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="2 stages but ranks were given for 1"):
        validate(replace(schedule, stage_to_rank=(0,)))
    with pytest.raises(ScheduleError, match="every rank must hold a stage"):
        validate(replace(schedule, stage_to_rank=(0, 0)))


@settings(deadline=None, max_examples=100)
@given(SMALL)
def test_communication_is_a_send_and_a_receive_per_message_with_the_compute_unchanged(schedule: Schedule) -> None:
    operations = insert_communication(schedule)
    compute = tuple(tuple(op for op in row if isinstance(op, Action)) for row in operations)
    assert compute == schedule.actions
    sides = {
        direction: sorted(
            (str(op.source), str(op.destination))
            for row in operations
            for op in row
            if isinstance(op, Transfer) and op.direction is direction
        )
        for direction in Direction
    }
    assert sides[Direction.SEND] == sides[Direction.RECEIVE]
    num_remote_boundaries = sum(
        not schedule.is_local(boundary, boundary + 1) for boundary in range(schedule.num_stages - 1)
    )
    assert len(sides[Direction.SEND]) == 2 * num_remote_boundaries * schedule.num_microbatches
    for rank, row in enumerate(operations):
        for position, op in enumerate(row):
            if isinstance(op, Transfer) and op.direction is Direction.SEND:
                assert row.index(op.source) < position
            elif isinstance(op, Transfer):
                assert position < row.index(op.destination)
        for peer in range(schedule.num_ranks):
            assert messages(row, peer) == messages(operations[peer], rank), "both see their messages in one order"


def messages(row: Sequence[Operation], peer: int) -> list[tuple[Action, Action]]:
    return [(op.source, op.destination) for op in row if isinstance(op, Transfer) and op.peer == peer]


def test_a_schedule_that_needs_a_wider_window_says_so() -> None:
    # Rank 0 sends four before it takes a gradient, rank 1 wants to give the second before it takes the third.
    schedule = parse_schedule(["0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3", "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"])
    with pytest.raises(Deadlock, match="rank 0: 0F3, rank 1: 1B1"):
        insert_communication(schedule, window=1)
    assert [within_window(schedule, window)[0] for window in (1, 2, 3)] == [2, 2, 3]

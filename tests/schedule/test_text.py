"""Schedules in torch's CSV text form, against torch's own schedules."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import (
    Kind,
    ScheduleError,
    build,
    check_trains,
    format_schedule,
    load_schedule,
    parse_schedule,
    resolve_schedule,
    schedule_names,
)
from penstock.schedule.text import own_or_named


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(schedule_names()), st.integers(1, 6), st.integers(1, 12))
def test_a_schedule_survives_being_written_and_read(name: str, num_ranks: int, num_microbatches: int) -> None:
    schedule = build(name, num_ranks, num_microbatches)
    assert parse_schedule(format_schedule(schedule), name) == schedule


def test_text_is_stage_kind_microbatch_per_rank() -> None:
    assert format_schedule(build("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert format_schedule(build("zb-h1", 1, 2)) == "0F0,0I0,0W0,0F1,0I1,0W1\n"


def torch_rows(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> list[list[str]]:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(name, num_ranks, num_microbatches, stages_per_rank)
    return [["" if action is None else str(action) for action in row] for row in rows]


@pytest.mark.parametrize(
    ("torch_name", "name", "stages_per_rank"),
    [("GPipe", "gpipe", None), ("Interleaved1F1B", "interleaved-1f1b", 2), ("Interleaved1F1B", "interleaved-1f1b", 3)],
)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 12), (3, 3)])
def test_gpipe_and_interleaved_are_torchs_own(
    torch_name: str, name: str, stages_per_rank: int | None, num_ranks: int, num_microbatches: int
) -> None:
    theirs = parse_schedule(torch_rows(torch_name, num_ranks, num_microbatches, stages_per_rank), name)
    assert theirs == build(name, num_ranks, num_microbatches, stages_per_rank)


@pytest.mark.parametrize("torch_name", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_torchs_zero_bubble_schedules_are_read(torch_name: str) -> None:
    schedule = parse_schedule(torch_rows(torch_name, 4, 8, 2))
    assert (schedule.num_stages, schedule.num_microbatches, schedule.splits_backward) == (8, 8, True)


def test_backwards_in_reverse_are_refused_since_the_caller_goes_forward() -> None:
    with pytest.raises(ScheduleError, match=r"top stage 4 for microbatches 7, 6, 5, 4, 3, .* in order from 0"):
        parse_schedule(torch_rows("LoopedBFS", 4, 8, 2))


def test_torchs_loader_reads_what_is_written(tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _Action

    for name in schedule_names():
        for row in format_schedule(build(name, 3, 5)).splitlines():
            assert [str(_Action.from_str(cell)) for cell in row.split(",")] == row.split(",")


def test_both_ways_to_write_a_split_backward_are_one_schedule() -> None:
    torchs = parse_schedule("0F0,0F1,0I0,0W0,0I1,0W1")
    assert torchs == parse_schedule("0F0, 0F1, 0B0, 0W0, 0B1, 0W1")
    assert torchs == parse_schedule([["0F0", "0F1", "0I0", "0W0", "0B1"]]), "a full backward is I and W at once"
    assert [action.kind for action in torchs.actions[0]] == [Kind.F, Kind.F, Kind.B, Kind.W, Kind.B, Kind.W]
    assert not parse_schedule("0F0,0B0").splits_backward


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "schedule has no actions"),
        ("0F0,0X0", "row 0 has the cell '0X0'"),
        ("0F0,0B0\n1F0,1SEND_B0", "row 1 has the cell '1SEND_B0', .* compute only, communication follows from it"),
        (["0F0,0B0", "0F0,1F0,1B0"], "stage 0 is on ranks 0 and 1: 0F0 is in row 1"),
        (["0F0,0B0", "2F0,2B0"], "stages are numbered up to 2, but no row has stage 1"),
        (["0F0,0B0", "1B0,1F0"], "rank 1 is blocked at 1B0, which needs 1F0 of rank 1"),
        (
            ["0F0,0B0,0B1,0F1", "1F0,1F1,1B0,1B1", "2F0,2B0,2F1,2B1"],
            "schedule deadlocks: rank 0 is blocked at 0B0, which needs 1B0 of rank 1; rank 1 is blocked at 1F1, "
            "which needs 0F1 of rank 0; rank 2 is blocked at 2F1, which needs 1F1 of rank 1$",
        ),
        (["0F0,0W0,0B0", "1F0,1B0,1W0"], "rank 0 is blocked at 0W0, which needs 0B0 of rank 0; rank 1 is "),
        (
            ["0F0,0F1,0B0,0B1", "1F1,1F0,1B0,1B1"],
            "stage 0 sends the results of F to stage 1 in another order than they are used: number 0 is microbatch 0",
        ),
        (
            ["0F1,0F0,0B1,0B0", "1F1,1F0,1B1,1B0"],
            "rank 0 runs the backward of its top stage 0 for microbatches 1, 0",
        ),
        (["0F0,0B0", "1F0,1B0,1F1,1B1"], "rank 0 is missing 0B1, 0F1"),
        ([[], ["0F0", "0B0"]], "every rank must hold a stage"),
    ],
)
def test_bad_text_is_refused_by_name(source: str | Sequence[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_schedule(source)


def test_a_schedule_is_found_by_name_path_or_rows(tmp_path: Path) -> None:
    schedule = build("zb-h1", 2, 3)
    path = tmp_path / "mine.csv"
    path.write_text(format_schedule(schedule) + "\n")
    assert resolve_schedule("zb-h1", 2, 3) == schedule
    assert resolve_schedule("interleaved-1f1b", 2, 3, 3) == build("interleaved-1f1b", 2, 3, 3)
    for source in (path, str(path), format_schedule(schedule).splitlines()):
        found = resolve_schedule(source, 2, 3)
        assert found.actions == schedule.actions
        assert found.name == ("mine" if source in (path, str(path)) else "custom")


def test_a_schedule_that_is_not_found_or_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("0F0,0B0,0B0\n")
    with pytest.raises(ScheduleError, match=r"broken\.csv: rank 0 has more than once 0B0"):
        load_schedule(path)
    with pytest.raises(ValueError, match=r"unknown schedule 'zb': known are gpipe, .*, or a \.csv file"):
        resolve_schedule("zb", 2, 3)
    with pytest.raises(FileNotFoundError):
        resolve_schedule("nowhere.csv", 2, 3)
    message = "'custom' is written for 1 ranks and 1 microbatches, but the pipeline has 2 ranks and 1 microbatches"
    with pytest.raises(ScheduleError, match=message):
        resolve_schedule(["0F0,0B0"], 2, 1)
    check_trains(own_or_named(["0F0,0B0"], 1)(1))
    with pytest.raises(
        ScheduleError, match=r"not written for 2 microbatches, .*: it can only evaluate .*, or write one for 2"
    ):
        check_trains(own_or_named(["0F0,0B0"], 1)(2))

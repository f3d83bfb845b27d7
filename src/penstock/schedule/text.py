"""Schedules as text, in the CSV form of torch.distributed.pipelining: one row per rank, cells like ``0F1``.

A cell is stage, kind, microbatch. Where a schedule splits its backward, torch writes ``I`` for the input gradient,
``W`` for the weight gradient and ``B`` for both at once; ``0B1`` with its own ``0W1`` is read as the input gradient
too. Blank cells (bubbles) and torch's ``0REDUCE_GRAD`` are passed over: the reduction follows from the layout.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.schedule.actions import Action, Kind, Schedule, ScheduleError
from penstock.schedule.registry import AUTO, build, is_own, schedule_names
from penstock.schedule.validation import validate

_PASSED_OVER = re.compile(r"|\d+REDUCE_GRAD")
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")

Rows = Sequence[str | Sequence[str]]


def format_schedule(schedule: Schedule) -> str:
    """`schedule` as CSV text that `parse_schedule` and torch's loader of compute-only schedules read."""
    names = {kind: "I" if schedule.splits_backward and kind is Kind.B else kind.value for kind in Kind}
    rows = ([f"{stage}{names[kind]}{microbatch}" for kind, stage, microbatch in row] for row in schedule.actions)
    return "".join(",".join(row) + "\n" for row in rows)


def checksum(schedule: Schedule) -> int:
    """Of all actions, on all ranks."""
    return zlib.crc32(format_schedule(schedule).encode())


def summary(schedule: Schedule) -> str:
    """A line that tells two schedules apart: the name and a checksum."""
    return f"{schedule.name} [{checksum(schedule):08x}]"


def summary_of(source: str | Path | Rows) -> str:
    """What ranks compare of the schedule that a user asked for, while nobody knows yet for which numbers it will be
    made: its name; of one that is written out a summary; of one that the user registered that of a small one. Each step
    compares the schedule that it runs (`Settings.schedule`)."""
    schedule = written_schedule(source)
    if schedule is None:
        assert isinstance(source, str)
        if not is_own(source):
            return source
        schedule = build(source, 2, 4)
    return summary(schedule)


def parse_schedule(source: str | Rows, name: str = "custom") -> Schedule:
    """A user's own schedule, validated.

    Args:
        source: CSV text, or one entry per rank: its cells, or a string of them separated by commas.
        name: the label that the schedule gets.

    Raises:
        ScheduleError: a cell that is no action, a stage on two ranks, or what `validate` refuses.
    """
    rows = _rows(source)
    cells = [[_parse_cell(cell, rank) for cell in row] for rank, row in enumerate(rows)]
    flat = [cell for row in cells for cell in row]
    if not flat:
        raise ScheduleError("schedule has no actions: give one row per rank with cells like 0F0,0B0")
    splits_backward = any(kind in "IW" for _, kind, _ in flat)
    weight_gradients = {(stage, microbatch) for stage, kind, microbatch in flat if kind == "W"}
    actions = tuple(
        tuple(action for cell in row for action in _actions(cell, splits_backward, weight_gradients)) for row in cells
    )
    schedule = Schedule(
        name=name,
        num_stages=1 + max(stage for stage, _, _ in flat),
        num_microbatches=1 + max(microbatch for _, _, microbatch in flat),
        stage_to_rank=_stage_to_rank(actions),
        actions=actions,
        splits_backward=splits_backward,
    )
    validate(schedule)
    return schedule


def load_schedule(path: str | Path) -> Schedule:
    """The schedule in the CSV file at `path`, validated and named after the file.

    Raises:
        FileNotFoundError: no such file.
        ScheduleError: as `parse_schedule`, naming the file.
    """
    path = Path(path)
    try:
        return parse_schedule(path.read_text(encoding="utf-8"), name=path.stem)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def resolve_schedule(
    source: str | Path | Rows, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """The schedule that a user asked for: by name, by the path of a CSV file, or as rows.

    Args:
        source: a name that `build` knows, a path that ends in ``.csv``, or rows as `parse_schedule` takes them.
        num_ranks: pipeline ranks. A schedule that was written out must have as many rows.
        num_microbatches: microbatches per step. A schedule that was written out must have as many.
        stages_per_rank: for a named schedule that allows several; ``None`` takes the schedule's own.

    Raises:
        ValueError: an unknown name, or (as ScheduleError) a schedule that is invalid or made for other numbers.
        FileNotFoundError: no file at the path.
    """
    schedule = written_schedule(source)
    if schedule is None:
        assert isinstance(source, str)
        return build(source, num_ranks, num_microbatches, stages_per_rank)
    if (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, num_microbatches):
        raise _made_for_other_sizes(schedule, num_ranks, num_microbatches)
    return schedule


def written_schedule(source: str | Path | Rows) -> Schedule | None:
    """The schedule that a user wrote, in a file or as rows; None if they asked for one by name."""
    if isinstance(source, str) and source in (*schedule_names(), AUTO):
        return None
    if isinstance(source, Path) or (isinstance(source, str) and source.endswith(".csv")):
        return load_schedule(source)
    if isinstance(source, str):
        raise ValueError(
            f"unknown schedule {source!r}: known are {', '.join((*schedule_names(), AUTO))}, or a .csv file"
        )
    return parse_schedule(source)


def own_or_named(source: str | Path | Rows, num_ranks: int) -> Callable[[int], Schedule]:
    """A maker of schedules for any number of microbatches, from what a user asked for; see `resolve_schedule`.

    A schedule that was written out serves its own number of microbatches. For any other the maker returns its placement
    with forwards only, microbatch by microbatch, which is what evaluation needs.
    """
    written = written_schedule(source)
    if written is None:
        assert isinstance(source, str)
        return partial(build, source, num_ranks)
    if written.num_ranks != num_ranks:
        raise ScheduleError(
            f"schedule {written.name!r} is written for {written.num_ranks} ranks, but the pipeline has {num_ranks}"
        )

    def make(num_microbatches: int) -> Schedule:
        return written if num_microbatches == written.num_microbatches else forwards_only(written, num_microbatches)

    return make


def forwards_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The placement of `schedule` with the forwards of `num_microbatches` microbatches, one after the other."""
    actions = tuple(
        tuple(
            Action(Kind.F, stage, microbatch)
            for microbatch in range(num_microbatches)
            for stage in schedule.stages_of(rank)
        )
        for rank in range(schedule.num_ranks)
    )
    return replace(schedule, num_microbatches=num_microbatches, actions=actions)


def _made_for_other_sizes(schedule: Schedule, num_ranks: int, num_microbatches: int) -> ScheduleError:
    return ScheduleError(
        f"schedule {schedule.name!r} is written for {schedule.num_ranks} ranks and {schedule.num_microbatches} "
        f"microbatches, but the pipeline has {num_ranks} ranks and {num_microbatches} microbatches"
    )


def _rows(source: str | Rows) -> list[list[str]]:
    rows = source.splitlines() if isinstance(source, str) else source
    split = [row.split(",") if isinstance(row, str) else row for row in rows]
    cells = [[str(cell).strip() for cell in row] for row in split]
    kept = [[cell for cell in row if not _PASSED_OVER.fullmatch(cell)] for row in cells]
    while kept and not kept[-1]:  # blank lines at the end of a file
        kept.pop()
    return kept


def _parse_cell(cell: str, rank: int) -> tuple[int, str, int]:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"row {rank} has the cell {cell!r}, which is not stage, F, B, I or W, and microbatch (such as 0F1): "
            "a schedule holds compute only, communication follows from it"
        )
    return int(match[1]), match[2], int(match[3])


def _actions(
    cell: tuple[int, str, int], splits_backward: bool, weight_gradients: set[tuple[int, int]]
) -> tuple[Action, ...]:
    stage, kind, microbatch = cell
    if kind == "I":
        return (Action(Kind.B, stage, microbatch),)
    if kind == "B" and splits_backward and (stage, microbatch) not in weight_gradients:
        return Action(Kind.B, stage, microbatch), Action(Kind.W, stage, microbatch)
    return (Action(Kind(kind), stage, microbatch),)


def _stage_to_rank(actions: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            other = rank_of.setdefault(action.stage, rank)
            if other != rank:
                raise ScheduleError(f"stage {action.stage} is on ranks {other} and {rank}: {action} is in row {rank}")
    missing = sorted(set(range(max(rank_of) + 1)) - set(rank_of))
    if missing:
        raise ScheduleError(f"stages are numbered up to {max(rank_of)}, but no row has stage {missing[0]}")
    return tuple(rank_of[stage] for stage in sorted(rank_of))

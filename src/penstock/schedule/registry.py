"""The named schedules: what the package knows of each is in its row here, or computed from its actions.

`PLAIN`, `DEFERRING` and `ZERO_BUBBLE_V` name those that "auto" chooses from.

Configuration, commands and planner read these rows; a test compares the docs with them. A user's own schedule
is registered by `register_schedule`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from penstock.schedule import generators
from penstock.schedule.actions import Schedule, ScheduleError
from penstock.schedule.validation import validate

# What a user asks for: a name, or a schedule written out.
Asked = TypeVar("Asked")
# What `initialize` and the plugin replace as suits the model, see `resolve_auto`; without a model it is `PLAIN`.
AUTO = "auto"
# What "auto" means: where weight gradients are not worth putting off, where they are, and where it also pays to have
# two stages on each rank.
PLAIN, DEFERRING, ZERO_BUBBLE_V = "1f1b", "zb-h1", "zb-v"
# With so many microbatches for each rank a schedule holds its most. One that still holds all of them is taken to hold
# all of any number.
DEEP = 4


@dataclass(frozen=True, eq=False)  # a row is one by identity, as a maker may have no hash
class NamedSchedule:
    """A kind of schedule, for any number of ranks and microbatches.

    Attributes:
        name: by which configurations and commands ask for it.
        make: gives the schedule for a number of ranks and of microbatches. Where a rank may hold any number of stages
            it takes that as `stages_per_rank`, with the usual number as its default.
        summary: what is special about it, in a few words.
        source: the paper that it is from.
        bubble: how long p ranks wait in a step of m microbatches, in words. F, B and W are a rank's times for one.
        held: how many microbatches rank r holds at most, in words: summed over its stages, divided by their number.
        live: the same, from the number of ranks, r and the number of microbatches; None: counted in the actions, which
            takes the planner longer.
        planned: whether the planner tries it. Not if another one takes as long and holds less.
    """

    name: str
    make: Callable[..., Schedule]
    summary: str
    source: str = ""
    bubble: str = ""
    held: str = ""
    live: Callable[[int, int, int], int] | None = None
    planned: bool = True

    @property
    def any_stages_per_rank(self) -> bool:
        return "stages_per_rank" in inspect.signature(self.make).parameters


_NAMED = (
    NamedSchedule(
        "gpipe",
        generators.gpipe,
        "all forwards, then all backwards",
        "Huang et al. 2019",
        "(p - 1)(F + B + W)",
        "m",
        lambda p, r, m: m,
        planned=False,
    ),
    NamedSchedule(
        "1f1b",
        generators.one_forward_one_backward,
        "a backward after each forward",
        "PipeDream-Flush; Narayanan et al. 2021",
        "(p - 1)(F + B + W)",
        "p - r",
        lambda p, r, m: p - r,
    ),
    NamedSchedule(
        "zb-h1",
        generators.zb_h1,
        "weight gradients where ranks would wait",
        "Qi et al. 2024, zero bubble",
        "(p - 1) max(F, B, F + B - W), if m >= p",
        "p",
        lambda p, r, m: p,
    ),
    NamedSchedule(
        "zb-h2",
        generators.zb_h2,
        "more forwards first",
        "Qi et al. 2024, zero bubble",
        "(p - 1) F, if B <= 2 min(F, W) and m >= 2p - 1",
        "2p - 1, or p if m < 2p - 1",
        lambda p, r, m: 2 * p - 1 if m >= 2 * p - 1 else p,
    ),
    NamedSchedule(
        "interleaved-1f1b",
        generators.interleaved_one_forward_one_backward,
        "two stages on each rank",
        "Narayanan et al. 2021",
        "(p - 1)(F + B + W) / v",
        "at most p + (p - 1) / v, if p divides m",
        lambda p, r, m: -(-(generators.largest_group(p, m) + 2 * (p - r) - 1) // generators.INTERLEAVED_STAGES),
    ),
    NamedSchedule(
        "zb-v",
        generators.zb_v,
        "each rank holds one stage of each half",
        "Qi et al. 2024, zero bubble",
        "(p - 1) F / 2, if F = B = W",
        "p",
        lambda p, r, m: p,
    ),
    NamedSchedule(
        "v-half",
        generators.v_half,
        "about half the activations of 1f1b",
        "Qi et al. 2024, controllable memory",
        "about half of `1f1b`'s",
        "(p + 2) / 2",
        lambda p, r, m: (p + 2) // 2,
    ),
)
# By name, in the order in which they are shown, and in which the planner tries them.
SCHEDULES: dict[str, NamedSchedule] = {row.name: row for row in _NAMED}


def register_schedule(
    name: str, make: Callable[..., Schedule], summary: str = "a schedule of the user's own"
) -> NamedSchedule:
    """Make a schedule of your own known by a name: configurations, the planner and the commands of this process take
    it then. Every rank registers it, before the name is used.

    Args:
        name: a new one.
        make: gives the schedule for any number of ranks, from two, and of microbatches, from one. One rank has nothing
            to overlap, and takes 1F1B with as many stages. If it has a parameter `stages_per_rank`, it serves any
            number of these, too. Evaluations, the planner, and the ranks that are left after a loss ask for other
            numbers than those of a step. Each schedule that it gives is validated: it puts as many stages on each rank,
            the same ones for any number of microbatches, and has the backwards of a rank's last stage in the order of
            the microbatches.
        summary: what is special about it, in a few words.

    Returns:
        Its row.

    Raises:
        ScheduleError: it gives none for two ranks and one or four microbatches, or one that cannot run, or one that
            puts more stages on one rank than on the other.
        ValueError: the name is taken, or cannot be one.
    """
    if not name or name.endswith(".csv") or name in (*SCHEDULES, AUTO):
        raise ValueError(
            f"register_schedule({name!r}, ...): a name must be new (known are {', '.join((*SCHEDULES, AUTO))}) and not "
            "end in .csv, as files do"
        )
    row = NamedSchedule(name, make, summary)
    _check_placement(row, _built(row, 2, 4), _stages_per_rank(row))
    SCHEDULES[name] = row
    return row


def schedule_names() -> tuple[str, ...]:
    """The schedules that there are. `build` accepts "auto", too."""
    return tuple(SCHEDULES)


def planned_schedules() -> tuple[str, ...]:
    """Those that the planner tries."""
    return tuple(name for name, row in SCHEDULES.items() if row.planned)


def is_own(name: str) -> bool:
    """Whether a schedule is one that the user registered, which other ranks may lack, or have otherwise."""
    return named_schedule(name) not in _NAMED


def named_schedule(name: str) -> NamedSchedule:
    """The row of a schedule. Raises ValueError for an unknown name."""
    row = SCHEDULES.get(PLAIN if name == AUTO else name)
    if row is None:
        raise ValueError(f"unknown schedule {name!r}: known are {', '.join(schedule_names())}")
    return row


def resolve_auto(name: Asked, deferring_pays: bool) -> Asked | str:
    """The schedule to run where a user asked for `name`, or for one written out, with one stage on each rank.

    ZB-H1 has the messages of 1F1B, forwards and backwards in the same order, and holds no more microbatches than
    1F1B's first rank. It is faster where weight gradients are worth putting off.
    """
    return (DEFERRING if deferring_pays else PLAIN) if name == AUTO else name


def build(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The schedule called `name` for one pipeline.

    Args:
        name: one of `schedule_names()`, or "auto".
        num_ranks: pipeline ranks, at least 1.
        num_microbatches: microbatches per step, at least 1, be it below `num_ranks` or not a multiple of it.
        stages_per_rank: stages that each rank holds. ``None`` takes the schedule's own number, see
            `default_stages_per_rank`. Another number is for schedules whose maker takes it; of those of the papers
            that is ``interleaved-1f1b``. On one rank a registered schedule is 1F1B with as many stages.

    Raises:
        ValueError: an unknown name, or a number that the schedule cannot have.
        ScheduleError: a registered maker gives none for these numbers, or one that cannot run, or that has its stages
            elsewhere than with one microbatch or in another number per rank.
    """
    row = named_schedule(name)
    if num_ranks < 1:
        raise ValueError(f"a pipeline has at least 1 rank, but num_ranks is {num_ranks}")
    if num_microbatches < 1:
        raise ValueError(f"a step has at least 1 microbatch, but num_microbatches is {num_microbatches}")
    usual = default_stages_per_rank(row.name)
    if stages_per_rank not in (None, usual) and (stages_per_rank < 1 or not row.any_stages_per_rank):
        wanted = "at least 1" if row.any_stages_per_rank else str(usual)
        raise ValueError(f"schedule {name!r} has {wanted} stages per rank, but stages_per_rank is {stages_per_rank}")
    if num_ranks == 1 and row not in _NAMED:
        stages = stages_per_rank or usual
        return build(PLAIN if stages == 1 else "interleaved-1f1b", 1, num_microbatches, stages)
    if stages_per_rank in (None, usual):
        made = _built(row, num_ranks, num_microbatches)
        _check_placement(row, made, usual)
        return made
    made = _built(row, num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
    _check_placement(row, made, stages_per_rank, stages_per_rank=stages_per_rank)
    return made


def _built(row: NamedSchedule, num_ranks: int, num_microbatches: int, **more: int) -> Schedule:
    """The row's schedule. One of the user's own is validated."""
    if row in _NAMED:
        return row.make(num_ranks, num_microbatches, **more)
    asked = f"schedule {row.name!r} on {num_ranks} ranks with {num_microbatches} microbatches"
    try:
        made = row.make(num_ranks, num_microbatches, **more)
    except ValueError as error:
        raise ScheduleError(f"{asked}: its maker, which must serve any numbers, gives none: {error}") from error
    if (made.num_ranks, made.num_microbatches) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"schedule {row.name!r} was asked for {num_ranks} ranks and {num_microbatches} microbatches, but its maker "
            f"gave one for {made.num_ranks} and {made.num_microbatches}"
        )
    try:
        validate(made)
    except ScheduleError as error:
        raise ScheduleError(f"{asked}: {error}") from None
    return replace(made, name=row.name)


def _check_placement(row: NamedSchedule, made: Schedule, num_stages: int, **more: int) -> None:
    """Refuse a schedule of the user's own whose ranks have not so many stages each, or whose stages are elsewhere than
    with one microbatch: ranks keep theirs for any number."""
    if row in _NAMED:
        return
    if (given := _equal_share(made)) != num_stages:
        raise ScheduleError(
            f"schedule {row.name!r} has {num_stages} stages per rank, but its maker gave one with {given} for "
            f"{made.num_ranks} ranks"
        )
    with_one = _built(row, made.num_ranks, 1, **more).stage_to_rank
    if made.stage_to_rank != with_one:
        raise ScheduleError(
            f"schedule {row.name!r} on {made.num_ranks} ranks with {made.num_microbatches} microbatches: its stages "
            f"are on ranks {made.stage_to_rank}, but with 1 microbatch on {with_one}"
        )


# -- what the actions say ----------------------------------------------------------------------------------------------


def default_stages_per_rank(name: str) -> int:
    """Stages that each rank holds under `name` unless told otherwise. Raises ValueError for an unknown name."""
    return _stages_per_rank(named_schedule(name))


@lru_cache
def _stages_per_rank(row: NamedSchedule) -> int:
    return _equal_share(_built(row, 2, 4))


def _equal_share(made: Schedule) -> int:
    """Stages that each rank holds, which must be as many for all."""
    per_rank, more = divmod(made.num_stages, made.num_ranks)
    if more or any(len(made.stages_of(rank)) != per_rank for rank in range(made.num_ranks)):
        raise ScheduleError(
            f"schedule {made.name!r} must put the same number of stages on each rank: {made.stage_to_rank}"
        )
    return per_rank


def live_microbatches(name: str, num_ranks: int, rank: int, num_microbatches: int) -> int:
    """Microbatches that a rank holds at most, at a time.

    Args:
        name: one of `schedule_names()`.
        num_ranks: pipeline ranks.
        rank: one of them, counted from 0.
        num_microbatches: microbatches per step.
    """
    row = named_schedule(PLAIN if num_ranks == 1 and is_own(name) else name)
    if row.live is not None:
        return min(row.live(num_ranks, rank, num_microbatches), num_microbatches)
    most = _counted(row, num_ranks, min(num_microbatches, DEEP * num_ranks))[rank]
    return num_microbatches if most == DEEP * num_ranks else most


@lru_cache
def _counted(row: NamedSchedule, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    made = _built(row, num_ranks, num_microbatches)
    peaks = made.peaks([1.0] * made.num_stages)
    return tuple(math.ceil(peak / len(made.stages_of(rank))) for rank, peak in enumerate(peaks))

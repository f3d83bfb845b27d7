"""Is a schedule right? Checked before anything runs, so that a wrong one is refused instead of hanging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice, takewhile
from operator import attrgetter, ne

from penstock.schedule.actions import Action, Kind, Schedule, ScheduleError
from penstock.schedule.communication import Deadlock, insert_communication

_SHOWN = 5


def validate(schedule: Schedule) -> None:
    """Check that `schedule` computes one whole step and cannot deadlock.

    Checked: every rank holds a stage and every stage has a rank; every action exactly once, on the rank of its stage;
    the caller's order (each rank runs the B of its top stage for microbatch 0, 1, 2, ...); one order per channel (each
    boundary and direction); that one run reaches the end, and so all that keep its order of messages.

    Raises:
        ScheduleError: naming the first kind of fault found; for a deadlock, the blocked action of each rank.
    """
    _check_placement(schedule)
    _check_every_action_once(schedule)
    _check_order_at_the_caller(schedule)
    try:
        insert_communication(schedule)
    except Deadlock as blocked:
        raise ScheduleError(_describe_block(schedule, blocked)) from None
    _check_channels(schedule)


def _check_placement(schedule: Schedule) -> None:
    if min(schedule.num_stages, schedule.num_microbatches) < 1:
        raise ScheduleError("a schedule has at least 1 stage and 1 microbatch")
    if len(schedule.stage_to_rank) != schedule.num_stages:
        raise ScheduleError(
            f"schedule has {schedule.num_stages} stages but ranks were given for {len(schedule.stage_to_rank)}"
        )
    held = set(schedule.stage_to_rank)
    if held != set(range(schedule.num_ranks)):
        raise ScheduleError(
            f"schedule has actions for ranks 0 to {schedule.num_ranks - 1} "
            f"but its stages are on ranks {_some(sorted(held))}: every rank must hold a stage"
        )


def _check_every_action_once(schedule: Schedule) -> None:
    kinds = (Kind.F, Kind.B, Kind.W) if schedule.splits_backward else (Kind.F, Kind.B)
    for rank, actions in enumerate(schedule.actions):
        wanted = {
            Action(kind, stage, microbatch)
            for kind in kinds
            for stage in schedule.stages_of(rank)
            for microbatch in range(schedule.num_microbatches)
        }
        if len(actions) == len(wanted) and wanted.issuperset(actions) and wanted.issubset(actions):
            continue
        count = Counter(actions)
        faults: list[tuple[str, list[Action]]] = [
            ("is missing", [action for action in wanted if action not in count]),
            ("has more than once", [action for action, times in count.items() if times > 1]),
            ("must not have", [action for action in count if action not in wanted]),
        ]
        for fault, faulty in faults:
            if faulty:
                in_order = sorted(faulty, key=attrgetter("microbatch", "stage", "kind.value"))
                raise ScheduleError(f"rank {rank} {fault} {_some(in_order)}")


def _check_order_at_the_caller(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        top = schedule.top_stage(rank)
        order = [action.microbatch for action in actions if action.kind is Kind.B and action.stage == top]
        if order != list(range(schedule.num_microbatches)):
            raise ScheduleError(
                f"rank {rank} runs the backward of its top stage {top} for microbatches {_some(order)}, "
                "but must take them in order from 0: this is where the caller receives them"
            )


def _check_channels(schedule: Schedule) -> None:
    """What a channel carries must be used in the order in which it was sent."""
    order: dict[tuple[Kind, int], list[int]] = {}
    for actions in schedule.actions:
        for action in actions:
            order.setdefault((action.kind, action.stage), []).append(action.microbatch)
    for boundary in range(schedule.num_stages - 1):
        if schedule.is_local(boundary, boundary + 1):
            continue
        for kind, source, user in ((Kind.F, boundary, boundary + 1), (Kind.B, boundary + 1, boundary)):
            sent, used = order[kind, source], order[kind, user]
            if sent != used:
                position = next(index for index, pair in enumerate(zip(sent, used, strict=True)) if pair[0] != pair[1])
                raise ScheduleError(
                    f"stage {source} sends the results of {kind} to stage {user} in another order than they are used: "
                    f"number {position} is microbatch {sent[position]} where {used[position]} is expected"
                )


def _describe_block(schedule: Schedule, blocked: Deadlock) -> str:
    ended = [takewhile(partial(ne, head), row) for row, head in zip(schedule.actions, blocked.heads, strict=True)]
    done = {action for row in ended for action in row}
    lines = []
    for rank, head in enumerate(blocked.heads):
        if head is None:
            lines.append(f"rank {rank} is done")
        elif isinstance(head, Action):
            missing = [needed for needed in head.prerequisites(schedule.num_stages) if needed not in done]
            waits = " and ".join(f"{needed} of rank {schedule.stage_to_rank[needed.stage]}" for needed in missing)
            lines.append(f"rank {rank} is blocked at {head}, which needs {waits}")
    return "schedule deadlocks: " + "; ".join(lines)


def _some(items: Sequence[object]) -> str:
    """The first few of `items`, and how many more there are."""
    text = ", ".join(str(item) for item in islice(items, _SHOWN))
    return text if len(items) <= _SHOWN else f"{text}, ... ({len(items)} in all)"

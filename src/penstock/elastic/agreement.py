"""The members' way from one generation to the next, through the store. What they do is decided by `protocol`."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.elastic.meeting import Meeting
from penstock.elastic.membership import Membership, tell
from penstock.elastic.protocol import Decision, MemberReport, Move, View, next_move

# Between two looks at the store, which serves all members: longer by as much again for so many of them.
PAUSE, MEMBERS_A_PAUSE = 0.01, 32
# A member that lives has so many times the hang timeout for its report: a step may take long, or its program have left
# the training loop without an end.
REPORT_PATIENCE = 5

# (what the decider sees) -> the next generation
Plan = Callable[[View], Decision]


class LeftOut(RuntimeError):
    """The other members went on without this one."""


def agree(membership: Membership, now: Decision, report: MemberReport, plan: Plan, announce: bool) -> Decision:
    """End a generation and return the next one.

    Args:
        plan: makes the next generation, on the member that decides.
        announce: whether the others need to be told that the generation ends.
    """
    meeting, pulse = membership.meeting, membership.pulse
    pulse.forget()
    me, decided = membership.id, None
    reports: dict[int, MemberReport] = {}
    lost: set[int] = set()
    others = [member for member in now.members if member != me]
    deadline = time.monotonic() + REPORT_PATIENCE * membership.hang
    while True:
        if pulse.has_news():
            decided = decision(meeting, now.generation + 1)
            if decided is None:
                _read_reports(meeting, now, reports)
                lost |= {member for member in others if pulse.has_ended(member)}
        if decided is None:
            suspects = {suspect for one in reports.values() for suspect in one.suspects} - {me}
            lost |= {member for member in others if pulse.process_has_ended(member)}
            lost |= pulse.lost(suspects - lost, suspects, membership.hang)
            # The one that will decide looks whether those live whose reports it waits for, the others whether it does.
            if pulse.lowest([m for m in sorted(others) if m < me], lost, suspects, membership.hang) is None:
                lost |= pulse.lost([m for m in others if m not in reports and m not in lost], (), membership.hang)
            if time.monotonic() > deadline:
                lost |= {member for member in now.members if member not in reports}
        view = View(me, now.members, reports, lost, decided)
        move = next_move(view)
        if move is Move.REPORT:
            meeting.create(f"report/{now.generation}/{me}", report.to_json())
            if announce:
                meeting.put(f"ending/{now.generation}", "1")
            tell(meeting)
        elif move is Move.DECIDE:
            meeting.create(f"decision/{now.generation + 1}", plan(view).to_json())
            tell(meeting)
        elif move is Move.ENTER:
            assert decided is not None
            return decided
        elif move is Move.END and not report.leaving:
            raise LeftOut(
                f"member {me} was taken for lost, and the others went on without it (generation "
                f"{now.generation + 1}): it ends. Start it again to join them"
            )
        elif move is Move.END:
            assert decided is not None
            return decided
        else:
            time.sleep(PAUSE * (1 + len(now.members) / MEMBERS_A_PAUSE))


def decision(meeting: Meeting, generation: int) -> Decision | None:
    """What was decided on a generation, None if nothing yet."""
    text = meeting.get(f"decision/{generation}")
    return None if text is None else Decision.from_json(text)


def latest(meeting: Meeting) -> Decision | None:
    """The newest generation that was decided on."""
    found, number = None, 0
    while (following := decision(meeting, number)) is not None:
        found, number = following, number + 1
    return found


def _read_reports(meeting: Meeting, now: Decision, reports: dict[int, MemberReport]) -> None:
    for member in now.members:
        if member not in reports:
            text = meeting.get(f"report/{now.generation}/{member}")
            if text is not None:
                reports[member] = MemberReport.from_json(text)

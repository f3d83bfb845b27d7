"""A member of a run, as the others see it: its record, its heartbeat, and who else is alive.

A thread writes the heartbeat, looks after the next member's, and listens for what the others announce. A member is
lost if it said goodbye, or its process has ended on this machine; or if it is suspected, as a connection to it closed,
and its heartbeat stands still for `STILL_SECONDS`; or if it is silent for the hang timeout. One that is merely slow
still has a heartbeat.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from penstock.elastic.meeting import STORE_ERRORS, Meeting
from penstock.elastic.protocol import MemberMessage
from penstock.runtime.failures.keys import in_one_line
from penstock.runtime.failures.ring import has_ended, machine
from penstock.runtime.threads import start_thread

logger = logging.getLogger("penstock")

BEAT_SECONDS = 0.2
# How long the heartbeat of a member whose connection closed stands still before it is lost.
STILL_SECONDS = 0.5
# So many numbers in a row that no member has (a process took one, and ended as it came) end the list of members.
LONGEST_GAP = 16
# Seconds after which all is read once more, though nobody has told of news.
LOOK_AGAIN = 1.0


def tell(meeting: Meeting) -> None:
    """Have everybody look: something was written. It costs each of them one read to know that nothing was."""
    meeting.put("news", secrets.token_hex(8))


@dataclass(frozen=True)
class MemberRecord(MemberMessage):
    """What a member says about itself when it comes. `group`, `shard`: members of one group share stages, each with a
    shard of their weights. `facts`: a digest of its model and settings, which must be everybody's."""

    member: int
    group: str
    shard: int
    facts: str
    host: str
    machine: str
    process: int


class Pulse:
    """What this process knows about others' heartbeats, from reading them repeatedly."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._seen: dict[int, tuple[str | None, float]] = {}
        self._records: dict[int, MemberRecord] = {}
        self._news: str | None = ""
        self._look_again = 0.0

    def still(self, member: int) -> float:
        """How many seconds a member's heartbeat has not changed, counted from the first call."""
        now, beat = time.monotonic(), self.meeting.get(f"beat/{member}")
        before = self._seen.get(member)
        if before is None or before[0] != beat:
            self._seen[member] = beat, now
            return 0.0
        return now - before[1]

    def forget(self) -> None:
        """Forget heartbeats that were not read for a while: they say nothing."""
        self._seen.clear()
        self._look_again = 0.0

    def has_news(self) -> bool:
        """Whether anybody has told anything since the last call (`tell`); also now and then in any case."""
        news, now = self.meeting.get("news"), time.monotonic()
        if news == self._news and now < self._look_again:
            return False
        self._news, self._look_again = news, now + LOOK_AGAIN
        return True

    def record(self, member: int) -> MemberRecord | None:
        """What a member said about itself, or None if it has not yet."""
        if member not in self._records:
            text = self.meeting.get(f"member/{member}")
            if text is None:
                return None
            self._records[member] = MemberRecord.from_json(text)
        return self._records[member]

    def everyone(self) -> list[int]:
        """All members that have ever come."""
        number, end = 0, LONGEST_GAP
        while number < end:
            if self.record(number) is not None:
                end = number + 1 + LONGEST_GAP
            number += 1
        return [number for number in range(end) if number in self._records]

    def lowest(
        self, members: Sequence[int], lost: set[int], suspects: Collection[int], hang_timeout: float
    ) -> int | None:
        """The first of `members` that is not lost, None if all are. Those found lost are added to `lost`."""
        for member in members:
            if member not in lost:
                lost |= self.lost([member], suspects, hang_timeout)
            if member not in lost:
                return member
        return None

    def has_ended(self, member: int) -> bool:
        """Whether a member said goodbye, or its process has ended on this machine."""
        return self.process_has_ended(member) or self.has_left(member)

    def process_has_ended(self, member: int) -> bool:
        """Whether a member's process has ended on this machine."""
        record = self.record(member)
        return record is not None and has_ended(record.machine, record.process)

    def has_left(self, member: int) -> bool:
        """Whether a member said goodbye."""
        return self.meeting.get(f"gone/{member}") is not None

    def lost(self, members: Collection[int], suspects: Collection[int], hang_timeout: float) -> set[int]:
        """Those of `members` that are lost; see the top of this file."""
        gone = set()
        for member in members:
            still = self.still(member)
            if still > hang_timeout or (member in suspects and still > STILL_SECONDS) or self.has_ended(member):
                gone.add(member)
        return gone


class Membership:
    """This process's membership in the run. `asked`: how many requests to change the members are known here. `silent`:
    the members that were silent for too long in the generation that is watched, or was last."""

    def __init__(self, meeting: Meeting, hang_timeout: float, group: str, shard: int, facts: str) -> None:
        self.meeting = meeting
        self.hang_timeout = hang_timeout
        self.id = meeting.next_number("members")
        self.record = MemberRecord(self.id, group, shard, facts, socket.gethostname(), machine(), os.getpid())
        self.pulse = Pulse(meeting)
        self.wants_to_leave = False
        self.asked = 0
        self.silent: set[int] = set()
        self._generation = -1
        self._watched = self.id
        self._fail: Callable[[str, Sequence[int]], None] | None = None
        # That of the generation that is watched: while it forms it is another one.
        self._hang_timeout = hang_timeout
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._warned = False
        meeting.put(f"beat/{self.id}", "0")
        meeting.put(f"member/{self.id}", self.record.to_json())
        tell(meeting)
        self._thread = start_thread(self._live, name="penstock-member")

    def watch(
        self, generation: int, members: Sequence[int], fail: Callable[[str, Sequence[int]], None], hang_timeout: float
    ) -> None:
        """From here on this member is part of a generation: `fail(why, members)` is called, in another thread, when it
        ends, or the next member's process has ended, or that member is silent for `hang_timeout` seconds."""
        with self._lock:
            if generation != self._generation:  # whoever is in the next one is alive
                self.silent.clear()
            self._generation, self._fail, self._hang_timeout = generation, fail, hang_timeout
            self._watched = members[(members.index(self.id) + 1) % len(members)]

    def unwatch(self) -> None:
        """This member is in no generation now."""
        with self._lock:
            self._fail = None

    def close(self) -> None:
        """End the heartbeat, and say so: the others need not wait to find out."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(*STORE_ERRORS):
            self.meeting.put(f"gone/{self.id}", str(time.time()))
            tell(self.meeting)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT_SECONDS)

    # -- joining ---------------------------------------------------------------------------------------------------

    def ask_to_join(self) -> None:
        """Ask the members to take this one in, at the end of a step."""
        self.meeting.put(f"join/{self.id}", "1")
        self.meeting.next_number("request")
        tell(self.meeting)

    def num_requests(self) -> int:
        """How many requests to change the members there have been."""
        return self.meeting.count("request")

    def refuse(self, member: int, reason: str) -> None:
        """Tell a member that asks to join why it may not."""
        self.meeting.put(f"refused/{member}", reason)

    def refusal(self, member: int) -> str | None:
        """Why a member was refused; None if it was not."""
        return self.meeting.get(f"refused/{member}")

    def candidates(self, members: Collection[int]) -> list[int]:
        """The processes that ask to join `members` and are alive; one with another model or settings is refused."""
        asking = []
        for member in self.pulse.everyone():
            if member in members or self.meeting.get(f"join/{member}") is None or self.pulse.has_ended(member):
                continue
            record = self.pulse.record(member)
            assert record is not None
            if record.facts != self.record.facts:
                self.refuse(
                    member,
                    f"member {member} on {record.host} was given another model or other settings than the run; every "
                    "process must be given the same",
                )
            elif self.refusal(member) is None:
                asking.append(member)
        return asking

    # -- the thread ------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        pulse, beat = None, 0
        while not self._closed.wait(BEAT_SECONDS):
            try:
                if pulse is None:
                    pulse = Pulse(self.meeting.clone())
                beat += 1
                pulse.meeting.put(f"beat/{self.id}", str(beat))
                self._listen(pulse)
                self._warned = False
            except STORE_ERRORS as error:
                pulse = None
                if not self._warned and not self._closed.is_set():
                    self._warned = True
                    logger.warning(
                        "the store at %s does not answer (%s). Training goes on; but a lost member cannot be survived "
                        "and nobody can join until it is back",
                        self.meeting.address, in_one_line(error),
                    )  # fmt: skip

    def _listen(self, pulse: Pulse) -> None:
        meeting = pulse.meeting
        with self._lock:
            generation, member = self._generation, self._watched
            fail, hang_timeout = self._fail, self._hang_timeout
        if fail is None:
            pulse.forget()
            return
        if pulse.has_news():
            self.asked = meeting.count("request")
            if meeting.get(f"ending/{generation}") is not None:
                self._tell(generation, "the members change", ())
        if member == self.id or pulse.has_left(member):
            return
        if pulse.process_has_ended(member):
            self._tell(generation, f"the process of member {member} has ended", (member,))
        elif pulse.still(member) > hang_timeout:
            with self._lock:
                if generation == self._generation:
                    self.silent.add(member)
            self._tell(generation, f"member {member} has been silent for {hang_timeout:g} s", (member,))

    def _tell(self, generation: int, why: str, members: Sequence[int]) -> None:
        with self._lock:
            fail, same = self._fail, self._generation == generation
            if same:
                self._fail = None
        if same and fail is not None:
            fail(why, members)

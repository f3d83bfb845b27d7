"""A process's place among the members of a run: it comes, meets the others, and goes on with them.

Through the store they go from one generation to the next. Each generation has a default process group of torch's of its
own (`form_world`). What the members agree on is decided by `protocol`.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock.config.elastic import Elastic
from penstock.elastic.layout_planner import LayoutPlanner
from penstock.elastic.meeting import STORE_ERRORS, Meeting, meet
from penstock.elastic.membership import Membership, Pulse, tell
from penstock.elastic.protocol import Generation, MemberReport, Move, View, next_move
from penstock.runtime.comm import bootstrap
from penstock.runtime.comm.devices import use_local_device
from penstock.runtime.failures import watcher
from penstock.runtime.failures.board import FailureBoard, PipelineFailure
from penstock.runtime.failures.keys import in_one_line
from penstock.runtime.failures.ring import machine

logger = logging.getLogger("penstock")

PAUSE = 0.02
# How long the members of a new generation may take to meet.
FORMING = datetime.timedelta(seconds=20)
# Seconds of silence after which a member counts as lost while a generation forms, in place of `Elastic.hang_timeout`.
FORMING_HANG_TIMEOUT = 10.0
# How long a failure's details are waited for.
DETAILS = 0.1
# How long others that begin a run are waited for without a word.
WAITING = 10.0
# How long the members of a run that may be over are looked at: it is over if all stand still for half of that.
DEAD = 3.0
_imported = time.time()
# By these a process knows the others that one launcher has started on this machine.
LAUNCHER = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
# So many changes in a row in which nobody was lost and nobody joined, without an update in between, are no accident.
MOST_WITHOUT_PROGRESS = 3


class RunEnded(PipelineFailure):
    """The remaining members cannot go on."""


class Generations:
    """This process as a member of one generation after the other, from `enter` on until `close`.

    Attributes:
        now: the present generation, the one that is being formed, or the one that says why the run has ended.
        changes_without_progress: how many changes there were in a row, since the last update, in which nobody was lost
            and nobody joined.
        checkpoint: finds step and path of one to go back to, if there is one.
    """

    now: Generation

    def __init__(self, settings: Elastic, planner: LayoutPlanner, tensor_parallel_size: int, facts: str) -> None:
        self.settings = settings
        self.planner = planner
        self.changes_without_progress = 0
        self.checkpoint: Callable[[], tuple[int, str] | None] = lambda: None
        self._board: FailureBoard | None = None
        # What SIGTERM does in this process when it is no member.
        self._on_sigterm: Any = None
        self.membership = _come(settings, tensor_parallel_size, facts)
        atexit.register(self.membership.close)

    @property
    def member(self) -> int:
        """This member's number."""
        return self.membership.id

    def close(self) -> None:
        """End this process's membership, and its heartbeat. SIGTERM means what it did before."""
        self.membership.close()
        atexit.unregister(self.membership.close)
        with contextlib.suppress(ValueError):  # not in the main thread
            if signal.getsignal(signal.SIGTERM) == self._leave:
                signal.signal(signal.SIGTERM, self._on_sigterm or signal.SIG_DFL)

    # -- coming ----------------------------------------------------------------------------------------------------

    def enter(self) -> Generation:
        """Wait until this member is part of a generation, the first one or a later one, and meet its other members.
        Raises RuntimeError if the run has ended, ValueError if it refuses this process."""
        self.now = latest(self.membership.meeting) or self._begin()
        while True:
            if self.member not in self.now.members:
                self.now = self._join(self.now)
            if self.now.reason_to_stop:
                raise RunEnded(f"the run cannot begin: {self.now.reason_to_stop}")
            try:
                self.meet()
            except PipelineFailure as error:
                self.refuse_without_progress(error)
                self.finish_generation(MemberReport(self.member, self.now.step, suspects=self.suspects(), new=True))
            else:
                break
        if self.settings.leave_on_sigterm:
            with contextlib.suppress(ValueError):  # not in the main thread
                self._on_sigterm = signal.signal(signal.SIGTERM, self._leave)
        return self.now

    def _begin(self) -> Generation:
        """Meet the other members that begin the run."""
        settings, meeting, pulse = self.settings, self.membership.meeting, self.membership.pulse
        known: list[int] = []
        everyone: list[int] = []
        lost: set[int] = set()
        changed, has_warned = time.monotonic(), False
        while (first := generation_of(meeting, 0)) is None:
            if pulse.has_news():
                everyone = pulse.everyone()
            if pulse.lowest([m for m in everyone if m < self.member], lost, (), FORMING_HANG_TIMEOUT) is not None:
                time.sleep(PAUSE)  # the lowest member begins the run
                continue
            here = [m for m in everyone if m == self.member or not pulse.lost([m], (), FORMING_HANG_TIMEOUT)]
            if here != known:
                known, changed = here, time.monotonic()
            waited = time.monotonic() - changed
            enough = len(here) >= settings.start if settings.start else waited > settings.gather
            if settings.start and waited > WAITING and not has_warned:
                has_warned = True
                logger.warning(
                    "member %d waits for others to begin the run: %d of %d processes are here",
                    self.member, len(here), settings.start,
                )  # fmt: skip
            if enough and here and here[0] == self.member:
                proposal = self.planner.decide((), here[: settings.start or len(here)], 0, pulse.record)
                meeting.create("generation/0", proposal.to_json())
            time.sleep(PAUSE)
        return first

    def _join(self, now: Generation) -> Generation:
        """Wait for a generation that takes this member in."""
        membership, pulse = self.membership, self.membership.pulse
        membership.ask_to_join()
        pulse.forget()
        lost: set[int] = set()
        while self.member not in now.members or now.reason_to_stop:
            if now.reason_to_stop:
                raise RunEnded(
                    f"the run that this process was to join has ended at step {now.step}: {now.reason_to_stop}; "
                    "to begin a new one, start all processes again"
                )
            if (reason := membership.refusal(self.member)) is not None:
                raise ValueError(f"the run does not take this process in: {reason}")
            if pulse.lowest(now.members, lost, (), self.settings.hang_timeout) is None:
                raise RunEnded("the run that this process was to join has ended: none of its members is left")
            time.sleep(PAUSE)
            if (following := generation_of(membership.meeting, now.number + 1)) is not None:
                now, lost = following, set()
        return now

    def _leave(self, signum: int, frame: Any) -> None:
        """Handles SIGTERM while this process is a member."""
        if not self.membership.wants_to_leave:
            logger.warning("member %d leaves the run at the end of this step (SIGTERM)", self.member)
            self.membership.wants_to_leave = True

    # -- from one to the next --------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Make torch's default process group of the present generation's members."""
        now = self.now
        try:
            store = self.membership.meeting.clone().process_store(f"generation {now.number}", FORMING)
            form_world(store, now.members.index(self.member), len(now.members), FORMING, self.on_board)
        except PipelineFailure:
            raise
        except STORE_ERRORS as error:
            raise PipelineFailure(
                f"the members of generation {now.number} did not meet: {in_one_line(error)}"
            ) from error

    def on_board(self, board: FailureBoard) -> None:
        """Failures that this member's heartbeat thread hears of go to `board` from here on."""
        board.detail_wait = DETAILS
        self._board = board
        self._watch(board, FORMING_HANG_TIMEOUT)

    def formed(self) -> None:
        """The engine of this generation is formed: from here on a member may be silent for as long as a step takes."""
        assert self._board is not None
        self._watch(self._board, self.settings.hang_timeout)

    def _watch(self, board: FailureBoard, hang_timeout: float) -> None:
        now = self.now

        def fail(why: str, members: Sequence[int]) -> None:
            board.fail(why, suspects=[now.members.index(member) for member in members])

        self.membership.watch(now.number, now.members, fail, hang_timeout)

    def suspects(self) -> tuple[int, ...]:
        """The members whose loss is on the board, or that were silent for too long."""
        members = self.now.members
        lost = () if self._board is None else self._board.lost
        gone = {members[rank] for rank in lost if rank < len(members)}
        return tuple(sorted(gone | self.membership.silent & set(members)))

    def finish_generation(self, report: MemberReport, announce: bool = True) -> Generation:
        """End the present generation with this member's report, and take up the one that follows; see `agree`."""
        self.membership.unwatch()
        before = self.now

        def plan(view: View) -> Generation:
            return self.planner.following(view, before, self.membership, self.checkpoint)

        following = agree(self.membership, before, report, plan, announce)
        # That others join explains no change to a member that is itself joining.
        explained = following.lost or (following.joining and not report.new)
        self.changes_without_progress = 0 if explained else self.changes_without_progress + 1
        self.now, self._board = following, None  # its ranks are those of the generation before
        return following

    def refuse_without_progress(self, error: Exception) -> None:
        """Raise `error` if it follows too many changes that led nowhere."""
        if self.changes_without_progress >= MOST_WITHOUT_PROGRESS:
            raise error


def _come(settings: Elastic, tensor_parallel_size: int, facts: str) -> Membership:
    """Make this process a member."""
    store, number = meet(settings.store, settings.run), 0
    # A run that is over leaves its keys behind; the next one of that name goes by another number.
    while _is_over(meeting := store.within(str(number))):
        number += 1
    return Membership(meeting, settings.hang_timeout, *tensor_group(tensor_parallel_size), facts)


def tensor_group(size: int) -> tuple[str, int]:
    """A name that the processes share which have the shards of one stage's layers, and the shard of this one. Raises
    ValueError if that cannot be told."""
    if size == 1:
        return f"{socket.gethostname()} {os.getpid()}", 0
    if not (local := os.environ.get("LOCAL_RANK")):
        raise ValueError(
            "with tensor parallelism a launcher must set LOCAL_RANK, as the ranks of a stage are on one node"
        )
    index, shard = divmod(int(local), size)
    launcher = " ".join(os.environ.get(name, "") for name in LAUNCHER)
    return f"{socket.gethostname()} {launcher} {index}", shard


def _is_over(meeting: Meeting) -> bool:
    """Whether an earlier run has no living member. RunEnded is raised in a process that was to join it and came too
    late: it would wait for others to begin a new one. One that was itself a member, or began after its end, does so."""
    now, pulse = latest(meeting), Pulse(meeting)
    if now is None or (meeting.get("over") is None and not _are_dead(now.members, pulse)):
        return False
    meeting.put("over", "1")
    records = [record for member in now.members if (record := pulse.record(member)) is not None]
    ended = max((float(meeting.get(f"gone/{member}") or 0) for member in now.members), default=0.0)
    if _began() < ended and all((record.machine, record.process) != (machine(), os.getpid()) for record in records):
        raise RunEnded(
            f"the run that this process was to join has ended {time.time() - ended:.0f} s ago; "
            "to begin a new one, start all processes again"
        )
    return True


def _began() -> float:
    """When this process began, seconds since the epoch, or imported this file if that cannot be told."""
    with contextlib.suppress(OSError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    return _imported


def _are_dead(members: Sequence[int], pulse: Pulse) -> bool:
    deadline = time.monotonic() + DEAD
    while time.monotonic() < deadline:
        lost = pulse.lost(members, (), DEAD / 2)
        if len(lost) == len(members):
            return True
        if any(pulse.still(member) == 0.0 for member in members if member not in lost) and (
            time.monotonic() > deadline - DEAD / 2
        ):
            return False
        time.sleep(PAUSE)
    return False


# Seconds between two looks at the store, which serves all members: longer by as much again for every so many of them.
AGREEMENT_PAUSE, MEMBERS_A_PAUSE = 0.01, 32
# A member that lives has so many times the hang timeout for its report: a step may take long, or its program may have
# left the training loop without an end.
REPORT_PATIENCE = 5


class LeftOut(RuntimeError):
    """The other members went on without this one."""


def agree(
    membership: Membership, now: Generation, report: MemberReport, plan: Callable[[View], Generation], announce: bool
) -> Generation:
    """End a generation and return the next one. `plan`: makes the next generation, on the member that decides.
    `announce`: whether the others need to be told that the generation ends. Raises LeftOut if this member is not part
    of the next one, unless its report says that it is leaving, or new, and may ask again."""
    meeting, pulse = membership.meeting, membership.pulse
    pulse.forget()
    me, decided = membership.id, None
    reports: dict[int, MemberReport] = {}
    lost: set[int] = set()
    others = [member for member in now.members if member != me]
    deadline = time.monotonic() + REPORT_PATIENCE * membership.hang_timeout
    while True:
        if pulse.has_news():
            decided = generation_of(meeting, now.number + 1)
            if decided is None:
                for member in now.members:
                    if member not in reports and (text := meeting.get(f"report/{now.number}/{member}")) is not None:
                        reports[member] = MemberReport.from_json(text)
                lost |= {member for member in others if pulse.has_ended(member)}
        if decided is None:
            suspects = {suspect for report in reports.values() for suspect in report.suspects} - {me}
            lost |= {member for member in others if pulse.process_has_ended(member)}
            lost |= pulse.lost(suspects - lost, suspects, membership.hang_timeout)
            # The one that will decide looks whether those live whose reports it waits for, the others whether it does.
            if pulse.lowest([m for m in sorted(others) if m < me], lost, suspects, membership.hang_timeout) is None:
                lost |= pulse.lost(
                    [m for m in others if m not in reports and m not in lost], (), membership.hang_timeout
                )
            if time.monotonic() > deadline:
                lost |= {member for member in now.members if member not in reports}
        view = View(me, now.members, reports, lost, decided)
        move = next_move(view)
        if move is Move.LEFT_OUT and not (report.leaving or report.new):
            raise LeftOut(
                f"member {me} was taken for lost, and the others went on without it (generation "
                f"{now.number + 1}): it ends. Start it again to join them"
            )
        if decided is not None:
            return decided
        if move is Move.REPORT:
            meeting.create(f"report/{now.number}/{me}", report.to_json())
            if announce:
                meeting.put(f"ending/{now.number}", "1")
            tell(meeting)
        elif move is Move.DECIDE:
            meeting.create(f"generation/{now.number + 1}", plan(view).to_json())
            tell(meeting)
        else:
            time.sleep(AGREEMENT_PAUSE * (1 + len(now.members) / MEMBERS_A_PAUSE))


def generation_of(meeting: Meeting, number: int) -> Generation | None:
    """The generation of a number, None if it is not decided on yet."""
    text = meeting.get(f"generation/{number}")
    return None if text is None else Generation.from_json(text)


def latest(meeting: Meeting) -> Generation | None:
    """The newest generation that was decided on."""
    newest, number = None, 0
    while (following := generation_of(meeting, number)) is not None:
        newest, number = following, number + 1
    return newest


def form_world(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
    on_board: Callable[[FailureBoard], object],
) -> None:
    """Make a new default process group of torch's, in place of the present one, with the ranks that meet in `store`;
    `on_board` is given the board on which failures of their meeting are."""
    leave_world()
    # The counter by which torch names groups must be equal on all ranks; an attempt that failed has advanced it.
    dist.distributed_c10d._world.group_count = 0
    use_local_device()
    atexit.unregister(bootstrap.leave_in_order)
    atexit.register(bootstrap.leave_in_order)
    try:
        bootstrap.meet(store, rank, world_size, timeout, on_board)
    except BaseException:
        watcher.stop()
        raise


def leave_world() -> None:
    """Give up torch's default process group, if there is one."""
    watcher.stop()
    if dist.is_initialized():
        dist.destroy_process_group()

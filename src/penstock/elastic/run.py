"""One process's part in an elastic run: it comes, trains, survives the loss of others, and leaves.

A step is a transaction. `perform` makes the calls in which all ranks take part, and keeps a log of those since the last
update; `commit` makes the update, after a vote. When a rank is lost in any of them, those that are left agree on the
next generation (`agreement`), take up its layout with the same objects (`Engine.reform`), and repeat what the log says
is lost (`log`). So the caller sees a call that took longer. If values were lost with all that had them, everybody goes
back to the last checkpoint.

The vote and the recovery share the state of the step that is under way; that makes the file long.
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
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist

from penstock.elastic.agreement import LeftOut, agree, decision, everyone, latest
from penstock.elastic.events import Change
from penstock.elastic.formations import Formations
from penstock.elastic.log import Call, Log
from penstock.elastic.meeting import STORE_ERRORS, FolderMeeting, TcpMeeting, meet
from penstock.elastic.membership import Membership, Pulse, describe, request_change
from penstock.elastic.protocol import Decision, Report, View, successor
from penstock.elastic.settings import Elastic
from penstock.modeling.weights.names import unit_of
from penstock.runtime.comm.bootstrap import form_world, leave_world
from penstock.runtime.comm.rollcall import Call as RollCallName
from penstock.runtime.engine import Engine, Values
from penstock.runtime.failures.board import FailureBoard, PipelineFailure, is_transport_error
from penstock.runtime.moving import from_elsewhere, from_live_ranks, hand_over

logger = logging.getLogger("penstock")

PAUSE = 0.02
# How long the members of a new generation may take to meet, and a silent one is waited for meanwhile.
FORMING = datetime.timedelta(seconds=20)
FORMING_PATIENCE = 10.0
# How long a failure's details are waited for.
DETAILS = 0.1
# How long the members of a run that may be over are looked at before it is taken to be.
DEAD = 3.0
# So many changes in a row that no loss explains, without an update in between, are no accident.
MOST_FRUITLESS = 3


class RunEnded(PipelineFailure):
    """The remaining members cannot go on."""


class LastResort(Protocol):
    """Where to load values from that no member has any more."""

    def newest(self) -> tuple[int, str] | None:
        """Step and path of a checkpoint to go back to, if there is one."""

    def go_back(self, step: int) -> None:
        """Load the checkpoint of a step. All members call this."""


class ElasticRun:
    """This process's part in a run.

    Args:
        facts: a digest of the model and the settings, the same for all members.

    Attributes:
        step: how many updates have been made.
        changes: what happened to the members, see `Change`.
        decision: the present generation.
        performing: whether `perform` is at work.
        last_resort: checkpoints of this run, if it makes any.
        objects: whose states a process that joins is given, by name; see `register`.
        joined: whether this process came to a run under way.
        num_restored: how many times the run went back to a checkpoint.
    """

    def __init__(self, settings: Elastic, formations: Formations, tp_size: int, facts: str) -> None:
        self.settings = settings
        self.formations = formations
        self.step = 0
        self.changes: list[Change] = []
        self.decision: Decision | None = None
        self.on_layout: Callable[[Decision], tuple[Any, Any]] = lambda decision: (None, None)
        self.objects: dict[str, Any] = {}
        # On a joiner, the states of objects that are not registered yet.
        self._received: dict[str, Any] = {}
        self.engine: Engine | None = None
        self.optimizer: Any = None
        self.performing = False
        self.joined = False
        self.last_resort: LastResort | None = None
        self.num_restored = 0
        self._restoring = self._going_back = False
        self._num_updates = 0
        self._log = Log()
        self._todo: list[Call] = []
        self._update: Callable[[], Any] | None = None
        self._updated: Any = None
        self._change_due = False
        self._handled = 0
        self._fruitless = 0
        self._change: Change | None = None
        self._redo_from = 0.0
        self._moved = 0.0
        self._num_bytes = 0
        self._deciding: Decision | None = None  # the generation that is being formed
        self._board: FailureBoard | None = None
        self._membership = self._come(tp_size, facts)
        atexit.register(self._membership.close)

    # -- coming ----------------------------------------------------------------------------------------------------

    def _come(self, tp_size: int, facts: str) -> Membership:
        settings, number = self.settings, 0
        store = meet(settings.store, settings.run)
        # A run that is over leaves its keys behind; the next one of that name goes by another number.
        while True:
            room = store.within(str(number))
            if room.get("over") is None and not self._is_dead(room):
                break
            room.put("over", "1")
            number += 1
        local = os.environ.get("LOCAL_RANK")
        if tp_size > 1 and not local:
            raise ValueError(
                "with tensor parallelism a launcher must set LOCAL_RANK, as the ranks of a stage are on one node"
            )
        node = os.environ.get("TORCHELASTIC_RUN_ID") or str(os.getpid())
        index, shard = divmod(int(local or 0), tp_size)
        group = f"{socket.gethostname()} {node} {index}" if local else f"{socket.gethostname()} {os.getpid()}"
        return Membership(room, settings.hang_timeout, group, shard, facts)

    def _is_dead(self, room: TcpMeeting | FolderMeeting) -> bool:
        """Whether an earlier run exists that has no living member."""
        now = latest(room)
        if now is None:
            return False
        pulse, deadline = Pulse(room), time.monotonic() + DEAD
        while time.monotonic() < deadline:
            lost = pulse.lost(now.members, (), DEAD / 2)
            if len(lost) == len(now.members):
                return True
            if any(pulse.still(member) == 0.0 for member in now.members if member not in lost) and (
                time.monotonic() > deadline - DEAD / 2
            ):
                return False
            time.sleep(PAUSE)
        return False

    @property
    def number(self) -> int:
        """This member's id."""
        return self._membership.id

    @property
    def asked(self) -> int:
        """How many processes are known to have asked to join."""
        return self._membership.asked

    def enter(self) -> Decision:
        """Wait until this member is part of a generation, the first one or a later one that takes it in, and meet the
        other members.

        Raises:
            RuntimeError: the run has ended, or refuses it.
        """
        membership = self._membership
        now = latest(membership.meeting)
        if now is None:
            now = self._begin()
        if membership.id not in now.members:
            now = self._join(now)
        while True:
            if now.end:
                raise RunEnded(f"the run cannot begin: {now.end}")
            self.decision, self.step, self.joined = now, now.step, not self.begins(now)
            try:
                self.meet(now)
            except PipelineFailure as error:
                now = self._come_again(now, error)
            else:
                break
        if self.settings.leave_on_sigterm:
            self._hear_of_leaving()
        self._handled = now.requests
        return now

    def _come_again(self, now: Decision, error: PipelineFailure) -> Decision:
        """The next generation, as this member's first one did not meet."""
        self._membership.unwatch()
        suspects = self._lost_ranks(now) | (self._membership.silent & set(now.members))
        report = Report(self.number, now.step, suspects=tuple(sorted(suspects)), new=True)
        following = agree(self._membership, now, report, self._decide)
        self._fruitless = 0 if following.lost else self._fruitless + 1
        if self._fruitless >= MOST_FRUITLESS:
            raise error
        return following

    def _begin(self) -> Decision:
        """Meet the other members that begin the run."""
        settings, membership = self.settings, self._membership
        meeting, pulse = membership.meeting, membership.pulse
        known: list[int] = []
        changed = time.monotonic()
        while (first := decision(meeting, 0)) is None:
            here = [m for m in everyone(pulse) if m == membership.id or not pulse.lost([m], (), FORMING_PATIENCE)]
            if here != known:
                known, changed = here, time.monotonic()
            waited = time.monotonic() - changed
            enough = len(here) >= settings.start if settings.start else waited > settings.gather
            if enough and here and here[0] == membership.id:
                proposal = self.formations.decide(0, (), here[: settings.start or len(here)], pulse.record)
                meeting.create("decision/0", proposal.to_json())
            time.sleep(PAUSE)
        return first

    def _join(self, now: Decision) -> Decision:
        membership = self._membership
        meeting, pulse = membership.meeting, membership.pulse
        meeting.put(f"join/{membership.id}", "1")
        request_change(meeting)
        pulse.forget()
        while membership.id not in now.members or now.end:
            if now.end:
                raise RunEnded(f"the run that this process was to join has ended: {now.end}")
            if (reason := meeting.get(f"refused/{membership.id}")) is not None:
                raise ValueError(f"the run does not take this process in: {reason}")
            if len(pulse.lost(now.members, (), self.settings.hang_timeout)) == len(now.members):
                raise RunEnded("the run that this process was to join has ended: none of its members is left")
            time.sleep(PAUSE)
            now = decision(meeting, now.generation + 1) or now
        return now

    def _hear_of_leaving(self) -> None:
        def leave(signum: int, frame: Any) -> None:
            if not self._membership.wants_to_leave:
                logger.warning("member %d leaves the run at the end of this step (SIGTERM)", self.number)
                self.leave()

        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, leave)

    def leave(self) -> None:
        """Leave the run at the end of the step."""
        self._membership.wants_to_leave = True

    # -- forming ---------------------------------------------------------------------------------------------------

    def meet(self, now: Decision) -> None:
        """Make torch's default process group of a generation's members."""
        meeting = self._membership.meeting.clone()
        store = meeting.process_store(f"generation {now.generation}", FORMING)
        rank = now.members.index(self.number)
        try:
            form_world(store, rank, len(now.members), FORMING, self.on_board)
        except PipelineFailure:
            raise
        except STORE_ERRORS as error:
            reason = str(error).splitlines()[0][:200]
            raise PipelineFailure(f"the members of generation {now.generation} did not meet: {reason}") from error

    def on_board(self, board: FailureBoard) -> None:
        """Failures that this member's heartbeat thread hears of go to `board` from here on."""
        board.detail_wait = DETAILS
        self._board = board
        self._watch(board, FORMING_PATIENCE)

    def _watch(self, board: FailureBoard, patience: float) -> None:
        assert self.decision is not None
        now = self._deciding or self.decision

        def fail(why: str, members: Sequence[int]) -> None:
            board.fail(why, suspects=[now.members.index(member) for member in members])

        self._membership.watch(now.generation, now.members, fail, patience)

    def values(self, now: Decision) -> Values:
        """What fills in what a member of a generation holds newly."""
        moving = from_live_ranks(self.optimizer, also=lambda engine: self._share_states(engine, now))

        def fill(engine: Engine, taken: Any, had: Any) -> None:
            started = time.perf_counter()
            moving(engine, taken, had)
            self._moved = time.perf_counter() - started
            self._num_bytes = sum(tensor.nbytes for tensor in taken.values())

        return fill

    def begins(self, now: Decision) -> bool:
        """Whether a generation is the first."""
        return len(now.joining) == len(now.members)

    def register(self, name: str, one: Any) -> None:
        """Have `one.state_dict()` of a member given to `one.load_state_dict()` of each that joins.

        Raises:
            TypeError: it lacks one of the two. ValueError: the name is taken.
        """
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(one, method, None)):
                raise TypeError(f"register({name!r}, ...): a {type(one).__name__} has no {method}()")
        if name in self.objects:
            raise ValueError(f"register({name!r}, ...): something is registered under this name already")
        self.objects[name] = one
        if name in self._received:
            one.load_state_dict(self._received.pop(name))

    def _share_states(self, engine: Engine, now: Decision) -> None:
        """Give those who join what they need beside the model's state."""
        if not now.joining or self.begins(now):
            return
        first = next(rank for rank, member in enumerate(now.members) if member not in now.joining)
        content: list[Any] = [None]
        if dist.get_rank() == first:
            states = {name: one.state_dict() for name, one in self.objects.items()}
            settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
            content = [(states, settings, engine.loss_scale)]
        dist.broadcast_object_list(content, first, group=engine.groups.world_control)
        if self.number in now.joining:
            self._received, settings, engine.loss_scale = content[0]
            if len(settings) != len(self.optimizer.param_groups):
                raise ValueError(
                    f"the optimizer has {len(self.optimizer.param_groups)} parameter groups, but that of the run has "
                    f"{len(settings)}"
                )
            for group, values in zip(self.optimizer.param_groups, settings, strict=True):
                group.update(values)
            for name in self._received.keys() & self.objects.keys():
                self.objects[name].load_state_dict(self._received.pop(name))

    def formed(self, engine: Engine) -> None:
        """The engine is formed; from here on failures of its ranks are survived."""
        if self.engine is None:
            self._log.begin(engine.step_number)
        self.engine = engine
        engine.run = self
        engine.on_board = self.on_board
        self._watch(engine.board, self.settings.hang_timeout)

    # -- steps -----------------------------------------------------------------------------------------------------

    def perform(self, call: Call) -> Any:
        """Do something that all ranks do, however many are lost meanwhile.

        Raises:
            what it raises that is no loss of a rank; RunEnded: those that are left cannot go on.
        """
        if call.trains and not self._log.trains:
            self._change_if_due()
        while True:
            self.performing = True
            try:
                self._repeat()
                result = call.run()
            except Exception as error:
                self._recover(error)
                continue
            finally:
                self.performing = False
            if not call.stale:
                self._log.add(call)
            self._note_redone()
            return result

    def do(self, work: Callable[[], Any], stale: Callable[[], Any] | None = None) -> Any:
        """Do something without gradients on all ranks, again after a rank was lost. See `perform`.

        Args:
            stale: is done in place of `work` if the run went back to a checkpoint meanwhile; by default that is an
                error.
        """
        if self.performing:
            return work()
        restored = self.num_restored

        def unless_stale() -> Any:
            if restored == self.num_restored:
                return work()
            call.stale = True
            if stale is not None:
                return stale()
            raise RunEnded(f"values were lost meanwhile, and the run went back to step {self.step}. {self._advice()}")

        call = Call(unless_stale, trains=False)
        return self.perform(call)

    def load(self, load: Callable[[], int | None]) -> None:
        """Load all values on all ranks, again after a rank was lost.

        Args:
            load: returns the step of what it has loaded; None if nothing has changed.
        """

        def work() -> None:
            self._restoring = True
            step = load()
            self._restoring = False
            self.step = self.step if step is None else step

        self.do(work)
        self._begin_log()

    def commit(self, prepare: Callable[[], Callable[[], Any]]) -> Any:
        """Make an update on all ranks or on none.

        Args:
            prepare: does what needs other ranks, and returns the update, which needs none.
        """
        before = self._num_updates
        while self._num_updates == before:
            try:
                self._repeat()
                self._update = prepare()
                self._change_due = self._vote()
            except Exception as error:
                self._recover(error)
            else:
                self._make_update()
        self._note_redone()
        return self._updated

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients that no update has used."""
        return self._log.trains

    def drop(self) -> None:
        """Gradients were dropped: what made them need not be repeated once all ranks have dropped them."""
        assert self.engine is not None
        self._log.drop(self.engine.step_number)

    def _begin_log(self) -> None:
        assert self.engine is not None
        self._log.begin(self.engine.step_number)

    def _make_update(self) -> None:
        assert self._update is not None and self.engine is not None
        self._updated, self._update = self._update(), None
        self.step += 1
        self._num_updates += 1
        self._fruitless = 0
        self._begin_log()

    def _vote(self) -> bool:
        """Once this returns on any rank, all ranks have their gradients. Returns whether the members are to change."""
        assert self.engine is not None
        wishes = [int(self._membership.asked > self._handled or self._membership.wants_to_leave)]
        with self.engine.together(RollCallName.UPDATE, wishes) as said:
            return any(facts[0] for facts in said.values())

    def _repeat(self) -> None:
        while self._todo:
            self._todo[0].run()
            self._todo.pop(0)

    # -- changes ---------------------------------------------------------------------------------------------------

    def _change_if_due(self) -> None:
        if not self._change_due:
            return
        self._change_due = False
        assert self.decision is not None
        leaving = self._membership.wants_to_leave
        try:
            assert self.engine is not None
            hand_over(self.engine, self.optimizer, leaving)
            self._to(self._next("a planned change", (), planned=True, leaving=leaving))
        except Exception as error:
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        """Go on without those that were lost, if `error` says that somebody was; otherwise raise it."""
        while True:
            if isinstance(error, RunEnded | LeftOut) or not (
                isinstance(error, PipelineFailure) or is_transport_error(error)
            ):
                raise error
            if self._fruitless >= MOST_FRUITLESS:
                raise error
            try:
                self._to(self._next(str(error), self._suspects(), planned=False))
                return
            except Exception as another:
                another.__cause__ = error
                error = another

    def _suspects(self) -> tuple[int, ...]:
        assert self.engine is not None and self.decision is not None
        now = self._deciding or self.decision
        return tuple(sorted(self._lost_ranks(now) | (self._membership.silent & set(now.members))))

    def _lost_ranks(self, now: Decision) -> set[int]:
        """The members whose loss is on the board."""
        lost = () if self._board is None else self._board.lost
        return {now.members[rank] for rank in lost if rank < len(now.members)}

    def _next(self, cause: str, suspects: tuple[int, ...], planned: bool, leaving: bool = False) -> Decision:
        """End this generation and agree on the next."""
        engine, now = self.engine, self._deciding or self.decision
        assert engine is not None and now is not None
        started, failed_at = time.time(), engine.board.failed_at
        self._membership.unwatch()
        engine.dissolve()
        report = Report(
            self.number,
            self.step,
            self._log.num_calls,
            self._log.dropped,
            leaving,
            suspects,
            self._held_units(engine),
            ready=planned,
            going_back=self._going_back,
        )
        try:
            following = agree(self._membership, now, report, self._decide, announce=not planned)
        except (LeftOut, PipelineFailure):
            raise
        except STORE_ERRORS as error:
            raise RunEnded(
                f"the members cannot agree how to go on, because the store at {self.settings.store} does not answer "
                f"({str(error).splitlines()[0][:200]}), after this: {cause}"
            ) from error
        gone = following.lost
        self._fruitless = 0 if gone or following.joining else self._fruitless + 1
        unfinished = () if self._change is None else self._change.lost  # by a generation that did not come about
        self._change = Change(
            following.generation,
            cause,
            (*unfinished, *(member for member in gone if member not in following.left)),
            following.left,
            following.joining,
            tuple(f"{len(stages)}x{count}" for stages, count in following.pipelines),
            following.restore,
            self.step,
            failed_at or started,
            {
                "detect": max(0.0, started - failed_at) if failed_at else 0.0,
                "agree": time.time() - started - following.seconds,
                "plan": following.seconds,
            },
        )
        if leaving:
            self._say_goodbye()
        if following.end:
            raise RunEnded(f"the run cannot go on: {following.end}. {self._advice()}")
        self._deciding = following
        self._settle(following)
        return following

    def _decide(self, view: View) -> Decision:
        going_on, step, calls, dropped = successor(view)
        joining = [report.member for report in going_on if report.new]
        going_on = [report for report in going_on if not report.new]
        meeting, pulse = self._membership.meeting, self._membership.pulse
        now = self._deciding or self.decision
        assert now is not None
        requests = int(meeting.get("requests") or 0)
        fresh = all(report.ready for report in going_on)
        if fresh:
            joining += self._candidates(now)
        generation = now.generation + 1
        arguments = (pulse.record, now, step, self._newest_checkpoint)
        following = self.formations.decide(generation, going_on, joining, *arguments)
        while following.end and joining:  # the members go on without the last who came
            refused = joining.pop()
            meeting.put(f"refused/{refused}", following.end)
            following = self.formations.decide(generation, going_on, joining, *arguments)
        left = tuple(report.member for report in view.reports.values() if report.leaving)
        return replace(
            following,
            calls=0 if fresh or following.restore else calls,
            dropped=0 if fresh or following.restore else dropped,
            fresh=fresh,
            requests=requests if fresh else 0,
            left=left,
            lost=tuple(member for member in following.lost if member not in left),
        )

    def _advice(self) -> str:
        assert self.engine is not None
        return self.engine.board.advice()

    def _newest_checkpoint(self) -> tuple[int, str] | None:
        return None if self.last_resort is None else self.last_resort.newest()

    def _candidates(self, now: Decision) -> list[int]:
        """The processes that ask to join and are alive."""
        meeting, pulse = self._membership.meeting, self._membership.pulse
        own, found = self._membership.record, []
        for member in everyone(pulse):
            if member in now.members or meeting.get(f"join/{member}") is None or pulse.has_ended(member):
                continue
            record = pulse.record(member)
            assert record is not None
            if record.facts != own.facts:
                meeting.put(
                    f"refused/{member}", "its model or its settings are not those of the run (member "
                    f"{describe([record])}); every process must be given the same",
                )  # fmt: skip
            elif meeting.get(f"refused/{member}") is None:
                found.append(member)
        return found

    def _settle(self, following: Decision) -> None:
        """Make the last update, if another survivor has made it; otherwise forget its gradients."""
        engine = self.engine
        assert engine is not None
        if following.restore:
            self._log.go_back(engine.step_number)
            self._change_due = False
            self.step, self._restoring, self._going_back = following.step, True, True
            self.num_restored += 1
        elif following.step == self.step + 1:
            self._make_update()
        assert following.step == self.step, f"step {self.step}, but the members are at {following.step}"
        self._lose_gradients()
        self._update = None
        self._handled = max(self._handled, following.requests)
        if following.fresh:
            self._log.begin(engine.step_number)
        self._todo, engine.step_number = self._log.to_repeat(following.calls, following.dropped, self._lose_gradients)

    def _lose_gradients(self) -> None:
        assert self.engine is not None
        for parameter in self.engine.known.values():
            parameter.grad = None

    def _to(self, following: Decision) -> None:
        """Form the next generation."""
        engine, change = self.engine, self._change
        assert engine is not None and change is not None
        started = time.perf_counter()
        layout, make_schedule = self.on_layout(following)
        self.meet(following)
        values = from_elsewhere(self.optimizer) if following.restore else self.values(following)
        engine.reform(layout, make_schedule, values=values)
        self.decision, self._deciding = following, None
        self.formed(engine)
        if following.restore:
            self._restore(engine, following)
        change.seconds["move"] = self._moved
        change.seconds["form"] = time.perf_counter() - started - self._moved
        change.num_bytes = self._num_bytes
        self._redo_from = time.perf_counter()

    def _restore(self, engine: Engine, now: Decision) -> None:
        """Go back to a checkpoint: some values were lost."""
        assert self.last_resort is not None
        started = time.perf_counter()
        logger.warning(
            "some values were lost with every rank that had them: the run goes back to step %d, %s",
            now.step,
            now.restore,
        )
        try:
            self.performing = True
            self.last_resort.go_back(now.step)
        except ValueError as error:
            raise RunEnded(f"the run cannot go on: {error}") from error
        finally:
            self.performing = False
        self._restoring = self._going_back = False
        self._log.go_back(engine.step_number)
        self._moved, self._num_bytes = time.perf_counter() - started, 0

    def _note_redone(self) -> None:
        change = self._change
        if change is None:
            return
        change.seconds["redo"] = time.perf_counter() - self._redo_from
        self.changes.append(change)
        self._change = None
        if dist.get_rank() == 0:
            logger.warning("%s", change)

    def _say_goodbye(self) -> None:
        """Leave as requested: the others have what they need."""
        logger.warning("member %d has left the run after step %d", self.number, self.step)
        self._membership.close()
        leave_world()
        raise SystemExit(0)

    def _held_units(self, engine: Engine) -> tuple[str, ...]:
        """The units whose values are all here."""
        if self._restoring:  # what is here may be half loaded
            return ()
        units = engine.layout.units
        known, lacking = engine.value_names, set[str | None]()
        for names in engine.split.aliases:
            if names[0] not in known:
                lacking.update(unit_of(name, units) for name in names)
        return tuple(unit for unit in units if unit not in lacking)

    def close(self) -> None:
        """End this process's part, after the last step."""
        self._membership.close()

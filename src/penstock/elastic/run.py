"""Steps as transactions, and the recovery when members of a run are lost.

`run_call` makes the calls in which all ranks take part, and keeps a log of those since the last update; `commit_update`
makes the update, after a vote. When a rank is lost in any of them, those that are left agree on the next generation,
take up its layout with the same objects, and repeat what the log says is lost. So the caller sees a call that took
longer. If values were lost with all that had them, everybody goes back to the last checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from penstock.data.loader import Batches
from penstock.elastic.changes import Change, ChangeRecords
from penstock.elastic.generations import Generations, LeftOut, RunEnded, leave_world
from penstock.elastic.meeting import STORE_ERRORS
from penstock.elastic.moving import SharedStates, from_elsewhere, hand_over
from penstock.elastic.protocol import Generation, Log, LoggedCall, MemberReport
from penstock.layout.layout import Layout
from penstock.modeling.weights.whole import unit_of
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.engine import Engine
from penstock.runtime.failures.board import PipelineFailure, is_transport_error
from penstock.runtime.failures.interrupts import EXIT_CODE
from penstock.runtime.failures.keys import in_one_line
from penstock.runtime.migration import Migration
from penstock.runtime.parts import ScheduleMaker
from penstock.runtime.recovery import LastResort, Pause
from penstock.runtime.reforming import change_layout

logger = logging.getLogger("penstock")

T = TypeVar("T")


def is_loss(error: Exception) -> bool:
    """Whether an error says that a rank was lost, or that the members change, and the run may go on."""
    of_ranks = isinstance(error, PipelineFailure) or is_transport_error(error)
    return of_ranks and not isinstance(error, RunEnded | LeftOut)


class ElasticRun:
    """This process's part in a run, once the engine of its first generation stands.

    Attributes:
        generations, engine: this process's place among the members; what computes on it, in every generation.
        step: how many updates were made; the engine's `step_number` counts the steps that were begun.
        on_layout: takes up a generation's layout; gives it with the schedules of this rank's pipeline.
        states: of what belongs to the model and is the user's, such as the optimizer.
        records: of the changes of members.
        in_call: whether a call is being made, or made again: what it calls is part of it.
        joined: whether this process came to a run under way.
        last_resort: the `CheckpointManager` that has values which no member has any more.
        save_unfinished: saves the run, on all ranks, when all of them leave it; None if nothing here can.
        num_steps: how many steps the run is to make, if that is known.
        num_restored: how many times the run went back to a checkpoint.
    """

    repeats = True

    def __init__(
        self,
        generations: Generations,
        states: SharedStates,
        engine: Engine,
        on_layout: Callable[[Generation], tuple[Layout, ScheduleMaker]],
    ) -> None:
        self.generations = generations
        self.states = states
        self.engine = engine
        self.on_layout = on_layout
        self.step = generations.now.step
        self.joined = not generations.now.is_first
        self.records = ChangeRecords()
        self.in_call = False
        self.last_resort: LastResort | None = None
        self.save_unfinished: Callable[[], None] | None = None
        self.num_steps: int | None = None
        self._saved: tuple[int, str] | None = None  # step and path of the newest checkpoint written here
        self.num_restored = 0
        # Whether a checkpoint is being loaded, so that the values here may be half loaded.
        self._restoring = False
        # Whether the members have decided to go back to a checkpoint, and this one has not loaded it yet.
        self._going_back = False
        self._num_updates = 0
        # The calls since the last update, as far as they may have to be repeated.
        self._log = Log()
        # Those of them that are to be repeated before the next call.
        self._todo: list[LoggedCall] = []
        # Makes the update that is being voted on; it needs no other rank.
        self._update: Callable[[], Any] | None = None
        # What `complete_update` was given: sends the new weights of a sharded optimizer.
        self._after_update: Callable[[], object] | None = None
        # The calls that made the last update's gradients, and what the update returned.
        self._updated_from: list[LoggedCall] = []
        self._updated: Any = None
        self._change_due = generations.now.handing_over
        # How many requests to change the members this generation, or an earlier one, has looked at.
        self._handled = generations.now.requests
        self._migration: Migration | None = None  # of the change under way
        engine.recovery = self
        generations.checkpoint = self._newest_checkpoint
        generations.formed()
        self._begin_log()

    def leave(self) -> None:
        """Leave the run at the end of the step."""
        self.generations.membership.wants_to_leave = True

    def close(self) -> None:
        """End this process's part, after the last step."""
        self.generations.close()

    def note_saved(self, path: str) -> None:
        self._saved = self.step, path

    def refuse(self, what: str, instead: str) -> None:
        raise NotImplementedError(f"{what} in an elastic run is not repeated after a loss: {instead}")

    def _newest_checkpoint(self) -> tuple[int, str] | None:
        return None if self.last_resort is None else self.last_resort.newest(self.states.objects)

    # -- steps -----------------------------------------------------------------------------------------------------

    def run_call(self, work: Callable[[], T], trains: bool, local: bool = False) -> T:
        """Make a call in which all ranks take part, or with `local` this one alone, however many are lost meanwhile;
        see `LoggedCall`. An error of `work` is raised, unless it says that a rank was lost. Raises RunEnded if those
        that are left cannot go on, LeftOut if they go on without this one."""
        result: T = self._run_logged(LoggedCall(work, trains, local))
        return result

    def _run_logged(self, call: LoggedCall) -> Any:
        # The vote on the last update found that members wish to come or go: they do so before the first step after it.
        while self._change_due and call.trains and not self._log.training:
            self._change_members()
        while True:
            self.in_call = True
            try:
                self._repeat()
                result = call.run()
            except Exception as error:
                self._recover(error)
                continue
            finally:
                self.in_call = False
            if not call.stale:
                self._log.add(call)
            self.records.redone()
            return result

    def run_without_gradients(self, work: Callable[[], T], stale: Callable[[], T] | None = None) -> T:
        """Do something without gradients on all ranks, again after a rank was lost. See `run_call`. `stale`: is done in
        place of `work` if the run went back to a checkpoint meanwhile; by default that is an error."""
        if self.in_call:
            return work()
        restored = self.num_restored

        def unless_stale() -> T:
            if restored == self.num_restored:
                return work()
            call.stale = True
            if stale is not None:
                return stale()
            raise RunEnded(
                f"values were lost meanwhile, and the run went back to step {self.step}. {self.engine.board.advice()}"
            )

        call = LoggedCall(unless_stale, trains=False)
        result: T = self._run_logged(call)
        return result

    def run_step(self, batches: Iterator[Any], step: Callable[[Any], T], pause: Pause | None) -> T:
        """Make a step, or an evaluation without gradients, on the next of `batches`. After a loss the batch is the same
        one; that of a step is the one that follows the checkpoint, if the run went back to one."""
        if not isinstance(batches, Batches):
            raise TypeError(
                f"with elastic= the data iterator must be iter(dataloader) itself, which can be set back, got a "
                f"{type(batches).__name__}"
            )
        position, restored, trains = batches.position, self.num_restored, torch.is_grad_enabled()

        # After going back to a checkpoint the loader stands elsewhere: the step takes the batch there, or if the epoch
        # has ended there, the first of the next one.
        def once() -> T:
            nonlocal position, restored
            moved = trains and restored != self.num_restored
            if moved:
                position, restored = batches.position, self.num_restored
            batches.seek(position)
            with torch.set_grad_enabled(trains), contextlib.nullcontext() if pause is None else pause():
                try:
                    return step(next(batches))
                except StopIteration:
                    if not moved:
                        raise
                    batches.follow()
                    position = batches.position
                    return step(next(batches))

        return self.run_call(once, trains)

    def load(self, load: Callable[[], int | None]) -> None:
        """Load all values on all ranks, again after a rank was lost. `load`: returns the step of what it has loaded;
        None if nothing has changed."""

        def work() -> None:
            self._restoring = True
            try:
                step = load()
            except Exception as error:
                self._restoring = is_loss(error)  # else it comes up to the caller
                raise
            self._restoring = False
            if step is not None:
                self.step, self._saved = step, None

        self.run_without_gradients(work, stale=work)
        self._begin_log()

    def commit_update(self, prepare: Callable[[], Callable[[], T]]) -> T:
        """Make an update on all ranks or on none. `prepare`: does what needs other ranks, and returns the update, which
        needs none but for what `complete_update` is given."""
        before = self._num_updates
        while self._num_updates == before:
            try:
                self._repeat()
                self._update = prepare()
                self._change_due = self._vote()
            except Exception as error:
                self._recover(error)  # makes the update, too, if a survivor has made it
            else:
                self._make_update()
        self.records.redone()
        if self._after_update is not None:
            made_from, restored = self._updated_from, self.num_restored
            self.run_without_gradients(self._after_update, stale=lambda: None)
            if self.num_restored != restored:  # the update is lost: make it again where the run is now
                for call in made_from:
                    self._run_logged(call)
                return self.commit_update(prepare)
        updated: T = self._updated
        return updated

    def complete_update(self, work: Callable[[], object]) -> None:
        self._after_update = work

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients that no update has used."""
        return bool(self._log.training)

    def drop(self) -> None:
        """Gradients were dropped: what made them need not be repeated once all ranks have dropped them."""
        self._log.drop(self.engine.step_number)

    def _begin_log(self) -> None:
        self._log.begin(self.engine.step_number)

    def _make_update(self) -> None:
        assert self._update is not None
        self._updated_from, self._after_update = self._log.training, None
        self._updated, self._update = self._update(), None
        self.step += 1
        self._num_updates += 1
        self.generations.changes_without_progress = 0
        self._begin_log()

    def _vote(self) -> bool:
        """Once this returns on any rank, all ranks have their gradients. Returns whether the members are to change."""
        membership = self.generations.membership
        wishes = [int(membership.asked > self._handled or membership.wants_to_leave)]
        with self.engine.together(Call.UPDATE, wishes) as facts_by_rank:
            return any(facts[0] for facts in facts_by_rank.values())

    def _repeat(self) -> None:
        before, self.in_call = self.in_call, True
        try:
            while self._todo:
                self._todo[0].run()
                self._todo.pop(0)
        finally:
            self.in_call = before

    # -- changes ---------------------------------------------------------------------------------------------------

    def _change_members(self) -> None:
        """Between two steps: take in those who asked to join, and let those go who asked to leave."""
        # Close the record of a change that only kept leavers for a hand-over: nothing was done again after it.
        self.records.redone()
        self._change_due = False
        leaving = self.generations.membership.wants_to_leave
        try:
            self._migration = Migration.of(self.engine)
            is_saved = self._saved is not None and self._saved[0] == self.step
            with self.engine.together(Call.CHANGE, [int(leaving), int(is_saved)]) as facts_by_rank:
                all_leave, all_saved = (all(facts[index] for facts in facts_by_rank.values()) for index in range(2))
            if not all_leave:
                hand_over(self.engine, self.states.optimizer, leaving, self._migration)
            elif self.save_unfinished is not None and not all_saved:
                self.save_unfinished()
            self._enter_next_generation("a planned change", (), planned=True, leaving=leaving)
        except Exception as error:
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        """Go over to the next generation if `error` is a loss; otherwise raise it."""
        while True:
            if not is_loss(error):
                raise error
            self.generations.refuse_without_progress(error)
            try:
                self._enter_next_generation(str(error), self.generations.suspects(), planned=False)
                return
            except Exception as another:
                another.__cause__ = another.__cause__ or error
                error = another

    def _enter_next_generation(
        self, cause: str, suspects: tuple[int, ...], planned: bool, leaving: bool = False
    ) -> None:
        """Go over from this generation to the next. What is lost then is repeated by the call under way, or the next
        one (`_repeat`)."""
        started, failed_at = time.time(), self.engine.board.failed_at
        self.generations.membership.unwatch()
        self.engine.dissolve()
        self._migration = self._migration or Migration.of(self.engine)
        following = self._agree(self._make_report(suspects, planned, leaving, self._migration), cause)
        change = self.records.begin(following, cause, self.step, started, failed_at)
        if leaving and self.generations.member not in following.members:
            self._leave(following.reason_to_stop)
        if following.reason_to_stop:
            raise RunEnded(f"the run cannot go on: {following.reason_to_stop}. {self.engine.board.advice()}")
        self._catch_up(following)
        self._form(following, change)

    def _make_report(
        self, suspects: tuple[int, ...], planned: bool, leaving: bool, migration: Migration
    ) -> MemberReport:
        """What this member says at the end of a generation."""
        return MemberReport(
            self.generations.member,
            self.step,
            self._log.num_calls,
            self._log.dropped,
            leaving,
            suspects,
            self._held_units(migration),
            ready=planned,
            going_back=self._going_back,
            owned=self._owned_parameters(migration),
        )

    def _agree(self, report: MemberReport, cause: str) -> Generation:
        """What the members that are left have decided on."""
        try:
            return self.generations.finish_generation(report, announce=not report.ready)
        except (LeftOut, PipelineFailure):
            raise
        except STORE_ERRORS as error:
            raise RunEnded(
                f"the members cannot agree how to go on, because the store at {self.generations.settings.store} "
                f"does not answer ({in_one_line(error)}), after this: {cause}"
            ) from error

    def _catch_up(self, following: Generation) -> None:
        """Go to the step at which the next generation begins: that of a checkpoint, or, if another survivor has made
        the last update, one step further. Gradients are lost in any case."""
        engine = self.engine
        if following.restore:
            self._log.go_back(engine.step_number)
            self.step, self._restoring, self._going_back = following.step, True, True
            self.num_restored += 1
        elif following.step == self.step + 1:
            self._make_update()
        assert following.step == self.step, f"step {self.step}, but the members are at {following.step}"
        self._lose_gradients()
        self._update = None
        self._handled = max(self._handled, following.requests)
        self._change_due = following.handing_over
        if following.fresh:
            self._log.begin(engine.step_number)
        self._todo, engine.step_number = self._log.to_repeat(following.calls, following.dropped, self._lose_gradients)

    def _lose_gradients(self) -> None:
        for parameter in self.engine.known.values():
            parameter.grad = None

    def _form(self, following: Generation, change: Change) -> None:
        """Form the next generation: its world, its engine, and the values that this member holds newly."""
        engine = self.engine
        started = time.perf_counter()
        layout, make_schedule = self.on_layout(following)
        self.generations.meet()
        values = from_elsewhere(self.states.optimizer) if following.restore else self.states.values(following)

        def timed_values(engine: Engine, taken: Mapping[str, torch.Tensor], migration: Migration) -> None:
            begun = time.perf_counter()
            values(engine, taken, migration)
            change.seconds["move"] = time.perf_counter() - begun
            change.num_bytes = sum(tensor.nbytes for tensor in taken.values())

        change_layout(
            engine,
            layout,
            make_schedule,
            fill_values=timed_values,
            migration=self._migration,
            on_board=self.generations.on_board,
        )
        self._migration = None
        self.generations.formed()
        if following.restore:
            self._restore(following, change)
        change.seconds["form"] = time.perf_counter() - started - change.seconds["move"]
        self.records.formed()

    def _restore(self, following: Generation, change: Change) -> None:
        """Go back to a checkpoint: some values were lost."""
        assert self.last_resort is not None
        started = time.perf_counter()
        logger.warning(
            "some values were lost with every rank that had them: the run goes back to step %d, %s",
            following.step,
            following.restore,
        )
        before, self.in_call = self.in_call, True
        try:
            self.last_resort.go_back(following.step)
        except ValueError as error:
            raise RunEnded(f"the run cannot go on: {error}") from error
        finally:
            self.in_call = before
        self._restoring = self._going_back = False
        self._log.go_back(self.engine.step_number)  # again, as loading has set another
        change.seconds["move"] += time.perf_counter() - started
        change.num_bytes = 0

    def _leave(self, reason_to_stop: str) -> None:
        """Leave as requested: the others have what they need, unless nobody goes on (`Generation.reason_to_stop`)."""
        if not reason_to_stop:
            logger.warning("member %d has left the run after step %d", self.generations.member, self.step)
        else:
            total = "" if self.num_steps is None else f" of {self.num_steps}"
            saved = "this step is not saved"
            if self._saved is not None and self._saved[0] == self.step:
                saved = f"saved in {self._saved[1]}"
            logger.warning("the run ends unfinished at step %d%s: %s; %s", self.step, total, reason_to_stop, saved)
        self.close()
        leave_world()
        raise SystemExit(EXIT_CODE if reason_to_stop else 0)

    def _owned_parameters(self, migration: Migration) -> tuple[str, ...]:
        """With a sharded optimizer, the parameters whose newest weights and states are here."""
        engine = self.engine
        if self._restoring or engine.options.owner_choice is None:
            return ()
        return tuple(name for name in engine.known if name in migration.had and name not in migration.elsewhere)

    def _held_units(self, migration: Migration) -> tuple[str, ...]:
        """The units whose values are all here."""
        if self._restoring:  # what is here may be half loaded
            return ()
        engine = self.engine
        units = engine.layout.units
        lacking = set[str | None]()
        for names in engine.split.aliases:
            if names[0] not in migration.had:
                lacking.update(unit_of(name, units) for name in names)
        return tuple(unit for unit in units if unit not in lacking)

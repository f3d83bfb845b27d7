"""A training step: an interpreter of one rank's schedule, written as a generator.

It runs actions until a backward of the rank's top stage is due, yields that microbatch's output, and goes on once the
caller has called `.backward()` on its loss. Everything else happens between two yields or inside that backward.

A step that all ranks have begun comes to its end, unless a rank is lost or fails. If the caller leaves the loop early
(a break, an exception in its body), the step runs what is left by itself, as the other ranks wait for this one's
messages. All ranks then meet in the sum at its end, which counts those that left: if everyone did, the pipeline goes
on; if not, every rank hears who did. A signal ends no step either: its handler is called after the last action and
before that sum, or after the sum if the caller has left the loop; what it raises is raised at the end. A signal that
came to some ranks may reach the others a moment later, and they wait for it, so that all have trained on the same
steps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from penstock.modeling.graph.loss import LoopError
from penstock.modeling.stage.split import SplitModel
from penstock.runtime.boundary.boundaries import LOSS_DTYPE, Boundaries
from penstock.runtime.comm.totals import StepFacts, Totals
from penstock.runtime.context import RankContext
from penstock.runtime.failures.board import PipelineFailure, noting_on
from penstock.runtime.failures.position import Among
from penstock.runtime.gradients.gradients import Gradients, autocast_now, multiply_gradients
from penstock.runtime.gradients.watch import GradientWatch
from penstock.runtime.inputs import StepInputs
from penstock.runtime.loss_proxy import (
    LiveMicrobatch,
    StageOutput,
    autograd_engine,
    copied,
    hook_loss,
    proxy_loss,
    requires_grad,
    run_backward,
)
from penstock.runtime.program import Program
from penstock.runtime.report import ReductionReport, StepReport, numbered
from penstock.schedule.actions import Kind
from penstock.schedule.communication import ActionOrLoss

# How many seconds a signal that interrupted some ranks may take to reach another one.
LATE_SIGNAL = 3.0
CHANGED = (
    "gradients were changed or dropped inside the loop over microbatches, before they were complete: call zero_grad(), "
    "and whatever else changes gradients, before the loop or after it"
)


class StepListener(Protocol):
    """Is told what a step does. Times are this process's monotonic clock, in seconds."""

    def action(self, kind: str, stage: int, microbatch: int, start: float, end: float) -> None:
        """An action (F, B or W) that ran from `start` to `end`."""

    def reductions(self, intervals: Iterable[tuple[float, float]]) -> None:
        """Buckets of gradients that were under way in these intervals."""


class TrainingStep:
    """One training step of one rank. Iterate over `run()`; then read `report`."""

    def __init__(
        self,
        context: RankContext,
        split: SplitModel,
        boundaries: Boundaries,
        gradients: Gradients,
        totals: Totals,
        program: Program,
        inputs: StepInputs,
        *,
        reduces_gradients: bool = True,
        loss_scale: float = 1.0,
        own_means: bool = False,
    ):
        self._context, self._board, self._interrupts = context, context.board, context.interrupts
        self._split, self._boundaries, self._channels = split, boundaries, boundaries.channels
        self._to_previous, self._to_next = boundaries.to_previous, boundaries.to_next
        self._gradients, self._queues, self._reducer = gradients, gradients.queues, gradients.reducer
        self._totals = totals
        self._program = program
        self._posts = program.posts
        self._inputs = inputs
        self._last_microbatch = len(inputs.microbatches) - 1
        self._reduces_gradients = reduces_gradients
        self._anything_shared = self._reducer.active
        # Whether the queues or the reducer want to know which backward is under way.
        self._marks_backwards = program.splits_backward or self._anything_shared
        self._loss_scale = loss_scale
        self._own_means = own_means
        self._listeners: Sequence[StepListener] = ()
        self._live: dict[tuple[int, int], LiveMicrobatch] = {}
        self._total_counts: Sequence[float] | None = None
        self._position = 0
        # For a loss's hook, lest a model that keeps a loss keep the step: a cycle that Python's collector does not see.
        self._weakly = weakref.ref(self)
        self._begun = False
        # Why the step was not begun.
        self._refusal: BaseException | None = None
        # What the loop's body has at this moment.
        self._due: LiveMicrobatch | None = None
        # The fault of a backward() call, raised inside the loop's body.
        self._fault: str | None = None
        # Of all losses until now.
        self._values: list[torch.Tensor] = []
        self._watch = GradientWatch(gradients.parameters)
        # The gradient that the caller's latest backward() brought, scaled as the caller scales losses.
        self._callers_gradient: torch.Tensor | None = None
        self._autocast = autocast_now(context.device)
        self._device_type = context.device.type
        self._autocasting = torch.is_autocast_enabled(self._device_type)
        dtypes = (parameter.dtype for parameter in gradients.parameters if parameter.is_floating_point())
        self._proxy_dtype = torch.float64 if next(dtypes, torch.get_default_dtype()) == torch.float64 else torch.float32
        self.report: StepReport | None = None
        # What a signal's handler raised at the end of the step.
        self.interruption: BaseException | None = None

    @property
    def num_microbatches(self) -> int:
        return len(self._inputs.microbatches)

    @property
    def microbatch(self) -> int:
        """The microbatch under way: the one whose backward is due, or that of the present action. After the last action
        their number."""
        if self._due is not None:
            return self._due.microbatch
        action = next(iter(self._program.actions[self._position :]), None)
        return self.num_microbatches if action is None else action.microbatch

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The model's arguments for `microbatch`."""
        return self._inputs.microbatches[self.microbatch]

    def run(
        self, meet: Callable[[], Sequence[Hashable]], number: int = 0, listeners: Sequence[StepListener] = ()
    ) -> Generator[Any, None, None]:
        """Run the step, yielding each microbatch's output when its backward is due.

        Such a backward, that of this rank's top stage, goes through the caller: `_open_backward` makes the output,
        which is yielded here; the caller calls `backward()` on its loss; the hook on that loss calls `backward_begins`,
        which receives the next stage's gradients; when autograd has ended, `_callers_backward_ends` sends this stage's
        to the previous one; then the caller takes the next output, and `_finish_backward` lets go of this one. All
        other actions run between two outputs.

        Args:
            meet: waits until all ranks have begun the step, and gives the stages' states, see `Boundaries.prepare`;
                called before the first message. What it raises ends a step that no rank has begun.
            number: which training step this is, counted from 0 alike on all ranks; it seeds dropout.
            listeners: are told what runs when.
        """
        if number != self._inputs.number:
            self._inputs = replace(self._inputs, number=number)
        self._listeners = listeners
        board = self._board
        self._started, self._waited = time.perf_counter(), self._channels.seconds_waited
        self._meet = meet
        name = "training step" if self._reduces_gradients else "training step under no_sync()"
        board.position.enter(name, among=Among.ALL, detail=self)
        due_backwards = self._run_actions()
        fault: LoopError | None = None
        try:
            for due in due_backwards:
                yield due.take_output()
                if self._context.groups.closed:  # the others may have noticed, and failed, already
                    raise LoopError(
                        "the pipeline was closed inside the loop over microbatches: close it after the loop"
                    )
                if board.failed is not None:
                    board.check()
                if not due.called or self._watch.sees_change():
                    fault = self._fault_of_body(due)
                    with noting_on(fault):  # the others get it as a failure of this rank
                        self._run_to_the_end(due, due_backwards, str(fault))
                    raise fault
            self._finish()
        except GeneratorExit:
            fault_of_body = self._fault or "a break, or an exception in the loop's body"
            self._run_to_the_end(due, due_backwards, fault_of_body)
        except PipelineFailure as failure:
            if self.interruption is not None:
                raise self.interruption from failure
            raise
        except BaseException as error:
            if error is not self._refusal and error is not fault:
                board.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            if self._due is not None:
                self._due.output = self._due.loss = None
            self._watch.stop()
            board.position.leave()

    def _fault_of_body(self, due: LiveMicrobatch) -> LoopError:
        """What the loop's body did that it must not, or left out."""
        if due.called:
            return LoopError(CHANGED)
        return LoopError(
            f"backward() was not called on the loss of microbatch {due.microbatch}; call it exactly once on each "
            "yielded loss, before taking the next (to give up the step, break out of the loop on every rank)"
        )

    def _run_actions(self) -> Generator[LiveMicrobatch, None, None]:
        """Run this rank's part of the schedule; gives each backward that is due."""
        for position, action in numbered(self._program.actions):
            kind, stage, microbatch = action
            self._position = position
            if self._posts:
                self._post(self._posts[position].before)
            start = time.perf_counter() if self._listeners else 0.0
            if kind is Kind.F:
                self._forward(stage, microbatch)
            elif kind is Kind.W:
                self._weight_gradients(stage, microbatch)
            elif stage == self._program.top:
                due = self._due = self._open_backward(microbatch)
                yield due
                self._due = due.loss = None
                self._finish_backward(stage, microbatch)
            else:
                self._inner_backward(stage, microbatch)
            for listener in self._listeners:
                listener.action(kind.value, stage, microbatch, start, time.perf_counter())
        self._position = len(self._program.actions)
        if not self._begun:  # not a single microbatch here
            self._begin_together()

    def _run_to_the_end(self, due: LiveMicrobatch, following: Iterator[LiveMicrobatch], fault: str) -> None:
        """The caller has left the loop at `due`: call the backwards that are left, which nobody else will."""
        if self._board.failed is not None:
            return
        at = self.microbatch
        self._watch.stop()
        # Perhaps nobody sees an error that is raised here, as where an iterator is dropped: the guard tells every rank.
        with self._board.guard("working together"), torch.enable_grad():
            if not due.called:
                due.run_backward(self._callers_gradient)
            for later in following:
                later.run_backward(self._callers_gradient)
            if self._finish(fault):
                raise self._board.abort(f"left the training step at microbatch {at}, while others did not ({fault})")

    @property
    def progress(self) -> int:
        """See `position.Progress`."""
        return self._position

    @property
    def place(self) -> str:
        """See `position.Progress`."""
        return f"{self._inputs.number}, microbatch {self.microbatch}"

    # -- the actions -----------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> None:
        """Receive, compute, send."""
        last = stage == self._program.last
        # The first stage computes while the ranks meet, unless it needs the loss's counts.
        if not self._begun and (stage or last):
            self._begin_together()
        received = self._to_previous[stage].recv_forward(microbatch)
        # The loop's body may have other modes than the call, which the ranks compared.
        if self._autocasting or torch.is_autocast_enabled(self._device_type) or not torch.is_grad_enabled():
            with torch.enable_grad(), self._autocast():
                output, sent = self._compute(stage, microbatch, received, last)
        else:
            output, sent = self._compute(stage, microbatch, received, last)
        if not self._begun:
            self._begin_together()
        if not last:
            self._to_next[stage].send_forward(microbatch, sent)
        live = self._live[stage, microbatch] = LiveMicrobatch(microbatch, list(filter(requires_grad, received)))
        if last:
            live.output, live.loss = output, output.loss
        else:
            live.sent = list(filter(requires_grad, sent))

    def _compute(
        self, stage: int, microbatch: int, received: Sequence[torch.Tensor], last: bool
    ) -> tuple[Any, Sequence[torch.Tensor]]:
        """The model's output, on the last stage, and what the next stage needs."""
        inputs, split = self._inputs, self._split
        plan = inputs.plans[microbatch]
        return split.forward(
            plan,
            stage,
            inputs.microbatches[microbatch],
            received,
            seed=inputs.seed(microbatch) if split.draws(plan) else None,
            shares=inputs.shares(microbatch, self._global_counts()) if last else None,
            criterion=inputs.criterion,
            host=inputs.hosts[microbatch],
            watch=microbatch == 0,
        )

    def _post(self, users: Sequence[ActionOrLoss]) -> None:
        """Post the receives of the messages that `users` will use, if there are any."""
        if users:
            if not self._begun:
                self._begin_together()
            self._boundaries.post(users)

    def _open_backward(self, microbatch: int) -> LiveMicrobatch:
        """Make the output to yield for `microbatch`, its loss hooked so that the backward is noticed."""
        stage = self._program.top
        live = self._live[stage, microbatch]
        on_backward = partial(_backward_begins, self._weakly, microbatch)
        if stage == self._program.last:
            assert live.loss is not None
            # A copy: the loop's body may change the loss in place.
            value = copied(live.loss.detach(), LOSS_DTYPE)
            loss = hook_loss(live.loss, on_backward, self._loss_scale)
            if loss is not live.loss:
                live.output.loss = live.loss = loss
        else:
            assert self._boundaries.after_top is not None
            value = self._boundaries.after_top.recv_loss()
            live.connected = self._boundaries.after_top.has_all_gradients(microbatch, len(live.sent))
            live.loss = proxy_loss(value, self._proxy_dtype, on_backward, live.sent if live.connected else ())
            live.output = StageOutput(live.loss, self._inputs.plans[microbatch].fields)
        for channel in self._boundaries.losses_to:
            channel.send([value])
        if self._values and self._watch.noted is None:  # zero_grad() at the loop's first microbatch does no harm
            self._watch.note()
        self._values.append(value)
        return live

    def backward_begins(self, microbatch: int, gradient: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """The caller has called `backward()`, which brings the loss's `gradient`: check that it is due. On earlier
        stages than the last, receive the next stage's gradients, and return them to autograd; or run the stage's
        backward here, if the proxy is not connected to it."""
        due = self._due
        if due is None or due.called or due.microbatch != microbatch:
            number = None if due is None else due.microbatch
            when = "a second time" if number == microbatch else f"while microbatch {number} is due"
            self._fault = (
                f"backward() of microbatch {microbatch}'s loss was called {when}; call it exactly once on each yielded "
                "loss, before taking the next"
            )
            raise LoopError(self._fault)
        if torch.is_grad_enabled():
            self._fault = (
                "backward(create_graph=True): gradients of gradients would cross the stages again, for which the "
                "schedule has no messages. Leave create_graph out, or train this model without pipelines"
            )
            raise LoopError(self._fault)
        if self._watch.sees_change() or (microbatch == self._last_microbatch and self._watch.sees_exchange()):
            self._fault = CHANGED
            raise LoopError(CHANGED)
        self._watch.noted = None
        due.called, self._callers_gradient = True, gradient
        # A repeated signal is not to come between the check and the end of the wait for gradients.
        before, self._interrupts.busy = self._interrupts.busy, True
        try:
            if self._posts:
                self._post(self._posts[self._position].inside)
            top = self._program.top
            if self._marks_backwards:
                self._enter_backward(top, microbatch)
            autograd_engine.queue_callback(self._callers_backward_ends)
            gradients = () if top == self._program.last else self._to_next[top].recv_backward(microbatch)
        finally:
            self._interrupts.busy = before
        if gradients and not due.connected:
            run_backward(due.sent, gradients)
            return ()
        return gradients

    def _callers_backward_ends(self) -> None:
        """The caller's `backward()` has come to its end. Send what the previous stage waits for, before the rest of the
        loop's body."""
        due = self._due
        assert due is not None
        if due.leaves:
            self._send_backward(self._program.top, due)
        if not self._anything_shared or self._position != self._program.final_backward:  # else they may be summed now
            self._watch.note()

    def _inner_backward(self, stage: int, microbatch: int) -> None:
        """The backward of a stage before the rank's last one, which no user sees."""
        self._watch.noted = None
        if self._marks_backwards:
            self._enter_backward(stage, microbatch)
        run_backward(self._live[stage, microbatch].sent, self._to_next[stage].recv_backward(microbatch))
        self._finish_backward(stage, microbatch)

    def _enter_backward(self, stage: int, microbatch: int) -> None:
        program = self._program
        if program.splits_backward:
            if self._position in program.whole_backwards:
                self._queues.open_at_once()
            else:
                self._queues.open(stage, microbatch)
        if self._anything_shared:
            final = self._position == program.final_backward and self._reduces_gradients
            self._reducer.enter_backward(final)

    def _finish_backward(self, stage: int, microbatch: int) -> None:
        """End an action B. On the top stage `_callers_backward_ends` came before."""
        if self._program.splits_backward:
            self._queues.close()
        live = self._live.pop((stage, microbatch))
        if live.leaves:
            self._send_backward(stage, live)
        live.sent = ()  # the loop over the backwards has it until the next one
        if self._anything_shared and self._position == self._program.final_backward:
            self._reducer.after_last_message()

    def _send_backward(self, stage: int, live: LiveMicrobatch) -> None:
        leaves, live.leaves = live.leaves, ()
        self._to_previous[stage].send_backward(live.microbatch, leaves)

    def _weight_gradients(self, stage: int, microbatch: int) -> None:
        self._watch.noted = None
        waited_for = self._anything_shared and self._reduces_gradients and self._position in self._program.final_weights
        self._queues.run(stage, microbatch, self._reducer.ready if waited_for else None)

    # -- the loss --------------------------------------------------------------------------------------------------

    def _global_counts(self) -> Sequence[float]:
        """The numbers of elements in the loss's means, over all pipelines, or with own means over this one; on the rank
        of the last stage."""
        if self._total_counts is None:
            self._total_counts = self._inputs.total_counts() if self._own_means else self._totals.finish_counts()
        return self._total_counts

    # -- the ends of the step --------------------------------------------------------------------------------------

    def _begin_together(self) -> None:
        """Wait until all ranks have begun the step, and make ready for its messages and gradients."""
        try:
            states = self._meet()
        except BaseException as error:
            self._refusal = error
            self._board.position.retract()
            raise
        self._begun = True
        self._gradients.prepare(self._loss_scale)
        self._program.prepare(self._boundaries, self._inputs, states)
        if self._program.top == self._program.last and not self._own_means:
            # Now, so that no pipeline waits until another's first microbatch has come to its last stage; and also
            # without a microbatch here, of which the others must be told.
            self._totals.start_counts(self._inputs.total_counts())

    def _finish(self, fault: str | None = None) -> bool:
        """Meet all ranks at the end of the step, which the caller may have left. Returns True if this rank has left it
        and others have not."""
        interrupts = self._interrupts
        if fault is None:
            self._call_handlers()
        # A repeated signal ends the loop's body by an exception, but it has come to the other ranks, too.
        interrupted = self.interruption is not None or (fault is not None and bool(interrupts.called))
        left = fault is not None and not interrupted
        if self._program.top == self._program.last:
            self._global_counts()
        waited = self._channels.seconds_waited - self._waited
        loss, global_loss, reduction, facts = self._sum_over_pipelines(left, interrupted)
        # All ranks were in the sums, so what was sent has arrived: this waits for nobody who may be lost.
        self._channels.flush()
        if reduction is not None:
            for listener in self._listeners:
                listener.reductions(reduction.intervals)
        seconds = time.perf_counter() - self._started
        on_cpu = self._context.device.type == "cpu"
        bubble = waited / seconds if on_cpu and seconds > 0 else None
        sizes = facts.num_samples, facts.num_tokens
        self.report = StepReport(loss, global_loss, seconds, bubble, len(self._values), *sizes, reduction)
        only_some_left = 0 < facts.num_left < len(self._context.everyone)
        if left or interrupted:  # these say why themselves, and end this
            return left and only_some_left
        if only_some_left:
            # The ranks that left do not come to this sum: they raise on every rank, which ends the wait here.
            self._totals.sums([0.0], "asking who left the training step")
        # Without a signal of its own this rank goes on, and hears from its watcher how the others end.
        if facts.num_interrupted and interrupts.wait(LATE_SIGNAL):
            self._call_handlers()
        return False

    def _call_handlers(self) -> None:
        """Of signals that came in the step; what they raise is raised once nothing is under way."""
        try:
            self._interrupts.deliver()
        except BaseException as error:
            self.interruption = error

    def _sum_over_pipelines(
        self, left: bool, interrupted: bool
    ) -> tuple[torch.Tensor, torch.Tensor, ReductionReport | None, StepFacts]:
        """Complete the gradients, and sum the loss. Every rank does this, also one without any microbatch. Gives this
        pipeline's loss and that of the global batch (shape (), where the stage computes), what the reduction took (None
        without one), and what is found of all ranks."""
        totals, reducer, report = self._totals, self._reducer, None
        if self._reduces_gradients:
            reducer.launch_rest()
        values = self._values or [torch.zeros((), dtype=LOSS_DTYPE, device=self._context.device)]
        own_loss = loss = torch.stack(values).sum()
        mine = facts = StepFacts(left, interrupted, sum(self._inputs.sizes), self._inputs.num_tokens())
        if totals.shared:
            # Behind every bucket, which is one order on all ranks, and under way while they are waited for.
            totals.start(loss, mine)
        if self._reduces_gradients and reducer.active:
            report = reducer.finish()
        if totals.shared:
            loss, facts = totals.finish()
        multiply_gradients(self._gradients.parameters, 1.0 / self._loss_scale)
        return own_loss, loss, report, facts


def _backward_begins(
    step: weakref.ref[TrainingStep], microbatch: int, gradient: torch.Tensor | None
) -> Sequence[torch.Tensor | None]:
    """See `TrainingStep.backward_begins`."""
    running = step()
    if running is None:
        raise LoopError(f"backward() of microbatch {microbatch}'s loss was called after its step had ended")
    return running.backward_begins(microbatch, gradient)

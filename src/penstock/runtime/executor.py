"""The executor: an interpreter of one rank's schedule, written as a generator.

It runs actions until a backward of the rank's top stage is due, yields that microbatch's output, and goes on once the
caller has called `.backward()` on its loss. Everything else, receiving, sending, inner backwards, deferred weight
gradients, reduction, happens between two yields or inside that backward.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from penstock.modeling.loss import Criterion
from penstock.schedule.actions import Kind

from .cuts import LOSS_DTYPE
from .ending import sum_over_pipelines
from .failure import PipelineFailure
from .gate import copied, gate_loss, proxy_loss
from .inputs import StepInputs
from .precision import autocast_now, multiply_gradients
from .program import Program
from .recorder import Recorder
from .station import StageOpener, Station
from .step import Live, StageOutput, StepReport, requires_grad


class LoopError(RuntimeError):
    """The loop over the microbatches was not written as it must be: one `backward()` for each yielded loss, in
    order."""


class TrainingStep:
    """One training step of one rank. Iterate over `run()`; then read `report`."""

    def __init__(
        self,
        station: Station,
        program: Program,
        inputs: StepInputs,
        *,
        criterion: Criterion | None = None,
        reduce_gradients: bool = True,
        loss_scale: float = 1.0,
        recorder: Recorder | None = None,
    ):
        self._station = station
        self._program = program
        self._posts = program.posts
        self._below, self._above = station.exchange.below, station.exchange.above
        self._loss_cut = station.exchange.top
        self._inputs = inputs
        self._criterion = criterion
        self._reduce = reduce_gradients
        self._anything_shared = station.reducer.active
        # Whether the queues or the reducer want to know which backward is under way.
        self._marks_backwards = program.splits_backward or self._anything_shared
        self._loss_scale = loss_scale
        self._recorder = recorder
        self._live: dict[tuple[int, int], Live] = {}
        self._total_counts: Sequence[int] | None = None
        self._position = 0
        self._open: int | None = None
        self._called = False
        # What was wrong with a backward(), raised inside the loop's body.
        self._fault: str | None = None
        self._losses: list[torch.Tensor] = []
        self._incoming: torch.Tensor | None = None
        self._autocast = autocast_now(station.device)
        self._autocasting = torch.is_autocast_enabled(station.device.type)
        self._random = station.split.random
        self._proxy_dtype = torch.float64 if station.split.dtype == torch.float64 else torch.float32
        self.report: StepReport | None = None

    def run(self) -> Iterator[Any]:
        """Run the step, yielding each microbatch's output when its backward is due."""
        station = self._station
        self._started = time.perf_counter()
        waited = station.channel.seconds_waited
        name = "training step" if self._reduce else "training step under no_sync()"
        station.board.position.enter(name, world=True, detail=self)
        try:
            station.channel.sends_ahead = self._program.sends_ahead
            station.reducer.begin()
            # An interrupt in an earlier step may have left some.
            station.queues.clear()
            # Gradients left from an earlier step must have the scale of those that are added to them.
            multiply_gradients(station.parameters, self._loss_scale)
            with self._autocast():
                self._opener = StageOpener(station, self._program.orders, self._inputs)
            for position, action in enumerate(self._program.actions):
                kind, stage, microbatch = action.kind, action.stage, action.microbatch
                self._position = position
                if self._posts:
                    self._opener.post(self._posts[position].before)
                start = 0.0 if self._recorder is None else time.perf_counter()
                if kind is Kind.F:
                    self._forward(stage, microbatch)
                elif kind is Kind.W:
                    self._weight_gradients(stage, microbatch)
                elif stage == self._program.top:
                    yield self._open_backward(microbatch)
                    if station.board.failed is not None:
                        station.board.check()
                    if not self._called:
                        raise LoopError(
                            f"backward() was not called on the loss of microbatch {microbatch}; call it exactly once "
                            "on each yielded loss, before taking the next (to give up the step, break out of the loop "
                            "on every rank)"
                        )
                    self._open = None
                    self._finish_backward(stage, microbatch)
                else:
                    self._inner_backward(stage, microbatch)
                if self._recorder is not None:
                    self._recorder.action(kind.value, stage, microbatch, start, time.perf_counter())
            if self._total_counts is None and self._program.top == self._program.last:
                # Not a single microbatch here, but the other pipelines need to hear so.
                self._total_counts = station.totals.counts(())
            station.channel.flush()
            self.report = self._finish(station.channel.seconds_waited - waited)
        except GeneratorExit:
            # Python would print an error in here, and go on; the next call raises it.
            with contextlib.suppress(PipelineFailure):
                self._leave(self._fault or "a break, or an exception in the loop's body")
            return
        except LoopError as error:
            # The rank that is to blame says what was wrong; the others hear of it as a failure of this rank.
            with contextlib.suppress(PipelineFailure):
                self._leave(str(error))
            raise
        except PipelineFailure:
            raise
        except Exception as error:
            station.board.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            station.board.position.leave()

    @property
    def progress(self) -> int:
        """See `position.Inside`."""
        return self._position

    @property
    def place(self) -> str:
        """See `position.Inside`."""
        actions = self._program.actions
        return f"{self._inputs.number}" + (f", microbatch {actions[self._position].microbatch}" if actions else "")

    # -- the actions -----------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> None:
        received = self._take_activations(stage, microbatch)
        live = self._live[stage, microbatch] = Live(received)
        if self._autocasting or not torch.is_grad_enabled():
            with torch.enable_grad(), self._autocast():
                output, sent = self._compute(stage, microbatch, received)
        else:
            output, sent = self._compute(stage, microbatch, received)
        if stage == self._program.last:
            live.output, live.loss = output, output.loss
        else:
            live.sent = list(filter(requires_grad, sent))
            self._above[stage].give_activations(microbatch, sent)

    def _compute(self, stage: int, microbatch: int, received: list[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
        inputs = self._inputs
        return self._station.split.forward(
            inputs.plans[microbatch],
            stage,
            inputs.microbatches[microbatch],
            received,
            seed=inputs.seed(self._station.seed, microbatch) if self._random else None,
            shares=self._shares(microbatch) if stage == self._program.last else None,
            criterion=self._criterion,
        )

    def _take_activations(self, stage: int, microbatch: int) -> list[torch.Tensor]:
        if stage not in self._opener.states:
            self._opener.open(stage)
        if stage == self._program.last and self._total_counts is None:
            self._total_counts = self._station.totals.counts(self._inputs.total_counts())
        return self._below[stage].take_activations(microbatch)

    def _open_backward(self, microbatch: int) -> Any:
        """The output to yield for `microbatch`, its loss gated so that the backward is noticed."""
        stage = self._program.top
        live = self._live[stage, microbatch]
        self._open, self._called = microbatch, False
        on_backward = partial(self._backward_begins, microbatch)
        if stage == self._program.last:
            assert live.loss is not None
            # A copy: the loop's body may change the loss in place.
            value = copied(live.loss.detach(), LOSS_DTYPE)
            output = live.output
            gated = gate_loss(live.loss, on_backward, self._loss_scale)
            if gated is not live.loss:
                output.loss = gated
            live.output = live.loss = None
        else:
            assert self._loss_cut is not None
            value = self._loss_cut.take_loss()
            output = StageOutput(proxy_loss(value, self._proxy_dtype, live.sent, on_backward))
        self._below[stage].give_loss(value)
        self._losses.append(value)
        return output

    def _backward_begins(self, microbatch: int, incoming: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """Inside the user's `backward()`: check that it is due, and give autograd the next stage's gradients."""
        if self._called or self._open != microbatch:
            when = "a second time" if self._open == microbatch else f"while microbatch {self._open} is due"
            self._fault = (
                f"backward() of microbatch {microbatch}'s loss was called {when}; call it exactly once on each yielded "
                "loss, before taking the next"
            )
            raise LoopError(self._fault)
        self._called, self._incoming = True, incoming
        if self._posts:
            self._opener.post(self._posts[self._position].inside)
        top = self._program.top
        if self._marks_backwards:
            self._enter_backward(top, microbatch)
        live = self._live[top, microbatch]
        if live.leaves:
            # At the end of this backward, so that the stage below need not wait for the rest of the loop's body.
            give = partial(self._give_gradients, top, microbatch, live)
            torch.autograd.Variable._execution_engine.queue_callback(give)
        return () if top == self._program.last else self._above[top].take_gradients(microbatch)

    def _inner_backward(self, stage: int, microbatch: int) -> None:
        """The backward of a stage below the rank's top one, which no user sees."""
        if self._marks_backwards:
            self._enter_backward(stage, microbatch)
        gradients = self._above[stage].take_gradients(microbatch)
        if gradients:
            torch.autograd.backward(self._live[stage, microbatch].sent, gradients)
        self._finish_backward(stage, microbatch)

    def _enter_backward(self, stage: int, microbatch: int) -> None:
        program = self._program
        if program.splits_backward:
            if self._position in program.whole_backwards:
                self._station.queues.open_at_once()
            else:
                self._station.queues.open(stage, microbatch)
        if self._anything_shared:
            final = self._position == program.final_backward and self._reduce
            self._station.reducer.enter_backward(final)

    def _finish_backward(self, stage: int, microbatch: int) -> None:
        if self._program.splits_backward:
            self._station.queues.close()
        live = self._live.pop((stage, microbatch))
        if live.leaves and not live.answered:
            self._give_gradients(stage, microbatch, live)
        if self._anything_shared and self._position == self._program.final_backward:
            self._station.reducer.after_last_message()

    def _give_gradients(self, stage: int, microbatch: int, live: Live) -> None:
        """Send the gradients of what this stage received; zeros where nothing here depended on it."""
        live.answered = True
        gradients = []
        for leaf in live.leaves:
            gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        self._below[stage].give_gradients(microbatch, gradients)

    def _weight_gradients(self, stage: int, microbatch: int) -> None:
        waited_for = self._anything_shared and self._reduce and self._position in self._program.final_weights
        self._station.queues.run(stage, microbatch, self._station.reducer.ready if waited_for else None)

    # -- the loss --------------------------------------------------------------------------------------------------

    def _shares(self, microbatch: int) -> Sequence[float]:
        """What part of each of the global batch's means this microbatch is."""
        rule = self._inputs.plans[microbatch].loss
        assert rule is not None and self._total_counts is not None
        return rule.shares(self._inputs.counts[microbatch], self._total_counts)

    # -- the end of the step ---------------------------------------------------------------------------------------

    def _finish(self, waited: float) -> StepReport:
        scaled = self._station.scaling.note(self._incoming)
        loss, global_loss, reduction = sum_over_pipelines(
            self._station, self._losses, scaled, self._reduce, self._loss_scale
        )
        if reduction is not None and self._recorder is not None:
            self._recorder.reductions(reduction.intervals)
        seconds = time.perf_counter() - self._started
        on_cpu = self._station.device.type == "cpu"
        bubble = waited / seconds if on_cpu and seconds > 0 else None
        return StepReport(loss, global_loss, seconds, bubble, len(self._losses), reduction)

    def _leave(self, why: str) -> None:
        """The loop was left early. If it was left alike on all ranks, run what is left of the step without
        computing."""
        station = self._station
        if station.board.failed is not None:
            return
        patience = 2 * (time.perf_counter() - self._started)
        left_at = f"microbatch {self._open}, backward {'called' if self._called else 'not called'}"
        if not station.board.agree(f"left/{self._inputs.attempt}", left_at, station.everyone, patience):
            raise station.board.abort(
                f"left the loop over the microbatches at {left_at}, while other ranks did not ({why})"
            )
        with station.board.aborting():
            station.queues.clear()
            for position in range(self._position, len(self._program.actions)):
                self._skip(position)
            station.channel.flush()
            if self._reduce and self._anything_shared:
                station.reducer.finish()
            multiply_gradients(station.parameters, 1.0 / self._loss_scale)
            self._live.clear()

    def _skip(self, position: int) -> None:
        """Do the communication of an action with zeros, so that no message is left under way."""
        action = self._program.actions[position]
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if self._posts and position != self._position:
            self._opener.post(self._posts[position].before)
        is_top, is_last = stage == self._program.top, stage == self._program.last
        if kind is Kind.F:
            self._live[stage, microbatch] = Live(self._take_activations(stage, microbatch))
            if not is_last:
                self._above[stage].give_activations(microbatch, self._above[stage].stand_ins(microbatch))
        elif kind is Kind.B:
            is_open = is_top and microbatch == self._open
            if is_top and not is_open:
                nothing = torch.zeros((), dtype=LOSS_DTYPE, device=self._station.device)
                self._below[stage].give_loss(nothing if self._loss_cut is None else self._loss_cut.take_loss())
            if not (is_open and self._called):
                if self._posts:
                    self._opener.post(self._posts[position].inside)
                if not is_last:
                    self._above[stage].take_gradients(microbatch)
            live = self._live.pop((stage, microbatch))
            if live.leaves and not live.answered:
                self._give_gradients(stage, microbatch, live)

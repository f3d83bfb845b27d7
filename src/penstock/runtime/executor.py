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
from penstock.schedule.actions import Action, Kind, Schedule

from .ending import sum_over_pipelines
from .exchange import LOSS_DTYPE
from .failure import PipelineFailure
from .gate import gate_loss, proxy_loss
from .inputs import StepInputs
from .precision import autocast_now, multiply_gradients
from .recorder import Recorder
from .station import StageOpener, Station
from .step import Live, StageOutput, StepReport


class LoopError(RuntimeError):
    """The loop over the microbatches was not written as it must be: one `backward()` for each yielded loss, in
    order."""


class TrainingStep:
    """One training step of one rank. Iterate over `run()`; then read `report`."""

    def __init__(
        self,
        station: Station,
        schedule: Schedule,
        rank_in_pipeline: int,
        inputs: StepInputs,
        *,
        criterion: Criterion | None = None,
        reduce_gradients: bool = True,
        loss_scale: float = 1.0,
        recorder: Recorder | None = None,
    ):
        self._station = station
        self._schedule = schedule
        self._actions = schedule.actions_of(rank_in_pipeline)
        self._stages = schedule.stages_of(rank_in_pipeline)
        self._top = schedule.top_stage(rank_in_pipeline)
        self._last = schedule.num_stages - 1
        self._inputs = inputs
        self._criterion = criterion
        self._reduce = reduce_gradients
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
        self._proxy_dtype = torch.float64 if station.split.dtype == torch.float64 else torch.float32
        backwards = [i for i, action in enumerate(self._actions) if action.kind is Kind.B]
        weights = [i for i, action in enumerate(self._actions) if action.kind is Kind.W]
        self._final_backward = backwards[-1] if backwards else -1
        self._whole = schedule.whole_backwards(rank_in_pipeline)
        self._final_weight = {action.stage: i for i, action in enumerate(self._actions) if i in set(weights)}
        self.report: StepReport | None = None

    def run(self) -> Iterator[Any]:
        """Run the step, yielding each microbatch's output when its backward is due."""
        station = self._station
        self._started = time.perf_counter()
        waited = station.channel.seconds_waited
        try:
            station.reducer.begin()
            # An interrupt in an earlier step may have left some.
            station.queues.clear()
            # Gradients left from an earlier step must have the scale of those that are added to them.
            multiply_gradients(station.parameters, self._loss_scale)
            with self._autocast():
                self._opener = StageOpener(station, self._actions, self._inputs)
            for position, action in enumerate(self._actions):
                self._position = position
                start = time.perf_counter()
                if action.kind is Kind.F:
                    self._forward(action.stage, action.microbatch)
                elif action.kind is Kind.W:
                    self._weight_gradients(action)
                elif action.stage == self._top:
                    yield self._open_backward(action.microbatch)
                    self._close_backward(action.stage, action.microbatch)
                else:
                    self._inner_backward(action.stage, action.microbatch)
                if self._recorder is not None:
                    self._recorder.action(
                        action.kind.value, action.stage, action.microbatch, start, time.perf_counter()
                    )
            if self._total_counts is None and self._last in self._stages:
                # Not a single microbatch here, but the other pipelines need to hear so.
                self._total_counts = station.totals.counts(())
            station.channel.flush()
            self.report = self._finish(station.channel.seconds_waited - waited)
        except GeneratorExit:
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

    # -- the actions -----------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> None:
        station, inputs = self._station, self._inputs
        received = self._take_activations(stage, microbatch)
        live = self._live[stage, microbatch] = Live(received)
        with torch.enable_grad(), self._autocast():
            output, sent = station.split.forward(
                inputs.plans[microbatch],
                stage,
                inputs.microbatches[microbatch],
                received,
                seed=inputs.seed(station.seed, microbatch),
                shares=self._shares(microbatch) if stage == self._last else None,
                criterion=self._criterion,
            )
        if stage == self._last:
            assert output is not None
            live.output, live.loss = output, output.loss
        else:
            station.exchange.give_activations(stage, microbatch, sent)
            live.sent = [tensor for tensor in sent if tensor.requires_grad]
            station.exchange.post_gradients(stage)

    def _take_activations(self, stage: int, microbatch: int) -> list[torch.Tensor]:
        state = self._opener.open(stage)
        if stage == self._last and self._total_counts is None:
            self._total_counts = self._station.totals.counts(self._inputs.total_counts())
        return self._station.exchange.take_activations(stage, microbatch, state)

    def _open_backward(self, microbatch: int) -> Any:
        """The output to yield for `microbatch`, its loss gated so that the backward is noticed."""
        stage, exchange = self._top, self._station.exchange
        live = self._live[stage, microbatch]
        self._open, self._called = microbatch, False
        on_backward = partial(self._backward_begins, microbatch)
        if stage == self._last:
            assert live.loss is not None
            # A copy: the loop's body may change the loss in place.
            value = live.loss.detach().to(LOSS_DTYPE, copy=True)
            output = live.output
            gated = gate_loss(live.loss, on_backward, self._loss_scale)
            if gated is not live.loss:
                output.loss = gated
            live.output = live.loss = None
        else:
            value = exchange.take_loss(stage)
            output = StageOutput(loss=proxy_loss(value.to(self._proxy_dtype), live.sent, on_backward))
        exchange.give_loss(stage, value)
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
        self._enter_backward(self._top, microbatch)
        if self._live[self._top, microbatch].leaves:
            # At the end of this backward, so that the stage below need not wait for the rest of the loop's body.
            give = partial(self._give_gradients, self._top, microbatch)
            torch.autograd.Variable._execution_engine.queue_callback(give)
        if self._top == self._last:
            return ()
        return self._station.exchange.take_gradients(self._top, microbatch)

    def _inner_backward(self, stage: int, microbatch: int) -> None:
        """The backward of a stage below the rank's top one, which no user sees."""
        self._enter_backward(stage, microbatch)
        gradients = self._station.exchange.take_gradients(stage, microbatch)
        if gradients:
            torch.autograd.backward(self._live[stage, microbatch].sent, gradients)
        self._finish_backward(stage, microbatch)

    def _enter_backward(self, stage: int, microbatch: int) -> None:
        if self._schedule.splits_backward:
            if self._position in self._whole:
                self._station.queues.open_at_once()
            else:
                self._station.queues.open(stage, microbatch)
        self._station.reducer.enter_backward(final=self._position == self._final_backward and self._reduce)

    def _close_backward(self, stage: int, microbatch: int) -> None:
        if not self._called:
            raise LoopError(
                f"backward() was not called on the loss of microbatch {microbatch}; call it exactly once on each "
                "yielded loss, before taking the next (to give up the step, break out of the loop on every rank)"
            )
        self._open = None
        self._finish_backward(stage, microbatch)

    def _finish_backward(self, stage: int, microbatch: int) -> None:
        if self._schedule.splits_backward:
            self._station.queues.close()
        self._give_gradients(stage, microbatch)
        del self._live[stage, microbatch]

    def _give_gradients(self, stage: int, microbatch: int) -> None:
        """Send the gradients of what this stage received, once; zeros where nothing here depended on it."""
        live = self._live[stage, microbatch]
        if live.answered or not live.leaves:
            return
        live.answered = True
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in live.leaves]
        self._station.exchange.give_gradients(stage, microbatch, gradients)

    def _weight_gradients(self, action: Action) -> None:
        reducer = self._station.reducer
        waited_for = self._final_weight[action.stage] == self._position and self._reduce and reducer.active
        self._station.queues.run(action.stage, action.microbatch, reducer.ready if waited_for else None)

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
            for action in self._actions[self._position :]:
                self._skip(action)
            station.channel.flush()
            if self._reduce and station.reducer.active:
                station.reducer.finish()
            multiply_gradients(station.parameters, 1.0 / self._loss_scale)
            self._live.clear()

    def _skip(self, action: Action) -> None:
        """Do the communication of an action with zeros, so that no message is left under way."""
        exchange, stage, microbatch = self._station.exchange, action.stage, action.microbatch
        if action.kind is Kind.F:
            received = self._take_activations(stage, microbatch)
            self._live[stage, microbatch] = Live(received)
            if stage != self._last:
                exchange.give_activations(stage, microbatch, exchange.stand_ins(stage, microbatch))
                exchange.post_gradients(stage)
        elif action.kind is Kind.B:
            is_open = stage == self._top and microbatch == self._open
            if stage == self._top and not is_open:
                nothing = torch.zeros((), dtype=LOSS_DTYPE, device=self._station.device)
                exchange.give_loss(stage, nothing if stage == self._last else exchange.take_loss(stage))
            if stage != self._last and not (is_open and self._called):
                exchange.take_gradients(stage, microbatch)
            self._give_gradients(stage, microbatch)
            del self._live[stage, microbatch]

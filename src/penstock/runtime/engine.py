"""The engine that runs a parallelised model: one rank's part of a layout of pipelines, and what it needs to run steps.

`formation` forms engines; `reforming` forms them anew, with other ranks or in another layout, and for copies of models.
What an engine is made of then is in `parts`; here is what lasts over formations, and what the ranks do together. A
training step begins here; an evaluation in `evaluation`, a generation in `generation.generate`."""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from penstock.data.batch import PerMicrobatch, microbatches_of, place
from penstock.data.fingerprint import described, fingerprint
from penstock.data.media import MediaTokens
from penstock.data.microbatch import refuse_unknown_names
from penstock.layout.layout import Layout, Place
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.libraries import configuration_of
from penstock.modeling.stage.kept_state import KeptState
from penstock.modeling.stage.split import SplitModel
from penstock.random_state import key_of, mixed
from penstock.runtime.boundary.p2p import P2PChannels
from penstock.runtime.comm.rollcall import CLOSED, Call, Shared
from penstock.runtime.comm.settings import (
    MODULUS,
    BatchInWords,
    Settings,
    SettingsMismatch,
    bits_of,
    in_words,
    number_in_words,
    states_of_stages,
)
from penstock.runtime.context import RankContext
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.failures.position import Among
from penstock.runtime.gradients.gradients import autocast
from penstock.runtime.gradients.holders import HeldParameter
from penstock.runtime.gradients.updates import mixed_update
from penstock.runtime.gradients.weight_gradients import WeightGradientQueues, is_hooked
from penstock.runtime.inputs import (
    StepInputs,
    kept_buffers,
    refuse_tuples,
    refuse_without_loss,
    refuse_wrong_types,
    warn_of_batchwise,
    warn_of_changed_buffers,
    warn_of_changes_by_stages,
    warn_of_equal_batches,
    warn_of_hooks,
    warn_of_inexact_loss,
    warn_of_kept_state,
    warn_of_kept_tensors,
    warn_of_later_changes,
    warn_of_norms_of_one,
    warn_of_variables,
)
from penstock.runtime.loop import TrainingLoop
from penstock.runtime.options import EngineOptions
from penstock.runtime.parts import Parts, ScheduleMaker
from penstock.runtime.recovery import NoRecovery, Recovery
from penstock.runtime.report import StepReport
from penstock.runtime.step import StepListener, TrainingStep
from penstock.schedule.actions import check_trains

DEFAULT_MICROBATCHES_PER_RANK = 4
# Calls that need the model where its stages compute, beside steps and evaluations.
COMPUTING = frozenset({Call.GENERATE, Call.CLIP, Call.NORM})
# Calls whose numbers are mostly equal on all ranks; only where they are not does everyone hear everyone's.
WITH_EQUAL_NUMBERS = frozenset({Call.CLIP, Call.NORM, Call.UNSCALE, Call.DECIDE})
# What of an engine is for users of `model.pipeline`.
FOR_USERS = ["close", "device", "grad_norm", "last_step", "layout", "place", "rank", "step_number", "trace"]
FOR_USERS += ["trace_steps", "weight_gradients"]

T = TypeVar("T")


class StepObserver(Protocol):
    """Observes the training steps of an engine that has it among its `observers`."""

    def observing(self, engine: Engine, number: int) -> contextlib.AbstractContextManager[StepListener | None]:
        """Around training step `number` on each rank: gives what is told of its events, or None for a step that it
        passes over. All ranks decide alike, and may work together after the step."""


class Engine:
    """One rank's part of a layout: trains, and reduces gradients. See `formation` and `reforming` for how it forms.

    Until `begin_formation` gives it `parts`, only what `__init__` sets is there: most properties read them.

    Attributes:
        parts: what it has for as long as the ranks of a layout work together; another one after each formation.
        trace: a path; while it is set, each training step's timeline is written there (.svg or .json), that of the
            first pipeline. Set it on all ranks alike.
        trace_steps: the first and the last training step, counted from 0, that the timeline covers; None for the latest
            one. Set it on all ranks alike.
        autocast: the type of torch.autocast in which the model runs; None leaves that to the caller.
        loss_scale: what losses are multiplied with in the backward, so that half-precision gradients do not vanish. The
            gradients between steps do not have it.
        own_means: whether a loss that is a mean is one over each pipeline's own batch, and those are added up;
            otherwise it is over the global batch. Set it on all ranks alike.
        step_number: how many training steps were begun. It decides the random numbers of the next one, as `seed` does.
        num_evaluations: how many evaluations were begun after the latest training step. It decides the random numbers
            of the next one.
        known: by unsplit name, the parameters held here, and those that have given up their storage here.
        recovery: what becomes of calls when a rank is lost.
        observers: are told what training steps do.
    """

    parts: Parts

    def __init__(
        self,
        split: SplitModel,
        device: torch.device,
        options: EngineOptions,
    ):
        self.split = split
        self.device = device
        self.options = options
        split.say_batch_dim(options.batch_dim)
        split.loss_chunk_tokens = options.loss_chunk_tokens
        self.report: StepReport | None = None
        self.trace, self.trace_steps = options.trace, options.trace_steps
        self.autocast = options.autocast
        self.loss_scale = 1.0
        self.own_means = False
        self.step_number = self.num_evaluations = 0
        self.seed: int | None = None
        # The replica whose random numbers this rank has; None before the first formation.
        self.random_replica: int | None = None
        self.recovery: Recovery = NoRecovery()
        self.observers: list[StepObserver] = []
        self.reduces_gradients = True
        self.known: dict[str, nn.Parameter] = dict(split.released)
        # Names of the parameters of whose hooks users were warned.
        self._hooked: set[str] = set()
        self._main_input_name = getattr(split.model, "main_input_name", None)
        self.media = MediaTokens.of(configuration_of(split.model))

    # -- forming ---------------------------------------------------------------------------------------------------

    def begin_formation(self, parts: Parts) -> None:
        """Work with the parts of a new formation from now on."""
        self.parts = parts
        assert dist.group.WORLD is not None
        # Weakly: a group closes only when nothing refers to it.
        self._world = weakref.ref(dist.group.WORLD)
        self.note_known()
        self._of_formation: dict[Any, Any] = {}

    def note_known(self) -> None:
        self.known.update((weight.name, weight.parameter) for weight in self.held)

    def of_formation(self, make: Callable[[Engine], T]) -> T:
        """What a package above keeps for as long as the ranks work together as now: made when it is first asked for."""
        if make not in self._of_formation:
            self._of_formation[make] = make(self)
        made: T = self._of_formation[make]
        return made

    @property
    def channels(self) -> P2PChannels:
        """Between the stages of this rank and their neighbours."""
        return self.parts.boundaries.channels

    def dissolve(self) -> None:
        """Give up the present formation: groups, hooks, threads. The model keeps its weights."""
        self.parts.give_up()

    def close(self) -> None:
        """Give up the process groups, and end the recovery. The model keeps its weights but runs no more steps."""
        self.recovery.close()
        self.dissolve()

    # -- what it is ------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        here, count = self.context.pipeline, len(self.layout.pipelines)
        held = "; ".join(
            f"stage {stage}: {here.stages[stage][0]} to {here.stages[stage][-1]}" for stage in self.context.stages
        )
        last = "" if self.report is None else f", the last {self.report}"
        return (
            f"<pipeline {self.place.pipeline} of {count}, {here.num_stages} stages, schedule "
            f"{self.parts.schedule(1).name}; on rank {self.rank} ({self.device}): {held}; "
            f"{self.step_number} training steps{last}>"
        )

    def __dir__(self) -> list[str]:
        """What is for users; the rest serves the other packages."""
        return FOR_USERS

    @property
    def last_step(self) -> StepReport:
        """What the last training step took. RuntimeError before the end of the first."""
        if self.report is None:
            raise RuntimeError("no training step has ended yet, so there is no last_step")
        return self.report

    @property
    def context(self) -> RankContext:
        return self.parts.context

    @property
    def held(self) -> Sequence[HeldParameter]:
        """The parameters this rank holds, with the other ranks that do."""
        return self.parts.held

    @property
    def summed(self) -> list[list[nn.Parameter]]:
        """Those of `held` whose gradients the last step has summed with other ranks, bucket by bucket, in an order all
        ranks share."""
        return [bucket.parameters for bucket in self.parts.gradients.reducer.buckets]

    @property
    def layout(self) -> Layout:
        """All pipelines, and the ranks they are on."""
        return self.context.layout

    @property
    def make_schedule(self) -> ScheduleMaker:
        """Gives this rank's pipeline's schedule for a number of microbatches."""
        return self.parts.make_schedule

    @property
    def rank(self) -> int:
        """This global rank."""
        return self.context.rank

    @property
    def place(self) -> Place:
        """Where in the layout this rank stands."""
        return self.context.place

    @property
    def board(self) -> FailureBoard:
        return self.context.board

    def values_here(self) -> dict[str, torch.Tensor]:
        """The values that this rank has, by unsplit name; they last until the result is dropped."""
        return {weight.name: weight.parameter.detach() for weight in self.held} | dict(self.split.model.named_buffers())

    def owned_elsewhere(self) -> set[str]:
        """The names of the parameters here that other ranks own: this rank has none of their optimizer's state."""
        return {weight.name for weight in self.held if self.rank not in weight.keepers}

    @property
    def weight_gradients(self) -> WeightGradientQueues:
        """Where a module of your own may leave the weight gradients of its backward for their W action."""
        return self.parts.gradients.queues

    # -- steps -----------------------------------------------------------------------------------------------------

    def train(self, inputs: Mapping[str, Any], criterion: Criterion | None = None) -> TrainingLoop:
        """A training step on this pipeline's batch: yields each microbatch's output, whose loss wants a `backward()`.

        The batch is checked now, before any communication; the step runs as the caller iterates. A pipeline may have no
        microbatch at all, but must take part.
        """
        self.refuse_if_over()
        self.parts.open_step.refuse("another training step")
        microbatches, sizes = self.microbatches(inputs)
        # By default the replicas before this one are taken to have as many as this one.
        usual = self.context.replica * len(microbatches)
        first = next((v.first_microbatch for v in inputs.values() if isinstance(v, PerMicrobatch)), usual)
        prepared = self.prepare(microbatches, sizes, first, criterion, training=True)
        refuse_without_loss(self.split.model, prepared)
        several_stages = self.context.pipeline.num_stages > self.context.pipeline.num_ranks
        if self.context.holds_output:
            warn_of_inexact_loss(self.split.model, prepared)
            if self.report is None:
                (warn_of_changes_by_stages if several_stages else warn_of_later_changes)(prepared)
        if len(microbatches) > 1 or len(self.layout.pipelines) > 1:
            self._warn_of_what_sees_a_microbatch(prepared)
        schedule = self.parts.schedule(len(microbatches))
        if microbatches:
            check_trains(schedule)
        with autocast(self.device, self.autocast):
            step = TrainingStep(
                self.context,
                self.split,
                self.parts.boundaries,
                self.parts.gradients,
                self.parts.totals,
                self.parts.program(len(microbatches)),
                prepared,
                reduces_gradients=self.reduces_gradients,
                loss_scale=self.loss_scale,
                own_means=self.own_means,
            )
            settings = self.parts.settings(
                fingerprint(inputs), prepared, self.loss_scale, self.reduces_gradients, training=True
            )
        batch = partial(described, inputs, sizes)
        warned_of = prepared.changed if several_stages else prepared.changed_later
        run = partial(self._run, step, settings, inputs, batch, warned_of)
        return TrainingLoop(step, run, self.parts.open_step)

    def _warn_of_what_sees_a_microbatch(self, inputs: StepInputs) -> None:
        """Once, before the first step, or where there are new hooks."""
        hooked = [
            weight.name for weight in self.held if is_hooked(weight.parameter) and weight.name not in self._hooked
        ]
        self._hooked.update(hooked)
        warn_of_hooks(hooked)
        if self.report is None and self.context.holds_output:
            warn_of_batchwise(inputs)

    def _run(
        self,
        step: TrainingStep,
        settings: Settings,
        inputs: Mapping[str, Any],
        batch: BatchInWords,
        warned_of: Collection[str],
    ) -> Generator[Any, None, None]:
        number = self.step_number
        buffers = kept_buffers(self.split.model) if self.report is None else {}
        kept = self.split.kept_state = KeptState(self.split.model) if self.report is None else None
        with_equal_batches: list[int] = []
        roll_call = self.parts.roll_call.begin(Call.TRAIN, settings, shared=self.parts.shared(settings))

        def meet() -> Sequence[Hashable]:
            gathered = self.parts.compare(roll_call.wait(), batch)
            if number == 0 and len(self.layout.pipelines) > 1:
                with_equal_batches.extend(self.parts.with_equal_batches(inputs))
            self.parts.updates.begin_step()
            self.step_number += 1
            self.num_evaluations = 0
            return states_of_stages(gathered, self.context, training=True)

        try:
            with contextlib.ExitStack() as observed:
                seen = [observed.enter_context(observer.observing(self, number)) for observer in self.observers]
                yield from step.run(meet, number, [listener for listener in seen if listener is not None])
        finally:
            self.split.kept_state = None
            if step.report is not None:  # also if the caller has left the loop: the step ran itself to its end
                self.report = step.report
                self.parts.updates.end_step(due=bool(settings.reduces_gradients))
        if step.interruption is not None:
            raise step.interruption
        warn_of_equal_batches(with_equal_batches if self.rank == 0 else [])
        warn_of_changed_buffers(self.split.model, buffers)
        warn_of_variables([] if kept is None else [*kept.variables])
        warn_of_kept_tensors([] if kept is None else [*kept.keeping])
        warn_of_kept_state([] if kept is None else [name for name in kept.changed() if name not in warned_of])

    def sum_over_pipelines(self, values: Sequence[float]) -> list[float]:
        """Sums of what the pipelines' last stages give, on every rank. All ranks call this together, with as many
        values; those of the other stages count for nothing."""
        with self.together(Call.SUM):
            return self.parts.totals.sums(values)

    @contextlib.contextmanager
    def together(
        self,
        call: Call,
        settings: Settings | Sequence[int] = (),
        among: Among = Among.ALL,
        batch: BatchInWords | None = None,
    ) -> Iterator[Mapping[int, Sequence[int]]]:
        """Around what the ranks of `among` do together: it begins on all of them or on none, and no signal tears it.
        `batch` tells of this rank's batch.

        Gives what was said, by rank: of plain numbers by all of `among`; of `Settings`, and of numbers that a call of
        `WITH_EQUAL_NUMBERS` has found equal, by the ranks of this pipeline."""
        self.refuse_if_over()
        self.parts.open_step.refuse(str(call))
        if call in COMPUTING:
            self.split.refuse_if_moved(self.device)
        with self.context.interrupts.held(), self.board.call(str(call), among):
            try:
                gathered = self._meet(call, settings, among, batch)
            except BaseException:
                self.board.position.retract()
                raise
            yield gathered

    def _meet(
        self, call: Call, settings: Settings | Sequence[int], among: Among, batch: BatchInWords | None
    ) -> Mapping[int, Sequence[int]]:
        begin = self.parts.roll_call.begin
        if isinstance(settings, Settings):
            assert batch is not None
            return self.parts.compare(begin(call, settings, among, self.parts.shared(settings)).wait(), batch)
        shared = settings if call in WITH_EQUAL_NUMBERS else ()
        answers = begin(call, settings, among, lambda gathered: Shared(shared)).wait()
        return answers.pipeline if not settings or (shared and answers.equal) else answers.everyone()

    @contextlib.contextmanager
    def saving(self, call: Call) -> Iterator[None]:
        """Around a save: `together`, and warns if an interrupted optimizer's step left the ranks unlike, or if copies
        of a tied weight differ by more than roundings, which are taken away without a word."""
        with self.together(call, [self.parts.updates.state(), self.parts.copies.equality_term()]) as gathered:
            words = mixed_update({rank: facts[0] for rank, facts in gathered.items()})
            if words is None and sum(facts[1] for facts in gathered.values()) % MODULUS:
                words = self.parts.copies.reconcile()
            if words is not None:
                warnings.warn(words, stacklevel=4)
            yield

    @property
    def gradients_pending(self) -> bool:
        """Whether no weight has changed since the last training step: then no update has used its gradients."""
        return self.parts.updates.none

    def note_loaded(self) -> None:
        """The weights were given values that no step of an optimizer has made."""
        self.parts.updates.end_step(due=False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps in this context only accumulate gradients on this rank; the next one outside reduces them all."""
        before, self.reduces_gradients = self.reduces_gradients, False
        try:
            yield
        finally:
            self.reduces_gradients = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the whole model's gradient norm, every logical parameter counted once; see `GradientNorm`."""
        with self._norms(Call.CLIP, norm_type, max_norm):
            return self.parts.gradients.norm.clip(float(max_norm), float(norm_type), error_if_nonfinite)

    def norm_of(
        self, held: Sequence[HeldParameter], norm_type: float, error_if_nonfinite: bool, alone: bool = False
    ) -> torch.Tensor:
        """The norm of the gradients of `held` and of what the other ranks give; every rank calls it. `alone`: the
        caller has named a single parameter."""
        self.recovery.refuse(
            "torch.nn.utils.clip_grad_norm_", "clip with booster.clip_grad_norm, or optimizer.clip_grad_by_norm"
        )
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive, got {norm_type}")
        mine = [weight for weight in held if weight.parameter.grad is not None and self.rank in weight.keepers]
        equality = sum(weight.equality_term(self.rank, weight.keepers) for weight in mine) % MODULUS
        several = sum(weight.parameter.grad is not None for weight in self.held) > 1
        single = held[0].digest % MODULUS if alone and held and several else 0
        with self._norms(Call.CLIP, norm_type, equality=equality, single=single) as singles:
            if len(singles - {0}) > 1:
                warn_of_norms_of_one(held)
            return self.parts.gradients.norm.total(norm_type, error_if_nonfinite, held)

    def held_of(self, gradients: Sequence[torch.Tensor]) -> list[HeldParameter | None]:
        """The parameters of this rank that have these gradients; see `GradientNorm`."""
        return self.parts.gradients.norm.held_of(gradients)

    @property
    def is_open(self) -> bool:
        here = self._world() is dist.group.WORLD is not None
        return here and self.board.failed is None and not self.parts.closed

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm (`norm_type`) of the whole model's gradients: shape (), the same on every rank to the last bit."""
        with self._norms(Call.NORM, norm_type):
            return self.parts.gradients.norm.of_all(norm_type)

    # -- of the calls -------------------------------------------------------------------------------------------------

    def microbatches(self, inputs: Mapping[str, Any], at_most: bool = False) -> tuple[list[dict[str, Any]], list[int]]:
        wanted, dims = self.options.num_microbatches, self.options.batch_dim
        refuse_unknown_names(dims, [*inputs, *inspect.signature(self.split.model.forward).parameters] if dims else ())
        default = DEFAULT_MICROBATCHES_PER_RANK * self.context.pipeline.num_ranks
        if wanted is not None and at_most:
            return microbatches_of(inputs, self._main_input_name, default=wanted, media=self.media, dims=dims)
        size = self.options.microbatch_size
        return microbatches_of(inputs, self._main_input_name, wanted, size, default, self.media, dims)

    @contextlib.contextmanager
    def _norms(
        self, call: Call, norm_type: float, max_norm: float = 0.0, equality: int = 0, single: int = 0
    ) -> Iterator[Set[int]]:
        """Compare what the ranks give to a norm; gives their `single`, digests of parameters that are given alone."""
        with self.together(call, [bits_of(float(norm_type)), bits_of(float(max_norm)), equality, single]) as gathered:
            if sum(facts[2] for facts in gathered.values()) % MODULUS:
                shared = [weight.name for weight in self.held if len(weight.ranks) > 1]
                raise SettingsMismatch(
                    "the norm is of a weight on some of the ranks that hold it, but not on all (tied weights have "
                    "another name on each of their stages): give all of them, or none. Shared weights here: "
                    f"{', '.join(shared[:5])}{', ...' * (len(shared) > 5)}"
                )
            for number, name in enumerate(("norm_type", "max_norm")):
                values = {rank: facts[number] for rank, facts in gathered.items()}
                if len(set(values.values())) > 1:
                    raise SettingsMismatch(
                        f"the gradient norm's {name} differs: {in_words(values, number_in_words)}"
                        ". Give the same on all ranks"
                    )
            yield {facts[3] for facts in gathered.values()}

    def refuse_if_over(self) -> None:
        """Raise if the ranks of this engine can do nothing together any more."""
        self.board.check()
        if self.parts.closed:
            raise RuntimeError(CLOSED)

    def prepare(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        sizes: Sequence[int],
        first_microbatch: int,
        criterion: Criterion | None,
        training: bool = False,
        in_parts: bool = True,
    ) -> StepInputs:
        self.refuse_if_over()
        self.split.refuse_if_moved(self.device)
        refuse_tuples(self.split.model, microbatches)
        refuse_wrong_types(self.split.model, microbatches)
        hosts = None
        if self.device.type != "cpu":
            microbatches, hosts = place(microbatches, self.device)
        if in_parts and self.parts.sequences is not None:
            microbatches = self.parts.sequences.cut(microbatches, criterion)
            hosts = None if hosts is None else self.parts.sequences.cut(hosts, criterion)
        assert self.seed is not None
        seed = self.seed if training else mixed(self.seed, key_of("evaluation", self.num_evaluations))
        if in_parts and (part := self.layout.part_of(self.place.pipeline)):
            seed = mixed(seed, key_of("part of a sequence", part))  # its tokens are others
        plan = partial(self.split.plan, in_chunks=training and self.split.loss_chunk_tokens is not None)
        # The step may have another number once the caller iterates: `TrainingStep.run` puts that in its place.
        return StepInputs.of(
            microbatches, plan, sizes, first_microbatch, self.step_number,
            with_counts=self.context.holds_output, hosts=hosts, run_seed=seed, criterion=criterion,
        )  # fmt: skip

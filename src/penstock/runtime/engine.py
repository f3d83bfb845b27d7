"""The engine behind both faces: one rank's part of a layout of pipelines, with everything it needs to run steps."""

from __future__ import annotations

import contextlib
import datetime
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from penstock.checkpoint.comm import GroupComm, OnceLost
from penstock.data.batch import PerMicrobatch, microbatches_of
from penstock.data.fingerprint import fingerprint
from penstock.data.placing import place
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.stage.split import SplitModel
from penstock.planning.layout import Layout
from penstock.schedule import Schedule, check_trains

from .channel import Channel
from .evaluation import evaluate, share_output
from .exchange import Exchange
from .executor import TrainingStep
from .failure import FailureBoard
from .groups import Groups
from .holders import find_holders
from .inputs import StepInputs, refuse_tuples, refuse_without_loss, refuse_wrong_types, warn_of_inexact_loss
from .interrupts import Interrupts
from .loop import OpenStep, TrainingLoop
from .norm import GradientNorm
from .precision import ScaleWatch, autocast
from .program import Program
from .random_state import adopt_random_state
from .recorder import Recorder
from .reduction import GradientReducer
from .rollcall import Call, RollCall
from .settings import (
    FrozenParameters,
    Modes,
    Settings,
    SettingsMismatch,
    autocast_code,
    bits_of,
    frozen_differently,
    settings_in_words,
)
from .start import copy_from_first_holders, job_board, shared_seed
from .station import Station
from .step import StepReport
from .tensor_parallel import GroupCollectives
from .totals import Totals
from .updates import UpdateWatch, mixed_update
from .watcher import interruptible
from .weight_gradients import WeightGradientQueues
from .weight_gradients import install as install_deferral

# (number of microbatches) -> the schedule of this rank's pipeline
ScheduleMaker = Callable[[int], Schedule]
DEFAULT_MICROBATCHES_PER_STAGE = 4


class Pipeline:
    """One rank's part of a layout: trains, evaluates, reduces gradients.

    `split` has split the model for this rank. All ranks of the layout construct theirs together. `timeout` is that of
    the process groups, see `Groups`.

    Attributes:
        last_step: what the last training step took.
        trace: a path; while it is set, each training step's timeline is written there (.svg or .json), that of the
            first pipeline. Set it on all ranks alike.
        autocast: the type in which stages run their matrix products, None for that of the weights.
        loss_scale: what losses are multiplied with in the backward, so that half-precision gradients do not vanish. The
            gradients between steps do not have it.
        step_number: how many training steps were begun. It decides the dropout of the next one.
        holds_output: whether this rank holds the pipeline's last stage, which has the model's output.
    """

    def __init__(
        self,
        split: SplitModel,
        layout: Layout,
        make_schedule: ScheduleMaker,
        device: torch.device,
        *,
        num_microbatches: int | None = None,
        micro_batch_size: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        board: FailureBoard | None = None,
        timeout: datetime.timedelta | None = None,
    ):
        self.split = split
        self.layout = layout
        self.rank = dist.get_rank()
        self.place = layout.place_of(self.rank)
        self.device = device
        self.num_microbatches = num_microbatches
        self.micro_batch_size = micro_batch_size
        self.last_step: StepReport | None = None
        self.trace = trace
        self.autocast: torch.dtype | None = None
        self.loss_scale = 1.0
        self.step_number = 0
        self._interrupts = Interrupts()
        self._open_step = OpenStep(self._interrupts)
        self._closed = False
        self._recorder = Recorder(self.place.rank_in_pipeline)
        self._make_schedule = make_schedule
        self._schedules: dict[int, Schedule] = {}
        self._programs: dict[tuple[int, bool], Program] = {}
        self._synchronising = True
        self._main_input_name = getattr(split.model, "main_input_name", None)
        mine = layout.pipelines[self.place.pipeline]
        self.holds_output = mine.stage_to_rank[-1] == self.place.rank_in_pipeline
        self._last_rank = mine.global_rank(mine.num_stages - 1, self.place.tensor_parallel_rank)

        local = dict(split.model.named_parameters(remove_duplicate=False))
        cut = split.tensor_parallel
        self.held, shared = find_holders(
            layout, self.place.tensor_parallel_rank, split.aliases, local, cut.shards if cut else (),
            cut.partial if cut else (),
        )  # fmt: skip
        self.board = job_board() if board is None else board
        self._pipeline_ranks = mine.ranks()
        self.board.mates = frozenset(self._pipeline_ranks)
        everyone = range(layout.world_size)
        with self.board.guard("making process groups", everyone):
            self.groups = interruptible(partial(Groups, layout, self.rank, device, shared, timeout), self.board)
        self.board.on_end(self.groups.abort)
        # First, as it is to be called last: a group closes only when nothing refers to it.
        self.board.on_abort(self.groups.destroy)
        if cut is not None:
            assert self.groups.tensor_parallel is not None
            cut.region.collectives = GroupCollectives(self.groups.tensor_parallel, device, self.board)
        channel = Channel(
            self.groups.line, partial(mine.global_rank, tensor_parallel_rank=self.place.tensor_parallel_rank),
            device, self.board,
        )  # fmt: skip
        queues = WeightGradientQueues()
        holders = [(held.parameter, held.ranks) for held in self.held]
        reducer = GradientReducer(
            holders, self.groups.reduction, self.rank, self.board, queues.awaits,
            layout.are_of_several_stages, layout.has_several_stages(self.rank),
        )  # fmt: skip
        totals = Totals(layout, self.rank, self.groups, self.board, device)
        for give_up in (self._open_step.end, totals.clear, channel.clear, reducer.clear, queues.clear):
            self.board.on_abort(give_up)
        self.roll_call = RollCall(self.groups.crew_control, self.groups.world_control, self.board, self._interrupts)
        self._modes = Modes(split.model, layout.units)
        self._frozen = FrozenParameters(self.held, self.rank)
        self._updates = UpdateWatch([held.parameter for held in self.held])
        self._norm = GradientNorm(self.held, layout, self.rank, self.groups, device, self.board)
        with self.board.guard("agreeing on the run's seed", everyone):
            seed = shared_seed(self.groups)
        self._station = Station(
            split=split,
            parameters=[held.parameter for held in self.held],
            exchange=Exchange(channel, mine.stage_to_rank, self.place.rank_in_pipeline, device),
            channel=channel,
            reducer=reducer,
            queues=queues,
            board=self.board,
            device=device,
            everyone=everyone,
            seed=seed,
            totals=totals,
            scaling=ScaleWatch(),
            share_overflow=self._norm.share_overflow,
            interrupts=self._interrupts,
            computes_together=layout.tensor_parallel_size > 1,
        )
        own = mine.stages_of(self.place.rank_in_pipeline)
        with self.board.guard("sharing weights and random numbers before the first step", everyone):
            if device.type != "cpu":
                self.groups.warm_up()
            channel.warm_up([cut for cut, (a, b) in enumerate(pairwise(mine.stage_to_rank)) if a != b], own)
            copy_from_first_holders(self.held, self.groups)
            # A shuffle without a seed then draws one order on all ranks of a pipeline, as they need the same batches.
            adopt_random_state(mine.ranks()[0], self.groups.crew_control, device)
        if self.schedule(1).splits_backward:
            install_deferral(split.model, queues)

    @property
    def weight_gradients(self) -> WeightGradientQueues:
        """Where a module of your own may leave the weight gradients of its backward for their W action."""
        return self._station.queues

    # -- steps -----------------------------------------------------------------------------------------------------

    def train(self, inputs: Mapping[str, Any], criterion: Criterion | None = None) -> TrainingLoop:
        """A training step on this pipeline's batch: yields each microbatch's output, whose loss wants a `backward()`.

        The batch is checked now, before any communication; the step runs as the caller iterates.

        Raises:
            ValueError: the batch is empty, holds no tensors, is smaller than the number of microbatches, or gives the
                model nothing to compute a loss from.
            LoopError: a training step is under way.
        """
        first = next((v.first_microbatch for v in inputs.values() if isinstance(v, PerMicrobatch)), None)
        self._refuse_if_over()
        self._open_step.refuse("another training step")
        return self.train_microbatches(
            *self._cut(inputs), first_microbatch=first, criterion=criterion, digest=fingerprint(inputs)
        )

    def train_microbatches(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        sizes: Sequence[int],
        *,
        first_microbatch: int | None = None,
        criterion: Criterion | None = None,
        digest: int = 0,
    ) -> TrainingLoop:
        """`train` on a batch that is cut already; `sizes` are the microbatches' numbers of samples.

        `first_microbatch` is the index of the first one in the global batch; by default the pipelines before this one
        are taken to have as many as this one. A pipeline may have no microbatch at all, but must take part.
        """
        if first_microbatch is None:
            first_microbatch = self.place.pipeline * len(microbatches)
        inputs = self._prepare(microbatches, sizes, first_microbatch, criterion)
        refuse_without_loss(self.split.model, inputs)
        if self.holds_output:
            warn_of_inexact_loss(self.split.model, inputs)
        schedule = self.schedule(len(microbatches))
        if microbatches:
            check_trains(schedule)
        with autocast(self.device, self.autocast):
            step = TrainingStep(
                self._station,
                self._program(len(microbatches)),
                inputs,
                criterion=criterion,
                reduce_gradients=self._synchronising,
                loss_scale=self.loss_scale,
                recorder=self._recorder if self.trace is not None else None,
            )
            settings = self._settings(digest, inputs)
        return TrainingLoop(step, partial(self._run, step, settings), self._open_step, self._interrupts)

    def _run(self, step: TrainingStep, settings: Settings) -> Generator[Any, None, None]:
        step.number(self.step_number)
        roll_call = self.roll_call.begin(Call.TRAIN, settings)

        def all_begin() -> int:
            self._compare(settings, roll_call.wait())
            self._updates.begin_step()
            self.step_number += 1
            return self.roll_call.number

        if self.trace is None:
            yield from step.run(all_begin)
        else:
            path = self.trace if self.rank == 0 else None
            yield from self._recorder.recording(
                step.run(all_begin), self._station.channel, self.board, self.groups.pipeline_control, path
            )
        self.last_step = step.report
        self._updates.end_step()

    def evaluate(self, inputs: Mapping[str, Any]) -> Any:
        """The model's output for the whole batch, on every rank of this pipeline, without gradients.

        Raises:
            ValueError: as `train`, but a batch may come without labels and may be smaller than the number of
            microbatches.
        """
        with self._evaluation(inputs, None, over_all_pipelines=False) as output:
            return self._share(output)

    def evaluate_together(
        self, inputs: Mapping[str, Any], criterion: Criterion | None = None, share_outputs: bool = False
    ) -> tuple[float, Any]:
        """The loss of the global batch, of which each pipeline gives its own part; all pipelines call this together.

        Returns:
            The loss, on every rank, and this pipeline's output: with `share_outputs` on all its ranks, otherwise on the
            last stage. None where there is none, also on a pipeline without any microbatch.

        Raises:
            ValueError: as `train`.
        """
        with self._evaluation(inputs, criterion, over_all_pipelines=True) as output:
            own = torch.zeros((), device=self.device) if output is None else output.loss.detach()
            self._station.totals.start(own.to(torch.float64), False)
            loss, _, _ = self._station.totals.finish()
            return float(loss), self._share(output) if share_outputs else output

    @contextlib.contextmanager
    def together(
        self, call: Call, settings: Settings | Sequence[int] = (), everyone: bool = True
    ) -> Iterator[Mapping[int, Sequence[int]]]:
        """Around what the ranks of this pipeline (of all of them, with `everyone`) do together: it begins on all of
        them or on none, and no signal tears it. Gives every rank's settings.

        Raises:
            LoopError: a training step is under way. CallMismatch: the other ranks do something else.
            BatchMismatch, SettingsMismatch: they do it with something else.
        """
        self._refuse_if_over()
        self._open_step.refuse(str(call))
        with self._interrupts.held(), self.board.call(str(call), world=everyone):
            try:
                said = self.roll_call.take(call, settings, everyone)
                if isinstance(settings, Settings):
                    self._compare(settings, said)
            except BaseException:
                self.board.position.retract()
                raise
            yield said

    @contextlib.contextmanager
    def saving(self, call: Call = Call.SAVE) -> Iterator[None]:
        """Around a save: `together`, and warns if an interrupted optimizer's step left the ranks unlike."""
        with self.together(call, [self._updates.state()]) as said:
            words = mixed_update({rank: facts[0] for rank, facts in said.items()})
            if words is not None:
                warnings.warn(words, stacklevel=4)
            yield

    def schedule(self, num_microbatches: int) -> Schedule:
        """This pipeline's schedule for a number of microbatches; without any there is nothing to do."""
        if num_microbatches not in self._schedules:
            made = self._make_schedule(max(1, num_microbatches))
            if not num_microbatches:
                made = replace(made, num_microbatches=0, actions=((),) * made.num_ranks)
            self._schedules[num_microbatches] = made
        return self._schedules[num_microbatches]

    def _program(self, num_microbatches: int, forwards: bool = False) -> Program:
        """This rank's part of the schedule for a number of microbatches, or of its forwards alone."""
        key = num_microbatches, forwards
        if key not in self._programs:
            schedule = self.schedule(num_microbatches)
            self._programs[key] = Program.of(
                schedule.forwards() if forwards else schedule,
                self.place.rank_in_pipeline,
                far_ahead=self._station.channel.receives_ahead > 0,
            )
        return self._programs[key]

    def comms(self) -> tuple[GroupComm, GroupComm]:
        """How all ranks, and the ranks of this pipeline, talk about checkpoints."""
        if self.board.failed is not None:
            raise self.board.failed
        if self._closed:
            raise RuntimeError("this model's pipeline was closed: its ranks can no longer save or load together")
        guard = OnceLost(self.board.guard)
        return GroupComm(self.groups.world_control, guard), GroupComm(self.groups.crew_control, guard)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps in this context only accumulate gradients on this rank; the next one outside reduces them all."""
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the whole model's gradient norm, every logical parameter counted once; see `runtime.norm`."""
        with self._norms(Call.CLIP, norm_type, max_norm):
            return self._norm.clip(float(max_norm), float(norm_type), error_if_nonfinite)

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the whole model's gradients: shape (), the same on every rank to the last bit."""
        with self._norms(Call.NORM, norm_type):
            return self._norm.of_all(norm_type)

    def close(self) -> None:
        """Give up the process groups. The model keeps its weights but runs no more steps."""
        self._closed = True
        self.board.retire()
        if self.split.tensor_parallel is not None:
            self.split.tensor_parallel.region.collectives = None

    # -- parts -----------------------------------------------------------------------------------------------------

    def _cut(self, inputs: Mapping[str, Any], at_most: bool = False) -> tuple[list[dict[str, Any]], list[int]]:
        """Microbatches of a batch and their sizes."""
        wanted = self.num_microbatches
        default = DEFAULT_MICROBATCHES_PER_STAGE * self.layout.pipelines[self.place.pipeline].num_stages
        if wanted is not None and at_most:
            return microbatches_of(inputs, self._main_input_name, default=wanted)
        return microbatches_of(inputs, self._main_input_name, wanted, self.micro_batch_size, default)

    def _share(self, output: Any) -> Any:
        """The last stage's output, on all ranks of the pipeline."""
        groups = self.groups
        return share_output(output, groups.pipeline, groups.pipeline_control, self._last_rank, self.device)

    @contextlib.contextmanager
    def _evaluation(
        self, inputs: Mapping[str, Any], criterion: Criterion | None, over_all_pipelines: bool
    ) -> Iterator[Any]:
        """Evaluate a batch; gives the output on the rank of the last stage, None elsewhere."""
        microbatches, sizes = self._cut(inputs, at_most=True)
        prepared = self._prepare(microbatches, sizes, 0, criterion)
        if over_all_pipelines:
            refuse_without_loss(self.split.model, prepared)
        with autocast(self.device, self.autocast):
            settings = self._settings(fingerprint(inputs), prepared)
            call = Call.EVALUATE_TOGETHER if over_all_pipelines else Call.EVALUATE
            with (
                self.together(call, settings, over_all_pipelines),
                self.board.guard("evaluating", self._pipeline_ranks),
            ):
                program = self._program(len(microbatches), forwards=True)
                yield evaluate(self._station, program, prepared, criterion, over_all_pipelines)

    @contextlib.contextmanager
    def _norms(self, call: Call, norm_type: float, max_norm: float = 0.0) -> Iterator[None]:
        with self.together(call, [bits_of(float(norm_type)), bits_of(float(max_norm))]) as said:
            for number, name in enumerate(("norm_type", "max_norm")):
                values = {rank: facts[number] for rank, facts in said.items()}
                if len(set(values.values())) > 1:
                    raise SettingsMismatch(f"the gradient norm's {name} differs: {settings_in_words(values)}")
            yield

    def _settings(self, digest: int, inputs: StepInputs) -> Settings:
        """What this rank brings to the roll call of a step or an evaluation."""
        return Settings(
            digest,
            len(inputs.microbatches),
            autocast_code(self.device),
            self._modes.digest(),
            bits_of(self.loss_scale),
            int(self._synchronising),
            *self._frozen.numbers(),
        )

    def _compare(self, settings: Settings, said: Mapping[int, Sequence[int]]) -> None:
        """Raise, on every rank, if what all of them said differs."""
        if not settings.compare(said, self.layout):
            group = self.groups.world_control if len(said) == self.layout.world_size else self.groups.crew_control
            every: list[dict[str, bool]] = [{} for _ in said]
            with self.board.guard("comparing frozen parameters", list(said)):
                dist.all_gather_object(every, self._frozen.described(), group=group)
            raise frozen_differently(dict(zip(sorted(said), every, strict=True)))

    def _refuse_if_over(self) -> None:
        self.board.check()
        if self._closed:
            raise RuntimeError("this model's pipeline was closed: it keeps its weights, but runs no more steps")

    def _prepare(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        sizes: Sequence[int],
        first_microbatch: int,
        criterion: Criterion | None = None,
    ) -> StepInputs:
        self._refuse_if_over()
        refuse_tuples(self.split.model, microbatches)
        refuse_wrong_types(microbatches)
        hosts = None
        if self.device.type != "cpu":
            microbatches, hosts = place(microbatches, self.device)
        return StepInputs.of(
            microbatches, partial(self.split.plan, criterion=criterion), sizes, first_microbatch, self.step_number,
            self.holds_output, hosts,
        )  # fmt: skip

"""A trainer's own `compute_loss` over pipeline stages, unchanged.

Without gradients it needs no help: `model(**inputs)` gives the whole output on every rank. With gradients only the last
stage has outputs, one microbatch at a time. So a training step calls `compute_loss` for three purposes:

1. To record, before the step, on each rank and microbatch: what does it call the model with? A stand-in for the model
   ends it there (`arguments`).
2. To compute, on the last stage, as the criterion: the microbatch's share of each mean in the loss. A stand-in for the
   model returns the outputs that are there (`share_of_loss`).
3. To log, once after the step, on every rank: it is given the outputs of the whole batch, and logs what it logs in one
   process (`loss_and_metrics_of_batch`).

Each pipeline is one process of the plain trainer.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from transformers import Trainer
from transformers.cache_utils import Cache

from penstock.data.batch import MicrobatchedBatch
from penstock.data.microbatch import batch_size_of, microbatch_sizes, split_batch
from penstock.modeling.graph.loss import NUM_ITEMS, Criterion, zero_loss
from penstock.modeling.libraries import base_of
from penstock.modeling.stage.outputs import NamedOutput, OutputForm
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.engine import DEFAULT_MICROBATCHES_PER_RANK
from penstock.runtime.evaluation import share_output
from penstock.runtime.failures.position import Among
from penstock.runtime.inputs import AS_ACCUMULATED
from penstock.trainer.trainer_adapter import Metrics, TrainerAdapter, not_over_pipelines
from penstock.trainer.trl.fused_head import with_fused_head_of_stages

# Inputs of a microbatch that only the criterion is given (see `Criterion`): the trainer's own, as its
# `compute_loss` wants them, and the microbatch's share of each of the means.
BATCH, SHARES = "batch_of_the_trainer", "shares_of_the_loss"
# Methods of the accelerator that other ranks must call, too.
CALLS_OF_ALL_RANKS = frozenset({"gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone"})
# The rows of a batch from those of its microbatches.
JoinRows = Callable[[Sequence[torch.Tensor]], torch.Tensor]
# The form in which the outputs of a batch are sent to all ranks of a pipeline: a dictionary.
OUTPUT_FORM = OutputForm(dict, ())


@dataclass(frozen=True)
class Term:
    """A summand of the loss that is one mean.

    Attributes:
        count: the number of elements of the mean in a microbatch; None for a sum.
        changes: attributes of the trainer with which its `compute_loss` gives this term alone.
    """

    count: Callable[[Mapping[str, Any]], float] | None
    changes: Mapping[str, Any] = field(default_factory=dict)


class OwnLoss(TrainerAdapter):
    """The adapter for a trainer with its own `compute_loss`.

    What differs between trainers: `begin` of one that generates, and `while_made`; `refuse_arguments`,
    `add_precomputed` and `precomputed_attributes`, `microbatches` and `join_rows`, `terms`, `notes_in`; of a batch with
    what the model does not take, `arguments` and `evaluate`.
    """

    # Where the trainer notes metrics until it logs them.
    notes_in: ClassVar[Sequence[str]] = ("_metrics",)
    # Attributes that the trainer has while `compute_loss` is given a batch from `add_precomputed`.
    precomputed_attributes: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, trainer: Trainer, owner: type[Trainer]) -> None:
        super().__init__(trainer, owner)
        self._loss = _LossOfOutputs(self)
        self._warned = False

    @property
    def name(self) -> str:
        """Whose loss it is, in errors."""
        return self.owner.__name__

    def refuse_plugin(self) -> None:
        instead = 'use parallelism={"pipeline_parallel_size": ...}'
        raise not_over_pipelines(f"a HeterogeneousParallelPlugin with {self.name}", instead)

    def refuse_parts(self) -> None:
        raise NotImplementedError(
            f"context_parallel_size with a {type(self.trainer).__name__}, which looks at whole sequences itself: train "
            "with PipelineTrainer or PipelineSFTTrainer"
        )

    def while_made(self) -> AbstractContextManager[None]:
        return with_fused_head_of_stages(type(self.trainer))

    def begin(self) -> None:
        super().begin()
        if self.engine.options.loss_chunk_tokens is not None:
            raise not_over_pipelines(
                f"loss_chunk_tokens with {self.name}", "leave it out: its loss is of log-probabilities"
            )

    # -- what differs between trainers -------------------------------------------------------------------------------

    def add_precomputed(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch with what its loss needs besides the outputs of one forward. Runs without gradients, on every
        rank, and may call the model."""
        return inputs

    def microbatches(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The microbatches of a batch."""
        sizes = self.sizes(size := batch_size_of(batch))
        return split_batch(batch, size, sizes)

    def join_rows(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of the model's output for a batch, from those for its microbatches."""
        return torch.cat(list(rows))

    def terms(self) -> Sequence[Term]:
        """The means that add up to the loss."""
        return [Term(batch_size_of)]

    # -- a training step -------------------------------------------------------------------------------------------

    def sizes(self, num_samples: int) -> list[int]:
        """The numbers of samples in the microbatches of a batch."""
        engine, options = self.engine, self.engine.options
        default = DEFAULT_MICROBATCHES_PER_RANK * engine.context.pipeline.num_ranks
        return microbatch_sizes(num_samples, options.num_microbatches, options.microbatch_size, default)

    def step_inputs(
        self, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None
    ) -> Mapping[str, Any]:
        """As the base's. The number of labels is not used: TRL's losses count for themselves."""
        with torch.no_grad():
            self._whole = self.add_precomputed(inputs)
        microbatches = self.microbatches(self._whole)
        given = [
            {**self.arguments(microbatch), BATCH: microbatch, SHARES: shares}
            for microbatch, shares in zip(microbatches, self._shares(microbatches).tolist(), strict=True)
        ]
        place, num_pipelines = self.engine.place.pipeline, len(self.engine.layout.pipelines)
        samples = num_pipelines * sum(map(batch_size_of, given))
        return MicrobatchedBatch(given, samples, first_microbatch=place * len(given))

    def _shares(self, microbatches: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """The share of each microbatch in each of the loss's means: (microbatches, terms). A term that is a sum has
        the whole value of each microbatch: share 1."""
        columns = []
        for term in self.terms():
            elements = [1.0 if term.count is None else term.count(microbatch) for microbatch in microbatches]
            counts = torch.tensor(elements).double()
            total = 1.0 if term.count is None else float(counts.sum()) or 1.0
            columns.append(counts / total)
        return torch.stack(columns, 1)

    @property
    def criterion(self) -> Criterion:
        return self._loss

    def divisor(self, inputs: Mapping[str, Any]) -> int:
        """The loss is averaged over pipelines, as DDP averages over processes; and over the batches of an accumulation,
        unless it is divided for these already.

        transformers' `loss_is_scaled_for_ga` says whether it is: classes of trainers set it to True or False. If it is
        None, the loss is divided already if it was given the number of labels in the accumulation, or is made by a
        `compute_loss_func`. Of the classes
        derived from this one only `UsersLoss` passes that number.
        """
        trainer = self.trainer
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            by_number = trainer.model_accepts_loss_kwargs and NUM_ITEMS in inputs
            scaled = by_number or trainer.compute_loss_func is not None
        return len(self.engine.layout.pipelines) * (1 if scaled else trainer.current_gradient_accumulation_steps)

    def metrics(self, inputs: Mapping[str, Any]) -> Metrics:
        return OutputsOfStep(self)

    # -- compute_loss ------------------------------------------------------------------------------------------------

    def arguments(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What `compute_loss` calls the model with, for this batch or microbatch."""
        recorder = _ModelRecorder(base_of(self.trainer.model).forward)
        try:
            self._compute(self._trainer_view(recorder, {}), recorder, batch)
        except _ModelIsCalled as call:
            return call.arguments
        raise not_over_pipelines(
            f"{self.owner.__name__}.compute_loss", "it does not call the model. Train it without pipelines"
        )

    def share_of_loss(self, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """This microbatch's share of the loss of the batch; on the last stage."""
        summands = []
        for term, share in zip(self.terms(), inputs[SHARES], strict=True):
            loss = self.loss_of_microbatch(outputs, inputs[BATCH], term.changes)
            # With no element in this microbatch its mean is not a number.
            summands.append(loss * share if share else zero_loss(loss, outputs))
        return torch.stack(summands).sum()

    def loss_of_microbatch(
        self, outputs: Any, microbatch: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> torch.Tensor:
        """The loss of a microbatch, of which the model gave these outputs, with changed attributes."""
        stand_in = _ModelStandIn(outputs)
        view = self._trainer_view(stand_in, changes)
        try:
            return self._compute(view, stand_in, microbatch)
        except RuntimeError as error:
            asked = type(error) is RuntimeError and view.accelerator.asked
            if asked and self._can_compute_on_device(outputs, microbatch, changes):
                raise self._needs_others(f" ({error})") from error
            raise

    def _can_compute_on_device(self, outputs: Any, microbatch: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
        """Whether the loss raises nothing if what is gathered is where the outputs are. If so, it has failed before
        because it computes with what is gathered, which was on the CPU."""
        stand_in = _ModelStandIn(outputs)
        view = self._trainer_view(stand_in, changes)
        view.accelerator = _AcceleratorStandIn(self.trainer.accelerator, partial(_gathered_nan, None))
        try:
            self._compute(view, stand_in, microbatch)
        except Exception:
            return False
        return True

    def loss_and_metrics_of_batch(self, outputs: Any) -> torch.Tensor:
        """The loss of this pipeline's batch, with all that the trainer notes of it. Every rank calls this."""
        stand_in = _ModelStandIn(outputs)
        with torch.no_grad(), changed(self.trainer, self.precomputed_attributes):
            return self._compute(self.trainer, stand_in, self._whole)

    def _compute(self, trainer: Any, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = trainer.compute_loss_below(model, {**batch})
        return loss

    def _trainer_view(self, model: _ModelStandIn | _ModelRecorder, changes: Mapping[str, Any]) -> Any:
        """The trainer as its `compute_loss` sees it in a microbatch: what it notes there is dropped."""
        view = copy.copy(self.trainer)
        notes: dict[str, Any] = {name: defaultdict(partial(defaultdict, list)) for name in self.notes_in}
        vars(view).update(
            model=model,
            accelerator=_AcceleratorStandIn(self.trainer.accelerator, self.answer_without_ranks),
            **{**notes, **self.precomputed_attributes, **changes},
        )
        return view

    def answer_without_ranks(self, call: str, *args: Any, **kwargs: Any) -> Any:
        """What a call of the accelerator over all ranks gives in a microbatch, where no other rank answers. It is on
        the CPU: no host waits for it."""
        return _gathered_nan("cpu", call, *args, **kwargs)

    def check(self, whole: torch.Tensor, summed: torch.Tensor) -> None:
        """Compare the loss of the batch with the sum of its microbatches'. Raises ValueError if that sum alone is NaN;
        else warns, once, if they differ or routers were split."""
        if torch.isnan(summed) and not torch.isnan(whole):
            raise self._needs_others()
        # More than sums in another order make of it.
        apart = abs(whole - summed) > torch.finfo(whole.dtype).eps ** 0.75 * (1 + abs(whole))
        routed = getattr(self.trainer, "aux_loss_enabled", False) and self.engine.last_step.num_microbatches > 1
        if (apart or routed) and not self._warned:
            self._warned = True
            what = "the loss of its routers" if routed else "the loss"
            warnings.warn(
                f"{what} of {type(self.trainer).__name__} is no mean over samples or tokens: {AS_ACCUMULATED}",
                stacklevel=2,
            )

    def _needs_others(self, seen: str = "") -> ValueError:
        reason = (
            f"its loss depends on what it gathers from other processes{seen}. Train it without pipelines, or write the "
            "loss as a criterion: docs/your_own_loss.md"
        )
        return not_over_pipelines(f"{self.owner.__name__}.compute_loss", reason)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        model: Callable[..., Any],
        inputs: Mapping[str, Any],
        num_items_in_batch: torch.Tensor | int | None,
        return_outputs: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        given = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        loss = self.trainer.compute_loss_below(model, {**inputs}, **given)
        return loss if return_outputs else (loss, None)


class _LossOfOutputs:
    """The criterion of an `OwnLoss`."""

    reduction = "sum"
    own_inputs = (BATCH, SHARES)

    def __init__(self, adapter: OwnLoss) -> None:
        self._adapter = adapter

    def __call__(self, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self._adapter.share_of_loss(outputs, inputs)


class OutputsOfStep:
    """Keeps the outputs of a step's microbatches, without their graphs, and lets the trainer see them as one batch."""

    def __init__(self, adapter: OwnLoss) -> None:
        self._adapter = adapter
        self._outputs: list[Mapping[str, Any]] = []
        self._shares: list[float] = []

    def add(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        if self._adapter.engine.context.holds_output:
            kept = {name: value for name, value in outputs.items() if name != "loss" and not isinstance(value, Cache)}
            self._outputs.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, kept))
            self._shares.append(inputs[SHARES][0])

    def note(self) -> None:
        adapter, engine = self._adapter, self._adapter.engine
        merged = None
        if self._outputs:
            merged = NamedOutput(OUTPUT_FORM, **join_outputs(self._outputs, self._shares, adapter.join_rows))
        with engine.together(Call.SHARE, among=Among.PIPELINE):
            outputs = share_output(merged, engine.context, OUTPUT_FORM)
        whole = adapter.loss_and_metrics_of_batch(outputs)
        adapter.check(whole.cpu(), torch.as_tensor(engine.last_step.loss, dtype=whole.dtype))


def join_outputs(outputs: Sequence[Mapping[str, Any]], shares: Sequence[float], join_rows: JoinRows) -> dict[str, Any]:
    """The fields of the output of a batch from those of its microbatches, also inside tuples. A tensor of shape
    (), such as the loss of routers, is weighted as it was trained: by the `shares` of the microbatches in the loss's
    first mean. What is no tensor is that of the first microbatch."""
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(chain(*outputs)):
        having = [index for index, output in enumerate(outputs) if output.get(name) is not None]
        if having:
            total = sum(shares[index] for index in having) or 1.0
            weights = [shares[index] / total for index in having]
            join = partial(_join_leaves, join_rows, weights)
            joined[name] = pytree.tree_map(join, *(outputs[index][name] for index in having))
    return joined


def _join_leaves(join_rows: JoinRows, weights: Sequence[float], *leaves: Any) -> Any:
    if not isinstance(leaves[0], torch.Tensor):
        return leaves[0]
    if leaves[0].dim():
        return join_rows(leaves)
    return torch.stack([leaf * weight for leaf, weight in zip(leaves, weights, strict=True)]).sum()


class _ModelIsCalled(BaseException):
    """Ends a `compute_loss` where it calls the model. It is no `Exception`, so that nobody's code swallows it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class _ModelRecorder:
    """Stands for a model with this `forward`: the call of it ends `compute_loss`, and says what the arguments are."""

    training = True

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._names = inspect.signature(forward).parameters

    def __call__(self, *given: Any, **named: Any) -> Any:
        raise _ModelIsCalled({**dict(zip(self._names, given, strict=False)), **named})


class _ModelStandIn:
    """Stands for the model where its outputs are there already."""

    training = True

    def __init__(self, outputs: Any) -> None:
        self._outputs, self._called = outputs, False

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self._called:
            raise not_over_pipelines(
                "compute_loss",
                "it calls the model a second time, of which there are no outputs"
                ". Let it call the model once, or train it without pipelines",
            )
        self._called = True
        return self._outputs


def _gathered_nan(device: str | None, call: str, *args: Any, **kwargs: Any) -> Any:
    """In place of what is gathered: not a number, so that a loss which depends on it shows. It is on `device`, or on
    that of what was given."""
    tensors = next(iter((*args, *kwargs.values())), None)
    if call == "pad_across_processes":
        return tensors

    def nan(given: torch.Tensor) -> torch.Tensor:
        return torch.full(given.shape, torch.nan, device=device or given.device)

    return pytree.tree_map_only(torch.Tensor, nan, tensors)


class _AcceleratorStandIn:
    """Stands for the accelerator in a microbatch on the last stage. `answer` answers in place of the other ranks;
    `asked`: whether it has."""

    def __init__(self, accelerator: Any, answer: Callable[..., Any]) -> None:
        self._accelerator, self._answer, self.asked = accelerator, answer, False

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS_OF_ALL_RANKS:
            return getattr(self._accelerator, name)
        self.asked = True
        return partial(self._answer, name)


@contextmanager
def changed(trainer: Trainer, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a trainer has these attributes of its own."""
    with ExitStack() as stack:
        for name, value in attributes.items():
            stack.enter_context(mock.patch.object(trainer, name, value))
        yield

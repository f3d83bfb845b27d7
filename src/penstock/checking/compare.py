"""On each rank of a pipeline: a model beside itself unsplit, in all that a run does with it."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from penstock.api.initialize import initialize
from penstock.checking.copies import copied
from penstock.checking.reasons import NOT_FOUND, OF_ACCUMULATION, inputs_of_forward, near, reason_of_difference
from penstock.config.configuration import Configuration
from penstock.modeling.graph.dummy_inputs import dtype_of
from penstock.modeling.graph.loss import Criterion, loss_by
from penstock.modeling.stage.outputs import NamedOutput
from penstock.nested import named_tensors
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.inputs import AS_ACCUMULATED

EXACT, ACCUMULATED, NOT_TRIED = "exact", "exact against accumulation", "not tried"
REFUSED, DIFFERS, FAILED = "refused", "differs", "failed"
# What sums in another order may change, by the type that the model runs in, relative to the largest entry.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-4}
# What the largest entry of the first gradient changes a weight by.
FIRST_CHANGE = 0.01
NEW_TOKENS = 4

Named = Mapping[str, Any]
# Parts of a batch, each with its share of the batch's loss; a single one for the whole batch at once.
Pieces = Sequence[tuple[Named, float]]
Losses = Callable[[], Iterable[torch.Tensor]]  # of one step


@dataclass(frozen=True)
class Row:
    """How one thing came out."""

    what: str  # a row of the table in docs/verify.md; or "training", which then failed
    result: str
    difference: float | None = None  # the largest, relative to the largest entry; None where nothing was compared
    where: str = ""  # the parameter, output or step that has it
    reason: str = ""  # why it is not exact


@dataclass
class TrainingResult:
    """What training gave: the loss of each step, the gradients of the first, and the model after the last."""

    model: Any
    pieces: Pieces
    losses: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    rate: float

    @classmethod
    def of(cls, model: Any, losses: Losses, steps: int, rate: float = 0.0, pieces: Pieces = ()) -> TrainingResult:
        """Train with SGD and momentum; 0 chooses a `rate` by the first gradients."""
        totals, gradients, optimizer = {}, {}, None
        for number in range(1, steps + 1):
            model.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for loss in losses():
                loss.backward()
                total += loss.detach()
            totals[f"step {number}"] = total
            if optimizer is None:
                named = model.named_parameters(remove_duplicate=False)
                gradients = {name: None if each.grad is None else each.grad.clone() for name, each in named}
                rate = rate or FIRST_CHANGE / _largest_gradient(gradients)
                optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
            optimizer.step()
        return cls(model, pieces, totals, gradients, rate)


class Comparison:
    """A model parallelised on the ranks of this job, beside the same model unsplit on each of them. It is given whole,
    without noise, in training mode, and not changed. Raises whatever the unsplit model raises."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Named,
        configuration: Configuration,
        criterion: Criterion | None = None,
        steps: int = 1,
    ) -> None:
        self.initial, self.inputs, self.configuration = model, inputs, configuration
        self.criterion, self.steps = criterion, steps
        self.tolerance = TOLERANCES[dtype_of(model)]
        # Those that were chosen, once they are.
        self.schedule: Any = configuration.schedule
        self.num_stages: Any = configuration.pipeline_parallel_size
        self.whole = self._unsplit([(inputs, 1.0)])

    def rows(self, folder: Path | None = None) -> list[Row]:
        """What came out. Every rank calls it; `folder`, an empty one, is for a checkpoint."""
        model: Any = copied(self.initial)
        own_module = not isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config")
        example = inputs_of_forward(model, self.inputs) if own_module else None
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                initialize(model, self.configuration, self.criterion, example_inputs=example)
                self.schedule = model.pipeline.make_schedule(1).name
                self.num_stages = model.pipeline.context.pipeline.num_stages
                losses = lambda: (output.loss for output in model(**self.inputs))  # noqa: E731
                ours = TrainingResult.of(model, losses, self.steps, self.whole.rate)
                if self.configuration.context_parallel_size > 1:  # each pipeline has a part of each loss
                    values = model.pipeline.sum_over_pipelines([*map(float, ours.losses.values())])
                    totals = torch.tensor(values, dtype=torch.float64).unbind()
                    ours = replace(ours, losses=dict(zip(ours.losses, totals, strict=True)))
        except Exception as error:
            return [_failed("training", error)]
        messages = [str(w.message) for w in caught if AS_ACCUMULATED in str(w.message)]
        self.model, context = model, model.pipeline.context
        ranks = Ranks(context.groups.world_control, context.board.guard)
        by_rank = ranks.exchange(messages, "comparing warnings")  # only the rank with the loss warns of it
        self.warned = next((text.partition(f": {AS_ACCUMULATED}")[0] for texts in by_rank for text in texts), "")
        self.losses, scale, weights = ours.losses, FIRST_CHANGE / self.whole.rate, _tensors(model)
        tries: dict[str, Callable[[], Row | None]] = {
            "loss": lambda: self._row("loss", ours.losses, lambda run: run.losses),
            "gradients": lambda: self._row(
                "gradients", ours.gradients, lambda run: self._own(ours.gradients, run.gradients), scale
            ),
            "weights": lambda: self._row("weights", weights, lambda run: self._own(weights, _tensors(run.model))),
            "evaluation": self._evaluation,
            "tokens": self._tokens,
            "checkpoint": lambda: None if folder is None else self._checkpoint(folder),
        }
        rows = []
        for what, attempt in tries.items():
            try:
                rows += [row for row in [attempt()] if row is not None]
            except Exception as error:
                rows.append(_failed(what, error))
        # A rank that drops its model while another is still in a call is lost to that one.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        return rows

    def _unsplit(self, pieces: Pieces, rate: float = 0.0) -> TrainingResult:
        model = copied(self.initial)
        losses = lambda: (self._loss(model, inputs) * share for inputs, share in pieces)  # noqa: E731
        return TrainingResult.of(model, losses, self.steps, rate, pieces)

    def _loss(self, model: nn.Module, inputs: Named) -> torch.Tensor:
        loss = loss_by(self.criterion, model(**inputs_of_forward(model, inputs)), inputs)
        if loss is None:
            raise ValueError(f"the unsplit model computes no loss from {sorted(inputs)}: give labels, or a criterion")
        return loss

    @functools.cached_property
    def _accumulated(self) -> TrainingResult:
        """The unsplit model, accumulating over the microbatches that the pipeline has.

        Their losses are weighed by samples, or by tokens: by what gives the whole batch's loss in evaluation, where no
        statistics of the batch are in the way; where the loss itself is warned of, by what gives the pipeline's.
        """
        parts, sizes = self.model.pipeline.microbatches(self.inputs)
        ids = [n for n, v in self.inputs.items() if isinstance(v, torch.Tensor) and v.dtype == torch.int64 and v.dim()]
        counts = [[int((part[name][..., start:] != -100).sum()) for part in parts] for name in ids for start in (0, 1)]
        kinds = [[each / sum(weights) for each in weights] for weights in [sizes, *counts] if sum(weights)]
        kinds.append([1.0] * len(parts))  # of a sum
        of_loss = "the loss of" in self.warned
        model = copied(self.initial).train(of_loss)
        with torch.no_grad():
            losses = [float(self._loss(model, part)) for part in parts]
            expected = float(self.losses["step 1"] if of_loss else self._loss(model, self.inputs))
        # Samples that are nearly as hard as each other give nearly the same by any of them.
        totals = [sum(map(operator.mul, kind, losses)) for kind in kinds]
        nearest = min(totals, key=lambda total: abs(total - expected))
        shares = kinds[totals.index(nearest)] if near(nearest, expected) else kinds[0]
        return self._unsplit(list(zip(parts, shares, strict=True)), self.whole.rate)

    def _row(
        self, what: str, ours: Named, theirs: Callable[[TrainingResult], Named], scale: float | None = None
    ) -> Row:
        difference, where = _furthest(ours, theirs(self.whole), scale)
        if difference <= self.tolerance:
            return Row(what, EXACT, difference, where)
        beside, at = _furthest(ours, theirs(self._accumulated), scale)
        alike = beside <= self.tolerance
        if alike and self.warned:
            return Row(what, ACCUMULATED, beside, at, self._reason_of_accumulation)
        why = OF_ACCUMULATION if alike and self._why == NOT_FOUND else self._why
        return Row(what, DIFFERS, difference, where, why)

    @functools.cached_property
    def _reason_of_accumulation(self) -> str:
        with torch.no_grad():
            model = copied(self.initial).eval()
            parts = sum(float(self._loss(model, part)) for part, _ in self._accumulated.pieces)
            is_sum = "the loss of" in self.warned and near(parts, float(self._loss(model, self.inputs)))
        advice = '. It is a sum: return the mean, or give the criterion an attribute reduction = "sum"'
        return self.warned + (advice if is_sum else "")

    @functools.cached_property
    def _why(self) -> str:
        return reason_of_difference(self.initial, self.inputs, self._accumulated.pieces, self._loss)

    def _own(self, ours: Named, named: Named) -> Named:
        """Of the unsplit model's tensors, what this rank holds, which are those of `ours`."""
        held, sharding = {n: named[n] for n in ours if n in named}, self.model.pipeline.split.tensor_parallel
        for name in held.keys() & (sharding.shards.keys() if sharding is not None else ()):
            if held[name] is not None:
                held[name] = sharding.shards[name].take(held[name], sharding.index, sharding.size)
        return held

    def _evaluation(self) -> Row:
        self.model.eval()
        with torch.no_grad():
            output = self.model(**self.inputs)
        ours = _outputs(output.original() if isinstance(output, NamedOutput) else output)
        if self.criterion is not None:
            ours["loss"] = output.loss
        return self._row("evaluation", ours, self._evaluated)

    def _evaluated(self, run: TrainingResult) -> Named:
        run.model.eval()
        with torch.no_grad():
            theirs = _outputs(run.model(**inputs_of_forward(run.model, self.inputs)))
            if len(run.pieces) > 1:  # a router's balance, say, is that of each microbatch
                theirs = {name: value for name, value in theirs.items() if value.dim() or name == "loss"}
            if self.criterion is not None or "loss" in theirs:
                losses = [self._loss(run.model, inputs) * share for inputs, share in run.pieces]
                theirs["loss"] = torch.stack(losses).sum()
        return theirs

    def _tokens(self) -> Row | None:
        """Greedy tokens, of a model of transformers that generates, for the first microbatch without its padding, which
        would belong on the left, and with the prompt no longer than what the model was trained with."""
        known: Any = self.initial
        if not isinstance(known, PreTrainedModel) or not known.can_generate():
            return None
        self.model.eval()
        part = inputs_of_forward(known, self.model.pipeline.microbatches(self.inputs)[0][0])
        prompt = {name: value for name, value in part.items() if name != "labels" and "decoder" not in name}
        ids, mask = prompt.get("input_ids"), prompt.get("attention_mask")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            whole = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else prompt.pop("attention_mask")
            kept = whole.bool().all(0).nonzero().flatten()[: max(1, ids.shape[1] - NEW_TOKENS)]
            prompt = {n: v[:, kept] if getattr(v, "shape", None) == ids.shape else v for n, v in prompt.items()}
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        try:
            self.whole.model.eval().generate(**prompt, **options)
        except Exception as error:
            return Row("tokens", NOT_TRIED, reason=f"generate() does not run unsplit ({_short(error)})")
        ours = {"": self.model.generate(**prompt, **options)}
        return self._row("tokens", ours, lambda run: {"": run.model.eval().generate(**prompt, **options)})

    def _checkpoint(self, folder: Path) -> Row:
        """The weights of an ordinary checkpoint, read without Penstock: bit for bit those that were saved."""
        if hasattr(self.model, "peft_config"):
            return Row("checkpoint", NOT_TRIED, reason="adapters are saved as PEFT's; load them with PEFT")
        again, saved = copied(self.initial), self.whole.model.state_dict()
        try:
            again.load_state_dict(saved)
        except Exception as error:
            why = f"load_state_dict() does not take what state_dict() gives, unsplit either ({_short(error)})"
            return Row("checkpoint", NOT_TRIED, reason=why)
        odd = {name: type(value).__name__ for name, value in saved.items() if not isinstance(value, torch.Tensor)}
        # safetensors has no complex numbers in double precision
        double = any(getattr(value, "dtype", None) == torch.complex128 for value in saved.values())
        try:
            self.model.save_pretrained(os.fspath(folder), safe_serialization=not double)
        except Exception as error:
            if not odd:
                raise
            layout = ", ".join(f"{name} is a {kind}" for name, kind in odd.items())
            why = (
                f"its state_dict() has a layout of its own ({layout}), which is not saved over stages ({_short(error)})"
            )
            return Row("checkpoint", REFUSED, reason=why)
        if isinstance(self.initial, PreTrainedModel):
            again = type(self.initial).from_pretrained(folder, dtype=self.initial.dtype)
        elif double:
            again.load_state_dict(torch.load(folder / "pytorch_model.bin"))
        else:
            again.load_state_dict(load_file(folder / "model.safetensors"))
        weights = {name: value for name, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)}
        difference, where = _furthest(weights, self._own(weights, again.state_dict()))
        exact = difference == 0
        return Row("checkpoint", EXACT if exact else DIFFERS, difference, where, "" if exact else self._why)


def _tensors(model: nn.Module) -> Named:
    """The parameters and buffers, under all of their names; a `state_dict()` may have any layout."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _outputs(output: Any) -> dict[str, torch.Tensor]:
    """The tensors of an output by name, its loss as `loss`."""
    loss, named = loss_by(None, output, {}), named_tensors({"output": output})
    return {"loss" if value is loss else name.removeprefix("output."): value for name, value in named.items()}


def _furthest(ours: Named, theirs: Named, scale: float | None = None) -> tuple[float, str]:
    """The largest difference, in parts of `scale` or of a tensor's largest entry, at least 1; and the name with it."""
    differences = (
        (_difference(ours[name], each, scale) if name in ours else math.inf, name) for name, each in theirs.items()
    )
    return max(differences, default=(0.0, ""))


def _difference(ours: torch.Tensor | None, theirs: torch.Tensor | None, scale: float | None) -> float:
    """Infinite for unlike shapes; where one is None, the other is to be zero; 0 for one infinity, or nan, in both."""
    if ours is None or theirs is None:
        return math.inf if any(each is not None and each.any() for each in (ours, theirs)) else 0.0
    if ours.shape != theirs.shape:
        return math.inf
    same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
    apart = torch.where(same, 0.0, (_widened(ours) - _widened(theirs)).abs())
    largest = float(apart.nan_to_num(nan=math.inf).max()) if apart.numel() else 0.0
    return largest / (scale or max(1.0, _largest([theirs])))


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """In double precision, complex if the tensor is."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float64))


def _largest_gradient(gradients: Mapping[str, torch.Tensor | None]) -> float:
    """The largest absolute entry. Raises ValueError where gradients say nothing."""
    for name, each in gradients.items():
        if each is not None and not each.isfinite().all():
            raise ValueError(
                f"the unsplit model's gradient of {name} is not finite (NaN or infinite) for this batch, so that "
                "nothing can be compared: give other inputs, or mend the model or the criterion"
            )
    if largest := _largest(gradients.values()):
        return largest
    raise ValueError(
        "the unsplit model has no gradients from this batch, so that there is nothing to compare"
        ": give inputs by which parameters are trained, and let some require gradients"
    )


def _largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """The largest finite absolute entry of all; 0 if there is none."""
    finite = (_widened(each)[each.isfinite()].abs() for each in tensors if each is not None)
    return max((float(each.max()) for each in finite if each.numel()), default=0.0)


def _failed(what: str, error: Exception) -> Row:
    if isinstance(error, NotImplementedError):
        return Row(what, REFUSED, reason=str(error).partition("is not implemented... ")[2] or str(error))
    return Row(what, FAILED, reason=_short(error))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]

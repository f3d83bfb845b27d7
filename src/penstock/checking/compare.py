"""On each rank of a pipeline: a model beside itself unsplit, in all that a run does with it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from penstock.checking.reasons import reason_of_difference, taken
from penstock.config import Configuration
from penstock.data.batch import microbatches_of
from penstock.data.media import MediaTokens
from penstock.initialize import initialize
from penstock.modeling.graph.loss import Criterion, loss_by
from penstock.modeling.stage.named_output import NamedOutput
from penstock.nested import named_tensors
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.engine import DEFAULT_MICROBATCHES_PER_STAGE

EXACT = "exact"
ACCUMULATED = "exact against accumulation"
NOT_TRIED = "not tried"
REFUSED = "refused"
DIFFERS = "differs"
FAILED = "failed"
# Sums in another order, in the type the model runs in, relative to the largest entry.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-4}
# What the largest entry of the first gradient changes a weight by.
FIRST_CHANGE = 0.01
NEW_TOKENS = 4

# Parts of a batch, each with its share of the batch's loss; a single one for the whole batch at once.
Pieces = Sequence[tuple[Mapping[str, Any], float]]


@dataclass(frozen=True)
class Row:
    """How one thing came out.

    Attributes:
        what: `"loss"`, `"gradients"`, `"weights"`, `"evaluation"`, `"tokens"`, `"checkpoint"`; or `"training"`, which
            then failed.
        result: `EXACT`, `ACCUMULATED`, `NOT_TRIED`, `REFUSED`, `DIFFERS` or `FAILED`.
        difference: the largest, relative to the largest entry; None where nothing was compared.
        where: the parameter, output or step that has it.
        reason: why, but for `EXACT`.
    """

    what: str
    result: str
    difference: float | None = None
    where: str = ""
    reason: str = ""


@dataclass
class Trained:
    """What training gave: the loss of each step, the gradients of the first, and the model after the last."""

    model: Any
    pieces: Pieces
    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    rate: float

    @classmethod
    def of(cls, model: nn.Module, pieces: Pieces, step: Callable[[], float], steps: int, rate: float = 0.0) -> Trained:
        """Train with SGD and momentum. `step` accumulates gradients and returns the loss; 0 chooses a `rate`."""
        losses, gradients, optimizer = [], {}, None
        for _ in range(steps):
            model.zero_grad()
            losses.append(step())
            if optimizer is None:
                named = model.named_parameters(remove_duplicate=False)
                gradients = {name: None if each.grad is None else each.grad.clone() for name, each in named}
                rate = rate or FIRST_CHANGE / _largest(gradients.values())
                optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
            optimizer.step()
        return cls(model, pieces, losses, gradients, rate)


class Comparison:
    """A model parallelised on the ranks of this job, beside the same model unsplit on each of them.

    Args:
        model: whole, without noise, in training; left alone.
        inputs: a batch.
        steps: of training.

    Raises whatever the unsplit model raises.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        configuration: Configuration,
        criterion: Criterion | None = None,
        steps: int = 1,
    ) -> None:
        self.initial, self.inputs, self.configuration = model, inputs, configuration
        self.criterion, self.steps = criterion, steps
        self.warned: str | None = None
        self._losses: Sequence[float] = ()
        dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
        self.tolerance = TOLERANCES[dtype]
        self.whole = self._unsplit([(inputs, 1.0)])

    def rows(self, folder: Path | None = None) -> list[Row]:
        """What came out. Every rank calls it.

        Args:
            folder: an empty one on all ranks, for a checkpoint.
        """
        model: Any = copy.deepcopy(self.initial)
        own_module = not isinstance(model, PreTrainedModel)
        example = taken(model, self.inputs) if own_module and not hasattr(model, "peft_config") else None
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                initialize(model, self.configuration, self.criterion, example_inputs=example)
                ours = Trained.of(model, (), lambda: self._step(model), self.steps, self.whole.rate)
        except Exception as error:
            return [_failed("training", error)]
        said = [str(w.message) for w in caught if "accumulating over the same microbatches" in str(w.message)]
        context = model.pipeline.context
        ranks = Ranks(context.groups.world_control, context.board.guard)
        told = ranks.exchange(said, "comparing warnings")  # only the rank with the loss warns of it
        self.warned = next((text.partition(": the run equals")[0] for texts in told for text in texts), None)
        self._losses = ours.losses
        rows = [
            self._row("loss", lambda run: _of_losses(ours.losses, run.losses)),
            self._row("gradients", lambda run: self._of_gradients(ours, run)),
            self._row("weights", lambda run: self._of_weights(model, run.model)),
        ]
        tries: dict[str, Callable[[], Row | None]] = {
            "evaluation": lambda: self._evaluation(model),
            "tokens": lambda: self._tokens(model),
            "checkpoint": lambda: None if folder is None else self._checkpoint(model, folder),
        }
        for what, attempt in tries.items():
            try:
                rows += [row for row in [attempt()] if row is not None]
            except Exception as error:
                rows.append(_failed(what, error))
        # A rank that drops its model while another is still in a call is lost to that one.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        return rows

    def _step(self, model: Any) -> float:
        total = 0.0
        for output in model(**self.inputs):
            output.loss.backward()
            total += float(output.loss.detach())
        return total

    def _unsplit(self, pieces: Pieces, rate: float = 0.0) -> Trained:
        model: Any = copy.deepcopy(self.initial)

        def step() -> float:
            total = 0.0
            for inputs, share in pieces:
                loss = self._loss(model, inputs) * share
                loss.backward()
                total += float(loss.detach())
            return total

        return Trained.of(model, pieces, step, self.steps, rate)

    def _loss(self, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        loss = loss_by(self.criterion, model(**taken(model, inputs)), inputs)
        if loss is None:
            raise ValueError(f"the unsplit model computes no loss from {sorted(inputs)}: give labels, or a criterion")
        return loss

    @functools.cached_property
    def _accumulated(self) -> Trained:
        """The unsplit model, accumulating over the microbatches that the pipeline has."""
        stages = self.configuration.pipeline_parallel_size
        parts, sizes = microbatches_of(
            self.inputs,
            getattr(self.initial, "main_input_name", None),
            self.configuration.num_microbatches,
            self.configuration.micro_batch_size,
            DEFAULT_MICROBATCHES_PER_STAGE * int(stages),
            MediaTokens.of(getattr(self.initial, "config", None)),
            self.configuration.batch_dim or {},
        )
        return self._unsplit(list(zip(parts, self._shares(parts, sizes), strict=True)), self.whole.rate)

    def _shares(self, parts: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[float]:
        """What the losses of microbatches are weighed by: samples, or tokens.

        By what gives the whole batch's loss in evaluation, where no statistics of the batch are in the way; where the
        loss itself is warned of, and nothing gives it, by what gives the pipeline's.
        """
        ids = [n for n, v in self.inputs.items() if isinstance(v, torch.Tensor) and v.dtype == torch.int64 and v.dim()]
        labels = [[part[name][..., start:] for part in parts] for name in ids for start in (0, 1)]
        weights = [list(sizes), *([int((part != -100).sum()) for part in each] for each in labels)]
        kinds = [[each / sum(counts) for each in counts] for counts in weights if sum(counts)]
        of_loss = self.warned is not None and "the loss of" in self.warned
        model = copy.deepcopy(self.initial).train(of_loss)
        with torch.no_grad():
            losses = [float(self._loss(model, part)) for part in parts]
            expected = self._losses[0] if of_loss else float(self._loss(model, self.inputs))
        totals = [sum(loss * share for loss, share in zip(losses, shares, strict=True)) for shares in kinds]
        best = min(range(len(kinds)), key=lambda index: abs(totals[index] - expected))
        return kinds[best] if abs(totals[best] - expected) <= 1e-6 * max(1.0, abs(expected)) else kinds[0]

    def _row(self, what: str, compared: Callable[[Trained], tuple[float, str]]) -> Row:
        difference, where = compared(self.whole)
        if difference <= self.tolerance:
            return Row(what, EXACT, difference, where)
        if self.warned is not None:
            beside, at = compared(self._accumulated)
            if beside <= self.tolerance:
                return Row(what, ACCUMULATED, beside, at, self._reason_of_accumulation)
        return Row(what, DIFFERS, difference, where, self._why)

    @functools.cached_property
    def _reason_of_accumulation(self) -> str:
        with torch.no_grad():
            model = copy.deepcopy(self.initial).eval()
            parts = [float(self._loss(model, part)) for part, _ in self._accumulated.pieces]
            whole = float(self._loss(model, self.inputs))
        if "the loss of" in str(self.warned) and abs(sum(parts) - whole) <= 1e-6 * max(1.0, abs(whole)):
            return f'{self.warned}. It is a sum: return the mean, or give the criterion an attribute reduction = "sum"'
        return str(self.warned)

    @functools.cached_property
    def _why(self) -> str:
        parts = [part for part, _ in self._accumulated.pieces]
        return reason_of_difference(self.initial, self.inputs, parts, self._loss)

    def _own(self, model: Any, name: str, reference: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a weight of the unsplit model."""
        sharding = model.pipeline.split.tensor_parallel
        if sharding is None or name not in sharding.shards:
            return reference
        taken: torch.Tensor = sharding.shards[name].take(reference, sharding.index, sharding.size)
        return taken

    def _of_gradients(self, ours: Trained, theirs: Trained) -> tuple[float, str]:
        """Where one has no gradient the other's is to be zero."""
        scale, found = _largest(theirs.gradients.values()), []
        for name, gradient in ours.gradients.items():
            reference = theirs.gradients[name]
            wanted = None if reference is None else self._own(ours.model, name, reference)
            if gradient is not None and wanted is not None:
                found.append((_difference(gradient, wanted, scale), name))
            elif any(each is not None and each.any() for each in (gradient, wanted)):
                found.append((float("inf"), f"{name} ({'no gradient' if gradient is None else 'none unsplit'})"))
        return max(found, default=(0.0, ""))

    def _of_weights(self, ours: Any, theirs: nn.Module) -> tuple[float, str]:
        reference, found = theirs.state_dict(), []
        for name, value in ours.state_dict().items():
            if isinstance(value, torch.Tensor) and isinstance(reference.get(name), torch.Tensor):
                found.append((_difference(value, self._own(ours, name, reference[name])), name))
        return max(found, default=(0.0, ""))

    def _evaluation(self, model: Any) -> Row:
        model.eval()
        with torch.no_grad():
            output = model(**self.inputs)
        found = _outputs(output.original() if isinstance(output, NamedOutput) else output)
        if self.criterion is not None:
            found["loss"] = output.loss
        row = self._row("evaluation", lambda run: _of_outputs(found, self._evaluated(run)))
        if row.result == DIFFERS and "use_cache" in inspect.signature(self.initial.forward).parameters:
            without = self._evaluated(self.whole, use_cache=False)
            if _of_outputs(found, without)[0] <= self.tolerance:
                why = "not so from the unsplit model with use_cache=False, which is how Penstock evaluates"
                return Row(row.what, DIFFERS, row.difference, row.where, why)
        return row

    def _evaluated(self, run: Trained, **options: Any) -> dict[str, torch.Tensor]:
        run.model.eval()
        with torch.no_grad():
            found = _outputs(run.model(**taken(run.model, self.inputs), **options))
            if len(run.pieces) > 1:  # a router's balance, say, is that of each microbatch
                found = {name: value for name, value in found.items() if value.dim() or name == "loss"}
            if self.criterion is not None or "loss" in found:
                losses = [self._loss(run.model, inputs) * share for inputs, share in run.pieces]
                found["loss"] = torch.stack(losses).sum()
        return found

    def _tokens(self, model: Any) -> Row | None:
        """Greedy tokens, of a model of transformers that generates."""
        known: Any = self.initial
        if not isinstance(known, PreTrainedModel) or not known.can_generate():
            return None
        model.eval()
        given = {n: v for n, v in taken(known, self.inputs).items() if n != "labels" and "decoder" not in n}
        media = MediaTokens.of(known.config)
        prompt = microbatches_of(given, known.main_input_name, None, 2, media=media)[0][0]
        # Without padding, which belongs on the left here, and no longer in all than what the model was trained with.
        mask, ids = prompt.pop("attention_mask", None), prompt.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            whole = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask
            kept = whole.bool().all(0).nonzero().flatten()
            kept = kept[: max(1, min(len(kept), ids.shape[1] - NEW_TOKENS))]
            for name in ("input_ids", "mm_token_type_ids", "token_type_ids"):
                if name in prompt and prompt[name].shape == ids.shape:
                    prompt[name] = prompt[name][:, kept]
        elif mask is not None:
            prompt["attention_mask"] = mask
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        try:
            self.whole.model.eval().generate(**prompt, **options)
        except Exception as error:
            return Row("tokens", NOT_TRIED, reason=f"generate() does not run unsplit ({_short(error)})")
        found = model.generate(**prompt, **options)

        def compared(run: Trained) -> tuple[float, str]:
            expected = run.model.eval().generate(**prompt, **options)
            return (0.0, "") if torch.equal(found, expected) else (1.0, "other tokens")

        return self._row("tokens", compared)

    def _checkpoint(self, model: Any, folder: Path) -> Row:
        """The weights of an ordinary checkpoint, read without Penstock: bit for bit those that were saved."""
        if hasattr(model, "peft_config"):
            return Row("checkpoint", NOT_TRIED, reason="adapters are saved as PEFT's; load them with PEFT")
        model.save_pretrained(os.fspath(folder))
        if isinstance(self.initial, PreTrainedModel):
            again: nn.Module = type(self.initial).from_pretrained(folder, dtype=self.initial.dtype)
        else:
            again = copy.deepcopy(self.initial)
            again.load_state_dict(load_file(folder / "model.safetensors"))
        difference, where = self._of_weights(model, again)
        if difference == 0:
            return Row("checkpoint", EXACT, difference)
        return Row("checkpoint", DIFFERS, difference, where, self._why)


def _of_losses(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, str]:
    pairs = enumerate(zip(ours, theirs, strict=True), start=1)
    return max(
        (_difference(*torch.tensor([[a], [b]], dtype=torch.float64)), f"step {number} ({a:.6g}, unsplit {b:.6g})")
        for number, (a, b) in pairs
    )


def _outputs(output: Any) -> dict[str, torch.Tensor]:
    """The tensors of an output by name, its loss as `loss`."""
    loss, found = loss_by(None, output, {}), {}
    for name, value in named_tensors({"output": output}).items():
        found["loss" if value is loss else name.removeprefix("output.")] = value
    return found


def _of_outputs(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    missing = [(float("inf"), f"the output has no {name}") for name in theirs if name not in ours]
    found = [(_difference(ours[name], reference), name) for name, reference in theirs.items() if name in ours]
    return max(missing + found, default=(0.0, ""))


def _difference(ours: torch.Tensor, theirs: torch.Tensor, scale: float | None = None) -> float:
    """The largest difference of two tensors, in parts of `scale` or of the largest entry above 1; infinite for unlike
    shapes, 0 where both have one infinity, or no number."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
    apart = torch.where(same, 0.0, (ours.detach().double() - theirs.detach().double()).abs())
    return float(apart.nan_to_num(nan=float("inf")).max()) / (scale or max(1.0, _largest([theirs], 0.0)))


def _largest(tensors: Any, default: float | None = None) -> float:
    """The largest finite absolute entry of all."""
    entries = (each.detach().double().abs() for each in tensors if each is not None and each.numel())
    largest = max((float(each[each.isfinite()].max()) for each in entries if each.isfinite().any()), default=0.0)
    if largest or default is not None:
        return largest
    raise ValueError("the unsplit model has no gradients from this batch, so that there is nothing to compare")


def _failed(what: str, error: Exception) -> Row:
    if isinstance(error, NotImplementedError):
        return Row(what, REFUSED, reason=str(error).partition("is not implemented... ")[2] or str(error))
    return Row(what, FAILED, reason=_short(error))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]

"""Finds what a loss is, a mean, a sum or neither (`LossTrace.rule`), while a forward is traced.

Loss functions over classes are observed, and the targets that each is given are recognised as a function of the inputs.
What else is in the loss is followed through the operations that made it; see `reductions`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from penstock.data.microbatch import BatchDims, batch_dim
from penstock.modeling.graph.chunked_loss import ChunkedLogits
from penstock.modeling.graph.dataflow import DataDependentTensor, DataFlow, ForwardArgument, Sources, TensorOutsideUnits
from penstock.modeling.graph.loss import (
    ClassWeights,
    CriterionError,
    LossRule,
    LossTerm,
    batch_size,
)
from penstock.modeling.graph.reductions import MIXED, LossParts, parts_of
from penstock.nested import map_tensors

# Arguments that hold what a loss compares with: `labels`, `next_sentence_label`, `start_positions`, `target_values`.
LABEL_NAMES = ("label", "target", "start_positions", "end_positions", "positions")


def is_label(name: str) -> bool:
    """Whether an argument of this name is compared with the model's output by a loss."""
    return any(part in name for part in LABEL_NAMES) and not name.startswith("position")


def label_placeholder(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What planning puts in place of an argument: for integer labels a fixed pattern of the classes 0 and 1. It has no
    symmetry, so labels, shifted labels and masked labels can be told apart, and a plan does not depend on what the
    labels are. Everything else is copied, as the model might change it in place."""
    if not is_label(name) or tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.dim() == 0:
        return tensor.detach().clone()
    # Bits of the Fibonacci word: aperiodic, and every shift of it differs within a few places.
    index = torch.arange(1, tensor.numel() + 1, dtype=torch.float64)
    golden = (1 + 5**0.5) / 2
    bits = ((index + 1) * golden).floor() - (index * golden).floor() - 1
    return bits.reshape(tensor.shape).to(dtype=tensor.dtype, device=tensor.device)


def with_more_samples(inputs: Mapping[str, Any], times: int, dims: BatchDims) -> dict[str, Any]:
    """The inputs with each sample so many times."""
    size = batch_size(inputs, dims)

    def repeated(name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = batch_dim(name, tensor, dims)
        has_samples = dim is not None and tensor.dim() > dim and tensor.shape[dim] == size
        return torch.cat([tensor] * times, dim or 0) if has_samples else tensor

    return {
        name: value * times
        if isinstance(value, list) and len(value) == size and all(isinstance(each, Mapping) for each in value)
        else map_tensors(repeated, name, value)
        for name, value in inputs.items()
    }


_signature = cache(inspect.signature)  # of torch's loss functions, which are a few


class LossCall(NamedTuple):
    """A loss function's call: the mean that it gives, and why that is not exact, if so."""

    term: LossTerm
    reason: str


class LossTrace:
    """Records the loss functions of one traced forward; `in_chunks`, whether one of them was of `ChunkedLogits`."""

    def __init__(self, inputs: Mapping[str, Any], flow: DataFlow) -> None:
        self.in_chunks = False
        # The last loss function that left it to the model's code to reduce its result.
        self._unreduced = ""
        self._inputs, self._flow = inputs, flow
        self._calls: list[LossCall] = []

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        bound = _signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        self.in_chunks |= isinstance(given["input"], ChunkedLogits)
        followed = given["reduction"] in ("mean", "sum") and given["size_average"] is given["reduce"] is None
        if not followed:
            self._unreduced = func.__name__
            self._calls.append(LossCall(LossTerm("samples"), ""))
            return
        with self._flow.pause():
            call = self._recognise(func.__name__, given)
        self._flow.record.use(pytree.tree_leaves((args, kwargs)))
        self._flow.record.begin(result, call=len(self._calls), is_sum=given["reduction"] == "sum")
        self._calls.append(call)

    def rule(
        self,
        loss: torch.Tensor,
        output: Any,
        again: Callable[[int], tuple[LossTrace, torch.Tensor] | None],
        reduction: str | None = None,
    ) -> LossRule:
        """The rule for the loss of an output.

        Args:
            again: the loss of a forward with so many times as many samples, where that works.
            reduction: what the loss's maker says of it: "sum", or nothing.
        """
        parts = self._flow.record.calls_alone(loss)
        if parts is None:
            larger = [again(times) for times in (2, 4)]
            pairs = [pair for pair in larger if pair is not None]
            if len(pairs) == 2:
                # Whatever tensors the code works on: the loss of what cannot be compared is not known.
                with suppress(NotImplementedError, RuntimeError, TypeError):
                    parts = parts_of([losses._flow.record for losses, _ in pairs], [loss for _, loss in pairs])
            if parts is None:
                parts = self._flow.record.used_calls(loss) | {MIXED}
        rule = LossRule((LossTerm("sum"),)) if reduction == "sum" else self._rule_of(parts)
        used = {part.call for part in parts}
        fields = (
            name
            for name, value in (output.items() if isinstance(output, Mapping) else ())
            if name != "loss" and isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()
            and any(part.call in used for part in self._flow.record.used_calls(value))
        )  # fmt: skip
        return replace(rule, fields=tuple(fields))

    def _rule_of(self, parts: LossParts) -> LossRule:
        numbers: dict[LossTerm, tuple[int, ...]] = {}
        reasons = []
        for number in sorted({part.call for part in parts if part.call is not None}):
            term, reason = self._calls[number]
            powers = {part.power for part in parts if part.call == number}
            if powers == {0} and term.kind == "sum":  # divided by the number of samples
                term = LossTerm("samples")
            elif powers != {int(term.kind == "sum")}:
                reason = _MADE_OF_MEANS
            numbers[term] = (*numbers.get(term, ()), number)
            reasons.append(reason)
        terms = tuple(replace(term, calls=calls) for term, calls in numbers.items())
        more = {part for part in parts if part.call is None}
        powers = {part.power for part in more}
        mixes = bool(powers - {0, 1})
        if mixes:
            reasons.append(_REDUCES.format(self._unreduced) if self._unreduced else _MADE_OF_MEANS)
        over_items = mixes and all(part.over_items or part.power == 1 for part in more)
        of_rest = LossTerm("sum" if powers == {1} or over_items else "samples")
        if powers >= {0, 1} and not mixes:
            raise CriterionError(_SUM_AND_MEAN)
        rest = of_rest if more else None
        if mixes and any(term.kind != "sum" for term in terms):
            rest = None  # beside means it is weighted as they are
        if not terms:
            terms, rest = (of_rest,), None
        reason = "; ".join(dict.fromkeys(filter(None, reasons)))
        return LossRule(terms, not reason, reason, rest=rest if terms != (rest,) else None)

    def _recognise(self, label: str, arguments: Mapping[str, Any]) -> LossCall:
        if arguments["reduction"] == "sum":
            return LossCall(LossTerm("sum"), "")
        prediction, target, weight = arguments["input"], arguments["target"], arguments["weight"]
        selected = any(isinstance(source, DataDependentTensor) for source in self._flow.sources((prediction, target)))
        if not selected and target.is_floating_point():
            return LossCall(LossTerm("samples"), "")
        term, reason = self._class_term(label, arguments["ignore_index"], prediction, target)
        if weight is not None and not reason:
            if term.kind != "tokens" or weight.requires_grad or not self._is_constant(weight):
                return LossCall(LossTerm("samples"), f"{label} weighs classes by numbers that are computed")
            term = replace(term, weights=ClassWeights(weight))
        return LossCall(term, reason)

    def _is_constant(self, weight: torch.Tensor) -> bool:
        """Whether these are the same numbers for each batch: a tensor of the loss's own, or one that the model has."""
        sources = self._flow.sources(weight)
        return not sources or (len(sources) == 1 and all(isinstance(source, TensorOutsideUnits) for source in sources))

    def _class_term(
        self, label: str, ignore_index: int | None, prediction: torch.Tensor, target: torch.Tensor
    ) -> tuple[LossTerm, str]:
        """The term of a loss that is given classes: the labels, shifted or not, maybe only where a mask is 1.

        The elements that count may have been selected before: by the mask, or by nothing but the labels. Of these
        it can be seen only whether all that are not negative count, as the placeholders have no others. Targets that
        are probabilities have no such placeholder: only what a mask selects of them is known."""
        of_target, of_both = self._flow.sources(target), self._flow.sources((prediction, target))
        selected = any(isinstance(source, DataDependentTensor) for source in of_both)
        given, labels = _given(of_target), list(filter(is_label, _given(of_target)))
        chosen = any(isinstance(source, DataDependentTensor) for source in of_target)
        by_labels = labels == _given(of_both) and len(labels) == 1 and chosen
        if by_labels and not target.is_floating_point():
            ignore_index, selected = None, False
        by_mask = selected and labels == list(filter(is_label, _given(of_both)))
        if not given and not selected:
            return LossTerm("samples"), f"{label} compares with targets that are no input"
        masks: list[str | None] = [name for name in given if labels and name not in labels] or [None]
        for name in labels or given:
            for start, stop in ((0, None), (1, None), (0, -1)):
                for mask in masks:
                    if len(given) != 1 + (mask is not None) or (selected and not (by_mask and mask is not None)):
                        continue
                    term = LossTerm("tokens", name, start, stop, ignore_index, mask)
                    if self._explains(term, target, selected):
                        term = self._bounded(term, prediction, self._inputs[name])
                        # Placeholders do not show it if other labels than theirs are changed.
                        within = ("clamp",) if term.kind == "positions" else ()
                        if not self._flow.record.keeps(target, labels, within):
                            return LossTerm("samples"), f"{label} compares with targets that are computed from {name}"
                        return term, ""
        if selected:
            return LossTerm("samples"), _SELECTED.format(label)
        return LossTerm("samples"), f"{label} compares with targets that are made from {', '.join(given)}"

    def _explains(self, term: LossTerm, target: torch.Tensor, selected: bool) -> bool:
        """Whether `target` is the part of the input that `term` counts, possibly padded at its end; of that, if
        `selected`, only what the term's mask selects."""
        assert term.input is not None
        ignored = -1 if term.ignore_index is None else term.ignore_index
        tensor = self._inputs[term.input]
        if tensor.dim() == 0:
            return target.numel() == 1
        if term.mask is not None:
            mask = self._inputs[term.mask]
            if not isinstance(mask, torch.Tensor) or mask.shape != tensor.shape:
                return False
            if selected:
                part = slice(term.start, term.stop)
                chosen = tensor[..., part][mask[..., part] == 1]
                return torch.equal(chosen.to(target), target.reshape(-1))
            tensor = torch.where(mask == 1, tensor, torch.full_like(tensor, ignored))
        candidates = [tensor[..., term.start : term.stop]]
        if term.start:
            candidates.append(functional.pad(tensor, (0, term.start), value=ignored)[..., term.start :])
        flat = target.reshape(-1)
        return any(
            candidate.numel() == flat.numel() and torch.equal(candidate.reshape(-1).to(flat), flat)
            for candidate in candidates
        )

    def _bounded(self, term: LossTerm, prediction: torch.Tensor, tensor: torch.Tensor) -> LossTerm:
        """Question answering ignores positions at or beyond the sequence's length, which `ignore_index` then is."""
        classes = prediction.shape[1] if prediction.dim() > 1 else prediction.shape[0]
        if term.ignore_index != classes or tensor.dim() != 1:
            return term
        for name, value in self._inputs.items():
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == classes:
                return replace(term, kind="positions", ignore_index=None, limit=name)
        return term


# Why a loss is not exact.
_MADE_OF_MEANS = (
    "it is more than the results of torch's loss functions, and sums and means over samples, scaled by constants and "
    "added up"
)
_REDUCES = "the model's code reduces the result of {} (reduction='none')"
_SUM_AND_MEAN = (
    "the loss adds a sum over samples, or one divided by num_items_in_batch, to a mean or a constant, both taken "
    "by hand, so microbatches cannot tell which is which: divide both by num_items_in_batch or by the number of "
    "samples, or let torch.nn.functional.cross_entropy or nll_loss take one of the two"
)
_SELECTED = "{} is given elements selected by their values"


def _given(sources: Sources) -> list[str]:
    """The names of the arguments among sources, sorted."""
    return sorted({source.name for source in sources if isinstance(source, ForwardArgument)})

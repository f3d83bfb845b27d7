"""Finding the loss rule while a forward is traced."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from penstock.modeling.graph.chunked_loss import ChunkedLogits
from penstock.modeling.graph.dataflow import NOTHING, DataFlow, Given, Reduced, Selected, Sources
from penstock.modeling.graph.loss import CLASS_LOSSES, NUM_ITEMS, LossRule, LossTerm, batch_size

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


class LossCall(NamedTuple):
    """A loss function's call: the mean that it gives, why that is not exact, if so, and what it was computed from."""

    term: LossTerm
    reason: str
    result: Any
    is_sum: bool
    made_of: Sources


class LossTrace:
    """Records the loss functions of one traced forward; `in_chunks`, whether one of them was of `ChunkedLogits`."""

    def __init__(self, inputs: Mapping[str, Any], flow: DataFlow, batch_dim: Mapping[str, int | None]) -> None:
        self.in_chunks = False
        self._inputs, self._flow, self._batch_dim = inputs, flow, batch_dim
        self._calls: list[LossCall] = []

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        self.in_chunks |= isinstance(bound.arguments.get("input"), ChunkedLogits)
        with self._flow.pause():
            term, reason = self._recognise(func, bound.arguments)
        is_sum, made_of = bound.arguments.get("reduction") == "sum", self._flow.sources(result)
        if isinstance(result, torch.Tensor):
            self._flow.mark(result, (Reduced(len(self._calls)),))
            self._flow.mark_mean(result, result.dim() == 0)
        self._calls.append(LossCall(term, reason, result, is_sum, made_of))

    def rule(self, loss: torch.Tensor, output: Any, reduction: str | None = None) -> LossRule:
        """The rule for the loss of an output; `reduction` is what its maker says of it: "sum", or `NUM_ITEMS`."""
        sources = self._flow.sources(loss)
        used = {number: call for number, call in enumerate(self._calls) if Reduced(number) in sources}
        numbers: dict[LossTerm, tuple[int, ...]] = {}
        for number, call in used.items():
            numbers[call.term] = (*numbers.get(call.term, ()), number)
        terms = tuple(replace(term, calls=calls) for term, calls in numbers.items()) or (LossTerm("samples"),)
        reasons = dict.fromkeys(call.reason for call in used.values() if call.reason)
        rule = LossRule(terms, bool(used) and not reasons, "; ".join(reasons) if used else _NO_FUNCTION)
        result_is = [call.is_sum for call in self._calls if call.result is loss]
        # A mean by torch's loss functions that nothing was divided by is no sum over items.
        untouched = False in result_is or not self._flow.asks_inputs
        is_mean = rule.exact and untouched and Given(NUM_ITEMS) not in sources
        over_items = [term.kind for term in terms] == ["sum"]
        is_sum = reduction == "sum" or (reduction == NUM_ITEMS and not is_mean and not over_items)
        # What the model computed besides the results of loss functions.
        more = sources - NOTHING.union(*(call.made_of for call in used.values()))
        if over_items and any(not isinstance(source, Reduced | Given) for source in more):
            # The forward adds it once, whatever the caller divides the sum by: microbatches make a mean of it.
            rule = replace(rule, rest=LossTerm("samples"))
        if rule.exact and (self._flow.branches_on_loss or not self._flow.is_mean(loss)):
            rule = replace(rule, exact=False, reason=_MADE_OF_MEANS)
        if is_sum or True in result_is:
            # A sum over the batch, of which nothing was made: the sums of the microbatches add up to it.
            rule = LossRule((LossTerm("sum", calls=terms[0].calls),))
        fields = (
            name
            for name, value in (output.items() if isinstance(output, Mapping) else ())
            if name != "loss" and isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()
            and any(Reduced(number) in self._flow.sources(value) for number in used)
        )  # fmt: skip
        return replace(rule, fields=tuple(fields))

    def _recognise(self, func: Any, arguments: Mapping[str, Any]) -> tuple[LossTerm, str]:
        label = func.__name__
        reduction = arguments.get("reduction", "mean")
        if reduction == "sum" and self._inputs.get(NUM_ITEMS) is not None:
            return LossTerm("sum"), ""
        if reduction not in ("mean", "batchmean"):
            return LossTerm("samples"), f"the model's code reduces the result of {label} (reduction={reduction!r})"
        if arguments.get("weight") is not None and func in CLASS_LOSSES:
            return LossTerm("samples"), f"{label} weighs classes, so its mean is over class weights"
        if func is functional.ctc_loss:  # each sample's by the length of its target, and of these the mean
            return LossTerm("samples"), ""
        # The first two tensors: what was predicted, and what it is compared with.
        prediction, target, *_ = (value for value in arguments.values() if isinstance(value, torch.Tensor))
        selected = any(isinstance(source, Selected) for source in self._flow.sources((prediction, target)))
        if func in CLASS_LOSSES and (selected or not target.is_floating_point()):
            return self._class_term(label, arguments.get("ignore_index", -100), prediction, target)
        if selected:
            return LossTerm("samples"), _SELECTED.format(label)
        if func is functional.kl_div and reduction == "mean":
            return LossTerm("samples"), ""
        if prediction.numel() % batch_size(self._inputs, self._batch_dim):
            return LossTerm("samples"), f"{label} is over elements that do not divide into samples"
        return LossTerm("samples"), ""

    def _class_term(
        self, label: str, ignore_index: int | None, prediction: torch.Tensor, target: torch.Tensor
    ) -> tuple[LossTerm, str]:
        """The term of a loss that is given classes: the labels, shifted or not, maybe only where a mask is 1.

        The elements that count may have been selected before: by the mask, or by nothing but the labels. Which labels
        are valid then cannot be seen, but whether every non-negative one is: the placeholders have no others. Targets
        that are probabilities have no such placeholder: of them, only a mask's selection is known."""
        of_target, of_both = self._flow.sources(target), self._flow.sources((prediction, target))
        selected = any(isinstance(source, Selected) for source in of_both)
        given, labels = _given(of_target), list(filter(is_label, _given(of_target)))
        by_labels = labels == _given(of_both) and len(labels) == 1 and any(isinstance(s, Selected) for s in of_target)
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
                        return self._bounded(term, prediction, self._inputs[name]), ""
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
_NO_FUNCTION = "it is computed by none of torch's loss functions"
_MADE_OF_MEANS = "it is more than the results of torch's loss functions, scaled by constants and added up"
_SELECTED = "{} is given elements selected by their values"


def _given(sources: Sources) -> list[str]:
    """The names of the arguments among sources, sorted."""
    return sorted({source.name for source in sources if isinstance(source, Given)})

"""What will happen to a model on stages, tried without computing anything: training, evaluation, images."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.modeling.graph.dummy_images import with_dummy_images
from penstock.modeling.graph.plan import make_plan
from penstock.modeling.graph.shapes import ShapeFunctions
from penstock.modeling.graph.trace import Trace, Untraceable
from penstock.modeling.graph.units import trace_units
from penstock.modeling.tensor_parallel.plans import or_none
from penstock.planning.partition import partition

EXACT = "exact"
ACCUMULATED = "exact against accumulation over the same microbatches"
REFUSED = "refused"
NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Verdict:
    """What will happen.

    Attributes:
        what: `"training"`, `"evaluation"`, or one of them `" with images"`.
        answer: `EXACT`, `ACCUMULATED`, `REFUSED` or `NOT_TRIED`.
        reason: why, but for `EXACT`.
    """

    what: str
    answer: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.answer}" + (f", because {self.reason}" if self.reason else "")


def verdicts(
    model: nn.Module, units: Sequence[str], costs: Sequence[float], inputs: Mapping[str, Any]
) -> tuple[Verdict, ...]:
    """What training and evaluation on two stages of about equal cost will be, with the model's own loss.

    Args:
        units, costs: of the model, in forward order.
        inputs: arguments of a forward, without labels.
    """
    first = partition(list(costs), [1.0, 1.0]).sizes[0]
    stage_of = {unit: int(place >= first) for place, unit in enumerate(units)}
    training = model.training
    found = []
    try:
        kinds: list[tuple[str, Sequence[Mapping[str, Any]]]] = [("", [inputs])]
        images = list(_with_images(model, inputs))
        if images:
            kinds.append((" with images", images))
        for suffix, batches in kinds:
            for what, attempt in (("training", _training), ("evaluation", _evaluation)):
                try:
                    found.append(attempt(model, units, stage_of, batches, f"{what}{suffix}"))
                except Exception as error:  # whatever a model's own code raises
                    found.append(Verdict(f"{what}{suffix}", REFUSED, _in_words(error)))
    finally:
        model.train(training)
    return tuple(found)


def _with_images(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "pixel_values" not in inputs:
        with contextlib.suppress(Exception):  # whatever a model's own code raises
            yield from with_dummy_images(model, inputs)


def _evaluation(
    model: nn.Module, units: Sequence[str], stage_of: Mapping[str, int], batches: Iterable[Any], what: str
) -> Verdict:
    model.eval()
    reason = ""
    for batch in batches:
        try:
            make_plan(_trace(model, units, batch), stage_of, 2)
            return Verdict(what, EXACT)
        except Exception as error:
            reason = reason or _in_words(error)
    return Verdict(what, REFUSED, reason)


def _training(
    model: nn.Module, units: Sequence[str], stage_of: Mapping[str, int], batches: Iterable[Any], what: str
) -> Verdict:
    model.train()
    refused = ""
    for batch in batches:
        for labels in _labels(model, batch):
            try:
                trace = _trace(model, units, {**batch, **labels})
            except Exception:
                continue  # labels of this form are not for this model
            if trace.loss is None:
                continue
            make_plan(trace, stage_of, 2)
            if not trace.loss.exact:
                return Verdict(what, ACCUMULATED, trace.loss.reason)
            normalising = [n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            if normalising:
                reason = f"batch normalisation ({normalising[0]}, ...) takes its statistics from each microbatch"
                return Verdict(what, ACCUMULATED, reason)
            return Verdict(what, EXACT)
        try:
            make_plan(_trace(model, units, batch), stage_of, 2)
        except Exception as error:
            refused = refused or _in_words(error)
    if refused:
        return Verdict(what, REFUSED, refused)
    return Verdict(what, NOT_TRIED, "no labels were found from which it computes a loss; a criterion of your own may")


def _trace(model: nn.Module, units: Sequence[str], inputs: Mapping[str, Any]) -> Trace:
    return trace_units(model, ShapeFunctions({name: model.get_submodule(name) for name in units}), inputs)


def _labels(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Labels that the forward may take: a class or a position for each sample, a token for each token."""
    parameters = inspect.signature(model.forward).parameters
    samples = next((len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()), 1)
    classes = torch.zeros(samples, dtype=torch.long)
    if "start_positions" in parameters:
        yield {"start_positions": classes, "end_positions": classes + 1}
    for name in ("labels", "label", "next_sentence_label"):
        if name not in parameters:
            continue
        guesses = list(_label_values(inputs, classes))
        # A model with a head for tokens has labels for tokens.
        heads = or_none(getattr(model, "get_output_embeddings", None))
        for guess in sorted(guesses, key=lambda guess: (guess.dim() == 1) == (heads is not None)):
            yield {name: guess}


def _label_values(inputs: Mapping[str, Any], classes: torch.Tensor) -> Iterator[torch.Tensor]:
    yield classes
    if "decoder_input_ids" in inputs:
        yield torch.ones_like(inputs["decoder_input_ids"])
    elif "input_ids" in inputs:
        yield inputs["input_ids"].clone()
        yield torch.zeros_like(inputs["input_ids"])
    yield torch.ones(len(classes), 4, dtype=torch.long)


def _in_words(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    text = text.partition("is not implemented... ")[2] or text
    return text if isinstance(error, (NotImplementedError, Untraceable)) else f"{type(error).__name__}: {text}"

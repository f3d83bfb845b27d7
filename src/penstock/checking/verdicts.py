"""What will happen to a model on two stages, tried without computing anything: training, evaluation, generate().

The model is split as each of two ranks would split it, and both stages run one after the other: the model's own code
between units as it is, and zeros of the right shapes for what units return.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from penstock.checking.dummy_images import with_dummy_images
from penstock.layout.partition import partition
from penstock.modeling.graph.forwards import entries_of_generation, named_arguments
from penstock.modeling.graph.plan import ForwardPlan, StageCall, refusal
from penstock.modeling.graph.shapes import flatten
from penstock.modeling.graph.trace import Untraceable
from penstock.modeling.instrumentation import Intercepted, OnAnotherStage
from penstock.modeling.placeholders.ghosts import answer_for_parameters, meta_placeholder, sync_capture_hooks
from penstock.modeling.stage.run import StageRun
from penstock.modeling.stage.split import SplitModel
from penstock.tensor_parallel.plans import or_none

EXACT = "exact"
ACCUMULATED = "exact against accumulation over the same microbatches"
REFUSED = "refused"
NOT_TRIED = "not tried"


# Tokens that are generated for a try: one from the prompt, and one from the cache.
NEW_TOKENS = 2


@dataclass(frozen=True)
class Verdict:
    """The verdict of a check.

    Attributes:
        what: `"training"`, `"evaluation"`, `"generate"`, or one of them `" with images"`.
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
    """What training, evaluation and generate() on two stages of about equal cost will be, with the model's own loss."""
    first = partition(list(costs), [1.0, 1.0]).sizes[0]
    stages = [list(units[:first]), list(units[first:])]
    kinds: list[tuple[str, Sequence[Mapping[str, Any]]]] = [("", [inputs])]
    images = list(_with_images(model, inputs))
    if images:
        kinds.append((" with images", images))
    tries: dict[str, Callable[[_Pipeline, Sequence[Mapping[str, Any]], str], Verdict]] = {
        "training": _training,
        "evaluation": _evaluation,
    }
    if isinstance(model, PreTrainedModel) and or_none(model.can_generate):
        tries["generate"] = _generation
    found = []
    pipeline = _Pipeline(model, stages)
    for suffix, batches in kinds:
        for name, attempt in tries.items():
            what = f"{name}{suffix}"
            try:
                found.append(attempt(pipeline, batches, what))
            except Exception as error:  # whatever a model's own code raises
                found.append(Verdict(what, REFUSED, _in_words(error)))
    return tuple(found)


class _DryRun(StageRun):
    """Runs a stage whose units return zeros."""

    def _run(
        self, planned: StageCall, unit: Intercepted, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def zeros(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = flatten((args, kwargs))[0]
            shape = self._functions(unit.name, args, kwargs, planned.call.output.known)
            output = shape.answer(lambda _, spec: spec.zeros(self._device), given)
            if shape.cache is not None:
                shape.cache.apply(given, self._device)
            return output

        return super()._run(planned, replace(unit, original=zeros), module, args, kwargs)


class _Pipeline:
    """Both stages of a model in one process, and nothing in memory. `model` is left alone."""

    def __init__(self, model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
        self.model, self._stages = model, stages

    @functools.cached_property
    def _splits(self) -> list[SplitModel]:
        return [self.split([stage]) for stage in range(2)]

    def split(self, local_stages: Sequence[int]) -> SplitModel:
        """A copy of the model as a rank has it."""
        copy = meta_placeholder(self.model)
        sync_capture_hooks(self.model, copy)
        split = SplitModel(copy, self._stages, local_stages)
        split.stage_run = _DryRun
        return split

    def forward(self, inputs: Mapping[str, Any], training: bool) -> ForwardPlan:
        """Run both stages; returns the plan. Raises whatever there is to refuse, or the model's code raises."""
        sent: Sequence[torch.Tensor] = ()
        plans = []
        for stage, split in enumerate(self._splits):
            for module in split.model.modules():  # a model's own `train` may return nothing, or do more
                module.training = training
            with split.zeros_outside(), torch.no_grad():
                plan = split.plan(inputs)
                shares = None
                if plan.loss is not None:
                    counts = plan.loss.counts(inputs)
                    shares = plan.loss.shares(counts, counts)
                plans.append(plan)
                try:
                    _, sent = split.forward(plan, stage, inputs, sent, shares=shares)
                except Exception as error:
                    raise Untraceable(f"stage {stage} cannot run: {_in_words(error)}") from error
        if plans[0].checksum != plans[1].checksum:
            raise Untraceable("its forward takes a different path on each stage")
        return plans[0]


def _with_images(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "pixel_values" not in inputs:
        with contextlib.suppress(Exception):  # whatever a model's own code raises
            yield from with_dummy_images(model, inputs)


def _evaluation(pipeline: _Pipeline, batches: Iterable[Mapping[str, Any]], what: str) -> Verdict:
    reason = ""
    for batch in batches:
        try:
            pipeline.forward(batch, training=False)
            return Verdict(what, EXACT)
        except Exception as error:
            reason = reason or _in_words(error)
    return Verdict(what, REFUSED, reason)


def _training(pipeline: _Pipeline, batches: Iterable[Mapping[str, Any]], what: str) -> Verdict:
    refused = ""
    for batch in batches:
        for labels in _labels(pipeline.model, batch):
            try:
                loss = pipeline.forward({**batch, **labels}, training=True).loss
            except Exception:
                continue  # labels of this form are not for this model
            if loss is None:
                continue
            if not loss.exact:
                return Verdict(what, ACCUMULATED, loss.reason)
            modules = pipeline.model.named_modules()
            normalising = [name for name, module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)]
            if normalising:
                reason = f"batch normalisation ({normalising[0]}, ...) takes its statistics from each microbatch"
                return Verdict(what, ACCUMULATED, reason)
            return Verdict(what, EXACT)
        try:
            pipeline.forward(batch, training=True)
        except Exception as error:
            refused = refused or _in_words(error)
    if refused:
        return Verdict(what, REFUSED, refused)
    return Verdict(what, NOT_TRIED, "no labels were found from which it computes a loss; a criterion of your own may")


def _generation(pipeline: _Pipeline, batches: Iterable[Mapping[str, Any]], what: str) -> Verdict:
    """transformers' own generate(), for a few tokens, as each of the two ranks runs it."""
    reason = ""
    for batch in batches:
        prompt = {name: value for name, value in batch.items() if not name.startswith("decoder_")}
        try:
            for stage in range(2):
                _generate(pipeline.split(()), stage, prompt)
            return Verdict(what, EXACT)
        except OnAnotherStage as error:
            return Verdict(what, REFUSED, f"it runs a part of the model by itself, past the model's forward: {error}")
        except (NotImplementedError, Untraceable) as error:
            return Verdict(what, REFUSED, _in_words(error))
        except Exception as error:
            reason = reason or _in_words(error)
    return Verdict(what, NOT_TRIED, f"its generate() does not run on a prompt made up for it ({reason})")


def _generate(split: SplitModel, stage: int, prompt: Mapping[str, Any]) -> None:
    """generate() on a rank that has `stage`."""
    model: Any = split.model
    answer_for_parameters(model, lambda: True, lambda: torch.device("cpu"))
    inside = False

    def over_stages(call: Callable[..., Any] | None, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return function(*args, **kwargs)
            inside = True
            try:
                return _walk(split, stage, named_arguments(signature, args, kwargs), call)
            finally:
                inside = False

        return forward

    besides = [(owner, name, getattr(owner, name)) for owner, name in entries_of_generation(model)]
    for owner, name, call in ((model, "forward", None), *besides):
        owner.__dict__[name] = over_stages(call, call or model.forward)
    with split.zeros_outside(), torch.no_grad(), _quiet():
        model.generate(**prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice about the arguments of generate()."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _walk(split: SplitModel, stage: int, inputs: Mapping[str, Any], call: Callable[..., Any] | None) -> Any:
    """A forward of `stage` that goes on to the end of the model's."""
    plan = split.plan(inputs, call)
    received = [shape.zeros(torch.device("cpu")) for shape in split.shapes_received(plan, stage, inputs, call)]
    if plan.controlled:
        raise refusal(split.model, "what its code does next depends on values that only the last stage has")
    return split.walk(plan, stage, inputs, received, call=call)


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

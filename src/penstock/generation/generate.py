"""generate() over the stages of a pipeline: transformers' own, run by every rank on the same values.

Each rank runs generate() itself, for each group of the batch; what it would call, the model and its encoder, runs on
all stages, and every rank gets the result, or only the tokens that are chosen of it. So every decision that follows is
the same on every rank, and what could make them differ is shared: the random state, chosen tokens, the verdicts of
stopping criteria, errors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, QuantizedCache
from transformers.generation.streamers import BaseStreamer

from penstock.data.batch import to_device
from penstock.data.fingerprint import fingerprint
from penstock.data.microbatch import MAIN_INPUTS
from penstock.generation import groups
from penstock.generation.choosing import RowsOfBatch, TokenChoice
from penstock.generation.decoding import Decoding, decoding_of
from penstock.generation.groups import MANY_POSITIONS, setting
from penstock.modeling.graph.loss import Criterion, loss_by
from penstock.modeling.instrumentation import OnAnotherStage, calls_redirected
from penstock.modeling.placeholders.caches import decoder_part, past_length
from penstock.modeling.stage.outputs import output_with_loss
from penstock.runtime.inputs import refuse_tuples

# Arguments in which the ranks may differ.
INDIVIDUAL_ARGUMENTS = ("streamer", "stopping_criteria")
# Decoding that uses parts of the model by themselves, or another forward than its own.
REFUSED_SETTINGS = {
    "assistant_early_exit": "it runs the first layers by themselves",
    "use_mtp": "it runs the model's prediction heads by themselves",
}


def generate(
    model: Any,
    original: Callable[..., Any],
    *args: Any,
    generation_groups: int | str = "auto",
    stream_on_all_ranks: bool = False,
    **kwargs: Any,
) -> Any:
    """Run `original`, transformers' generate() of `model`, on all ranks of the pipeline.

    Args:
        args, kwargs: its arguments. Every rank passes equal ones, except that a `streamer` and `stopping_criteria` may
            be given on some ranks only: a criterion that is met on one rank stops them all.
        generation_groups: in how many groups the batch is decoded, so that as many stages have work at a time. "auto"
            is the number of ranks in the pipeline for at least two samples for each, otherwise 1. It is 1 wherever
            something looks at the whole batch; the log says so once.
        stream_on_all_ranks: let every streamer stream, not only that of the first rank that was given one.

    Returns:
        What the unsplit model returns, the same on every rank; of a cache that is part of it, each rank has the layers
        of its own stages, and for the others entries of the right length.
    """
    engine = model.pipeline
    decoding = decoding_of(engine)
    if decoding.running:  # called by a generate() that goes on: long-form Whisper, token healing
        return original(*args, **kwargs)
    with decoding.session(), calls_redirected(model, decoding.forward):
        arguments = _named_arguments(inspect.signature(original), args, kwargs)
        options = {"generation_groups": generation_groups, "stream_on_all_ranks": bool(stream_on_all_ranks)}
        (any_streamer, is_first), any_criteria = _compare(arguments, options, decoding)
        _refuse(arguments, model)
        if any_criteria:
            arguments.setdefault("stopping_criteria", [])
        decoding.every_position = any(setting(name, arguments, model) is not None for name in MANY_POSITIONS)
        with _streaming(arguments, any_streamer, is_first, everywhere=stream_on_all_ranks):
            why_everywhere = groups.why_logits_everywhere(arguments, model, original)
            if any_criteria and why_everywhere is None:
                why_everywhere = groups.LOGITS_EVERYWHERE["stopping_criteria"]
            number, size = groups.number_of_groups(generation_groups, arguments, model, why_everywhere)
            try:
                return _run(model, original, arguments, number, size, logits_everywhere=why_everywhere is not None)
            except OnAnotherStage as error:
                raise NotImplementedError(
                    f"generate() of {type(model).__name__} runs a part of the model by itself, past the model's "
                    f"forward, which is not implemented over pipeline stages: {error}"
                ) from error


def evaluate_with_cache(model: Any, inputs: Mapping[str, Any], criterion: Criterion | None) -> Any:
    """An evaluation with a cache of keys and values: the whole batch in one forward, without gradients.

    All ranks of the pipeline call this together, with equal inputs. Returns the model's output, on every rank. Of the
    cache in it, each rank has the layers of its own stages, and for the others entries of the right length: it may be
    passed to the next call."""
    engine = model.pipeline
    if not isinstance(model, PreTrainedModel):
        raise NotImplementedError(
            f"{type(model).__name__} is no model of transformers, whose caches of keys and values alone are known: "
            "call it without one"
        )
    inputs, decoding = to_device(inputs, engine.device), decoding_of(engine)
    refuse_tuples(model, [inputs])
    with decoding.session():
        _compare(inputs, {}, decoding, f"{type(model).__name__} with a cache")
        _refuse_quantised_cache(inputs)
        decoding.every_position = True
        output = decoding.forward(inputs)
    loss = None if criterion is None else loss_by(criterion, output, inputs)
    return output if loss is None else output_with_loss(output, loss)


def _run(
    model: Any, original: Callable[..., Any], arguments: dict[str, Any], number: int, size: int, logits_everywhere: bool
) -> Any:
    """The generation, in `number` groups of a batch of `size`."""
    decoding, device = decoding_of(model.pipeline), model.pipeline.device
    token_choice = TokenChoice(model, decoding, logits_everywhere)
    with _over_stages(model, decoding, token_choice):
        if number == 1:
            (result,) = decoding.in_groups([partial(original, **arguments)])
        else:
            parts, samples = groups.split(arguments, size, number)
            loops = [partial(original, **part) for part in parts]
            drawing: list[RowsOfBatch] = []
            if setting("do_sample", arguments, model):
                drawing = [RowsOfBatch(each.start, each.stop, size, device) for each in samples]
                loops = [partial(rows.within, loop) for rows, loop in zip(drawing, loops, strict=True)]
            with groups.said_once():
                results = decoding.in_groups(loops)
            assert token_choice.config is not None
            result = groups.join(results, token_choice.config)
            longest = max(drawing, key=lambda rows: rows.num_draws, default=None)
            if longest is not None and longest.num_draws:
                longest.adopt()
    if token_choice.config is not None and token_choice.config.do_sample and decoding.groups[0].tokens_only:
        decoding.adopt_random_state()  # the rank that chooses has drawn alone
    return result


class SilentStreamer(BaseStreamer):  # type: ignore[misc]  # a library without types
    """Replaces a streamer that does not stream here, so that all ranks accept or refuse one together."""

    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


@contextmanager
def _streaming(arguments: dict[str, Any], any_streamer: bool, is_first: bool, everywhere: bool) -> Iterator[None]:
    """Inside, the streamer of the first rank that was given one streams, or all do. `arguments`: of generate(); the
    streamer among them is replaced where it is not to stream. `any_streamer`: whether a rank of the pipeline was given
    one; `is_first`: whether this is the first of these ranks."""
    streamer: Any = arguments.get("streamer")
    streams = streamer is not None and (is_first or everywhere)
    if any_streamer and not streams:
        arguments["streamer"] = SilentStreamer()
    try:
        yield
    finally:
        # Whoever iterates over a streamer that was given nothing shall not wait for ever.
        if not streams and (hasattr(streamer, "__iter__") or hasattr(streamer, "__aiter__")):
            streamer.end()


def _refuse(arguments: Mapping[str, Any], model: nn.Module) -> None:
    """Raise NotImplementedError for options that bypass the model's forward, and for caches that other stages cannot
    follow; ValueError for an empty batch."""
    for name, reason in REFUSED_SETTINGS.items():
        if setting(name, arguments, model):
            raise NotImplementedError(
                f"generate({name}=...) is not implemented over pipeline stages: {reason}. Leave it out"
            )
    if setting("cache_implementation", arguments, model) == "paged":
        raise NotImplementedError(
            "continuous batching (cache_implementation='paged') is not implemented over pipeline stages: leave it out"
        )
    _refuse_quantised_cache(arguments, setting("cache_implementation", arguments, model))
    if isinstance(arguments.get("custom_generate"), str) or arguments.get("trust_remote_code"):
        raise NotImplementedError(
            "decoding with code from a repository (custom_generate='...', trust_remote_code=True, which contrastive "
            "search, DoLa, group and constrained beam search need) is not implemented over pipeline stages: it may use "
            "the model in parts; a function passed as custom_generate is run as it is"
        )
    for name, value in arguments.items():
        if name in ("inputs", *MAIN_INPUTS) and isinstance(value, torch.Tensor) and value.dim() and not value.shape[0]:
            raise ValueError(f"the batch is empty: {name} has shape {tuple(value.shape)}, without a single sample")


def _refuse_quantised_cache(arguments: Mapping[str, Any], implementation: str | None = None) -> None:
    """Placeholders have one head and one dimension, which cannot be packed as the owner's keys and values are."""
    given = (decoder_part(value) for value in arguments.values() if isinstance(value, Cache))
    if implementation == "quantized" or any(isinstance(cache, QuantizedCache) for cache in given):
        raise NotImplementedError(
            "a quantised cache of keys and values (cache_implementation='quantized', QuantizedCache) is not "
            "implemented over pipeline stages: leave it out; each rank caches the layers of its own stages only"
        )


def _compare(
    arguments: Mapping[str, Any], options: Mapping[str, Any], decoding: Decoding, called: str = "generate()"
) -> tuple[tuple[bool, bool], bool]:
    """Compare the ranks' arguments. Returns whether a rank was given a streamer, and whether this is the first such;
    whether one was given criteria. Raises ValueError, on every rank, if their arguments differ."""
    described = {name: _described(value) for name, value in arguments.items() if name not in INDIVIDUAL_ARGUMENTS}
    streams, stops = arguments.get("streamer") is not None, bool(arguments.get("stopping_criteria"))
    by_rank = decoding.gather([fingerprint({**described, **options}), int(streams), int(stops)])
    if any(theirs[0] != by_rank[0][0] for theirs in by_rank):
        raise ValueError(
            f"{called} was given different arguments on ranks {list(decoding.ranks)} of this pipeline: every "
            f"rank passes the same inputs and options, except for {' and '.join(INDIVIDUAL_ARGUMENTS)}; this rank "
            f"passed {sorted(arguments)}"
        )
    streaming = [rank for rank, theirs in zip(decoding.ranks, by_rank, strict=True) if theirs[1]]
    return (bool(streaming), streaming[:1] == [decoding.rank]), any(theirs[2] for theirs in by_rank)


def _described(value: Any) -> Any:
    """What `fingerprint` can read."""
    if isinstance(value, GenerationConfig):
        return value.to_json_string()
    if isinstance(value, Cache):
        return f"{type(value).__name__} of {past_length(value)} tokens"
    return value


@contextmanager
def _over_stages(model: Any, decoding: Decoding, token_choice: TokenChoice) -> Iterator[None]:
    """For the duration, route what generate() calls besides the model itself over the stages."""
    with ExitStack() as restoring:

        def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
            # With the wrapped function's signature, which generate() inspects.
            wrapped = functools.wraps(getattr(owner, name))(function)
            restoring.enter_context(mock.patch.object(owner, name, wrapped))

        for owner, name in _entries_of_generation(model):
            replace(owner, name, _over_all_stages(decoding, getattr(owner, name)))
        replace(model, "_get_logits_processor", token_choice.processors(model._get_logits_processor))
        replace(model, "_get_stopping_criteria", token_choice.criteria(model._get_stopping_criteria))
        # A compiled forward would capture the messages between the stages.
        replace(model, "_valid_auto_compile_criteria", lambda *args, **kwargs: False)
        yield


def _entries_of_generation(model: Any) -> list[tuple[nn.Module, str]]:
    """The modules and their methods that generate() calls besides the model's forward, and that run units."""
    entries = []
    if getattr(model.config, "is_encoder_decoder", False):
        entries.append((model.get_encoder(), "forward"))
    # What it calls for images and videos before the first forward: it goes round the forward of the model.
    for name in ("get_image_features", "get_video_features"):
        if hasattr(model.base_model, name):
            entries.append((model.base_model, name))
    return entries


def _named_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those too that the function takes together, as `**generate_kwargs` say."""
    arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def _over_all_stages(decoding: Decoding, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if decoding.inside:
            return original(*args, **kwargs)
        return decoding.forward(_named_arguments(signature, args, kwargs), call=original)

    return forward

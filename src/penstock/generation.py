"""generate() over the stages of a pipeline: transformers' own, run by every rank on the same values.

Each rank runs generate() itself; what it would call, the model and its encoder, runs on all stages and gives every
rank the same result. So every decision that follows is the same on every rank, and what could make them differ is
shared: the random state, the verdicts of stopping criteria, errors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from penstock.data.fingerprint import fingerprint
from penstock.modeling.placeholders.caches import past_length
from penstock.runtime.decoding import Decoding

# Criteria that depend on the tokens alone, and so agree on every rank.
AGREEING_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
# Arguments in which the ranks may differ.
INDIVIDUAL_ARGUMENTS = ("streamer", "stopping_criteria")
# Arguments with which decoding looks at more than the last position's logits.
MANY_POSITIONS = ("assistant_model", "custom_generate", "prompt_lookup_num_tokens")
# Decoding that uses parts of the model by themselves, or another forward than its own.
REFUSED_SETTINGS = {
    "assistant_early_exit": "it runs the first layers by themselves",
    "use_mtp": "it runs the model's prediction heads by themselves",
}


def generate(model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `original`, transformers' generate() of `model`, on all ranks of the pipeline.

    Args:
        model: the parallelised model, a `PipelineModel`.
        original: the bound method of the model's own class.
        args, kwargs: its arguments. Every rank passes equal ones, except that a `streamer` and `stopping_criteria` may
            be given on some ranks only: a criterion that is met on one rank stops them all.

    Returns:
        What the unsplit model returns, the same on every rank; of a cache that is part of it, each rank has the layers
        of its own stages, and for the others entries of the right length.

    Raises:
        ValueError: the ranks were given different arguments.
        NotImplementedError: the way of decoding cannot work on stages.
        PipelineFailure: a rank was lost or failed.
    """
    decoding = model.pipeline.decoding
    if decoding.running:  # called by a generate() that goes on: long-form Whisper, token healing
        return original(*args, **kwargs)
    with decoding.session():
        arguments = dict(inspect.signature(original).bind_partial(*args, **kwargs).arguments)
        arguments.update(arguments.pop("kwargs", {}))
        _refuse(arguments, model)
        if _compare(arguments, decoding) and "streamer" not in arguments:
            kwargs["streamer"] = Unheard()
        decoding.every_position = any(_setting(name, arguments, model) is not None for name in MANY_POSITIONS)
        with _over_stages(model, decoding):
            return original(*args, **kwargs)


class Unheard(BaseStreamer):
    """Stands on ranks without a streamer for another rank's, so that all ranks accept or refuse one together."""

    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


class SharedCriteria(StoppingCriteriaList):
    """Stopping criteria that may differ between ranks (by the clock, or a user's own): met on one is met on all."""

    def __init__(self, criteria: StoppingCriteriaList, decoding: Decoding) -> None:
        super().__init__(criteria)
        self._decoding = decoding

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self._decoding.any(super().__call__(input_ids, scores, **kwargs))


def _setting(name: str, arguments: Mapping[str, Any], model: nn.Module) -> Any:
    """An option of this generate(): given by itself, in a configuration, or in the model's configuration."""
    if arguments.get(name) is not None:
        return arguments[name]
    configurations = (arguments.get("generation_config"), getattr(model, "generation_config", None))
    values = (getattr(configuration, name, None) for configuration in configurations)
    return next((value for value in values if value is not None), None)


def _refuse(arguments: Mapping[str, Any], model: nn.Module) -> None:
    """Raise NotImplementedError for what would go round the model's forward."""
    for name, reason in REFUSED_SETTINGS.items():
        if _setting(name, arguments, model):
            raise NotImplementedError(f"generate({name}=...) is not implemented over pipeline stages: {reason}")
    if _setting("cache_implementation", arguments, model) == "paged":
        raise NotImplementedError(
            "continuous batching (cache_implementation='paged') is not implemented over pipeline stages"
        )
    if isinstance(arguments.get("custom_generate"), str) or arguments.get("trust_remote_code"):
        raise NotImplementedError(
            "decoding with code from a repository (custom_generate='...', trust_remote_code=True, which contrastive "
            "search, DoLa, group and constrained beam search need) is not implemented over pipeline stages: it may use "
            "the model in parts; a function passed as custom_generate is run as it is"
        )


def _compare(arguments: Mapping[str, Any], decoding: Decoding) -> bool:
    """Whether a rank was given a streamer. Raises ValueError on every rank if they were given different arguments."""
    described = {name: _described(value) for name, value in arguments.items() if name not in INDIVIDUAL_ARGUMENTS}
    every = decoding.gather([fingerprint(described), int(arguments.get("streamer") is not None)])
    if any(theirs[0] != every[0][0] for theirs in every):
        raise ValueError(
            f"generate() was given different arguments on ranks {list(decoding.ranks)} of this pipeline: every "
            f"rank passes the same inputs and options, except for {' and '.join(INDIVIDUAL_ARGUMENTS)}; this rank "
            f"passed {sorted(arguments)}"
        )
    return any(theirs[1] for theirs in every)


def _described(value: Any) -> Any:
    """What `fingerprint` can read."""
    if isinstance(value, GenerationConfig):
        return value.to_json_string()
    if isinstance(value, Cache):
        return f"{type(value).__name__} of {past_length(value)} tokens"
    return value


@contextmanager
def _over_stages(model: Any, decoding: Decoding) -> Iterator[None]:
    """For the duration, route what generate() calls besides the model itself over the stages."""
    replaced: list[tuple[nn.Module, str, Any]] = []

    def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
        replaced.append((owner, name, vars(owner).get(name)))
        # Past nn.Module.__setattr__, and with the wrapped function's signature, which generate() inspects.
        owner.__dict__[name] = functools.wraps(getattr(owner, name))(function)

    try:
        if getattr(model.config, "is_encoder_decoder", False):
            encoder = model.get_encoder()
            replace(encoder, "forward", _over_all_stages(decoding, encoder.forward))
        replace(model, "_get_stopping_criteria", _shared_criteria(decoding, model._get_stopping_criteria))
        # A compiled forward would capture the messages between the stages.
        replace(model, "_valid_auto_compile_criteria", lambda *args, **kwargs: False)
        yield
    finally:
        for owner, name, before in reversed(replaced):
            if before is None:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = before


def _over_all_stages(decoding: Decoding, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if decoding.inside:
            return original(*args, **kwargs)
        arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
        arguments.update(arguments.pop("kwargs", {}))
        return decoding.forward(arguments, call=original)

    return forward


def _shared_criteria(decoding: Decoding, original: Callable[..., Any]) -> Callable[..., Any]:
    def get_stopping_criteria(*args: Any, **kwargs: Any) -> StoppingCriteriaList:
        criteria = original(*args, **kwargs)
        own = any(type(criterion) not in AGREEING_CRITERIA for criterion in criteria)
        return SharedCriteria(criteria, decoding) if any(rank[0] for rank in decoding.gather([own])) else criteria

    return get_stopping_criteria

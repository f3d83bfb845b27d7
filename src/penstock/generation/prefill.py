"""A forward over the prompts of a batch, as several forwards over some of its samples each.

A stage can then hand on the first samples while it works on the next ones. Every part fills a cache of its own, and the
batch's is put together of them. This is done only where nothing but the samples' own rows can matter: with the ordinary
growing cache, still empty, and inputs that are known to have one row for each sample.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from penstock.data.microbatch import microbatch_sizes, split_batch
from penstock.modeling.stage.outputs import merge_outputs

MOST_PARTS = 4
LEAST_SAMPLES = 2
# Tensors that are simply one row for each sample.
INPUTS = frozenset(("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids"))
# Layers of a cache whose keys and values have one row for each sample, and nothing else that depends on the samples.
LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class Prefill:
    """The parts of such a forward."""

    def __init__(self, inputs: Mapping[str, Any], name: str, batch_size: int, number: int) -> None:
        self._name, self._cache = name, inputs[name]
        self._sizes = microbatch_sizes(batch_size, number)
        self._caches = [_like(self._cache) for _ in self._sizes]
        parts = split_batch({key: value for key, value in inputs.items() if key != name}, batch_size, self._sizes)
        self.parts = [{**part, name: cache} for part, cache in zip(parts, self._caches, strict=True)]

    @classmethod
    def of(cls, inputs: Mapping[str, Any], least_tokens: int) -> Prefill | None:
        """A forward in parts of at least `least_tokens` tokens; None if it can or should only be run whole."""
        tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        name = next((name for name, value in inputs.items() if isinstance(value, Cache)), None)
        if name is None or not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
            return None
        batch_size, length = tokens.shape[:2]
        number = min(MOST_PARTS, batch_size // LEAST_SAMPLES, batch_size * length // least_tokens)
        if number < 2 or not _is_empty(inputs[name]):
            return None
        for key, value in inputs.items():
            if isinstance(value, torch.Tensor):
                per_axis = key == "position_ids" and value.dim() != 2
                if key not in INPUTS or value.dim() < 2 or value.shape[0] != batch_size or per_axis:
                    return None
            elif key != name and not (value is None or isinstance(value, (bool, int, float, str))):
                return None
        return cls(inputs, name, batch_size, number)

    def joined(self, outputs: Sequence[Any]) -> Any:
        """One output of the parts', with logits of the last position alone and the batch's cache."""
        for output in outputs:
            if isinstance(logits := output.get("logits"), torch.Tensor) and logits.dim() == 3:
                output["logits"] = logits[:, -1:]
        cached = [name for name, value in outputs[0].items() if isinstance(value, Cache)]
        merged = merge_outputs(outputs, self._sizes)
        self._cache.layers = [_joined(layers) for layers in zip(*(each.layers for each in self._caches), strict=True)]
        for name in cached:
            merged[name] = self._cache
        return merged


def _is_empty(cache: Any) -> bool:
    """Whether it is an ordinary cache that is still empty."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) in LAYERS and not layer.is_initialized for layer in cache.layers)
    )


def _like(cache: Any) -> Any:
    """A new empty cache of the same kind."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    return made


def _joined(layers: Sequence[Any]) -> Any:
    """A layer with the samples of all `layers`, which are emptied."""
    first = layers[0]
    if first.is_initialized:
        for states in ("keys", "values"):
            joined = torch.cat([getattr(layer, states) for layer in layers])
            for layer in layers:
                setattr(layer, states, None)
            setattr(first, states, joined)
    return first

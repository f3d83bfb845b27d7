"""Key-value caches on a stage that holds only some of the layers.

The owner of a layer caches its keys and values as always. For the layers of other stages the standard cache classes
get entries of one head and one dimension: no memory to speak of, but the right *length*, so that `get_seq_length`,
mask sizes, beam reordering and cropping answer as in the unsplit model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache


class ShapeCache(Cache):
    """Given to a unit's shape function in place of a real cache: answers with meta tensors of the cached length.

    Args:
        real: the cache whose lengths count; it is read, never written.
        log: collects the index of every layer that is updated.
        remembers: False for the cross-attention part of an encoder-decoder cache, which has no past of its own.
    """

    def __init__(self, real: Cache, log: list[int], remembers: bool = True) -> None:
        self.real, self.log, self.remembers = real, log, remembers
        self.layers: list[Any] = []
        self.is_updated: dict[int, bool] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.remembers:
            return key_states, value_states
        self.log.append(layer_idx)
        return _meta_layer(self.real, layer_idx, key_states, value_states).update(
            key_states, value_states, *args, **kwargs
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.real.get_seq_length(layer_idx))


def _meta_layer(real: Cache, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> Any:
    """A copy of a layer on the meta device, with heads and dimensions like the new states: it knows how it grows."""
    layer: Any
    if layer_idx < len(real.layers):
        layer = copy.copy(real.layers[layer_idx])
    elif real.layer_class_to_replicate is not None:
        layer = real.layer_class_to_replicate()
    else:
        raise IndexError(f"the cache has {len(real.layers)} layers, but layer {layer_idx} is updated")
    for name, tensor in vars(layer).items():
        if isinstance(tensor, torch.Tensor):
            like = value_states if name == "values" else key_states
            shape = tensor.shape if tensor.dim() != 4 else (*like.shape[:2], tensor.shape[2], like.shape[3])
            setattr(layer, name, torch.empty(shape, dtype=tensor.dtype, device="meta"))
    if hasattr(layer, "device"):
        layer.device = torch.device("meta")
    return layer


def shape_cache(real: Cache, log: list[int]) -> Cache:
    """The stand-in for `real` in a shape function; `log` collects the layers that the function updates."""
    if isinstance(real, EncoderDecoderCache):
        past = real.self_attention_cache
        return EncoderDecoderCache(ShapeCache(past, log), ShapeCache(past, log, remembers=False))
    return ShapeCache(real, log)


def advance(cache: Cache, layer_index: int, like: torch.Tensor, num_tokens: int) -> None:
    """Lengthen the entry of a layer that another stage holds.

    Args:
        cache: the cache of the running forward.
        layer_index: the layer; linear-attention layers keep no length and are left alone.
        like: a tensor with the batch in its first dimension, and the dtype and device of the states.
        num_tokens: tokens to add.
    """
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    entry = cache.layers[layer_index] if layer_index < len(cache.layers) else None
    if entry is not None and cache.is_linear[layer_index]:
        return
    keys = getattr(entry, "keys", None)
    # An existing entry keeps its width: while planning, a copy of the owner's own layer may be lengthened.
    heads, width = (keys.shape[1], keys.shape[3]) if isinstance(keys, torch.Tensor) and keys.dim() == 4 else (1, 1)
    dtype = keys.dtype if isinstance(keys, torch.Tensor) else like.dtype
    states = torch.zeros(like.shape[0], heads, num_tokens, width, dtype=dtype, device=like.device)
    cache.update(states, states, layer_index)


def thin_copy(cache: Cache) -> Cache:
    """A copy of `cache` of the same lengths whose keys and values have one head and one dimension.

    Planning runs on it, so that the real cache stays as it is and its memory is not doubled.
    """
    memo: dict[int, Any] = {}
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    for part in parts:
        for layer in part.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name, None)
                if isinstance(states, torch.Tensor) and states.dim() == 4:
                    memo[id(states)] = states[:, :1, :, :1].clone()
    return copy.deepcopy(cache, memo)


def signature(cache: Cache) -> tuple[Any, ...]:
    """What of a cache a plan may depend on: its class and whether it holds anything yet."""
    return type(cache).__name__, int(cache.get_seq_length()) > 0

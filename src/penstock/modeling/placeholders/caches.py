"""Caches on a stage that holds only some of the layers.

The owner of a layer caches its keys and values as always. For the layers of other stages the standard cache classes
get entries of one head and one dimension: no memory to speak of, but the right *length*, so that `get_seq_length`,
mask sizes, beam reordering and cropping answer as in the unsplit model. A layer with a convolution's or a recurrence's
state has no length; on other stages it only knows whether there is a state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache


@dataclass(frozen=True)
class CacheUse:
    """What one call of a unit does with a cache.

    Attributes:
        lengthened: indices of the layers that get further keys and values.
        states: on the meta device, the layers whose convolution's or recurrence's state goes on, by index.
    """

    lengthened: list[int] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)


class ShapeCache(Cache):
    """Given to a unit's shape function in place of a real cache: answers with meta tensors of the cached length.

    Args:
        real: the cache whose lengths count; it is read, never written.
        use: collects what is done with which layer.
        begun: layers as an earlier call left them on the meta device. Only a layer's owner has its real state.
        batch: samples of this call.
        remembers: False for the cross-attention part of an encoder-decoder cache, which has no past of its own.
    """

    def __init__(
        self, real: Cache, use: CacheUse, begun: Mapping[int, Any], batch: int, remembers: bool = True
    ) -> None:
        self.real, self.use, self.remembers = real, use, remembers
        self.layers: list[Any] = []
        self.is_updated: dict[int, bool] = {}
        self._begun, self._batch = begun, batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.remembers:
            return key_states, value_states
        self.use.lengthened.append(layer_idx)
        return _meta_layer(self.real, layer_idx, key_states, value_states).update(
            key_states, value_states, *args, **kwargs
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.real.get_seq_length(layer_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.real.has_previous_state(layer_idx, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._state_layer(layer_idx).conv_states[state_idx]

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        return self._state_layer(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._state_layer(layer_idx).recurrent_states[state_idx]

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        return self._state_layer(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def _state_layer(self, layer_idx: int) -> Any:
        """A layer's state on the meta device. Raises IndexError if it has begun, but not in an earlier call."""
        states = self.use.states
        if layer_idx not in states:
            layer = self.real.layers[layer_idx]
            if any(layer.has_previous_state.values()):
                if layer_idx not in self._begun:
                    raise IndexError(f"nothing is known of the state of layer {layer_idx}")
                layer = self._begun[layer_idx]
            states[layer_idx] = copy.deepcopy(layer)
            for tensors in (states[layer_idx].conv_states, states[layer_idx].recurrent_states):
                for index, tensor in tensors.items():
                    if tensor is not None:
                        tensors[index] = tensor.new_empty((self._batch, *tensor.shape[1:]))
        return states[layer_idx]


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


def shape_cache(real: Cache, use: CacheUse, begun: Mapping[int, Any], batch: int) -> Cache:
    """The placeholder for `real` in a shape function; see `ShapeCache`."""
    if isinstance(real, EncoderDecoderCache):
        past = real.self_attention_cache
        cross = ShapeCache(past, use, begun, batch, remembers=False)
        return EncoderDecoderCache(ShapeCache(past, use, begun, batch), cross)
    return ShapeCache(real, use, begun, batch)


def advance_cache(
    arguments: Sequence[Any], layers: Sequence[int], state_layers: Sequence[int], device: torch.device | None = None
) -> None:
    """Let the cache among a unit's arguments know what the unit does to it, when another stage runs the unit.

    Args:
        arguments: the leaves of the arguments. The first tensor's first two dimensions are samples and tokens.
        layers: indices of the layers that the unit lengthens by these tokens.
        state_layers: indices of those whose convolution's or recurrence's state it begins or carries on.
        device: where the tokens' entries live if the tensor is a meta tensor.
    """
    cache = next((each for each in arguments if isinstance(each, Cache)), None)
    if cache is None or not (layers or state_layers):
        return
    part = decoder_part(cache)
    like = next(each for each in arguments if isinstance(each, torch.Tensor))
    for index in layers:
        keys: Any = getattr(part.layers[index], "keys", None) if index < len(part.layers) else None
        # An existing entry keeps its width: while planning, a copy of the owner's own layer may be lengthened.
        has_states = isinstance(keys, torch.Tensor)
        heads, width = (keys.shape[1], keys.shape[3]) if has_states and keys.dim() == 4 else (1, 1)
        dtype = keys.dtype if has_states else like.dtype
        shape = (like.shape[0], heads, like.shape[1], width)
        states = torch.zeros(shape, dtype=dtype, device=device if device and like.is_meta else like.device)
        part.update(states, states, index)
    for index in state_layers:
        flags = part.layers[index].has_previous_state
        flags.update(dict.fromkeys(flags, True))


def past_length(cache: Cache) -> int:
    """How many tokens the cache holds; of one whose layers have no lengths, whether it holds anything."""
    part = decoder_part(cache)
    if part.layers and not any(isinstance(layer, CacheLayerMixin) for layer in part.layers):
        return int(part.has_previous_state())
    return int(cache.get_seq_length())


def cache_placeholder(cache: Cache) -> Cache:
    """A copy of `cache` of the same lengths whose keys and values have one head and one dimension.

    Planning runs on it, so that the real cache stays as it is and its memory is not doubled.
    """
    pair: Any = cache
    is_pair = isinstance(cache, EncoderDecoderCache)
    parts = [pair.self_attention_cache, pair.cross_attention_cache] if is_pair else [pair]
    states = [each for part in parts for layer in part.layers for each in vars(layer).values() if _is_wide(each)]
    memo = {id(each): each[:, :1, :, :1].clone() for each in states}
    return copy.deepcopy(cache, memo)


def layer_placeholder(layer: Any) -> Any:
    """A copy of a layer of the same length with one head and one dimension."""
    small = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(small, name, (value[:, :1, :, :1] if _is_wide(value) else value).clone())
    return small


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


def decoder_part(cache: Cache) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def frozen_cache(value: Any, layers: Sequence[int]) -> Any:
    """`value`; a cache as a copy that does not see `layers` grow, made without copying keys and values."""
    if not isinstance(value, Cache):
        return value
    frozen = copy.copy(value)
    if isinstance(frozen, EncoderDecoderCache):
        frozen.self_attention_cache = frozen_cache(frozen.self_attention_cache, layers)
        return frozen
    frozen.layers = [copy.copy(each) if index in layers else each for index, each in enumerate(frozen.layers)]
    return frozen


def cache_kind(cache: Cache) -> tuple[Any, ...]:
    """What of a cache a plan may depend on: its class and whether it holds anything yet."""
    return type(cache).__name__, past_length(cache) > 0

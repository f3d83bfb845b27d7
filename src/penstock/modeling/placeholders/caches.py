"""Caches on a stage that holds only some of the layers.

The owner of a layer caches its keys and values as always. For the layers of other stages the standard cache classes get
entries of one head and one dimension: no memory to speak of, but the right *length*, so that `get_seq_length`, mask
sizes, beam reordering and cropping answer as in the unsplit model. A layer with a convolution's or a recurrence's state
has no length; on other stages it only knows whether there is a state."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, LinearAttentionCacheLayerMixin


@dataclass(frozen=True, slots=True)
class CacheGrowth:
    """What a call of a unit does to the cache among its arguments, by their shapes alone."""

    layers: tuple[int, ...]  # that it lengthens by its tokens
    state_layers: tuple[int, ...]  # whose convolution's or recurrence's state it begins or carries on
    indexed: tuple[int, ...]  # to whose indexer it gives keys of its tokens
    samples: int  # the dimension of samples of the call's first tensor argument; the next one is that of tokens
    per_token: int  # how many entries that dimension has for each token

    def apply(self, arguments: Sequence[Any], device: torch.device | None = None) -> None:
        """Let the cache among a call's arguments know what the call does to it, when another stage makes the call.
        Entries live on `device` if the first tensor is a meta tensor."""
        cache = next((each for each in arguments if isinstance(each, Cache)), None)
        if cache is None:
            return
        part = decoder_part(cache)
        like = next(each for each in arguments if isinstance(each, torch.Tensor))
        place = device if device and like.is_meta else like.device
        batch, tokens = like.shape[self.samples], like.shape[self.samples + 1] // self.per_token
        for index in self.layers:
            layer = part.layers[index] if index < len(part.layers) else None
            states = []
            for name in ("keys", "values"):
                # An existing entry keeps its width: while planning, a copy of the owner's own layer may be lengthened.
                cached: Any = getattr(layer, name, None)
                heads, width = (cached.shape[1], cached.shape[3]) if _is_wide(cached) else (1, 1)
                dtype = cached.dtype if isinstance(cached, torch.Tensor) else like.dtype
                states.append(torch.zeros((batch, heads, tokens, width), dtype=dtype, device=place))
            part.update(*states, index)
        for index in self.indexed:
            keys = part.layers[index].indexer_keys
            width, dtype = (1, like.dtype) if keys is None else (keys.shape[2], keys.dtype)
            part.update_indexer(torch.zeros((batch, tokens, width), dtype=dtype, device=place), index)
        for index in self.state_layers:
            flags = part.layers[index].has_previous_state
            flags.update(dict.fromkeys(flags, True))


@dataclass(frozen=True)
class CacheUse:
    """What one call of a unit does with a cache, by indices of layers."""

    lengthened: list[int] = field(default_factory=list)  # get further keys and values
    indexed: list[int] = field(default_factory=list)  # get keys of an indexer, which chooses what is attended to
    given: list[int] = field(default_factory=list)  # samples and tokens of the keys that were last given
    states: dict[int, Any] = field(default_factory=dict)  # layers with a state that goes on, on the meta device

    def growth(self, leaves: Sequence[Any]) -> CacheGrowth | None:
        """What a call with these leaves of arguments has done to the cache; None if nothing."""
        if not (self.lengthened or self.states or self.indexed):
            return None
        samples, per_token = self._place_of_samples(next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        return CacheGrowth(tuple(self.lengthened), tuple(self.states), tuple(self.indexed), samples, per_token)

    def _place_of_samples(self, first: torch.Tensor) -> tuple[int, int]:
        """Where in the first tensor the samples and tokens are whose keys were given: `samples, per_token`. Mostly
        in front, but there may be several streams of hidden states, before them or for each token."""
        if not self.given:
            return 0, 1
        samples, tokens = self.given
        sizes = list(zip(first.shape, first.shape[1:], strict=False))
        if (samples, tokens) in sizes:
            return sizes.index((samples, tokens)), 1
        for dim, (size, length) in enumerate(sizes):
            if size == samples and tokens and length % tokens == 0 and length:
                return dim, length // tokens
        return 0, 1


class ShapeCache(Cache):  # type: ignore[misc]  # a library without types
    """Given to a unit's shape function in place of a real cache: answers with meta tensors of the cached length.

    Args:
        begun: layers as an earlier call left them on the meta device. Only a layer's owner has its real state.
        remembers: False for the cross-attention part of an encoder-decoder cache, which has no past of its own.
    """

    def __init__(
        self, real: Cache, use: CacheUse, begun: Mapping[int, Any], batch: int, remembers: bool = True
    ) -> None:
        self.real, self.use, self.remembers = real, use, remembers
        self.layers: Any = _MetaLayers(real) if remembers else []
        self.is_updated: dict[int, bool] = {}
        self._begun, self._batch = begun, batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.remembers:
            return key_states, value_states
        self.use.lengthened.append(layer_idx)
        self.use.given[:] = key_states.shape[0], key_states.shape[2]
        layer = self.layers[layer_idx]
        for name, cached in _keys_and_values(layer).items():
            # Where another stage owns the layer, it has one head and one dimension.
            like = value_states if "value" in name else key_states
            setattr(layer, name, cached.new_empty((*like.shape[:2], cached.shape[2], like.shape[3])))
        if hasattr(layer, "device"):
            layer.device = torch.device("meta")
        result: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states, *args, **kwargs)
        return result

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        if not self.remembers:
            return indexer_key_states
        self.use.indexed.append(layer_idx)
        layer = self.layers[layer_idx]
        cached = layer.indexer_keys
        if cached is not None and cached.dim() == 3:
            layer.indexer_keys = cached.new_empty((*cached.shape[:2], indexer_key_states.shape[2]))
        keys: torch.Tensor = layer.update_indexer(indexer_key_states)
        return keys

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.real.get_seq_length(layer_idx))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state: torch.Tensor | None = self._state_layer(layer_idx).conv_states[state_idx]
        return state

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        state: torch.Tensor = self._state_layer(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state: torch.Tensor | None = self._state_layer(layer_idx).recurrent_states[state_idx]
        return state

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        state: torch.Tensor = self._state_layer(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return state

    def _state_layer(self, layer_idx: int) -> Any:
        """A layer's state on the meta device. Raises IndexError if it has begun, but in no call that was seen here."""
        states = self.use.states
        if layer_idx not in states:
            layer = self.real.layers[layer_idx]
            if any(layer.has_previous_state.values()):
                if layer_idx not in self._begun:
                    raise IndexError(f"the state of layer {layer_idx} is not known")
                layer = self._begun[layer_idx]
            states[layer_idx] = copy.deepcopy(layer)
            for tensors in (states[layer_idx].conv_states, states[layer_idx].recurrent_states):
                for index, tensor in tensors.items():
                    if tensor is not None:
                        tensors[index] = tensor.new_empty((self._batch, *tensor.shape[1:]))
        return states[layer_idx]


class _MetaLayers(Sequence[Any]):
    """Copies of a cache's layers on the meta device, made when they are looked at: they know how they grow."""

    def __init__(self, real: Cache) -> None:
        self._real = real
        self._made: dict[int, Any] = {}

    def __len__(self) -> int:
        return max(len(self._real.layers), 1 + max(self._made, default=-1))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index += len(self) if index < 0 else 0
        if index not in self._made:
            self._made[index] = self._layer(index)
        return self._made[index]

    def _layer(self, index: int) -> Any:
        layers = self._real.layers
        if index < len(layers):
            layer = copy.copy(layers[index])
            for name, value in vars(layer).items():
                setattr(layer, name, pytree.tree_map_only(torch.Tensor, _on_meta, value))
            return layer
        if self._real.layer_class_to_replicate is None:
            raise IndexError(f"the cache has {len(layers)} layers, but layer {index} is asked for")
        return self._real.layer_class_to_replicate()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def shape_cache(real: Cache, use: CacheUse, begun: Mapping[int, Any], batch: int) -> Cache:
    if isinstance(real, EncoderDecoderCache):
        past = real.self_attention_cache
        cross = ShapeCache(past, use, begun, batch, remembers=False)
        return EncoderDecoderCache(ShapeCache(past, use, begun, batch), cross)
    return ShapeCache(real, use, begun, batch)


def note_use(cache: Cache, layers: Collection[int]) -> None:
    """Record that a module which could not be run uses its layer (there should be one) of a cache in the usual way."""
    if not isinstance(cache, ShapeCache) or len(layers) != 1:
        raise NotImplementedError("its code uses the cache of keys and values in a way that cannot be followed")
    index = next(iter(layers))
    layer = cache.layers[index]
    if isinstance(layer, CacheLayerMixin) and index not in cache.use.lengthened:
        cache.use.lengthened.append(index)
    if hasattr(layer, "update_indexer") and index not in cache.use.indexed:
        cache.use.indexed.append(index)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        cache.use.states[index] = copy.deepcopy(layer)


def past_length(cache: Cache) -> int:
    """How many tokens the cache holds; of one whose layers have no lengths, whether it holds anything."""
    part = decoder_part(cache)
    if part.layers and not any(isinstance(layer, CacheLayerMixin) for layer in part.layers):
        return int(part.has_previous_state())
    return int(cache.get_seq_length())


def narrow_copy(cache: Cache) -> Any:
    """A copy of a cache of the same lengths, whose keys and values have one head and one dimension: what is done to it
    leaves the real one as it is, and does not double the memory of its keys and values."""
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    wide = [tensor for part in parts for layer in part.layers for tensor in _keys_and_values(layer).values()]
    return copy.deepcopy(cache, {id(tensor): tensor[:, :1, :, :1].clone() for tensor in wide})


def layer_placeholder(layer: Any) -> Any:
    """A copy of a layer of the same length, whose keys and values have one head and one dimension.

    It is made in every forward, so it is cheap: it has its own flags, but the tensors of its convolution's and
    recurrence's states are the layer's, since only the layer's owner reads or writes them."""
    small, wide = copy.copy(layer), _keys_and_values(layer)
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(small, name, (value[:, :1, :, :1] if name in wide else value).clone())
        elif isinstance(value, (dict, list)):
            setattr(small, name, value.copy())
    return small


def _keys_and_values(layer: Any) -> dict[str, torch.Tensor]:
    """The tensors of a layer that hold keys or values, by name: `keys`, `values`, and others of as many dimensions."""
    tensors = {}
    for name, tensor in vars(layer).items():
        main = vars(layer).get("values" if "value" in name else "keys")
        alike = tensor.shape[1::2] == main.shape[1::2] if _is_wide(tensor) and _is_wide(main) else True
        if _is_wide(tensor) and alike and ("key" in name or "value" in name):
            tensors[name] = tensor
    return tensors


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
    """The properties of a cache that a plan may depend on: its class, and whether it holds anything yet."""
    return type(cache).__name__, past_length(cache) > 0

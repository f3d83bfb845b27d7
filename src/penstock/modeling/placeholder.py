"""Placeholders whose shape is worked out only when somebody asks.

While a model generates, the shapes of attention weights and position biases change with every token. Working them out
takes a run of the unit's meta copy, and hardly ever does anybody look at them on a stage that was not sent the value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, EncoderDecoderCache


class LatePlaceholder(torch.Tensor):
    """Stands for the tensor that `make()` returns; made when an operation, or a look at its shape, first needs it."""

    _make: Callable[[], torch.Tensor]
    _made: torch.Tensor | None

    @staticmethod
    def __new__(cls, make: Callable[[], torch.Tensor]) -> LatePlaceholder:
        self = torch.Tensor._make_subclass(cls, torch.empty(0))
        self._make, self._made = make, None
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(LatePlaceholder, LatePlaceholder.made, (args, kwargs or {}))
        return func(*args, **kwargs)

    def made(self) -> torch.Tensor:
        if self._made is None:
            self._made = self._make()
        return self._made


def as_of_now(value: Any, layers: Sequence[int]) -> Any:
    """`value`; a cache as a copy that does not see `layers` grow, made without copying keys and values."""
    if not isinstance(value, Cache):
        return value
    frozen = copy.copy(value)
    if isinstance(frozen, EncoderDecoderCache):
        frozen.self_attention_cache = as_of_now(frozen.self_attention_cache, layers)
        return frozen
    frozen.layers = list(frozen.layers)
    for layer in layers:
        if layer < len(frozen.layers):
            frozen.layers[layer] = copy.copy(frozen.layers[layer])
    return frozen

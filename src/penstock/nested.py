"""Inputs inside of others: mappings, tuples, lists and data classes are walked, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

PLAIN = (torch.Tensor, Cache, bool, int, float, str, bytes, type(None))


def items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The keys and entries of what is walked, None for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if is_record(value):
        names = [field.name for field in fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def is_record(value: Any) -> bool:
    """Whether this is an instance of a data class, and neither a mapping, as a `ModelOutput` is, nor a module."""
    return is_dataclass(value) and not isinstance(value, (type, Mapping, nn.Module))


def with_items(value: Any, items: Sequence[Any]) -> Any:
    """What is walked with other entries; of subclasses, only data classes and named tuples keep their class."""
    if isinstance(value, Mapping):
        content = dict(zip(value, items, strict=True))
        # A ModelOutput (encoder_outputs) must keep its class: models ask for its fields.
        return type(value)(**content) if is_dataclass(value) else content
    if is_record(value):
        return _record(value, items)
    if hasattr(value, "_fields"):  # a named tuple takes its fields one by one
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else list(items)


def map_tensors(function: Callable[[str, torch.Tensor], Any], name: str, value: Any) -> Any:
    """`value` with what `function` makes of each tensor in it and of its name, such as "batch.labels"."""
    if isinstance(value, torch.Tensor):
        return function(name, value)
    items = items_of(value)
    if not items:
        return value
    mapped = [map_tensors(function, f"{name}.{key}", item) for key, item in items]
    return value if all(new is old for new, (_, old) in zip(mapped, items, strict=True)) else with_items(value, mapped)


def named_tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors in some inputs by name, those inside others too."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in inputs.items():
        map_tensors(tensors.setdefault, name, value)
    return tensors


def walkable(name: str, value: Any) -> Any:
    """An input such that torch walks it as well: other mappings as dictionaries, data classes known to torch."""
    if isinstance(value, PLAIN):
        return value
    items = None if isinstance(value, PackedSequence) else items_of(value)
    if items is None:
        if _holds_tensor(value):
            raise ValueError(
                f"{name} is a {type(value).__name__}, and the tensors in it cannot be split into microbatches: pass "
                "them as tensors, or in tuples, lists, dictionaries or data classes"
            )
        return value
    kind = type(value)
    if is_record(value):
        show_record_to_torch(kind)
    walked = [walkable(f"{name}.{key}", item) for key, item in items]
    known = kind in pytree.SUPPORTED_NODES or hasattr(value, "_fields")
    if known and all(new is old for new, (_, old) in zip(walked, items, strict=True)):
        return value
    return with_items(value, walked)


def show_record_to_torch(kind: type) -> None:
    """Let torch walk the instances of a data class."""
    if kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            kind,
            lambda record: ([item for _, item in items_of(record) or ()], _Like(record)),
            lambda new, like: _record(like.record, new),
        )


class _Like:
    """The instance that a data class is made again like. To torch two are equal if the same fields are set."""

    def __init__(self, record: Any) -> None:
        self.record = record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Like) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return " ".join(name for name, _ in items_of(self.record) or ())


def _record(record: Any, items: Any) -> Any:
    """A copy with other values of the fields that have one, without a call of its class's own code."""
    made: Any = object.__new__(type(record))
    getattr(made, "__dict__", {}).update(getattr(record, "__dict__", {}))
    for (name, _), item in zip(items_of(record) or (), items, strict=True):
        object.__setattr__(made, name, item)
    return made


def _holds_tensor(value: Any) -> bool:
    seen, left = set[int](), [value]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            return True
        if id(value) not in seen and not isinstance(value, (*PLAIN, type, nn.Module, ModuleType, FunctionType)):
            seen.add(id(value))
            left += gc.get_referents(value)
    return False

"""What a plan depends on: which function is run, and the kind of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from penstock.modeling import ghost_cache


def entry_of(module_names: Mapping[int, str], call: Callable[..., Any] | None) -> str:
    """The name of what is run; `module_names` are those of the model's modules, by identity."""
    if call is None:
        return "forward"
    owner = getattr(inspect.unwrap(call), "__self__", getattr(call, "__self__", None))
    name = module_names.get(id(owner))
    if name is not None:
        return f"{name}.{getattr(call, '__name__', 'forward')}"
    return str(getattr(call, "__qualname__", type(call).__name__))


def kind_of(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a plan depends on, of some inputs; cheap, as it is taken at every forward."""
    kinds = []
    generating = False
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            kind: Any = (value.dim(), value.is_floating_point())
        elif value is None or isinstance(value, (bool, int, float, str)):
            kind = value
        elif isinstance(value, Cache):
            kind, generating = ghost_cache.signature(value), True
        else:
            leaves, spec = pytree.tree_flatten(value)
            kind = (str(spec), *(type(leaf).__name__ for leaf in leaves))
        kinds.append((name, kind))
    if generating:  # one token at a time takes other paths than a prompt
        lengths = [inputs[n].shape[1] for n in ("input_ids", "decoder_input_ids") if inputs.get(n) is not None]
        kinds.append(("one token", lengths[-1:] == [1]))
    return tuple(sorted(kinds, key=lambda pair: pair[0]))


def criterion_key(criterion: Callable[..., Any] | None) -> Any:
    """What tells criteria apart. A lambda written inside a loop is a new function each time, but the same code."""
    if inspect.isfunction(criterion) and not (
        criterion.__closure__ or criterion.__defaults__ or criterion.__kwdefaults__
    ):
        return criterion.__code__
    return criterion


def device_of(inputs: Mapping[str, Any]) -> torch.device | None:
    for value in inputs.values():
        if isinstance(value, torch.Tensor):
            return value.device
    return None

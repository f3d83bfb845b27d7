"""Values that a model's code asks of its inputs, answered from the inputs' copies on the host.

transformers decides about masks by their contents: `if attention_mask.all()`. On an accelerator the host then waits
until the device comes to it, in every microbatch and on every stage. While `HostValues` is active, what the model's
code computes from its inputs by simple operations is remembered as an expression, and once Python asks for a value it
is computed from the copies on the host. What is not known is asked of the device as ever."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree

# Operations of whose results the values are the same on any device. Integers and booleans only, see `_follow`.
PURE = frozenset((
    "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "all", "any",
    "sum", "cumsum", "diff", "max", "min", "amax", "amin", "maximum", "minimum", "logical_and", "logical_or",
    "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "__and__", "__or__", "__invert__", "__rand__",
    "__ror__", "add", "sub", "mul", "__add__", "__sub__", "__mul__", "__radd__", "__rsub__", "__rmul__", "rsub",
    "abs", "neg", "where", "bool", "long", "int", "to", "type_as", "contiguous", "clone", "detach", "__getitem__",
    "select", "narrow", "index_select", "unsqueeze", "squeeze", "expand", "expand_as", "view", "reshape", "flatten",
    "transpose", "permute", "flip", "roll", "repeat", "cat", "stack", "pad", "arange", "ones", "zeros", "full",
    "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full",
))  # fmt: skip
# What Python reads.
READS = frozenset(["item", "tolist", "__bool__", "__int__", "__index__", "__float__", "is_nonzero"])


class HostValues(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        # By the tensor's identity, which is its own while the weak reference says so: its version, and its values.
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, Callable[[], torch.Tensor]]] = {}

    def know(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Tell that `host`, a CPU tensor that nobody changes, has the values of `tensor`, which is on a device."""
        if not tensor.is_inference():
            self._remember(tensor, lambda: host)

    def know_all(self, inputs: Mapping[str, Any], host: Mapping[str, Any]) -> None:
        for name, value in inputs.items():
            copy = host.get(name)
            if isinstance(value, torch.Tensor) and isinstance(copy, torch.Tensor) and copy.is_cpu and not value.is_cpu:
                self.know(value, copy)

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Suspend it: a unit has many operations of its own, computed from weights."""
        return _pop_mode_temporarily() if _get_current_function_mode() is self else contextlib.nullcontext()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in READS and len(args) == 1:
            value = self._value_of(args[0])
            return func(*args, **kwargs) if value is None else func(value(), **kwargs)
        result = func(*args, **kwargs)
        if name in PURE and isinstance(result, torch.Tensor) and not result.is_cpu:
            self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        # Sums of fractions depend on the device.
        if result.is_floating_point() or result.is_complex() or result.is_inference() or "out" in kwargs:
            return
        if any(result is argument for argument in args):
            return
        leaves, structure = pytree.tree_flatten((args, kwargs))
        values = [self._value_of(leaf) for leaf in leaves]
        if any(value is None and isinstance(leaf, torch.Tensor) for value, leaf in zip(values, leaves, strict=True)):
            return
        # The tensors themselves are not kept alive.
        others = [None if value else _on_host(leaf) for value, leaf in zip(values, leaves, strict=True)]

        @functools.cache
        def value() -> torch.Tensor:
            given = [known() if known else other for known, other in zip(values, others, strict=True)]
            host_args, host_kwargs = pytree.tree_unflatten(given, structure)
            found: torch.Tensor = func(*host_args, **host_kwargs)
            return found

        self._remember(result, value)

    def _remember(self, tensor: torch.Tensor, value: Callable[[], torch.Tensor]) -> None:
        key, known = id(tensor), self._known
        known[key] = weakref.ref(tensor, lambda _: known.pop(key, None)), tensor._version, value

    def _value_of(self, tensor: Any) -> Callable[[], torch.Tensor] | None:
        """What computes the values of a tensor on the host, if that is known and it was not changed in place since."""
        if not isinstance(tensor, torch.Tensor) or tensor.is_cpu or id(tensor) not in self._known:
            return None
        reference, version, value = self._known[id(tensor)]
        return value if reference() is tensor and version == tensor._version else None


def _on_host(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

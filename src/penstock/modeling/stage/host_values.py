"""Values that a model's code asks of its inputs, answered from the inputs' copies on the host.

transformers decides about masks by their contents: `if attention_mask.all()`. On an accelerator the host then waits
until the device comes to it, in every microbatch and on every stage, although the batch was on the host a moment ago.
While `HostValues` is active, what the model's code computes from its inputs by simple operations is remembered as an
expression, and once Python asks for a value it is computed from the inputs' copies on the host. Nothing is computed
otherwise, and what is not known is asked of the device as ever.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

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
    """While active, Python's questions about values that follow from known ones are answered on the host."""

    def __init__(self) -> None:
        super().__init__()
        # By the tensor's identity, which is its own while the weak reference says so.
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], _Expression]] = {}

    def know(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Tell that `host`, a CPU tensor that nobody changes, has the values of `tensor`, which is on a device."""
        if not tensor.is_inference():
            self._remember(tensor, _Expression(None, None, tensor._version, host))

    def know_all(self, inputs: Mapping[str, Any], host: Mapping[str, Any]) -> None:
        """Call `know` for all tensors of a batch that have a copy on the host under their name."""
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
            known = self._expression_of(args[0])
            return func(*args, **kwargs) if known is None else func(known.value(), **kwargs)
        result = func(*args, **kwargs)
        if name in PURE and isinstance(result, torch.Tensor) and not result.is_cpu:
            self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        # Sums of fractions depend on the device.
        if result.is_floating_point() or result.is_complex() or result.is_inference() or "out" in kwargs:
            return
        if any(result is argument for argument in args):
            return
        try:
            noted = _mapped(self._noted, (args, kwargs))
        except _UnknownError:
            return
        self._remember(result, _Expression(func, noted, result._version))

    def _remember(self, tensor: torch.Tensor, expression: _Expression) -> None:
        key, known = id(tensor), self._known
        known[key] = weakref.ref(tensor, lambda _: known.pop(key, None)), expression

    def _expression_of(self, tensor: Any) -> _Expression | None:
        """The expression of a tensor, if the tensor was not changed in place since."""
        if not isinstance(tensor, torch.Tensor) or tensor.is_cpu:
            return None
        reference, expression = self._known.get(id(tensor), (None, None))
        if reference is None or expression is None or reference() is not tensor:
            return None
        return expression if expression.version == tensor._version else None

    def _noted(self, argument: Any) -> Any:
        """An argument as an expression keeps it. Raises _UnknownError for a tensor that is not known."""
        known = self._expression_of(argument)
        if known is None and isinstance(argument, torch.Tensor):
            raise _UnknownError
        return argument if known is None else known


class _Expression:
    """A tensor as it would be computed on the host. `version` is that of the device's tensor it stands for."""

    __slots__ = ("_arguments", "_function", "_value", "version")

    def __init__(self, function: Callable[..., Any] | None, arguments: Any, version: int, value: Any = None) -> None:
        self._function = function
        self._arguments = arguments
        self._value = value
        self.version = version

    def value(self) -> torch.Tensor:
        if self._function is not None:
            args, kwargs = _mapped(_on_host, self._arguments)
            self._value = self._function(*args, **kwargs)
            self._function = self._arguments = None
        found: torch.Tensor = self._value
        return found


class _UnknownError(Exception):
    """A tensor of which the host has no copy."""


def _on_host(argument: Any) -> Any:
    """A kept argument as the function on the host takes it."""
    if isinstance(argument, _Expression):
        return argument.value()
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _mapped(function: Callable[[Any], Any], argument: Any) -> Any:
    """`argument` with the results of a function in place of all that tuples, lists and dictionaries in it hold."""
    if isinstance(argument, (tuple, list)):
        kind = tuple if isinstance(argument, tuple) else list
        return kind(_mapped(function, each) for each in argument)
    if isinstance(argument, dict):
        return {name: _mapped(function, value) for name, value in argument.items()}
    return function(argument)

"""Interception: calls of chosen modules pass through a handler while one is active.

The class of the module is swapped for a subclass whose `__call__` asks the handler first. A forward hook could not
do this: hooks and `forward` run inside the region that gradient checkpointing recomputes, where a value received
from another stage would be taken for a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn

from penstock.modeling.ghost import convert_absent

_SEAT = "_penstock_seat"


class Handler(Protocol):
    """What is asked when an intercepted module is called."""

    def call(self, seat: Seat, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the call of `module` shall return."""


class Switchboard:
    """Shared by the intercepted modules of one model: holds the handler that is active now, if any."""

    __slots__ = ("handler",)

    def __init__(self) -> None:
        self.handler: Handler | None = None


class Seat:
    """The place of one intercepted module: its name in the model and its own `__call__`."""

    __slots__ = ("name", "original", "switchboard")

    def __init__(self, name: str, original: Callable[..., Any], switchboard: Switchboard) -> None:
        self.name = name
        self.original = original
        self.switchboard = switchboard


_subclasses: dict[type, type] = {}


def _intercepted_class(base: Any) -> type:
    """The subclass of `base` whose instances ask their handler when called; one per class."""
    if base not in _subclasses:

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            seat: Seat = self.__dict__[_SEAT]
            handler = seat.switchboard.handler
            if handler is None:
                return seat.original(self, *args, **kwargs)
            return handler.call(seat, self, args, kwargs)

        def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
            convert_absent(self, fn)
            return base._apply(self, fn, recurse)

        # Same name, module and qualified name: error messages, repr and transformers' registries (which are keyed by
        # str(class)) see the model's own class.
        namespace = {
            "__call__": __call__,
            "_apply": _apply,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": _reduce_as_original,
            "_penstock_original": base,
        }
        _subclasses[base] = type(base)(base.__name__, (base,), namespace)
    return _subclasses[base]


def original_class(cls: type) -> type:
    """The model's own class behind an intercepted one; `cls` itself for any other class."""
    return getattr(cls, "_penstock_original", cls)


def _reduce_as_original(self: nn.Module, protocol: Any) -> Any:
    """Copies and pickles of an intercepted module are plain modules of the model's own class."""
    state = {name: value for name, value in self.__dict__.items() if name != _SEAT}
    return _new_module, (original_class(type(self)),), state


def _new_module(cls: Any) -> Any:
    return cls.__new__(cls)


def install(modules: Iterable[tuple[str, nn.Module]], switchboard: Switchboard) -> None:
    """Route the calls of `modules` (name, module) through `switchboard`."""
    for name, module in modules:
        base = original_class(type(module))
        module.__dict__[_SEAT] = Seat(name, base.__call__, switchboard)
        module.__class__ = _intercepted_class(base)


def uninstall(modules: Iterable[nn.Module]) -> None:
    """Give `modules` their own classes back."""
    for module in modules:
        module.__class__ = original_class(type(module))
        module.__dict__.pop(_SEAT, None)

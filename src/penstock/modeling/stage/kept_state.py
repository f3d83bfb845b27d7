"""What a model's forwards leave behind in plain attributes of its modules: a count of calls, a list that grows. Modules
that keep such a thing see a forward for each microbatch, and not for each batch."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# What torch itself keeps in every module; buffers are looked after elsewhere.
_TORCHS = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None), torch.Size)
_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)


class KeptState:
    """Sees what forwards of a model change. What one of them sets and the next leaves, as a table that is made once,
    is no such thing."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changes: Counter[tuple[int, str]] = Counter()

    def watching(self, stage: int, forward: Callable[[], Any]) -> Any:
        """Run a forward of a stage, which may be left by an exception."""
        before = _marks(self._model)
        try:
            return forward()
        finally:
            now = _marks(self._model)
            self._changes.update((stage, name) for name, mark in now.items() if before.get(name, _ABSENT) != mark)

    def changed(self) -> list[str]:
        """The names of what several forwards of one stage have changed."""
        return sorted({name for (_, name), times in self._changes.items() if times > 1})


_ABSENT = object()


def _marks(model: nn.Module) -> dict[str, Any]:
    """By name, what tells the value of each plain attribute from another one."""
    marks = {}
    for prefix, module in model.named_modules():
        own = vars(module)
        for name in own.keys() - _TORCHS:
            if (mark := _mark(own[name])) is not _ABSENT:
                marks[f"{prefix}.{name}" if prefix else name] = mark
    return marks


def _mark(value: Any) -> Any:
    kind = type(value)  # and not `isinstance`, which runs code of a configuration's class
    if issubclass(kind, _PLAIN):
        return repr(value)  # in which NaN is NaN
    if issubclass(kind, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if issubclass(kind, tuple):
        return tuple(map(_mark, value))
    return (id(value), len(value)) if kind in _CONTAINERS else _ABSENT

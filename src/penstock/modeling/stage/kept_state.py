"""What a model's forwards leave behind in plain attributes of its modules: a count of calls, a list that grows. Modules
that keep such a thing see a forward for each microbatch, and not for each batch."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.modeling.graph.attributes import OF_EVERY_MODULE, Variables, tensors_held_by

_PLAIN = (bool, int, float, str, type(None), torch.Size)
_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)


class KeptState:
    """Sees what forwards of a model change. What one of them sets and the next leaves, as a table that is made once,
    is no such thing."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changes: Counter[tuple[int, str]] = Counter()
        self._forwards: Counter[int] = Counter()
        # The user's forward hooks, with the names of their modules, and those of which a forward left something.
        self._hooks = [
            (prefix, hook)
            for prefix, module in model.named_modules()
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if not getattr(hook, "__module__", "").startswith(("torch.", "transformers."))
        ]
        self.keeping: dict[str, None] = {}
        # Variables outside of functions, and parameters, that a forward has changed.
        self.variables: dict[str, None] = {}
        self.weights: dict[str, None] = {}

    def watching(self, stage: int, forward: Callable[[], Any]) -> Any:
        """Run a forward of a stage, which may be left by an exception."""
        self._forwards[stage] += 1
        before, variables = _marks(self._model), Variables(self._model.modules())
        versions = _versions(self._model)
        held = [tensors_held_by(hook) for _, hook in self._hooks]
        try:
            return forward()
        finally:
            now = _marks(self._model)
            changed = [name for name, mark in now.items() if before.get(name, _ABSENT) != mark]
            self._changes.update((stage, name) for name in changed)
            self.variables |= dict.fromkeys(variables.changed())
            of_now = _versions(self._model)
            self.weights |= dict.fromkeys(name for name, version in versions.items() if of_now.get(name) != version)
            for (prefix, hook), known in zip(self._hooks, held, strict=True):
                if tensors_held_by(hook) - known:
                    self.keeping[prefix] = None

    def changed(self) -> list[str]:
        """The names of attributes that several forwards of one stage have changed, and of parameters that one has."""
        weights = self.weights if max(self._forwards.values(), default=0) > 1 else ()
        return sorted({*weights, *(name for (_, name), times in self._changes.items() if times > 1)})


_ABSENT = object()


def _versions(model: nn.Module) -> dict[str, int]:
    """Of each parameter, the number of its changes in place."""
    return {name: 0 if each.is_inference() else each._version for name, each in model.named_parameters()}


def _marks(model: nn.Module) -> dict[str, Any]:
    """By name, what tells the value of each plain attribute from another one."""
    marks = {}
    for prefix, module in model.named_modules():
        own = vars(module)
        for name in own.keys() - OF_EVERY_MODULE:
            if (mark := _mark(own[name])) is not _ABSENT:
                marks[f"{prefix}.{name}" if prefix else name] = mark
    return marks


def _mark(value: Any) -> Any:
    kind = type(value)  # and not `isinstance`, which runs code of a configuration's class
    if issubclass(kind, _PLAIN):
        return repr(value)  # in which NaN is NaN
    if issubclass(kind, torch.Tensor) and value.grad_fn is not None:
        return "of a graph"  # which another step could not go on with: it is computed anew in each forward
    if issubclass(kind, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if issubclass(kind, tuple):
        return tuple(map(_mark, value))
    return (id(value), len(value)) if kind in _CONTAINERS else _ABSENT

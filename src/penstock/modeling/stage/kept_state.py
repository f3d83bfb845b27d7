"""What a model's forwards leave behind in plain attributes of its modules.

That is a count of calls, say, or a list that grows. Modules that keep such a thing see a forward for each microbatch,
and not for each batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from penstock.modeling.graph.attributes import Attributes, Variables, tensors_held_by


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
        attributes, variables = Attributes(dict(self._model.named_modules())), Variables(self._model.modules())
        versions = _versions(self._model)
        held = [tensors_held_by(hook) for _, hook in self._hooks]
        try:
            return forward()
        finally:
            attributes.look(0)
            self._changes.update((stage, name) for name in attributes.changed)
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


def _versions(model: nn.Module) -> dict[str, int]:
    """Of each parameter, the number of its changes in place."""
    return {name: 0 if each.is_inference() else each._version for name, each in model.named_parameters()}

"""Tensors that stand for values which a stage was not sent, and the model's code between units that computes from them.

By the plan nothing of a stage uses such a value. If the code takes another path than the one that was followed, as the
inputs' values or an attribute are others, a unit here may be given one all the same. Its zeros would be taken for the
value, so that has to be seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.modeling.graph.reductions import storage_of

# What asks a tensor for its shape, type or device, in the words of `torch.overrides`.
_GETTER = "__get__"


class Unreceived(torch.Tensor):
    """Such a tensor, or what was computed from one. That follows torch's operations, as tracing does: what only takes
    another one's shape or type was not computed from it."""

    @staticmethod
    def of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(Unreceived) if type(tensor) is torch.Tensor else tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return Unreceived.of(self.detach().as_subclass(torch.Tensor).clone())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == _GETTER:
                result = func(*args, **kwargs)
                return result.as_subclass(cls) if type(result) is torch.Tensor else result
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            with _Reached(leaf for leaf in given if type(leaf) is cls) as reached:
                result = func(*args, **kwargs)
            for leaf in given:  # what the operation has written to
                if type(leaf) is torch.Tensor and reached.has(leaf):
                    leaf.__class__ = cls
            return pytree.tree_map_only(
                torch.Tensor, lambda t: t.as_subclass(cls) if type(t) is torch.Tensor and reached.has(t) else t, result
            )


class _Reached(TorchDispatchMode):
    """The storages that some tensors, and what is computed from them meanwhile, are in."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._storages = {storage_of(tensor)._cdata: tensor for tensor in tensors}

    def has(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor)._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and self.has(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    self._storages[storage_of(leaf)._cdata] = leaf
        return output


def has_unreceived(tree: Any) -> bool:
    """Whether one is in a tensor, a list, tuple or mapping."""
    if isinstance(tree, torch.Tensor):
        return type(tree) is Unreceived
    if isinstance(tree, Mapping):
        return any(map(has_unreceived, tree.values()))
    return isinstance(tree, (tuple, list)) and any(map(has_unreceived, tree))

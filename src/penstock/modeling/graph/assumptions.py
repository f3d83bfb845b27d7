"""Modules that cannot run on meta tensors, which are assumed to keep their input's shape.

They have a kernel without a meta version (the grouped matmul of mixture-of-experts layers), or code that asks after
values. What is assumed may be wrong: the unit's owner checks the real shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from penstock.modeling.placeholders.caches import note_use


class Assumptions:
    """What is assumed about modules in one unit while the context lasts.

    Args:
        unit: its meta copy.
        width: of what flows through it. Of several arguments of a module that one is kept which is as wide.
    """

    def __init__(self, unit: nn.Module, width: int | None) -> None:
        self._unit, self._width = unit, width
        self._made: dict[nn.Module, _Assumption] = {}

    def __enter__(self) -> Assumptions:
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._made:
            del module.forward

    @property
    def num_parameters(self) -> int:
        """Elements of the parameters in the modules about which something was assumed."""
        return sum(parameter.numel() for module in self._made for parameter in module.parameters())

    def assume(self, module: nn.Module) -> None:
        """Assume that a module keeps its input's shape."""
        if module not in self._made:
            module.forward = self._made[module] = _Assumption(module, self._width)

    def learn_from(self, error: Exception) -> bool:
        """Assume something more, or something else, after the unit failed; False if there is nothing left to assume."""
        # A module that was assumed to return one tensor may return several.
        if isinstance(error, _Unpacked):
            error.assumption.length = 1
            return True
        short = next((each for each in reversed(self._made.values()) if each.length == 1), None)
        if short is not None and (length := _unpacked_into(error)):
            short.length = length
            return True
        # The innermost module that failed, or else the one around it.
        running = _running(self._unit, error.__traceback__)
        culprit = next((module for module in running if module not in self._made), None)
        if culprit is not None:
            self.assume(culprit)
        return culprit is not None


class _Unpacked(TypeError):
    """A module that returns several tensors was assumed to return one."""

    def __init__(self, assumption: _Assumption) -> None:
        super().__init__("a module that returns several tensors was taken for one that keeps its input's shape")
        self.assumption = assumption


class _Assumed(torch.Tensor):
    """The output of a module that is assumed to keep its input's shape: one tensor, not to be unpacked like a tuple."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch itself does
    assumption: _Assumption

    def __iter__(self) -> Iterator[Any]:
        raise _Unpacked(self.assumption)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (int, slice)):  # of a tensor that would be a sample
            raise _Unpacked(self.assumption)
        return super().__getitem__(index)


class _Assumption:
    """The forward of a module that is assumed to keep its input's shape.

    If it is given a cache, it is taken to lengthen the layer that its `layer_idx` names.

    Args:
        module: the module.
        width: of what flows through the unit. Of several arguments that one is kept which is as wide.

    Attributes:
        length: how many values it returns, all but the first None; 0 for a tensor alone.
    """

    def __init__(self, module: nn.Module, width: int | None) -> None:
        self.width = width
        self.length = 0
        # The forward stands in the module's own attributes; a reference back would be a circle.
        indices: list[Any] = [getattr(each, "layer_idx", None) for each in module.modules()]
        self._layers = {index for index in indices if isinstance(index, int)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda node: isinstance(node, Cache))
        for leaf in leaves:
            if isinstance(leaf, Cache):
                note_use(leaf, self._layers)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        wide = (t for t in tensors if t.dim() and t.shape[-1] == self.width and t.is_floating_point())
        made = torch.empty_like(next(wide, tensors[0]), device="meta").as_subclass(_Assumed)
        made.assumption = self
        return made if not self.length else (made.as_subclass(torch.Tensor), *[None] * (self.length - 1))


def _unpacked_into(error: Exception) -> int:
    """How many values were expected where a module was taken for one that returns one; 0 if that is not the error."""
    if isinstance(error, IndexError):
        return 2 if "tuple index out of range" in str(error) else 0
    expected = re.search(r"not enough values to unpack \(expected (?:at least )?(\d+)", str(error))
    return int(expected[1]) if expected and isinstance(error, ValueError) else 0


def _running(root: nn.Module, traceback: TracebackType | None) -> list[nn.Module]:
    """The modules at or below `root` with a method on the stack of an exception, the innermost first."""
    members = set(map(id, root.modules()))
    found: list[nn.Module] = [root]
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in members:
            found.append(owner)
        traceback = traceback.tb_next
    return found[::-1]

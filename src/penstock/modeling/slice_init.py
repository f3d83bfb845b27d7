"""Random initialisation of weights of which a rank keeps a slice: each is whole only while it is written.

What initialises a weight writes all of it, may correct a part right after (the row of a padding token), and may come
back to write all of it again. So one weight at a time is held whole, from its first write to the first write to
another; then its slice is taken. In the model it stays a meta tensor of its whole shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .scratch import Scratch
from .tensor_parallel import Slicing

# In-place operations after which nothing is left of what was there.
_OVERWRITING = frozenset(
    [
        *("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_"),
        *("fill_", "zero_", "copy_"),
    ]
)


@dataclass(frozen=True)
class _Watched:
    parameter: nn.Parameter
    # Held, so that its place in memory, which is its identity, is not given to another one.
    storage: torch.UntypedStorage
    slicing: Slicing
    kept: torch.Tensor


class SliceKeeper:
    """Writes to watched weights, which are meta tensors, reach the slice that this rank keeps.

    Args:
        index, count: which slice of how many.
    """

    def __init__(self, index: int, count: int) -> None:
        self._index, self._count = index, count
        self._watched: dict[int, _Watched] = {}
        self._scratch = Scratch()
        self._open: _Watched | None = None
        self._whole = torch.empty(0)

    def watch(self, parameter: nn.Parameter, slicing: Slicing, value: torch.Tensor | None = None) -> None:
        """Keep a slice of `parameter`, a meta tensor.

        Args:
            value: what it has already, whole; None if it will be written.
        """
        if value is None:
            kept = torch.empty(slicing.shape(parameter.shape, self._count), dtype=parameter.dtype)
        else:
            kept = slicing.take(value, self._index, self._count)
        self.keep(parameter, slicing, kept)

    def keep(self, parameter: nn.Parameter, slicing: Slicing, part: torch.Tensor) -> None:
        """As `watch`, with the slice that is there already."""
        self._watched[_storage(parameter)] = _Watched(parameter, parameter.untyped_storage(), slicing, part)

    def slice_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What is kept of a parameter; None if it is not watched.

        Raises:
            NotImplementedError: it has got other data since, which was not seen.
        """
        self._close()
        watched = next((one for one in self._watched.values() if one.parameter is parameter), None)
        if watched is None:
            return None
        same = watched.slicing.shape(parameter.shape, self._count) == list(watched.kept.shape)
        # transformers copies a head's bias when it ties the head, lest it be shorter than the weight.
        copied = parameter.dim() == 1 or watched.storage._cdata == _storage(parameter)
        if not (same and copied and parameter.dtype == watched.kept.dtype):
            raise NotImplementedError("a weight that is cut got other data in place of its own")
        return watched.kept

    def whole(self, tensor: torch.Tensor, overwritten: bool) -> torch.Tensor | None:
        """Memory to write to in place of `tensor`, a watched weight or a view of one; None if it is neither.

        Args:
            overwritten: whether all of `tensor` will be written, whatever was there.

        Raises:
            NotImplementedError: a part of a weight is to be written, of which only a slice is left.
        """
        watched = self._watched.get(_storage(tensor)) if tensor.is_meta else None
        if watched is None:
            return None
        if self._open is not watched:
            if not (overwritten and tensor.numel() == watched.parameter.numel()):
                raise NotImplementedError("a weight that is cut is changed in part, after another one was written")
            self._close()
            self._open, self._whole = watched, self._scratch.like(watched.parameter)
        return self._whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Run an operation that writes to a watched weight. Returns whether it is one.

        Raises:
            NotImplementedError: it needs the values of weights that are not here.
        """
        if not func._schema.is_mutable:
            return False
        target = args[0] if args and isinstance(args[0], torch.Tensor) and self._watches(args[0]) else None
        others = [leaf for leaf in pytree.tree_leaves((args[target is not None :], kwargs)) if _is_meta(leaf)]
        if target is None:
            if any(map(self._watches, others)):
                raise NotImplementedError("something is computed from a weight that is cut")
            return False
        if others:
            raise NotImplementedError("a weight that is cut is computed from one that is not here")
        func(self.whole(target, func.overloadpacket.__name__ in _OVERWRITING), *args[1:], **kwargs)
        return True

    def _watches(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and _storage(tensor) in self._watched

    def _close(self) -> None:
        if self._open is not None:
            part = self._open.slicing.take(self._whole, self._index, self._count)
            self._open.kept.copy_(part)
            self._open = None


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _storage(tensor: torch.Tensor) -> int:
    """What a tensor and its views have in common. (A meta tensor's storage has no address.)"""
    return int(tensor.untyped_storage()._cdata)

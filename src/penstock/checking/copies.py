"""Copies of a model: also of one that keeps what autograd has computed, as torch's old `weight_norm` does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Model = TypeVar("Model", bound=nn.Module)


class _Detached(TorchFunctionMode):
    """A computed tensor, which `copy.deepcopy` refuses, is copied without its history."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def copied(model: Model) -> Model:
    with _Detached():
        return copy.deepcopy(model)

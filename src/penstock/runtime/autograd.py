"""Calling functions of autograd from hot paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its Python, which looks for transforms of torch.func and default arguments first.

    That takes longer than the call itself. Neither is possible where this is used.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # of torch's C base
    return apply

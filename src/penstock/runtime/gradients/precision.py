"""Mixed precision: autocast where a stage computes, and scaled losses so that float16 gradients do not vanish.

The scale is put on where the backward begins, on the last stage, and taken off when the step's gradients are complete.
So between steps `.grad` is always the unsplit model's gradient, whatever clips, logs or accumulates it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which matrix products run in `dtype`; one that changes nothing for None."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def autocast_now(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A maker of contexts that restore the autocast state of the moment of the call."""
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return partial(autocast, device, dtype)


def multiply_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiply all gradients in place. Exact for powers of two that stay within the range of the type."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)

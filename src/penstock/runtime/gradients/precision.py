"""Mixed precision: autocast where a stage computes, and scaled losses so that float16 gradients do not vanish.

The scale is put on where the backward begins, on the last stage, and taken off when the step's gradients are complete.
So between steps `.grad` is always the unsplit model's gradient, whatever clips, logs or accumulates it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
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


@dataclass
class LossScale:
    """A loss scale that adapts: it backs off when gradients overflow and grows while they do not.

    Mixed Precision Training, Micikevicius et al., ICLR 2018, section 3.2. All ranks must report the same overflows.

    Attributes:
        scale: the present scale.
        min_scale, max_scale: it stays between them.
        growth_factor: it grows by this after `growth_interval` steps without overflow.
        backoff_factor: it shrinks by this at an overflow, if that is at least the `hysteresis`-th since it last grew.

    Raises:
        ValueError: the numbers make no sense.
    """

    scale: float = 2.0**16
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    steps_since_overflow: int = 0
    overflows: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.scale <= self.max_scale < math.inf:
            raise ValueError(
                f"the loss scale must lie between min_scale and max_scale, got initial_scale={self.scale}, "
                f"min_scale={self.min_scale} and max_scale={self.max_scale}"
            )
        if not (self.growth_factor >= 1 and 0 < self.backoff_factor <= 1):
            raise ValueError(
                "growth_factor must be at least 1 and backoff_factor between 0 and 1, got "
                f"{self.growth_factor} and {self.backoff_factor}"
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ValueError(
                f"growth_interval and hysteresis must be at least 1, got {self.growth_interval} and {self.hysteresis}"
            )

    def update(self, overflow: bool) -> None:
        if overflow:
            self.steps_since_overflow = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
        else:
            self.steps_since_overflow += 1
            if self.steps_since_overflow >= self.growth_interval:
                self.scale = min(self.scale * self.growth_factor, self.max_scale)
                self.steps_since_overflow = self.overflows = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved scale was; the settings are this object's own."""
        self.scale = min(max(float(state["scale"]), self.min_scale), self.max_scale)
        self.steps_since_overflow = int(state["steps_since_overflow"])
        self.overflows = int(state["overflows"])

"""What the plugin makes of an optimizer: a step that clips by the whole model's norm and skips overflows everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from penstock.arguments import check_count, check_number
from penstock.runtime.engine import Engine

T = TypeVar("T")


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
        TypeError, ValueError: the numbers make no sense.
    """

    scale: float = 2.0**16
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    steps_since_overflow: int = field(default=0, init=False)
    overflows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_number("initial_scale", self.scale)  # as the plugin calls it
        for name in ("min_scale", "max_scale", "growth_factor", "backoff_factor"):
            check_number(name, getattr(self, name))
        for name in ("growth_interval", "hysteresis"):
            check_count(name, getattr(self, name))
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
        self.scale = float(self.scale)

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


class PipelineOptimizer(Optimizer):
    """Wraps the optimizer of a parallelised model; every other attribute is the wrapped optimizer's.

    Attributes:
        optim: the wrapped optimizer.
        pipeline: the engine of the model whose parameters it has.
        max_norm: `step` clips the norm of the whole model's gradients to this; 0 does not clip.
        loss_scale: what float16 training multiplies losses with; None in other precisions.
        step_was_skipped: whether the last step was skipped because gradients overflowed.
        num_skipped_steps: how many steps were.
    """

    def __init__(
        self, optim: Optimizer, pipeline: Engine, max_norm: float = 0.0, loss_scale: LossScale | None = None
    ) -> None:
        # No super().__init__(): parameter groups, state and hooks are the wrapped optimizer's.
        self.optim = optim
        self.pipeline = pipeline
        self.max_norm = max_norm
        self.loss_scale = loss_scale
        self.step_was_skipped = False
        self.num_skipped_steps = 0
        self._grad_norm: torch.Tensor | None = None
        if loss_scale is not None:
            pipeline.loss_scale = loss_scale.scale

    def __getattr__(self, name: str) -> Any:
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch keeps it as an attribute
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # torch keeps it as an attribute
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # torch keeps it as an attribute
        return self.optim.defaults

    def __repr__(self) -> str:
        return f"PipelineOptimizer({self.optim!r}, max_norm={self.max_norm})"

    def unwrap(self) -> Optimizer:
        """The wrapped optimizer."""
        return self.optim

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add `param_group` to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's parameters only; `Booster.save_optimizer` saves the whole model's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of this rank's parameters."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or to zeros without `set_to_none`."""
        self.optim.zero_grad(set_to_none)
        self.pipeline.recovery.drop()

    def backward(self, loss: torch.Tensor) -> None:
        """The backward of a yielded `loss`."""
        loss.backward()

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of the whole model's gradients, over all stages and pipelines; every rank calls it.

        Returns the norm before clipping, shape (). `max_norm`, `norm_type`, `error_if_nonfinite` are as in torch.
        """
        return self._change_gradients(partial(self.pipeline.clip_grad_norm_, max_norm, norm_type, error_if_nonfinite))

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every element of the gradients to [-clip_value, clip_value]."""
        clip = torch.nn.utils.clip_grad_value_
        self._change_gradients(
            lambda: clip([p for g in self.param_groups for p in g["params"]], clip_value), local=True
        )

    def _change_gradients(self, change: Callable[[], T], local: bool = False) -> T:
        """Change the gradients; the change is repeated if they are computed again."""
        return self.pipeline.recovery.run_call(change, trains=True, local=local)

    def get_grad_norm(self) -> float | None:
        """The norm of the whole model's gradients before the last `step`; None if it did not need to know."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, and take the wrapped optimizer's step. In float16, an overflow on one rank makes all ranks skip it.

        Every rank calls it. Raises ValueError for a `closure`: it would run the model outside of the schedule.
        """
        if closure is not None:
            raise ValueError("an optimizer's step over pipelines takes no closure: run the step's forwards before it")
        return self.pipeline.recovery.commit_update(self._prepare)

    def _prepare(self) -> Callable[[], Any]:
        """The part of a step that needs other ranks; the update itself needs none."""
        self._grad_norm = None
        if self.loss_scale is not None or self.max_norm > 0:
            self._grad_norm = self.pipeline.grad_norm()
        return self._update

    def _update(self) -> Any:
        self.step_was_skipped = self.loss_scale is not None and self._overflowed(self.loss_scale)
        if self.step_was_skipped:
            self.num_skipped_steps += 1
            self.optim.zero_grad()
            return None
        if self._grad_norm is not None and self.max_norm > 0:
            parameters = [held.parameter for held in self.pipeline.held]
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, self._grad_norm)
        return self.optim.step()

    def _overflowed(self, loss_scale: LossScale) -> bool:
        """Whether gradients overflowed, to which the scale adapts. All ranks have the same norm to the last bit, so the
        answer is the same."""
        overflow = self._grad_norm is not None and not math.isfinite(float(self._grad_norm))
        loss_scale.update(overflow)
        self.pipeline.loss_scale = loss_scale.scale
        return overflow

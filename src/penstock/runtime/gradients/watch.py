"""Notices that the body of the loop over microbatches changes gradients, which are not complete before its end."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch

from penstock.runtime.gradients.weight_gradients import is_hooked

_gradient = attrgetter("grad")


class GradientWatch:
    """What the gradients are while nothing but the loop's body may change them, in one step.

    To look at all of them around each microbatch would take longer than all else the host does there. So one is looked
    at each time, as a sample: whether it was dropped or changed in place. Whether any was dropped or exchanged, as
    `zero_grad()` does by default, is looked at once: of those that were there after the first backward, before the last
    one. What changes some gradients in place may go unnoticed.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self._parameters = parameters
        # The parameter last looked at, which is tried first the next time.
        self._sample: torch.Tensor | None = None
        # It, its gradient, and how often that was changed. A step sets it to None while backwards may change it.
        self.noted: tuple[torch.Tensor, torch.Tensor, int] | None = None
        # All parameters' gradients after the first backward, until they were compared.
        self._first: list[torch.Tensor | None] = []
        self._compares_all = True

    def note(self) -> None:
        """From now on nothing but the loop's body can change gradients."""
        sample = self._sample
        if sample is None or sample.grad is None:
            sample = self._sample = next((each for each in self._parameters if each.grad is not None), None)
        if sample is not None and (gradient := sample.grad) is not None:
            self.noted = sample, gradient, gradient._version
        if self._compares_all:
            self._compares_all = False
            self._first = list(map(_gradient, self._parameters))

    def stop(self) -> None:
        """Say nothing more in this step, which the caller has left, or of which something was said."""
        self._parameters, self._sample, self.noted, self._first = (), None, None, []

    def sees_change(self) -> bool:
        """Whether the sample has changed since `note`."""
        if self.noted is None:
            return False
        parameter, gradient, version = self.noted
        if parameter.grad is gradient and gradient._version == version:
            return False
        self.stop()
        return True

    def sees_exchange(self) -> bool:
        """Whether a gradient of the first backward has been dropped or exchanged; asked once, before the last one.
        Autograd may exchange sparse ones, and hooks of the user's those that they see."""
        first, self._first = self._first, []
        if all(map(is_, first, map(_gradient, self._parameters))):  # makes no call of Python
            return False
        pairs = zip(self._parameters, first, strict=True)
        exchanged = [
            (weight, gradient) for weight, gradient in pairs if gradient is not None and weight.grad is not gradient
        ]
        return any(not gradient.is_sparse and not is_hooked(weight) for weight, gradient in exchanged)

"""The notice that opens a step on each stage: what decides the types and gradient flags of the values that cross.

It goes down the pipeline ahead of the first activation. Everything else that ranks compare is in the roll call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .settings import autocast_code

MASK = (1 << 62) - 1
MIX = 1_000_003


class Notice(NamedTuple):
    """`state` sums up which parameters are trainable in all stages up to here, and autocast."""

    state: int

    @classmethod
    def of(cls, parameters: Iterable[torch.nn.Parameter], device: torch.device) -> Notice:
        """This rank's own notice."""
        trainable = hash(tuple(parameter.requires_grad for parameter in parameters))
        return cls(((trainable * MIX + autocast_code(device)) * 2 + torch.is_grad_enabled()) & MASK)

    def after(self, below: int) -> Notice:
        """This notice with the state of the stages below folded in."""
        return self._replace(state=(below * MIX + self.state) & MASK)

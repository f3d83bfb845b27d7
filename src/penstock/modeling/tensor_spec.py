"""What a tensor looks like, without its values: the one description of it, in plans and on the wire."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor, and whether a gradient travels back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @classmethod
    def shape_of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Shape and dtype only, for a plan that serves training and evaluation alike."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def expanded_zeros(self, device: torch.device) -> torch.Tensor:
        """Zeros that occupy a single element, whatever their shape, and cannot be written to."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)

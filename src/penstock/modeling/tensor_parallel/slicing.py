"""What part of a parameter each rank of a tensor-parallel group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Slicing:
    """A parameter cut along one dimension; of `blocks` fused weights, each is cut by itself.

    GPT-2's `c_attn` fuses queries, keys and values along its columns (`Slicing(1, blocks=3)`): a rank holds the
    columns of its own heads from each of the three.
    """

    dim: int
    blocks: int = 1

    def take(self, whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
        """Slice `index` of `count`, in memory of its own."""
        dim = self.dim % whole.dim()
        shape = list(whole.shape)
        width = shape[dim] // self.blocks
        blocked = whole.reshape(*shape[:dim], self.blocks, width, *shape[dim + 1 :])
        part = blocked.narrow(dim + 1, index * (width // count), width // count)
        return part.reshape(self.shape(shape, count)).clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole from all slices, in order."""
        dim, count = self.dim % parts[0].dim(), len(parts)
        shape = list(parts[0].shape)
        width = shape[dim] // self.blocks
        blocked = [part.reshape(*shape[:dim], self.blocks, width, *shape[dim + 1 :]) for part in parts]
        shape[dim] *= count
        return torch.cat(blocked, dim + 1).reshape(shape)

    def shape(self, whole: Sequence[int], count: int) -> list[int]:
        """The shape of a slice."""
        shape = list(whole)
        shape[self.dim % len(shape)] //= count
        return shape

    def whole_shape(self, part: Sequence[int], count: int) -> list[int]:
        """The shape of the whole, from that of a slice."""
        shape = list(part)
        shape[self.dim % len(shape)] *= count
        return shape

    def fits(self, whole: Sequence[int], count: int) -> bool:
        """Whether it can be cut into `count` equal slices."""
        return whole[self.dim % len(whole)] % (self.blocks * count) == 0

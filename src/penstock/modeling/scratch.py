"""Memory for temporaries that have the size of weights."""

from __future__ import annotations

import torch


class Scratch:
    """One block of memory in which every temporary is made in turn.

    Temporaries of every size between weights that stay would leave the allocator's heap full of holes.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory laid out like `tensor`: how many numbers a kernel draws, and in what order, depends on the layout."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
        if num_bytes > self._block.numel():
            self._block = torch.empty(num_bytes, dtype=torch.uint8)
        return self._block[:num_bytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

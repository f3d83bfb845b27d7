"""Tensors of unknown shape between two ranks: a header of fixed size says what follows, then the payload.

Used where shapes are not known beforehand: the first microbatch of a new signature, evaluation, generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
MAX_DIMENSIONS = 8
# dtype, gradient flag, number of dimensions, dimensions
HEADER_WIDTH = 3 + MAX_DIMENSIONS


class TensorSpec(NamedTuple):
    """What a receive buffer must look like, and whether a gradient will travel back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def encode_header(specs: Sequence[TensorSpec], device: torch.device) -> torch.Tensor:
    """One int64 row for each tensor, preceded by a row that holds their number."""
    rows = [[len(specs)] + [0] * (HEADER_WIDTH - 1)]
    for spec in specs:
        if len(spec.shape) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {len(spec.shape)} dimensions crosses a cut; at most {MAX_DIMENSIONS} can")
        padding = [0] * (MAX_DIMENSIONS - len(spec.shape))
        rows.append([DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape, *padding])
    return torch.tensor(rows, dtype=torch.int64, device=device)


def decode_header(header: torch.Tensor) -> tuple[TensorSpec, ...]:
    """The inverse of `encode_header`. Reads values, so on an accelerator it waits for them."""
    count, *rows = header.tolist()
    return tuple(TensorSpec(tuple(row[3 : 3 + row[2]]), DTYPES[row[0]], bool(row[1])) for row in rows[: count[0]])


def header_buffer(num_tensors: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(1 + num_tensors, HEADER_WIDTH, dtype=torch.int64, device=device)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor] | None, source: int, group: dist.ProcessGroup, device: torch.device
) -> list[torch.Tensor]:
    """Every rank of `group` gets the tensors of the global rank `source`; the others pass None."""
    if dist.get_rank() == source:
        assert tensors is not None
        payload = [tensor.detach().contiguous() for tensor in tensors]
        count = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        dist.broadcast(count, source, group=group)
        if payload:
            dist.broadcast(encode_header([TensorSpec.of(t) for t in payload], device), source, group=group)
    else:
        count = torch.zeros(1, dtype=torch.int64, device=device)
        dist.broadcast(count, source, group=group)
        number = int(count.item())
        payload = []
        if number:
            header = header_buffer(number, device)
            dist.broadcast(header, source, group=group)
            payload = [spec.empty(device) for spec in decode_header(header)]
    for tensor in payload:
        dist.broadcast(tensor, source, group=group)
    return payload

"""Tensors of unknown shape between two ranks: a header of fixed size says what follows, then the payload. For the first
microbatch of a new signature, and the first message of a new kind in generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.modeling.tensor_spec import TensorSpec

# What both gloo and NCCL can carry. Tensors of the other types travel as bytes.
CARRIED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
DTYPES = (*CARRIED, torch.int16, torch.bool, torch.complex64, torch.complex128)
MAX_DIMENSIONS = 8
# dtype, gradient flag, number of dimensions, dimensions
HEADER_WIDTH = 3 + MAX_DIMENSIONS


def encode_header(specs: Sequence[TensorSpec]) -> torch.Tensor:
    """One int64 row for each tensor, preceded by a row that holds their number. On the CPU, as hosts read it."""
    rows = [[len(specs)] + [0] * (HEADER_WIDTH - 1)]
    for spec in specs:
        if len(spec.shape) > MAX_DIMENSIONS:
            raise ValueError(
                f"a value that crosses a boundary has {len(spec.shape)} dimensions; at most {MAX_DIMENSIONS}"
            )
        padding = [0] * (MAX_DIMENSIONS - len(spec.shape))
        rows.append([DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape, *padding])
    return torch.tensor(rows, dtype=torch.int64)


def decode_header(header: torch.Tensor) -> tuple[TensorSpec, ...]:
    """The inverse of `encode_header`."""
    count, *rows = header.tolist()
    return tuple(TensorSpec(tuple(row[3 : 3 + row[2]]), DTYPES[row[0]], bool(row[1])) for row in rows[: count[0]])


def header_buffer(num_tensors: int) -> torch.Tensor:
    return torch.zeros(1 + num_tensors, HEADER_WIDTH, dtype=torch.int64)


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, contiguous, or a view of its memory of a type that every backend carries."""
    return tensor if tensor.dtype in CARRIED else tensor.reshape(-1).view(torch.uint8)

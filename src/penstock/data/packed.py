"""Packed rows: several sequences one after the other in a single row, told apart by their positions.

Such a batch has one sample. It is split between its sequences, which do not see each other, so that the pieces together
compute what the row does.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from penstock.data.batch import MicrobatchedBatch

# What attention kernels for packed rows are told beside the positions, from which it follows.
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def is_packed(inputs: Mapping[str, Any]) -> bool:
    """Whether a batch is one row of sequences, each with positions from 0 on, and no mask."""
    ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
    return (
        isinstance(ids, torch.Tensor)
        and isinstance(positions, torch.Tensor)
        and ids.dim() == 2
        and len(ids) == 1
        and positions.shape == ids.shape
        and inputs.get("attention_mask") is None
        and int(positions[0, 0]) == 0
    )


def cut_packed(inputs: Mapping[str, Any], num_microbatches: int, first_microbatch: int = 0) -> MicrobatchedBatch:
    """Split a packed row into at most `num_microbatches` pieces of about equally many tokens.

    Args:
        inputs: for which `is_packed` holds: tensors of shape (1, tokens), and `LENGTHS`, which each piece gets anew.
            All others are left out: give them beside the pieces.
        first_microbatch: see `MicrobatchedBatch`.
    """
    positions = inputs["position_ids"][0]
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
    edges = [0]
    for number in range(1, num_microbatches):
        wanted = number * len(positions) / num_microbatches
        edges.append(min((start for start in starts if start >= edges[-1]), key=lambda start: abs(start - wanted)))
    edges = sorted({*edges, len(positions)})
    pieces = []
    for begin, end in pairwise(edges):
        rows = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim() == 2}
        piece: dict[str, Any] = {name: value[:, begin:end] for name, value in rows.items()}
        if "seq_idx" in piece:
            piece["seq_idx"] = piece["seq_idx"] - piece["seq_idx"][:, :1]
        pieces.append(piece | _lengths(inputs, [start - begin for start in starts if begin <= start <= end]))
    return MicrobatchedBatch(pieces, 1, first_microbatch=first_microbatch)


def _lengths(inputs: Mapping[str, Any], starts: list[int]) -> dict[str, Any]:
    """`LENGTHS`, as far as the batch has them. The longest length is an upper bound: that of the whole batch."""
    edges = torch.tensor(starts, dtype=torch.int32)
    return {
        name: edges.to(inputs[name].device) if name.startswith("cu_") else inputs[name]
        for name in LENGTHS
        if name in inputs
    }

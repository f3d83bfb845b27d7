"""Batches of pairs as TRL collates them: the rows of all chosen completions, then those of all rejected ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch


def num_pairs(batch: Mapping[str, Any]) -> int:
    return int(batch["input_ids"].shape[0]) // 2


def microbatches_of_pairs(batch: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Microbatches of so many pairs each; a pair's two rows stay together."""
    pairs = num_pairs(batch)

    def rows(value: Any, start: int, stop: int) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or len(value) not in (pairs, 2 * pairs):
            return value
        return torch.cat([half[start:stop] for half in value.split(pairs)])

    edges = pairwise(accumulate(sizes, initial=0))
    return [{name: rows(value, *edge) for name, value in batch.items()} for edge in edges]


def join_pairs(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of the batch from those of its microbatches."""
    chosen, rejected = zip(*(of_microbatch.chunk(2) for of_microbatch in rows), strict=True)
    return torch.cat([*chosen, *rejected])

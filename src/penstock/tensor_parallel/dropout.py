"""Dropout of activations that are shards: what the unsplit model would drop, not the same on every rank.

The random generators stand alike on all ranks, so a mask drawn for a shard would be the same for unlike heads. It is
drawn for the whole instead, and this rank takes its shard: the same random numbers as without tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from penstock.modeling.sharding import Sharding
from penstock.random_state import accelerator_generator, restored
from penstock.tensor_parallel.region import Region

HEADS = Sharding(1)
FEATURES = Sharding(-1)


class ShardedDropout(TorchFunctionMode):
    """While active, dropout in a tensor-parallel region is that of the unsplit model; in attention only on a CPU."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._region.inside:
            if func is functional.dropout:
                return self._dropout(*args, **kwargs)
            if func is functional.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0.0 or input.is_meta:
            return functional.dropout(input, p, training, inplace)
        mask = self._mask(input.shape, input, p, HEADS if input.dim() == 4 else FEATURES)
        return input.mul_(mask) if inplace else input * mask

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        settings: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        attention: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
        if dropout_p == 0.0 or query.is_meta:
            return attention(query, key, value, attn_mask, dropout_p, is_causal, **settings)
        if query.device.type != "cpu":
            # Fused kernels draw inside: here the masks of different ranks are independent, but not the unsplit model's.
            with _own_random_numbers(self._region.index, query.device):
                return attention(query, key, value, attn_mask, dropout_p, is_causal, **settings)
        # As torch computes it on a CPU, where no fused kernel has dropout.
        if enable_gqa:
            key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], 1) for heads in (key, value))
        scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        # A row in which everything is masked gives zeros.
        weights: torch.Tensor = torch.ops.aten._safe_softmax(scores, -1)
        return (weights * self._mask(weights.shape, weights, dropout_p, HEADS)) @ value

    def _mask(self, shape: Any, like: torch.Tensor, p: float, shard: Sharding) -> torch.Tensor:
        """This rank's shard of a whole mask, whose entries are 0 or 1 / (1 - p)."""
        whole = torch.ones(shard.whole_shape(shape, self._region.size), dtype=like.dtype, device=like.device)
        with torch.no_grad():
            mask = functional.dropout(whole, p, True)
        return mask.chunk(self._region.size, shard.dim)[self._region.index]


@contextmanager
def _own_random_numbers(index: int, device: torch.device) -> Iterator[None]:
    """Inside, an accelerator's generator draws numbers of this rank's own; afterwards it is where it was."""
    (generator,) = accelerator_generator(device)
    with restored([generator]):
        generator.manual_seed((generator.initial_seed() + (index + 1) * 0x9E3779B97F4A7C15) & ((1 << 63) - 1))
        yield

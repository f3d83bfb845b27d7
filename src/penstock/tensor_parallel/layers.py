"""Layers that hold a shard of their weights: the module's own class with its call extended, its forward untouched.

A class is swapped rather than a forward replaced, so that copies of the module work on their own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from penstock.modeling.instrumentation import KeepsForward, mix_in, record_of
from penstock.tensor_parallel.region import Region


def _region(layer: Any) -> Region:
    region: Region = layer.__dict__["_penstock"].region
    return region


class _Column(KeepsForward):
    """Holds some of the output features; gives its shard of the output."""

    def __call__(self: Any, activation: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        region = _region(self)
        output = super().__call__(region.enter(activation), *args, **kwargs)  # type: ignore[misc]  # a mixin
        if not activation.is_meta:
            region.begin()
        return output


class _Row(KeepsForward):
    """Holds some of the input features; its outputs are summed, and the bias is added once."""

    def __call__(self: Any, activation: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        region = _region(self)
        region.end()
        bias = self._parameters.get("bias")
        if bias is None:
            return region.leave(super().__call__(activation, *args, **kwargs))  # type: ignore[misc]  # a mixin
        self._parameters["bias"] = None
        try:
            output = super().__call__(activation, *args, **kwargs)  # type: ignore[misc]  # a mixin
        finally:
            self._parameters["bias"] = bias
        output = region.leave(output)
        return output + bias.to(output.dtype)


class _RowOfWhole(_Row):
    """Row-wise, after layers whose outputs were gathered: takes its shard of a whole activation."""

    def __call__(self: Any, activation: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        region = _region(self)
        region.end()
        return super().__call__(region.own_part(region.enter(activation)), *args, **kwargs)


class _Heads(KeepsForward):
    """Takes its own heads of arguments that are made for all heads, such as a bias of the attention scores."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        region = _region(self)
        for name, dim in self.__dict__["_penstock"].by_heads.items():
            value = kwargs.get(name)
            if isinstance(value, torch.Tensor) and not value.is_meta:
                heads = value.unflatten(dim, (-1, self.num_heads * region.size))
                kwargs[name] = heads.narrow(dim + 1, region.index * self.num_heads, self.num_heads).flatten(
                    dim, dim + 1
                )
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # a mixin


class _RowConv1D(_Row):
    """Row-wise, for GPT-2's linear layer, whose own forward cannot work without a bias."""

    def forward(self: Any, activation: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return functional.linear(activation, self.weight.t())
        output: torch.Tensor = super().forward(activation)  # type: ignore[misc]  # a mixin
        return output


class _Gathered(KeepsForward):
    """Column-wise, with all shards of the output gathered."""

    def __call__(self: Any, activation: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        region = _region(self)
        output = super().__call__(region.enter(activation), *args, **kwargs)  # type: ignore[misc]  # a mixin
        region.end()
        return self._joined(region, output)

    def _joined(self, region: Region, output: torch.Tensor) -> torch.Tensor:
        return region.gather(output)


class _Head(_Gathered):
    """The language-model head: the shards of its output are gathered unless the loss takes them."""

    def _joined(self, region: Region, output: torch.Tensor) -> torch.Tensor:
        if not region.keep_logits_sharded or output.is_meta:
            output = region.gather(output)
        region.logits = output
        return output


class _Vocabulary(KeepsForward):
    """An embedding that holds some of the rows; tokens of other ranks count as zero in the sum."""

    def __call__(self: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        region = _region(self)
        rows = self.weight.shape[0]
        local = tokens - region.index * rows
        elsewhere = (local < 0) | (local >= rows)
        output = super().__call__(local.masked_fill(elsewhere, 0), *args, **kwargs)  # type: ignore[misc]  # a mixin
        return region.leave(output.masked_fill(elsewhere.unsqueeze(-1), 0))


class _Experts(KeepsForward):
    """Every expert's shard: takes whole activations and routing weights, gives the sum."""

    def __call__(self: Any, activation: torch.Tensor, indices: Any, weights: torch.Tensor, *args: Any) -> Any:
        region = _region(self)
        activation, weights = region.enter(activation), region.enter(weights)
        if not activation.is_meta:
            region.begin()
        output = super().__call__(activation, indices, weights, *args)  # type: ignore[misc]  # a mixin
        region.end()
        return region.leave(output)


COLUMN, ROW, GATHERED, HEAD, VOCABULARY, EXPERTS = _Column, _Row, _Gathered, _Head, _Vocabulary, _Experts
ROW_OF_WHOLE = _RowOfWhole


def extend(module: nn.Module, kind: type, region: Region) -> None:
    """Make `module`, whose parameters are shards already, a layer of this kind."""
    if kind is _Row and isinstance(module, Conv1D):
        kind = _RowConv1D
    record_of(module).region = region
    mix_in(module, kind)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        rows = module.weight.shape[0]
        place = module.padding_idx - region.index * rows
        # The row of the padding token gets no gradient, wherever it is.
        module.padding_idx = place if 0 <= place < rows else None


def extend_by_heads(module: nn.Module, arguments: Mapping[str, int], region: Region) -> None:
    """Let `module`, which counts only its own heads already, take its heads of these arguments: `{name: dimension}`."""
    record = record_of(module)
    record.region, record.by_heads = region, dict(arguments)
    mix_in(module, _Heads)

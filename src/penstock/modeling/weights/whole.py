"""The unsplit model's weights, as a rank that holds a part of them knows them: names, shapes, shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.modeling.instrumentation import known_of, record_of
from penstock.modeling.placeholders.ghosts import shown_whole


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The unsplit model's `state_dict`; what other ranks hold stands there as meta tensors, plain data as None."""
    with shown_whole(model):
        return dict(model.state_dict())


def packed_weights(model: nn.Module) -> dict[str, int]:
    """How many numbers each packed weight of the unsplit model has, by name: its tensor has fewer."""
    modules = model.named_modules()
    return {f"{name}.weight": one.num_weights for name, each in modules if (one := known_of(each).packed) is not None}


def tensor_parallel_of(model: nn.Module) -> Any:
    return known_of(model).tensor_parallel


def shards_of(model: nn.Module) -> Mapping[str, Sharding]:
    """How the parameters of a tensor-parallel model are sharded, by their names; nothing for any other model."""
    sharding = tensor_parallel_of(model)
    return {} if sharding is None else sharding.shards


def tensor_parallel_place(model: nn.Module) -> tuple[int, int]:
    """This rank's index among the ranks that hold shards of the same stage, and their number."""
    sharding = tensor_parallel_of(model)
    return (0, 1) if sharding is None else (sharding.index, sharding.size)


def whole_shape(model: nn.Module, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The unsplit model's shape of a tensor of `whole_state(model)`; this rank may have a slice of it."""
    sharding = tensor_parallel_of(model)
    return tuple(tensor.shape) if sharding is None else sharding.whole_shape(name, tensor.shape)


@dataclass(frozen=True, slots=True)
class Sharding:
    """A parameter sharded along one dimension; of `blocks` fused weights, each is sharded by itself: GPT-2's `c_attn`
    fuses queries, keys and values along its columns (`Shard(1, blocks=3)`), and a rank holds the columns of its own
    heads from each of the three."""

    dim: int
    blocks: int = 1

    def take(self, whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
        """Shard `index` of `count`, in memory of its own."""
        dim = self.dim % whole.dim()
        # `cat` copies, also a single part.
        ranges = self.ranges(whole.shape, index, count)
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)

    def ranges(self, whole: Sequence[int], index: int, count: int) -> list[tuple[int, int]]:
        """Where shard `index` of `count` lies along `dim` in a weight of shape `whole`: from and to, in each block."""
        width = whole[self.dim % len(whole)] // self.blocks
        size = width // count
        return [(block * width + index * size, block * width + (index + 1) * size) for block in range(self.blocks)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole from all shards, in order."""
        dim, count = self.dim % parts[0].dim(), len(parts)
        shape = list(parts[0].shape)
        width = shape[dim] // self.blocks
        blocked = [part.reshape(*shape[:dim], self.blocks, width, *shape[dim + 1 :]) for part in parts]
        shape[dim] *= count
        return torch.cat(blocked, dim + 1).reshape(shape)

    def shape(self, whole: Sequence[int], count: int) -> list[int]:
        shape = list(whole)
        shape[self.dim % len(shape)] //= count
        return shape

    def whole_shape(self, part: Sequence[int], count: int) -> list[int]:
        shape = list(part)
        shape[self.dim % len(shape)] *= count
        return shape


def leave_shards(model: nn.Module, shard_of: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Leave the shards that `shard_of` has of a model's meta tensors of whole shape for `TensorParallel.apply`."""
    parameters = model.named_parameters(remove_duplicate=False)
    record_of(model).shards = {name: part for name, each in parameters if (part := shard_of(each)) is not None}


def take_shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `leave_shards` left, by name."""
    record = known_of(model)
    shards, record.shards = record.shards, {}
    return shards

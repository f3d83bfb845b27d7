"""The unsplit model's weights, as a rank that holds a part of them knows them: names, shapes, shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from penstock.modeling.instrumentation import known_of, record_of
from penstock.modeling.placeholders.ghosts import shown_whole
from penstock.modeling.sharding import Sharding, WeightSharding


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The unsplit model's `state_dict`; what other ranks hold stands there as meta tensors, plain data as None."""
    with shown_whole(model):
        return dict(model.state_dict())


def packed_weights(model: nn.Module) -> dict[str, int]:
    """How many numbers each packed weight of the unsplit model has, by name: its tensor has fewer."""
    modules = model.named_modules()
    return {f"{name}.weight": one.num_weights for name, each in modules if (one := known_of(each).packed) is not None}


def sharding_in(model: nn.Module) -> WeightSharding | None:
    """How the weights of a tensor-parallel model are sharded; None for any other model."""
    return known_of(model).tensor_parallel


def shards_of(model: nn.Module) -> Mapping[str, Sharding]:
    """How the parameters of a tensor-parallel model are sharded, by their names; nothing for any other model."""
    sharding = sharding_in(model)
    return {} if sharding is None else sharding.shards


def tensor_parallel_place(model: nn.Module) -> tuple[int, int]:
    """This rank's index among the ranks that hold shards of the same stage, and their number."""
    sharding = sharding_in(model)
    return (0, 1) if sharding is None else (sharding.index, sharding.size)


def whole_shape(model: nn.Module, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The unsplit model's shape of a tensor of `whole_state(model)`; this rank may have a slice of it."""
    sharding = sharding_in(model)
    return tuple(tensor.shape) if sharding is None else sharding.whole_shape(name, tensor.shape)


def leave_shards(model: nn.Module, shard_of: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Leave the shards that `shard_of` has of a model's meta tensors of whole shape for `TensorParallel.apply`."""
    parameters = model.named_parameters(remove_duplicate=False)
    record_of(model).shards = {name: part for name, each in parameters if (part := shard_of(each)) is not None}


def take_shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `leave_shards` left, by name."""
    record = known_of(model)
    shards, record.shards = record.shards, {}
    return shards

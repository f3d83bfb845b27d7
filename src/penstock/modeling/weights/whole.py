"""The unsplit model's weights, as a rank that holds a part of them knows them: names, shapes, shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.modeling.instrumentation import known_of
from penstock.modeling.placeholders.ghosts import stripped_tensors
from penstock.modeling.weights.shard import Sharding


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The unsplit model's `state_dict`, in its order; what other ranks hold stands there as meta tensors."""
    elsewhere = dict(stripped_tensors(model)) | dict(stripped_tensors(model, "buffer"))
    here = model.state_dict()
    both = {**elsewhere, **here}
    modules = {prefix: place for place, (prefix, _) in enumerate(model.named_modules(remove_duplicate=False))}
    # Stable: within a module both sources are in the order of registration.
    return dict(sorted(both.items(), key=lambda item: modules[item[0].rpartition(".")[0]]))


def tensor_parallel_of(model: nn.Module) -> Any:
    """How a model's weights are sharded; None if they are not."""
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

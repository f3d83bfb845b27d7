"""What `initialize` and the plugin accept as a model to be parallelised."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from penstock.modeling.graph.dummy_inputs import arguments_by_name
from penstock.modeling.instrumentation import record_of
from penstock.nested import is_record, walkable

# Classes that wrap a model, by their names, as importing some of them takes long.
WRAPPERS = {
    "OptimizedModule": "torch.compile() made it. Pass the model itself, and call model.compile() afterwards",
    "DistributedDataParallel": "start more processes than stages instead: further pipelines are replicas",
    "FullyShardedDataParallel": "leave it out: the stages take its place",
    "FSDPModule": "leave fully_shard() out: the stages take its place",
    "DataParallel": "leave it out: each process drives one device",
    "ScriptModule": "pass the model that was scripted",
}


def check_whole_model(model: Any, caller: str, used_names: Collection[str]) -> None:
    """Refuse what cannot be parallelised whatever its layers are. No communication."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} takes a torch.nn.Module, got {type(model).__name__}")
    for cls in type(model).__mro__:
        if cls.__module__.startswith("torch.") and cls.__name__ in WRAPPERS:
            raise TypeError(f"{caller} was given a {cls.__name__}: {WRAPPERS[cls.__name__]}")
    if model._compiled_call_impl is not None:
        raise ValueError(
            f"this {type(model).__name__} is compiled as a whole: call model.compile() after {caller} instead, which "
            "compiles the blocks of each stage"
        )
    if absent := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
        raise ValueError(
            f"{absent} of this {type(model).__name__} is on the meta device, without values: build the model on the "
            "CPU, or let penstock.from_pretrained() or penstock.from_config() make each stage where it is held"
        )
    own = {*vars(model), *model._modules, *model._parameters, *model._buffers}
    if taken := sorted(own & set(used_names)):
        raise ValueError(
            f"this {type(model).__name__} has an attribute {taken[0]!r} of its own, which a parallelised model needs "
            "for itself: give it another name"
        )


def remember_example_inputs(model: nn.Module, example_inputs: Any) -> None:
    """Find the units of `model` with these inputs from now on.

    Args:
        example_inputs: the arguments of a forward: by name in a mapping, by position in a tuple or list, or a tensor or
            data class alone.
            None leaves them to be guessed.
    """
    if example_inputs is None:
        return
    if isinstance(example_inputs, torch.Tensor) or is_record(example_inputs):
        example_inputs = (example_inputs,)
    if isinstance(example_inputs, Mapping):
        found = dict(example_inputs)
    elif isinstance(example_inputs, (tuple, list)):
        found = arguments_by_name(model, tuple(example_inputs), {})
    else:
        kind = type(example_inputs).__name__
        raise TypeError(f"example_inputs must be a mapping, a tuple or a tensor, got a {kind}")
    record_of(model).example_inputs = {name: walkable(name, value) for name, value in found.items()}

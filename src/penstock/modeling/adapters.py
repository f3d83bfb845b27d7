"""Adapters that PEFT has put into a model, recognised without importing PEFT."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether a module is one that PEFT put around a layer, with the weights of all its adapters inside."""
    return hasattr(type(module), "adapter_layer_names")


def has_adapters(model: nn.Module) -> bool:
    """Whether any layer of a model has an adapter."""
    return any(map(is_adapter_layer, model.modules()))


def is_peft_model(model: Any) -> bool:
    """Whether `model` is a PeftModel. There is none unless somebody has imported PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: Any) -> Any:
    """The transformers model inside a PeftModel, adapters included; any other model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def modules_inside(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside `module`, except those inside adapter layers: such a layer counts as one piece."""
    for child in module.children():
        yield child
        if not is_adapter_layer(child):
            yield from modules_inside(child)

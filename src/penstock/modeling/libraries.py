"""Which library a model is of, and what that library says of it.

That is its configuration (transformers), its adapters (PEFT), and whether it is one of diffusers. Libraries that are
optional are not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig


def configuration_of(model: Any) -> PretrainedConfig | None:
    """The configuration of a model of transformers. What other models call `config` is theirs: a dictionary, a text, an
    object that raises when it is asked for what it lacks."""
    config = getattr(model, "config", None)
    return config if isinstance(config, PretrainedConfig) else None


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


# Classes of torch that wrap a model, by their names, as importing some of them takes long; and what to do instead of
# giving one to `initialize`.
WRAPPERS = {
    "OptimizedModule": "torch.compile() made it. Pass the model itself, and call model.compile() afterwards",
    "DistributedDataParallel": "start more processes than stages instead: further pipelines are replicas",
    "FullyShardedDataParallel": "leave it out: the stages take its place",
    "FSDPModule": "leave fully_shard() out: the stages take its place",
    "DataParallel": "leave it out: each process drives one device",
    "ScriptModule": "pass the model that was scripted",
}


def wrapper_of(model: nn.Module) -> str | None:
    """The class of torch by which a model is wrapped, such as DistributedDataParallel; None if it is not."""
    names = (cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("torch."))
    return next((name for name in names if name in WRAPPERS), None)


def base_of(model: Any) -> Any:
    """The model inside a PeftModel, adapters included; any other model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def modules_inside(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside `module`, except those inside adapter layers: such a layer counts as one piece."""
    for child in module.children():
        yield child
        if not is_adapter_layer(child):
            yield from modules_inside(child)


def of_diffusers(kind: type) -> bool:
    """Whether a class is a model of diffusers, or finds one (`AutoModel`); without importing diffusers."""
    names = {cls.__name__ for cls in kind.__mro__ if cls.__module__.startswith("diffusers.")}
    return bool(names & {"ModelMixin", "AutoModel"})

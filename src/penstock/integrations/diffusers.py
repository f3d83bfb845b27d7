"""Models of diffusers over pipeline stages: each rank loads its own; saved as diffusers loads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partialmethod
from typing import Any

import diffusers
import torch
from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.models.model_loading_utils import load_state_dict
from peft import get_peft_model_state_dict
from safetensors import safe_open

from penstock.model.pipeline_model import PipelineModel
from penstock.modeling.sharding import WeightSharding
from penstock.modeling.weights.load import StageLoadingInfo, finish_stage, refuse_arguments
from penstock.modeling.weights.whole import held_names

# Arguments that spread a model over devices in another way, or read all of it.
_REFUSED = ("offload_state_dict", "parallel_config", "use_flashpack", "ignore_mismatched_sizes")
# What changes the layers of a model of which this rank has a part.
_REFUSED_METHODS = (
    "add_adapter", "delete_adapters", "fuse_lora", "load_lora_adapter", "save_attn_procs", "unfuse_lora", "unload_lora",
)  # fmt: skip


class PipelineDiffusionModel(PipelineModel):
    """Mixed into the class of a model of diffusers that `initialize()` has parallelised."""

    def save_lora_adapter(
        self,
        save_directory: str | os.PathLike[str],
        adapter_name: str = "default",
        upcast_before_saving: bool = False,
        safe_serialization: bool = True,
        weight_name: str | None = None,
        prefix: str | None = None,
    ) -> None:
        """One adapter, of all stages, as diffusers' `save_lora_adapter` writes it. Every rank calls it.

        Args:
            prefix: begins the names of the weights; with "transformer", or "unet", a pipeline's
                `load_lora_weights(folder)` loads them. Without one a model's `load_lora_adapter(folder, prefix=None)`
                does.
        """
        known: Mapping[str, Any] = getattr(self, "peft_config", {})
        if adapter_name not in known:
            raise ValueError(f"there is no adapter {adapter_name}: the model has {', '.join(known) or 'none'}")
        start = f"{prefix}." if prefix else ""
        about = {start + key: value for key, value in known[adapter_name].to_dict().items()}

        def select(state: Mapping[str, torch.Tensor]) -> Any:
            return get_peft_model_state_dict(self, dict(state), adapter_name)

        def write(folder: str, state: Mapping[str, torch.Tensor]) -> None:
            tensors = {
                start + key: tensor.float() if upcast_before_saving else tensor for key, tensor in select(state).items()
            }
            write_layers: Any = LoraBaseMixin.write_lora_layers  # its types leave out that None is allowed
            metadata = about if safe_serialization else None
            write_layers(tensors, folder, True, weight_name, None, safe_serialization, metadata)

        self.save_adapter(save_directory, adapter_name, select, write)
        folder, board = os.fspath(save_directory), self.pipeline.board
        board.resume["model"] = f"model.load_lora_adapter({folder!r}, prefix={prefix!r}) before penstock.initialize()"

    def adapter_folders(self, directory: str) -> dict[str, str]:
        if getattr(self, "_hf_peft_config_loaded", False):
            _refuse(self, "load_ordinary")
        return {}


def _refuse(model: torch.nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(
        f"{name}() of a parallelised {type(model).__name__} changes layers of which this rank has a part: call it "
        "before penstock.initialize(), or in what from_pretrained() takes as adapt="
    )


for _name in _REFUSED_METHODS:
    setattr(PipelineDiffusionModel, _name, partialmethod(_refuse, _name))


# -- loading -----------------------------------------------------------------------------------------------------------


def class_of(path_or_name: str, model_class: Any, **kwargs: Any) -> type:
    """`model_class`, or in place of diffusers' `AutoModel` the class that wrote the configuration."""
    cls: type = model_class
    if cls is diffusers.AutoModel:
        name = diffusers.FluxTransformer2DModel.load_config(path_or_name, **kwargs)["_class_name"]  # any class reads it
        cls = getattr(diffusers, name, type(None))
        if not issubclass(cls, diffusers.ModelMixin):
            raise ValueError(
                f"{path_or_name} is of the class {name}, which is no model of diffusers: pass model_class="
            )
    return cls


def meta_model(kind: Any, path_or_name: str, **kwargs: Any) -> Any:
    """The whole model without memory for its weights, as `from_pretrained` would make it; to choose stages with."""
    kwargs.pop("quantization_config", None)
    return _stage_class(kind, lambda names: set()).from_pretrained(path_or_name, **_arguments(kwargs))


def load_stage(
    kind: Any,
    path_or_name: str,
    stages: Sequence[Sequence[str]],
    local_stages: Collection[int],
    tensor_parallel: WeightSharding | None = None,
    adapt: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, StageLoadingInfo]:
    """As `weights.load.load_stage`, of a class of diffusers. Raises ValueError if the checkpoint lacks a weight."""
    stage_class = _stage_class(kind, lambda names: held_names(names, stages, local_stages))
    model, info = stage_class.from_pretrained(path_or_name, output_loading_info=True, **_arguments(kwargs))
    model.__class__ = kind
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if lacking := [name for name in sorted(info["missing_keys"]) if name in parameters]:
        raise ValueError(f"{path_or_name} lacks weights of {kind.__name__}: {', '.join(lacking[:5])}")
    return finish_stage(model, adapt, stages, local_stages, info)


def _arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    refuse_arguments(dict(kwargs))
    for name in _REFUSED:
        if kwargs.get(name):
            raise ValueError(f"{name} cannot be combined with pipeline stages; load without it")
    return {**kwargs, "low_cpu_mem_usage": True}


def _stage_class(kind: Any, held_of: Callable[[Collection[str]], set[str]]) -> Any:
    """A subclass whose `from_pretrained` takes only what `held_of` chooses of a checkpoint's names; others are meta."""

    class Stage(kind):  # type: ignore[misc]  # a library without types
        @classmethod
        def _load_pretrained_model(
            cls, model: Any, state_dict: Any, files: Sequence[str], name: Any, keys: Sequence[str], **kwargs: Any
        ) -> Any:
            held = held_of(keys)
            read = _read(files, held) if state_dict is None else state_dict.items()
            state = {key: tensor for key, tensor in read if key in held}
            return super()._load_pretrained_model(model, state, files, name, keys, **kwargs)

        def to(self, *args: Any, **kwargs: Any) -> Any:
            return self  # where it is loaded to; what is meta could not be moved

    Stage.__name__, Stage.__qualname__, Stage.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Stage


def _read(files: Sequence[str], names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        if not str(file).endswith(".safetensors"):
            yield from load_state_dict(file).items()
            continue
        with safe_open(file, framework="pt") as opened:
            yield from ((name, opened.get_tensor(name)) for name in names.intersection(opened.keys()))

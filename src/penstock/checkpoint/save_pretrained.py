"""What transformers' `save_pretrained` does besides writing weights: its arguments, and the small files it writes."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME

from penstock.modeling.weights.names import of_diffusers
from penstock.modeling.weights.whole import packed_weights

from .files import SaveFunction, writing
from .names import check_variant
from .tensors import dtype_name
from .untrusted import CheckpointError


@dataclass(frozen=True)
class SaveOptions:
    """What `save_pretrained`'s arguments mean here.

    Attributes:
        state_dict: this rank's part of the state to save, under the unsplit names, instead of the model's.
        save_function: writes `.bin` files; called with a dictionary and a path.
        safe_serialization: write safetensors. Unlike in transformers 5 the default is False: `.bin` files.
        variant: `pytorch_model.fp16.bin` instead of `pytorch_model.bin`.
        max_shard_size: of a merged checkpoint, in bytes or as text (`"5GB"`); the most that any rank gathers at once,
            a single larger tensor excepted. Per-rank files are never sharded.
        save_original_format: merged files have the names and shapes of the original checkpoint format, which
            transformers converts when it loads. Per-rank files always have the model's own.
    """

    state_dict: Mapping[str, torch.Tensor] | None = None
    save_function: SaveFunction | None = None
    safe_serialization: bool = False
    variant: str | None = None
    max_shard_size: int | str = "50GB"
    save_original_format: bool = True

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> SaveOptions:
        """Read the keyword arguments of a call.

        `is_main_process`, `token` and `save_peft_format` are accepted and change nothing: the layout decides who
        writes, nothing is uploaded, and adapters are refused anyway.

        Raises:
            TypeError: an argument is unknown.
            ValueError: an argument has a value that cannot be honoured.
        """
        values = {name: value for name, value in arguments.items() if name not in _WITHOUT_EFFECT}
        if values.pop("push_to_hub", False):
            raise ValueError(
                "push_to_hub is not supported by save_parallelized; save with merge_checkpoints=True and upload the "
                "folder from one rank (huggingface_hub.upload_folder)"
            )
        if values.pop("distributed_checkpoint", False):
            raise ValueError("distributed_checkpoint is not supported by save_parallelized, which has its own format")
        if unknown := sorted(values.keys() - cls.__dataclass_fields__.keys()):
            raise TypeError(f"save_parallelized got unexpected arguments: {', '.join(unknown)}")
        options = cls(**values)
        if options.save_function is not None and options.safe_serialization:
            raise ValueError("save_function writes .bin files and cannot be combined with safe_serialization=True")
        check_variant(options.variant)
        return options

    @property
    def extension(self) -> str:
        return ".safetensors" if self.safe_serialization else ".bin"


_WITHOUT_EFFECT = frozenset({"is_main_process", "token", "save_peft_format"})


def refuse_unsupported(model: nn.Module, merged: SaveOptions | None) -> None:
    """Raise for a quantised model that is not to be merged into one folder, or that transformers does not save so.

    Args:
        merged: how it is written into one folder; None for other kinds of saves.

    Raises:
        CheckpointError: says what to do.
    """
    quantizer, diffusers = getattr(model, "hf_quantizer", None), of_diffusers(type(model))
    torchao = quantizer is not None and quantizer.quantization_config.quant_method == "torchao"
    kept = quantizer is None or not (diffusers or not quantizer.is_serializable())
    fits = merged is not None and (merged.safe_serialization or not torchao)
    if (packed_weights(model) or torchao) and not (fits and kept):
        raise CheckpointError(
            f"cannot save the packed weights of a quantised {type(model).__name__}"
            + (" so: use save_pretrained, with files of safetensors" if kept else ": this kind is not saved")
            + f"; adapters are saved by {'save_lora_adapter' if diffusers else 'save_pretrained'}, and the state of a "
            "run by penstock.save_checkpoint"
        )


def write_side_files(model: nn.Module, directory: str) -> list[str]:
    """Write the configuration, the generation configuration and custom code, as `save_pretrained` would.

    Returns the names of the files, not flushed to disk; none for a module of one's own.
    """
    place, before = os.path.join(directory, CONFIG_NAME), set(os.listdir(directory))
    if of_diffusers(type(model)):
        with writing(place, "the configuration"):
            cast(Any, model).save_config(directory)
        return [CONFIG_NAME]
    if not isinstance(model, PreTrainedModel):
        return []
    with writing(place, "the configurations"):
        config = copy.deepcopy(model.config)
        config.dtype = dtype_name(model.dtype)
        config.architectures = [type(model).__name__]
        if model.is_remote_code():
            custom_object_save(model, directory, config=config)
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
        return sorted(set(os.listdir(directory)) - before)

"""The small files beside the weights: what `save_pretrained` writes besides them."""

from __future__ import annotations

import copy
import os

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME

from .errors import CheckpointError
from .files import flush_file, writing
from .tensors import dtype_name


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise for a model whose weights `save_pretrained` would treat specially.

    Raises:
        CheckpointError: the model is quantized or has adapters.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError("cannot save a quantized model in parallel")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError("cannot save a model with adapters in parallel; merge them into the model first")


def write_side_files(model: PreTrainedModel, directory: str) -> list[str]:
    """Write the configuration, the generation configuration and custom code, as `save_pretrained` would.

    Returns:
        the names of the files, which are on disk.

    Raises:
        CheckpointError: naming the directory.
    """
    before = set(os.listdir(directory))
    with writing(os.path.join(directory, CONFIG_NAME), "the configurations"):
        config = copy.deepcopy(model.config)
        config.dtype = dtype_name(model.dtype)
        config.architectures = [type(model).__name__]
        if model.is_remote_code():
            custom_object_save(model, directory, config=config)
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
        names = sorted(set(os.listdir(directory)) - before)
        for name in names:
            flush_file(os.path.join(directory, name))
    return names

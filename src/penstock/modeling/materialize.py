"""A model of which only some stages have weights: from a configuration, as the whole model would be initialised.

`stage_loading` does the same from a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, initialization
from transformers.models.auto.auto_factory import _get_model_class

from .ghost import strip
from .random_init import drawing_for_meta, numbering_parameters
from .slice_init import SliceKeeper
from .tensor_parallel import TensorParallel, give_slices


def resolve_model_class(config: PretrainedConfig, model_class: type | None = None) -> type[PreTrainedModel]:
    """The class to build for `config`.

    Args:
        model_class: a model class, an auto class (`AutoModelForCausalLM`), or None for the first of
            `config.architectures`, which is the class that wrote the checkpoint.

    Raises:
        ValueError: `config` names no class that transformers has, or the auto class has none for it.
    """
    if model_class is None:
        names = config.architectures or []
        found = getattr(transformers, names[0], None) if names else None
        if not isinstance(found, type):
            raise ValueError(
                f"cannot tell the model class: the configuration ({type(config).__name__}) has architectures={names}, "
                "and transformers has no such class; pass model_class=, for example AutoModelForCausalLM"
            )
        return found
    if (mapping := getattr(model_class, "_model_mapping", None)) is not None:
        if type(config) not in mapping:
            raise ValueError(f"{model_class.__name__} has no model for a {type(config).__name__}; pass model_class=")
        resolved: type[PreTrainedModel] = _get_model_class(config, mapping)
        return resolved
    if not issubclass(model_class, PreTrainedModel):
        raise ValueError(f"model_class must be a PreTrainedModel or an auto class, not {model_class.__name__}")
    return model_class


def meta_model(model_class: type[PreTrainedModel], config: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """The whole model without memory: every tensor is a meta tensor, tied weights are tied. To choose stages with.

    Args:
        kwargs: as for `model_class._from_config`, for example `dtype`.
    """
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        return model_class._from_config(copy.deepcopy(config), **kwargs)


def init_stage(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    stages: Sequence[Sequence[str]],
    local_stages: Collection[int],
    seed: int | None = None,
    tensor_parallel: TensorParallel | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A randomly initialised model that holds the weights of `local_stages` only; other units are ghosts.

    Its parameters and buffers equal, bit for bit, those of `model_class._from_config(config)` (what an auto class's
    `from_config` calls) after `torch.manual_seed(seed)`, built on the CPU; so does the state of torch's generator
    afterwards. Parameters outside every unit are held by all stages.

    Args:
        stages: names of units per stage.
        local_stages: indices of the stages to hold.
        seed: None continues the generator where it is.
        tensor_parallel: how the whole model is cut. Of each weight that is, only this rank's slice is kept, for
            `TensorParallel.apply` to put in its place; the model shows a meta tensor there until then.
        kwargs: as for `model_class._from_config`, for example `dtype` or `attn_implementation`.

    Raises:
        NotImplementedError: a weight of this stage is computed from the value of another stage's weight, or one that is
            cut is not written as a whole.
        ValueError: a local stage does not exist.
    """
    with numbering_parameters() as numbering:
        skeleton = meta_model(model_class, config, **kwargs)
    numbers = numbering.of(skeleton)
    # Tied names have one number, so the source of a tie is made wherever one of its names is held.
    made = {**numbering.replaced(skeleton, numbers), **numbers}
    held = held_names(made, stages, local_stages)
    sliced, keeper = {}, None
    if tensor_parallel is not None:
        shards, keeper = tensor_parallel.shards, SliceKeeper(tensor_parallel.index, tensor_parallel.size)
        sliced = {made[name]: shards[name] for name in held if name in shards}
    keep = {made[name] for name in held} - sliced.keys()
    del skeleton, numbering
    if seed is not None:
        torch.manual_seed(seed)
    try:
        with torch.device("cpu"), drawing_for_meta(keeper), numbering_parameters(keep, sliced, keeper) as numbering:
            model = model_class._from_config(copy.deepcopy(config), **kwargs)
    except NotImplementedError as error:  # also torch's error for copying out of a meta tensor
        raise NotImplementedError(
            f"cannot initialise only a part of {model_class.__name__}: that needs values that are not here ({error}); "
            "create it whole and pass it to penstock.initialize"
        ) from error
    if numbering.of(model) != numbers:
        raise NotImplementedError(
            f"cannot initialise only a part of {model_class.__name__}: it creates its parameters in another order on "
            "the meta device; create it whole and pass it to penstock.initialize"
        )
    strip_foreign(model, stages, local_stages)
    if keeper is not None:
        give_slices(model, keeper.slice_of)
    return model


def held_names(names: Iterable[str], stages: Sequence[Sequence[str]], local_stages: Collection[int]) -> set[str]:
    """Those of `names` that a rank with `local_stages` holds: in its own units, or in no unit at all."""
    foreign = tuple(f"{unit}." for unit in foreign_units(stages, local_stages))
    return {name for name in names if not name.startswith(foreign)}


def foreign_units(stages: Sequence[Sequence[str]], local_stages: Collection[int]) -> list[str]:
    """The units of all stages but `local_stages`."""
    if unknown := sorted(set(local_stages) - set(range(len(stages)))):
        raise ValueError(f"local_stages has {unknown}, but there are {len(stages)} stages")
    return [unit for stage, units in enumerate(stages) if stage not in local_stages for unit in units]


def strip_foreign(model: nn.Module, stages: Sequence[Sequence[str]], local_stages: Collection[int]) -> None:
    """Turn the units of other stages into ghosts."""
    for unit in foreign_units(stages, local_stages):
        strip(model.get_submodule(unit))

"""Loading the weights of some stages from a checkpoint, through transformers' own `from_pretrained`.

transformers renames keys and fuses weights (experts, projections) while it loads, so a checkpoint's names say little
about the model's. The model is built whole on the meta device; its `state_dict` shows transformers only the names this
rank holds, so that all others are never read; the rest of the machinery (initialising what the checkpoint lacks, tying)
then sees the whole model again and does what it always does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from penstock.modeling.libraries import base_of
from penstock.modeling.sharding import ShardReader, WeightSharding
from penstock.modeling.weights.initialise import drawing_for_meta
from penstock.modeling.weights.whole import held_names, strip_foreign

# What spreads a model over devices in another way, or needs every weight to be present.
_REFUSED = (
    *("max_memory", "offload_folder", "device_mesh", "distributed_config", "tp_plan", "tp_size"),
    *("gguf_file", "adapter_kwargs", "state_dict"),
)
# Of these, what asks for expert parallelism.
_OF_EXPERTS = ("device_mesh", "distributed_config")


@dataclass(frozen=True)
class StageLoadingInfo:
    """What loading found. `missing_keys` and `unexpected_keys` are those of the whole model, the same on every rank.

    Attributes:
        missing_keys: tensors of the model that the checkpoint lacks; they were initialised as in the whole model.
        unexpected_keys: tensors of the checkpoint that the model has no place for.
        mismatched_keys: (name, shape in the checkpoint, shape in the model), for this rank's parameters.
        untied: names that this rank found *not* tied although the configuration ties them, because the checkpoint
            holds different values. Ranks that hold neither side cannot know: see `forget_ties`.
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched_keys: tuple[Any, ...]
    untied: tuple[str, ...]


def load_stage(
    model_class: type[PreTrainedModel],
    path_or_name: str,
    stages: Sequence[Sequence[str]],
    local_stages: Collection[int],
    tensor_parallel: WeightSharding | None = None,
    adapt: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, StageLoadingInfo]:
    """Load a model that holds the weights of `local_stages` only; other units are ghosts.

    Only tensors of these stages are read, plus the other names of their tied weights. Weights that the checkpoint lacks
    are drawn from the random stream as the whole model would draw them.

    Args:
        tensor_parallel: how the whole model is sharded; see `init_stage`. Sharded weights are read whole, one at a
            time, and only this rank's shard is kept.
        adapt: is given the model, where what other stages have is still there on the meta device, and returns it with
            adapters in it, or a PeftModel around it.
        kwargs: as for `model_class.from_pretrained`, which says what is raised. `device_map` may name one device.
    """
    refuse_arguments(kwargs)
    kwargs.pop("output_loading_info", None)
    stage_class = _stage_class(model_class, stages, local_stages, tensor_parallel)
    model, info = stage_class.from_pretrained(path_or_name, output_loading_info=True, **kwargs)
    untied = tuple(sorted(model._declared_ties - set(model.all_tied_weights_keys)))
    if model._shards is not None:
        model._shards.finish(model)
        del model._shards
    del model._held, model._declared_ties
    model.__class__ = model_class
    if tensor_parallel is not None and getattr(model, "hf_quantizer", None) is not None:
        raise NotImplementedError(
            "tensor_parallel_size cannot shard the packed weights of a quantised model: leave one of the two out"
        )
    return finish_stage(model, adapt, stages, local_stages, info, untied)


def finish_stage(
    model: nn.Module,
    adapt: Callable[[Any], Any] | None,
    stages: Sequence[Sequence[str]],
    local_stages: Collection[int],
    info: Mapping[str, Any],
    untied: tuple[str, ...] = (),
) -> tuple[Any, StageLoadingInfo]:
    """What `adapt` makes of a model, without what other stages have, and what `from_pretrained` said of it."""
    adapted = model if adapt is None else adapt(model)
    if base_of(adapted) is not model:
        raise TypeError(f"adapt must return the model that it was given, or a PeftModel of it, got {type(adapted)}")
    strip_foreign(model, stages, local_stages)
    missing, unexpected = (tuple(sorted(info[key])) for key in ("missing_keys", "unexpected_keys"))
    return adapted, StageLoadingInfo(missing, unexpected, tuple(info["mismatched_keys"]), untied)


def load_config(path_or_name: str, **kwargs: Any) -> PretrainedConfig:
    """The configuration that `from_pretrained(path_or_name, **kwargs)` would use, but for dtype and quantisation."""
    config = kwargs.pop("config", None)
    if isinstance(config, PretrainedConfig):
        return config
    path = os.fspath(path_or_name)
    # A hub has no such names; transformers would ask one for it.
    is_path = os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") > 1
    if config is None and is_path and not os.path.exists(path):
        raise FileNotFoundError(f"{path} is no directory: there is no model to load")
    for option in ("dtype", "torch_dtype", "quantization_config"):  # a dtype "auto" only the checkpoint can resolve
        kwargs.pop(option, None)
    return AutoConfig.from_pretrained(path_or_name if config is None else config, **kwargs)


def forget_ties(model: PreTrainedModel, untied: Collection[str]) -> None:
    """Make all ranks agree on what is tied: `untied` is the union of every rank's `StageLoadingInfo.untied`."""
    for name in untied:
        model.all_tied_weights_keys.pop(name, None)


def refuse_arguments(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an argument of `from_pretrained` that cannot be combined with stages."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            experts = ", and let stages hold the experts, or tensor_parallel_size shard each" * (name in _OF_EXPERTS)
            raise ValueError(f"{name} cannot be combined with pipeline stages; load without it{experts}")
    device_map = kwargs.get("device_map")
    try:
        is_one_device = device_map is None or torch.device(device_map).type != "meta"
    except (RuntimeError, TypeError):
        is_one_device = False
    if not is_one_device:
        raise ValueError(f"device_map must name one device when loading stages, but is {device_map!r}")


def _stage_class(
    model_class: type[PreTrainedModel],
    stages: Sequence[Sequence[str]],
    local_stages: Collection[int],
    tensor_parallel: WeightSharding | None,
) -> Any:
    """A subclass of `model_class` whose `from_pretrained` reads only the tensors of `local_stages`."""

    class Stage(model_class):  # type: ignore[misc]  # a library without types
        # What this rank must read. None: show every name.
        _held: frozenset[str] | None = None
        _shards: ShardReader | None = None
        _declared_ties: set[str]

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = super().state_dict(*args, **kwargs)
            if self._held is None:
                return state
            return {name: tensor for name, tensor in state.items() if name in self._held}

        @staticmethod
        def _load_pretrained_model(
            model: Any, state_dict: Any, checkpoint_files: Any, options: Any, *args: Any, **kwargs: Any
        ) -> Any:
            whole_state = model.state_dict()
            model._held = _with_tied_names(model, held_names(whole_state, stages, local_stages))
            model._declared_ties = set(model.all_tied_weights_keys)
            with contextlib.ExitStack() as opened:
                index = (options.sharded_metadata or {}).get("weight_map", {})
                if state_dict is None and index and not options.disable_mmap:
                    state_dict = _unread(checkpoint_files, index, opened)
                if tensor_parallel is not None:
                    model._shards = tensor_parallel.shard_reader(model, model._held)
                    opened.enter_context(model._shards.keeping(model.all_tied_weights_keys))
                    # Without sharded ones: transformers would reserve an accelerator's memory for each as a whole.
                    kwargs["expected_keys"] = [name for name in model._held if name not in tensor_parallel.shards]
                loading_info, offload_index = model_class._load_pretrained_model(
                    model, state_dict, checkpoint_files, options, *args, **kwargs
                )
            if index and loading_info.missing_keys - model.all_tied_weights_keys.keys():
                _refuse_unlisted(checkpoint_files, index)
            if loading_info.mismatched_keys and not options.ignore_mismatched_sizes:
                shapes = "; ".join(
                    f"{name}: {list(there)} in the checkpoint, {list(here)} in the model"
                    for name, there, here in sorted(loading_info.mismatched_keys)
                )
                raise ValueError(f"the checkpoint does not fit the model: {shapes}")
            known = _known_to_the_whole_model(model, loading_info.unexpected_keys, whole_state, options.weight_mapping)
            loading_info.unexpected_keys -= known.keys()
            present = set(known.values()) - model._held
            loading_info.missing_keys |= whole_state.keys() - model._held - present
            for name in present:
                model.get_parameter_or_buffer(name)._is_hf_initialized = True
            return loading_info, offload_index

        def _move_missing_keys_from_meta_to_device(self, missing_keys: set[str], *args: Any, **kwargs: Any) -> None:
            # What other stages lack stays on meta, and only draws its random numbers below.
            here = missing_keys & self._held if self._held is not None else missing_keys
            if self._shards is not None:
                here -= self._shards.initialise_later(self, here - self.all_tied_weights_keys.keys())
            super()._move_missing_keys_from_meta_to_device(here, *args, **kwargs)

        def tie_weights(self, missing_keys: set[str] | None = None, **kwargs: Any) -> None:
            if self._shards is not None and missing_keys is not None:
                self._shards.find_ties(self, missing_keys)
            super().tie_weights(missing_keys=missing_keys, **kwargs)

        def initialize_weights(self) -> None:
            with drawing_for_meta(None if self._shards is None else self._shards.writer):
                super().initialize_weights()

    Stage.__name__, Stage.__qualname__, Stage.__module__ = (
        model_class.__name__,
        model_class.__qualname__,
        model_class.__module__,
    )
    return Stage


class _UnreadTensor:
    """A tensor in a file of safetensors, which is opened once something of the tensor is asked for."""

    def __init__(self, name: str, open_file: Callable[[], Any]) -> None:
        self._name, self._open = name, open_file

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self._open().get_slice(self._name)[index]
        return found

    def get_shape(self) -> list[int]:
        return list(self._open().get_slice(self._name).get_shape())

    def get_dtype(self) -> str:
        return str(self._open().get_slice(self._name).get_dtype())


def _unread(
    files: Sequence[str], index: Mapping[str, str], opened: contextlib.ExitStack
) -> dict[str, _UnreadTensor] | None:
    """The tensors of a checkpoint by the names in its index, so that only files with a rank's own ones are opened;
    None for other files than those of safetensors."""
    paths = {os.path.basename(file): file for file in files}
    if not all(name.endswith(".safetensors") and name in paths for name in index.values()):
        return None

    @cache
    def open_file(path: str) -> Any:
        return opened.enter_context(safe_open(path, framework="pt", device="cpu"))

    return {name: _UnreadTensor(name, partial(open_file, paths[file])) for name, file in index.items()}


def _refuse_unlisted(files: Sequence[str], index: Mapping[str, str]) -> None:
    """Raise if files have a tensor that their index lacks: transformers, which reads all files, would find it."""
    for file in files if all(name.endswith(".safetensors") for name in files) else ():
        with safe_open(file, framework="pt") as opened:
            unlisted = sorted(set(opened.keys()) - index.keys())
        if unlisted:
            raise ValueError(
                f"the checkpoint's index does not list {len(unlisted)} tensors of {os.path.basename(file)}, such as "
                f"{unlisted[0]}, and the index lacks some of the model's weights: load the folder with transformers "
                "and save it again"
            )


def _known_to_the_whole_model(
    model: PreTrainedModel, keys: Collection[str], whole_state: Mapping[str, Any], transforms: Sequence[Any] | None
) -> dict[str, str]:
    """Those of the unexpected `keys` that belong to another stage, each with its name in the whole model."""
    prefix = model.base_model_prefix
    # transformers adds the model's prefix to a key only if the model shows that name.
    full = {key: rename_source_key(key, [], [], prefix, whole_state)[0] for key in keys}
    known = {key: name for key, name in full.items() if name in whole_state}
    # It has rules for older checkpoints, which change a key unless the model shows it. A stage does not show the names
    # of other stages, so some were changed: apply the same rules to those, to find them among the unexpected ones.
    renamings = [entry for entry in transforms or () if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms or () if isinstance(entry, WeightConverter)]
    left = {name: key for key, name in full.items() if key not in known}
    for name in whole_state if left else ():
        changed = rename_source_key(name, renamings, converters, prefix, whole_state)[0]
        if changed != name and changed in left:
            known[left[changed]] = name
    return known


def _with_tied_names(model: PreTrainedModel, names: set[str]) -> frozenset[str]:
    """`names` and every other name of the same weights: a checkpoint may hold a tied weight under any of them."""
    groups: dict[str, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, {source}).add(target)
    shared: dict[int, set[str]] = {}
    for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
        shared.setdefault(id(parameter), set()).add(name)
    tied_names = set(names)
    for group in [*groups.values(), *(group for group in shared.values() if len(group) > 1)]:
        if group & tied_names:
            tied_names |= group
    return frozenset(tied_names)

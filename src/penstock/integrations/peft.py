"""PEFT over pipeline stages: a PeftModel whose transformers model is parallelised.

The model inside, adapters and all, is split, and the PeftModel hands its calls on to it. Here is what concerns the
whole model: counting, saving, merging, and what cannot be done to a model of which each rank has a part.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar, cast
from unittest import mock

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTuner
from transformers import PreTrainedModel

from penstock.model.pipeline_model import PipelineModel
from penstock.modeling.instrumentation import mix_in
from penstock.modeling.libraries import is_adapter_layer
from penstock.modeling.packed_layers import mark_packed
from penstock.modeling.placeholders.ghosts import is_ghost, shown_whole
from penstock.modeling.weights.whole import packed_weights
from penstock.runtime.reforming import renewing

T = TypeVar("T")

# Arguments of a PeftModel's call that choose adapters sample by sample.
PER_SAMPLE = ("adapter_names", "alora_offsets")

# Arguments of PEFT's save that need the whole model, or the hub.
REFUSED_IN_SAVES = ("path_initial_model_for_weight_conversion", "push_to_hub", "state_dict")
CARD = "README.md"


class PipelinePeftModel(PipelineModel, PeftModel):
    """Mixed into the class of a PeftModel that `initialize()` or the plugin has parallelised.

    Calls, `generate`, `set_adapter` and `disable_adapter` are as on one process. `save_pretrained` writes one ordinary
    adapter folder; it, counting and merging are of the whole model, and every rank calls them.
    """

    @property
    def base(self) -> Any:
        return self.get_base_model()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `PipelineModel`'s: a training step's iterator, or with gradients disabled one output."""
        _refuse_per_sample(kwargs)
        return self.base(**self._bind(args, kwargs))

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        # The forward of a PeftModel for no task names no arguments.
        of_no_task = type(self).forward is PeftModel.forward
        bound: dict[str, Any] = self.base._bind(args, kwargs) if of_no_task else super()._bind(args, kwargs)
        return bound

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """PEFT's `generate`, over stages: on every rank the result of the unsplit model."""
        _refuse_per_sample(kwargs)
        return super().generate(*args, **kwargs)  # type: ignore[no-untyped-call]  # PEFT's has no types

    def set_adapter(self, adapter_name: str, inference_mode: bool = False) -> None:
        """PEFT's `set_adapter`, also of layers that this rank may hold later. Every rank calls it."""
        with shown_whole(self.base, themselves=True):
            super().set_adapter(adapter_name, inference_mode)

    def add_adapter(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"add the adapter {adapter_name} before penstock.initialize() splits the model")

    def delete_adapter(self, adapter_name: str) -> None:
        raise NotImplementedError(f"delete the adapter {adapter_name} before penstock.initialize() splits the model")

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineModel:
        # The tuner between this and the model inside looks for what it lacks in that model, for `__deepcopy__`, too.
        tuner: Any = self.base_model
        kind: Any = type(tuner)
        made = memo[id(tuner)] = kind.__new__(kind)
        made.__setstate__(copy.deepcopy(vars(tuner), memo))
        return super().__deepcopy__(memo)

    def extra_repr(self) -> str:
        """The model inside says which part of it this rank holds."""
        return torch.nn.Module.extra_repr(self)

    # -- the whole model -------------------------------------------------------------------------------------------

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """How many parameters of the unsplit model are trainable, and how many it has. Every rank calls it."""
        return self.base.num_parameters(only_trainable=True, whole=True), self.base.num_parameters(whole=True)

    def print_trainable_parameters(self) -> None:
        """Print what `get_nb_trainable_parameters` counts, on rank 0. Every rank calls it."""
        if self.pipeline.rank == 0:
            super().print_trainable_parameters()
        else:
            self.get_nb_trainable_parameters()

    def save_pretrained(  # type: ignore[override]  # its arguments are PEFT's, in PEFT's order
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        selected_adapters: Sequence[str] | None = None,
        save_embedding_layers: bool | Literal["auto"] = "auto",
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """PEFT's `save_pretrained`: one ordinary folder for each adapter, of all stages. Every rank calls it.

        `PeftModel.from_pretrained` loads it in one process. The arguments are PEFT's; `is_main_process` has no effect.
        """
        for name in REFUSED_IN_SAVES:
            if kwargs.get(name):
                raise ValueError(f"{name} does not work on a parallelised model: load the saved folder in one process")
        known = self.peft_config
        adapters = list(known if selected_adapters is None else selected_adapters)
        if unknown := [name for name in adapters if name not in known]:
            raise ValueError(f"there is no adapter {', '.join(unknown)}: the model has {', '.join(known)}")

        def select(adapter: str, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            selected: Mapping[str, torch.Tensor] = get_peft_model_state_dict(
                self, _prefixed(state), adapter, save_embedding_layers=save_embedding_layers
            )
            return selected

        options = {"safe_serialization": safe_serialization, "save_embedding_layers": save_embedding_layers}
        root = os.fspath(save_directory)
        for adapter in adapters:
            self.base.save_adapter(
                self._folder_of(adapter, root),
                adapter,
                partial(select, adapter),
                partial(self._write_adapter, adapter, root, options),
            )
        self.pipeline.board.resume["model"] = f"model.load_ordinary({root!r})"

    def _folder_of(self, adapter: str, directory: str) -> str:
        return directory if adapter == "default" else os.path.join(directory, adapter)

    def _write_adapter(
        self, adapter: str, root: str, options: Mapping[str, Any], folder: str, state: Mapping[str, torch.Tensor]
    ) -> None:
        """Let PEFT write an adapter into `folder`; the model card goes on from the one in `root`."""
        card, written = os.path.join(root, CARD), os.path.join(folder, CARD)
        if os.path.isfile(card):
            shutil.copyfile(card, written)
        super(PipelineModel, self).save_pretrained(
            folder, selected_adapters=[adapter], state_dict=_prefixed(state), **options
        )
        if adapter != "default":  # PEFT puts these into a folder below that of the model card
            os.replace(written, card)
            for name in os.listdir(os.path.join(folder, adapter)):
                os.replace(os.path.join(folder, adapter, name), os.path.join(folder, name))
            os.rmdir(os.path.join(folder, adapter))

    def save_parallelized(
        self, save_directory: str | os.PathLike[str], merge_checkpoints: bool = False, **kwargs: Any
    ) -> None:
        """Save the model inside with its adapters: a file per rank; with `merge_checkpoints` as `save_pretrained`."""
        if merge_checkpoints:
            self.save_pretrained(save_directory, **kwargs)
        else:
            self.base.save_parallelized(save_directory, **kwargs)

    def merge_and_unload(
        self, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> PipelineModel:
        """Merge the adapters into the layers: the transformers model, parallelised as before. Every rank calls it."""
        return self._unload("merge_and_unload", progressbar, safe_merge, adapter_names)

    def unload(self) -> PipelineModel:
        """The transformers model without its adapters, parallelised as before. Every rank calls it."""
        return self._unload("unload")

    def _unload(self, how: str, *args: Any) -> PipelineModel:
        base, tuner = self.base, self.base_model
        tied = getattr(base.config, "tie_word_embeddings", None)
        # For bitsandbytes, which repacks weights in evaluations on some CPUs, and puts them back when `state_dict()`
        # reads them. Merging does not read them so: it would take them as they are.
        base.state_dict()
        with renewing(self.pipeline), _unmerged_ghosts(base), warnings.catch_warnings():
            # A rank that has one side of a tie only looks to PEFT as if the weights were not tied.
            warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
            getattr(tuner, how)(*args)
        if tied:
            base.config.tie_word_embeddings = _embeddings_are_tied(base)
        return cast(PipelineModel, base)

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("merge_adapter() keeps the adapters beside the layers: use merge_and_unload()")

    def adapter_folders(self, directory: str) -> dict[str, str]:
        return {name: self._folder_of(name, directory) for name in self.peft_config}


@contextmanager
def _unmerged_ghosts(model: torch.nn.Module) -> Iterator[None]:
    """Inside, layers of other stages are unloaded without merging: their weights are not here."""
    layers = [layer for layer in model.modules() if is_adapter_layer(layer) and hasattr(layer, "merge")]
    with ExitStack() as undo:
        for layer in layers:
            if any(map(is_ghost, layer.modules())):
                undo.enter_context(mock.patch.object(layer, "merge", lambda *args, **kwargs: None))
        yield


def _embeddings_are_tied(model: Any) -> bool:
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    names = {f"{name}.weight" for name, module in model.named_modules() if any(module is end for end in ends)}
    return any(names <= set(group) for group in model.pipeline.split.aliases)


def _prefixed(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names in the PeftModel."""
    return {f"base_model.model.{name}": tensor for name, tensor in state.items()}


def refuse_peft(model: PeftModel) -> None:
    """Raise for a PeftModel whose forward is more than that of the model inside."""
    kind = model.active_peft_config.peft_type
    name = f"the adapters of type {getattr(kind, 'value', kind)}"
    if model.active_peft_config.is_prompt_learning:
        raise NotImplementedError(f"{name} put tokens before the input, which pipelines do not support: use LoRA")
    if (shared := _shared_between_layers(model)) is not None:
        raise NotImplementedError(
            f"{name} share tensors between layers, which would be on several stages ({shared}): use LoRA"
        )
    if type(model.base_model).forward is not BaseTuner.forward:
        raise NotImplementedError(f"{name} do more in a forward than the model's layers do: use LoRA")
    if not type(model).__module__.startswith("peft."):
        cls = next((cls for cls in type(model).__mro__ if "forward" in vars(cls)), PeftModel)
        if not cls.__module__.startswith("peft."):
            raise NotImplementedError(
                f"{cls.__name__}.forward is not PEFT's own, and would not be called: give a model of PEFT's own class"
            )
    if experts := _packed_targets(model):
        raise NotImplementedError(
            f'adapters shall be on packed experts ({", ".join(experts)}), where PEFT puts none: it takes "all-linear" '
            "and names as gate_proj for experts, too. Name other linear layers in target_modules (q_proj, v_proj), or "
            "leave the experts as they are (BitsAndBytesConfig)"
        )
    if any(getattr(config, "alora_invocation_tokens", None) for config in model.peft_config.values()):
        raise NotImplementedError(
            "activated LoRA chooses tokens sample by sample, which pipelines do not support: use LoRA"
        )


def _packed_targets(model: PeftModel) -> list[str]:
    """The targets of adapters that a library keeps packed outside of a layer."""
    listed = (getattr(config, "target_parameters", None) or () for config in model.peft_config.values())
    packed = packed_weights(mark_packed(model.get_base_model()))
    # As they are called in a model that is neither packed nor adapted.
    names = [re.sub(r"\.(base_layer|parametrizations|original)\b", "", f".{name}") for name in packed]
    return sorted({target for target in chain(*listed) if any(name.endswith(f".{target}") for name in names)})


def _shared_between_layers(model: PeftModel) -> str | None:
    """The name of a tensor of the adapters that several layers use, if there is one: it is outside of the model inside,
    or in two layers whose own weights are not the same, as they are in tied layers."""
    inside = set(map(id, model.get_base_model().modules()))
    wrapped_by_users: dict[int, list[set[int]]] = {}  # of a tensor: the weights that each layer with it wraps
    layers: list[Any] = [layer for layer in model.modules() if is_adapter_layer(layer)]
    for layer in layers:
        wrapped = _tensors_of(layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module)
        for tensor in _tensors_of(layer) - wrapped:
            wrapped_by_users.setdefault(tensor, []).append(wrapped)
    shared = {key for key, users in wrapped_by_users.items() if any(users[0].isdisjoint(other) for other in users[1:])}
    for name, module in model.named_modules():
        for tensor_name, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None and (id(module) not in inside or id(value) in shared):
                return f"{name}.{tensor_name}"
    return None


def _tensors_of(module: torch.nn.Module) -> set[int]:
    return set(map(id, (*module.parameters(), *module.buffers())))


def initialize_peft(model: PeftModel, parallelize: Callable[[PreTrainedModel], T]) -> T:
    """Let `parallelize` parallelise the model inside `model` in place. Returns and raises what it does."""
    refuse_peft(model)
    base = model.get_base_model()
    if isinstance(base, PipelineModel) and not isinstance(model, PipelineModel):
        raise NotImplementedError("adapters come first: get_peft_model(model, ...), then penstock.initialize()")
    result = parallelize(base)
    if not isinstance(model, PipelinePeftModel):
        mix_in(model, PipelinePeftModel)
    return result


def _refuse_per_sample(arguments: Mapping[str, Any]) -> None:
    for name in PER_SAMPLE:
        if arguments.get(name) is not None:
            raise NotImplementedError(
                f"{name} chooses adapters sample by sample, which pipelines do not support"
                ": choose one for the batch with set_adapter(name)"
            )

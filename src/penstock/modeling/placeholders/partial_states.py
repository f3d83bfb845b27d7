"""State dicts of modules of which this rank lacks a part: they can be read, but not saved as if they were whole."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from penstock.modeling.instrumentation import known_of
from penstock.modeling.placeholders.ghosts import stripped_tensors

# Packages whose functions `save...` copy a state dict, and give the copy to safetensors.
_SAVING_PACKAGES = frozenset({"accelerate", "diffusers", "huggingface_hub", "safetensors", "transformers"})


def mark_states(model: nn.Module) -> None:
    """Let the state dicts of `model`, and of its modules that lack tensors, say so when they are saved."""
    for module in model.modules():
        if _mark not in module._state_dict_hooks.values() and (module is model or any(_lacked(module))):
            module._register_state_dict_hook(_mark)


def _mark(module: nn.Module, state: Any, prefix: str, local_metadata: dict[str, Any]) -> PartialState | None:
    """Called by `module.state_dict()`, also when it is a part of that of a module around it."""
    sharded = known_of(module).tensor_parallel is not None
    if not sharded and not any(_lacked(module)):
        return None
    name, held = type(module).__name__, sum(key.startswith(prefix) for key in state)

    def refusal() -> str:
        return (
            f"this state_dict() is of one rank's part of {name}: {held} of its {held + sum(_lacked(module))} tensors"
            f"{', some of them in shards' * sharded}. To save the whole model, call model.save_pretrained(folder) on "
            "every rank, or model.save_parallelized(folder), which writes a file per rank; to save this part alone, "
            "save dict(model.state_dict())"
        )

    # torch.save writes this, too: it is an attribute of the dictionary.
    if hasattr(state, "_metadata"):
        state._metadata[prefix[:-1]] = _PartialMetadata(local_metadata, refusal)
    if prefix:
        return None
    partial = PartialState(state)
    partial.__dict__.update(vars(state), refusal=refusal)
    return partial


def _lacked(module: nn.Module) -> Iterator[bool]:
    """One true value for each tensor of the unsplit module's `state_dict()` that is on other ranks."""
    return (True for kind in ("parameter", "buffer") for _ in stripped_tensors(module, kind))


class _PartialMetadata(dict[str, Any]):
    """The metadata of a module of which this rank lacks a part."""

    def __init__(self, metadata: dict[str, Any], refusal: Callable[[], str]) -> None:
        super().__init__(metadata)
        self._refusal = refusal

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(self._refusal())

    def __deepcopy__(self, memo: dict[int, Any]) -> _PartialMetadata:
        return _PartialMetadata(copy.deepcopy(dict(self), memo), self._refusal)


class PartialState(OrderedDict[str, Any]):
    """The state dict of a module of which this rank lacks a part. Safetensors and who uses it cannot write it."""

    def copy(self) -> PartialState:
        made = super().copy()
        vars(made).update(vars(self))
        return made

    def items(self) -> Any:
        """As of any dictionary."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _SAVING_PACKAGES:
            if frame.f_code.co_name.startswith("save"):
                raise TypeError(vars(self)["refusal"]())
            frame = frame.f_back
        return super().items()

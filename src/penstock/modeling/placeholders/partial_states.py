"""State dicts of modules of which this rank lacks a part: to be read, but not saved as if they were whole.

What a class's own code saves of a ghost is left to the rank that holds it.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from penstock.modeling.instrumentation import known_of
from penstock.modeling.placeholders.ghosts import OwnMethod, is_ghost, stripped_tensors

# Packages whose functions `save...` copy a state dict, and give the copy to safetensors.
_SAVING_PACKAGES = frozenset({"accelerate", "diffusers", "huggingface_hub", "safetensors", "transformers"})


def mark_states(model: nn.Module) -> None:
    """Let the state dicts of `model`, and of its modules that lack tensors, say so when they are saved."""
    for module in model.modules():
        _hand_over(module)
        if _mark not in module._state_dict_hooks.values() and (module is model or any(_lacked(module))):
            module._register_state_dict_hook(_mark)


def _hand_over(module: nn.Module) -> None:
    """Let the code of a module's class save and load the module where it is whole, and nothing where it is a ghost."""
    for method in ("state_dict", "get_extra_state", "_load_from_state_dict"):
        if isinstance(vars(module).get(method), OwnMethod):
            del module.__dict__[method]
    if is_ghost(module) and _has_own_code(module):
        module.__dict__["state_dict"] = OwnMethod(_state_of_ghost, module, nn.Module.state_dict)
        module.__dict__["get_extra_state"] = OwnMethod(_nothing, module, _nothing)
        module.__dict__["_load_from_state_dict"] = OwnMethod(_nothing, module, nn.Module._load_from_state_dict)


def _has_own_code(module: nn.Module) -> bool:
    methods = ("state_dict", "get_extra_state", "_save_to_state_dict", "_load_from_state_dict")
    hooks = [hook for hook in module._state_dict_hooks.values() if hook is not _mark]
    hooks += [*module._state_dict_pre_hooks.values(), *module._load_state_dict_pre_hooks.values()]
    return bool(hooks) or any(getattr(type(module), name) is not getattr(nn.Module, name) for name in methods)


def _nothing(module: nn.Module, /, *args: Any, **kwargs: Any) -> None:
    pass


def _state_of_ghost(module: nn.Module, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
    """What a ghost saves: nothing, but for what its modules hold that are no ghosts. The names of all of it while it is
    shown whole."""
    state: Any = _new_state() if destination is None else destination
    metadata = state._metadata[prefix[:-1]] = {"version": module._version}
    record = known_of(module)
    if record.shown and record.packed is None:
        made = _new_state()
        with contextlib.suppress(Exception):  # of code that wants values
            type(module).state_dict(module, destination=made, prefix=prefix, keep_vars=keep_vars)
            state.update(made)
            return state
    if record.shown:
        nn.Module._save_to_state_dict(module, state, prefix, keep_vars)
    for name, child in module._modules.items():
        if child is not None:
            child.state_dict(destination=state, prefix=f"{prefix}{name}.", keep_vars=keep_vars)
    return _mark(module, state, prefix, metadata) or state


def _new_state() -> Any:
    """An empty state dict as torch makes it."""
    state: Any = OrderedDict()
    state._metadata = OrderedDict()
    return state


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
    """The state dict of a module of which this rank lacks a part. Neither safetensors nor what uses it can write it."""

    def copy(self) -> PartialState:
        made = super().copy()
        vars(made).update(vars(self))
        return made

    def items(self) -> Any:
        """As of any dictionary; raises TypeError if a function `save...` of `_SAVING_PACKAGES` asks."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _SAVING_PACKAGES:
            if frame.f_code.co_name.startswith("save"):
                raise TypeError(vars(self)["refusal"]())
            frame = frame.f_back
        return super().items()

"""A model's state as tensors by name: its parameters and buffers, and what else its modules' own code saves.

That may be tensors (`_save_to_state_dict`), and plain data (`get_extra_state`, a hook of `state_dict`): numbers, texts,
bytes, None, and dictionaries, lists and tuples of these and of tensors. Plain data travels and is stored as bytes of
JSON, in a tensor under a marked name, so nothing is run to read it. A merged file of torch's has it as it is, under its
own name, as the plain model's `state_dict` does.
"""

from __future__ import annotations

import base64
import json
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.checkpoint.manifest import SEPARATOR
from penstock.checkpoint.tensors import DTYPES, bytes_of, dtype_name, of_run
from penstock.checkpoint.untrusted import CheckpointError, describe
from penstock.modeling.placeholders.ghosts import shown_whole

# What the names of such tensors of bytes end with.
MARK = f"{SEPARATOR}plain"


# -- plain data --------------------------------------------------------------------------------------------------------


def own_name(name: str) -> str:
    """The name in the model's `state_dict` of what a checkpoint has under `name`."""
    return name.removesuffix(MARK)


def as_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A `state_dict` with plain data as tensors of bytes. Raises CheckpointError if something is neither that nor a
    dense tensor."""
    made = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            made[name + MARK] = _encoded(name, value)
        elif value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(
                f"cannot save {name}: it is a {type(value).__name__}, not a dense tensor"
                ". Make a dense one of it, with to_dense(), say"
            )
        else:
            made[name] = value
    return made


def as_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The inverse of `as_tensors`. Raises CheckpointError for bytes that it has not made."""
    return {own_name(n): _decoded(n, tensor) if n.endswith(MARK) else tensor for n, tensor in tensors.items()}


def _encoded(name: str, value: Any) -> torch.Tensor:
    try:
        text = json.dumps(_told(value), separators=(",", ":"))
    except (TypeError, RecursionError) as error:
        raise CheckpointError(
            f"cannot save {name}: {error}. It must be a tensor, or plain data: numbers, texts, bytes, and "
            "dictionaries, lists and tuples of these and of tensors"
        ) from None
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _decoded(name: str, content: torch.Tensor) -> Any:
    try:
        return _understood(json.loads(bytes(bytes_of(content))))
    except Exception as error:  # whatever is wrong with it
        raise CheckpointError(f"{name} is damaged: {describe(error)}") from None


# The kinds of containers, by the name that stands first in what they become.
_LISTS: Mapping[str, type] = {"list": list, "tuple": tuple}
_DICTIONARIES: Mapping[str, type] = {"dict": dict, "OrderedDict": OrderedDict}


def _told(value: Any) -> Any:
    """Plain data in the types that JSON has."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return ["float", value.hex()]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        tensor = value.detach().cpu()
        content = base64.b64encode(bytes_of(tensor) if tensor.numel() else b"").decode()
        return ["tensor", dtype_name(tensor.dtype), list(tensor.shape), content]
    if kind in _LISTS.values():
        return [kind.__name__, *map(_told, value)]
    if kind in _DICTIONARIES.values():
        return [kind.__name__, *([_told(key), _told(each)] for key, each in value.items())]
    raise TypeError(f"it is, or holds, a {kind.__name__}")


def _understood(told: Any) -> Any:
    if not isinstance(told, list):
        return told
    kind, *parts = told
    if kind in _LISTS:
        return _LISTS[kind](map(_understood, parts))
    if kind in _DICTIONARIES:
        return _DICTIONARIES[kind]((_understood(key), _understood(each)) for key, each in parts)
    if kind == "tensor":
        dtype, shape, content = parts
        flat = torch.frombuffer(bytearray(base64.b64decode(content)) or bytearray(8), dtype=DTYPES[dtype])
        return flat[: torch.Size(shape).numel()].reshape(shape).clone()
    (content,) = parts
    return float.fromhex(content) if kind == "float" else base64.b64decode(content)


# -- of a model --------------------------------------------------------------------------------------------------------


def held_state(model: nn.Module, state_dict: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers that this rank holds, and what else its modules save, under their names in
    the unsplit model; or `state_dict`. Raises CheckpointError if something cannot be saved."""
    values = model.state_dict() if state_dict is None else state_dict
    _refuse_nested(model, values)
    state = as_tensors(values)
    return {name: tensor.detach() for name, tensor in state.items() if not tensor.is_meta}


def _refuse_nested(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse values that hold tensors of other modules: each rank has some of them only, and one rank's value would be
    saved."""
    plain = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    inside = {name: {x.data_ptr() for x in pytree.tree_leaves(each) if _in_memory(x)} for name, each in plain.items()}
    if not any(inside.values()):
        return
    for held, tensor in chain(model.named_parameters(), model.named_buffers()):
        for name, pointers in inside.items():
            elsewhere = held.rpartition(".")[0] != name.rpartition(".")[0]
            if elsewhere and _in_memory(tensor) and tensor.data_ptr() in pointers:
                raise CheckpointError(
                    f"cannot save {name}: it is a {type(plain[name]).__name__} that holds {held}, and each rank has a "
                    "part of the model only. Save parameters and buffers under names of their own"
                )


def _in_memory(value: Any) -> bool:
    is_dense = type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided
    return is_dense and not value.is_meta and value.numel() > 0


def parts_of_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Of the state that this rank holds: the parameters and buffers themselves, and the names of all else, which only
    the modules' own code can load."""
    state = of_run(model, model.state_dict(keep_vars=True))
    registered = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    themselves = {name: value for name, value in state.items() if id(value) in registered and not value.is_meta}
    return themselves, [name for name, value in state.items() if id(value) not in registered]


def registered_names(model: nn.Module) -> set[str]:
    """Which names of the unsplit model's state are those of parameters and buffers."""
    with shown_whole(model):
        registered = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
        return {name for name, value in model.state_dict(keep_vars=True).items() if id(value) in registered}


@torch.no_grad()
def fill(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give the state that this rank holds these values; what is not among them stays."""
    themselves, others = parts_of_state(model)
    done = set[int]()
    for name, target in themselves.items():
        if id(target) not in done and name in values:
            target.copy_(values[name])
            done.add(id(target))
    if others:  # with what else is in the same modules, which their code may want to see
        modules = {name.rpartition(".")[0] for name in others}
        names = [*others, *(name for name in themselves if name.rpartition(".")[0] in modules)]
        model.load_state_dict({name: values[name] for name in names if name in values}, strict=False)


def warn_of_unsaved(model: nn.Module) -> None:
    """Warn of what a save will refuse of this rank's part of a model."""
    try:
        held_state(model)
    except Exception as error:  # of a module's own code, too
        warnings.warn(f"this model can be trained, but not saved: {describe(error)}", stacklevel=3)

"""Values of simple types and tensors as plain data, which can be exchanged, and back."""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from transformers.utils import ModelOutput

from penstock.modeling.stage.named_output import output_of
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.comm.exchange import Plain

# Of classes only those are made that this process has, and that are containers.
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def to_plain(value: Any) -> Plain:
    """A value that `from_plain` makes again elsewhere."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):  # counters of samplers and loaders
        return to_plain(value.item())
    if type(value) is list:
        return [to_plain(each) for each in value]
    kind = type(value).__name__
    if _SEQUENCES.get(kind) is type(value):
        return {kind: [to_plain(each) for each in value]}
    if _MAPPINGS.get(kind) is type(value):
        return {kind: [[to_plain(key), to_plain(each)] for key, each in value.items()]}
    if isinstance(value, TensorSpec):
        return {"spec": [value.shape, _name(value.dtype), value.requires_grad]}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [value.shape, _name(value.dtype), base64.b64encode(content).decode()]}
    if isinstance(value, np.ndarray):
        return {"array": to_plain(torch.from_numpy(value))}
    if isinstance(value, ModelOutput) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        fields = value.items() if isinstance(value, ModelOutput) else zip(value._fields, value, strict=True)
        return {"fields": [_full_name(type(value)), [[name, to_plain(each)] for name, each in fields]]}
    raise TypeError(f"a {type(value).__name__} is neither plain data nor a tensor, and cannot be sent to another rank")


def from_plain(data: Plain) -> Any:
    """What `to_plain` was given; tensors on the CPU."""
    if isinstance(data, list):
        return [from_plain(each) for each in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](map(from_plain, content))
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({from_plain(key): from_plain(each) for key, each in content})
    if kind == "dtype":
        return _dtype(content)
    if kind == "array":
        return from_plain(content).numpy()
    if kind == "fields":
        return output_of(_class(content[0]), {name: from_plain(each) for name, each in content[1]})
    shape, dtype, last = content
    if kind == "spec":
        return TensorSpec(tuple(shape), _dtype(dtype), last)
    flat = torch.frombuffer(bytearray(base64.b64decode(last)), dtype=torch.uint8) if last else torch.empty(0)
    return flat.view(_dtype(dtype)).view(shape) if last else torch.empty(shape, dtype=_dtype(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _class(name: str) -> Any:
    """A class of outputs or named tuples, by its name."""
    todo = [ModelOutput, *(kind for kind in tuple.__subclasses__() if hasattr(kind, "_fields"))]
    for kind in todo:
        if _full_name(kind) == name:
            return kind
        todo += kind.__subclasses__()
    raise TypeError(f"another rank has sent a {name}, which this process does not know")

"""A model's outputs: with named fields, whatever its forward returns, and one of a whole batch from its microbatches'.

From models of transformers it is a `ModelOutput`, from one of the user's own maybe a tensor, a tuple, a dictionary, a
dataclass. Everything else works on a `NamedOutput`.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from penstock.modeling.graph.loss import loss_of, set_loss
from penstock.nested import items_of

# A shape for each tensor of an output, in the output's own nesting.
Shapes = Mapping[str, Any]


@dataclass(frozen=True)
class OutputForm:
    """How the fields of a `NamedOutput` make up what the module returned."""

    kind: type | None  # a dictionary's, dataclass's or named tuple's class; None if it is the field "output"
    names: tuple[str, ...]  # also of fields that are None


@dataclass(init=False, repr=False)
class NamedOutput(ModelOutput):  # type: ignore[misc]  # a library without types
    """The output of a module that is no model of transformers, which can be turned back. A dictionary, dataclass or
    named tuple has its own fields. Anything else, such as a tensor or a tuple, is the field `output`. The loss is in
    `loss`, wherever it comes from."""

    loss: torch.Tensor | None = None

    def __init__(self, form: OutputForm | None = None, **values: Any):
        self.__dict__["_form"] = form
        for name, value in values.items():
            self[name] = value

    @property
    def form(self) -> OutputForm:
        form: OutputForm = self.__dict__["_form"]
        return form

    def __setitem__(self, name: str, value: Any) -> None:
        # Not ModelOutput's: a field may be called "values".
        if value is not None:
            OrderedDict.__setitem__(self, name, value)
        if not hasattr(OrderedDict, name):
            self.__dict__[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def original(self) -> Any:
        """What the module would return, with this loss."""
        kind, loss = self.form.kind, self.get("loss")
        if kind is None:
            return _with_own_loss(self["output"], loss)
        values = {name: self.get(name) for name in self.form.names}
        if issubclass(kind, tuple):
            return kind(**values)
        if issubclass(kind, Mapping):
            return kind(values)  # type: ignore[call-arg]  # as every mapping
        made = object.__new__(kind)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made


def named_output(output: Any) -> Any:
    """`output` if it is a `ModelOutput`, otherwise a `NamedOutput` of it."""
    if isinstance(output, ModelOutput):
        return output
    values = dict(items_of(output) or ())
    if not values or not all(isinstance(name, str) for name in values):
        return NamedOutput(OutputForm(None, ("loss", "output")), loss=loss_of(output), output=output)
    return NamedOutput(OutputForm(type(output), tuple(values)), **values)


def output_with_loss(output: Any, loss: torch.Tensor) -> ModelOutput:
    if isinstance(output, ModelOutput):
        set_loss(output, loss)
        return output
    named = named_output(output)
    if named.form.kind is None:
        named["output"] = _with_own_loss(output, loss)
    named["loss"] = loss
    return named


def form_of(output: Any) -> OutputForm | None:
    """The form of a `NamedOutput`, None for any other output."""
    return output.form if isinstance(output, NamedOutput) else None


def joint_form(forms: Iterable[OutputForm | None]) -> OutputForm | None:
    """The form with the fields of all of these, which are of one class: microbatches may have unlike ones."""
    known = [form for form in forms if form is not None]
    return replace(known[0], names=tuple(dict.fromkeys(chain(*(form.names for form in known))))) if known else None


def output_of(kind: Any, values: Mapping[str, Any]) -> Any:
    """An output of a class, or of an `OutputForm`; a criterion may have given a loss to one that has no such field."""
    if isinstance(kind, OutputForm):
        return NamedOutput(kind, **values)
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else values.keys()
    output = kind(**{name: value for name, value in values.items() if name in known})
    for name in values:  # in one order on all ranks
        if name not in known:
            output[name] = values[name]
    return output


def shapes_of(output: Mapping[str, Any]) -> Shapes:
    return {
        name: pytree.tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, value)
        for name, value in output.items()
        if not isinstance(value, Cache)
    }


def without_graph(output: Any) -> Any:
    values = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, dict(output))
    return output_of(form_of(output) or type(output), values)


def refuse_hidden_tensors(output: ModelOutput) -> None:
    """Raise NotImplementedError for an output with tensors inside an object of a class that cannot be looked into."""
    for name, value in output.items() if isinstance(output, NamedOutput) else ():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, (torch.Tensor, Cache)) or not hasattr(leaf, "__dict__"):
                continue
            if any(isinstance(inner, torch.Tensor) for inner in pytree.tree_leaves(list(vars(leaf).values()))):
                raise NotImplementedError(
                    f"its forward returns a {type(leaf).__name__} ({name}), whose tensors cannot be followed: return "
                    "tensors, or tuples, lists, dictionaries or one dataclass of them"
                )


def _with_own_loss(output: Any, loss: torch.Tensor | None) -> Any:
    """What a module returned, with another loss in the place of its own, if it has one."""
    own_loss = loss_of(output)
    if own_loss is None or loss is None:
        return output
    if output is own_loss:
        return loss
    if isinstance(output, (tuple, list)):
        return type(output)(loss if entry is own_loss else entry for entry in output)
    if isinstance(output, Mapping):
        return {**output, "loss": loss}
    changed = copy.copy(output)
    changed.loss = loss
    return changed


def merge_outputs(
    outputs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    losses: Collection[str] = (),
    grown: Callable[[], Shapes] | None = None,
) -> Any:
    """One output for the batch from those of its microbatches of `sizes` samples.

    The loss is the sum of the shares. Tensors are concatenated along the dimension that has a row for each sample, also
    inside tuples; without one (router logits of shape (samples * length, experts)) along the dimension in which they
    differ, or the first. Other scalars (a router's balance loss) are averaged by samples. Caches are dropped: each
    stage's holds only its own layers.

    Args:
        losses: fields besides `loss` that are shares of the batch's, too.
        grown: the shapes of the first output if its microbatch had one sample more. Asked for where two dimensions, or
            a list, are as large as the microbatch; by default the first dimension is the samples', and no list is.
    """
    first = outputs[0]
    kind = joint_form(map(form_of, outputs)) or type(first)
    outputs = [_without_caches(output) for output in outputs]
    if len(outputs) == 1:
        return output_of(kind, outputs[0])
    shapes = None if grown is None else functools.cache(grown)

    def larger(path: Sequence[Any]) -> Any:
        if shapes is None:
            return None
        shape: Any = shapes()
        for step in path:
            if step not in shape and isinstance(step, str):  # the first microbatch lacks it
                return None
            shape = shape[step]
        return shape

    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for output in outputs for name in output):
        # A microbatch of texts alone has no vectors of images.
        having = [index for index, output in enumerate(outputs) if output.get(name) is not None]
        values = [outputs[index][name] for index in having]
        if not values:
            merged[name] = None
            continue
        if name == "loss" or name in losses:
            merged[name] = sum(values)
        else:
            merged[name] = _merge(values, [sizes[index] for index in having], larger, (name,))
    return output_of(kind, merged)


def _merge(
    values: Sequence[Any], sizes: Sequence[int], larger: Callable[[Sequence[Any]], Any], path: tuple[Any, ...]
) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        if not first.dim():
            if not first.is_floating_point():
                return first
            return sum(value * (size / sum(sizes)) for value, size in zip(values, sizes, strict=True))
        rows = [
            dim
            for dim in range(first.dim())
            if all(value.shape[dim] == size for value, size in zip(values, sizes, strict=True))
        ]
        if not rows:  # several rows for each sample: choices, beams, or as many as a sample has images
            rows = [dim for dim in range(first.dim()) if len({value.shape[dim] for value in values}) > 1]
        dim = rows[0] if rows else 0
        if len(rows) > 1:
            pairs = enumerate(zip(first.shape, larger(path) or first.shape, strict=True))
            dim = next((dim for dim, (size, more) in pairs if size != more), 0)
        return torch.cat(list(values), dim)
    if isinstance(first, tuple | list) and _has_entry_for_each(values, sizes, larger, path):
        return type(first)(entry for value in values for entry in value)
    if isinstance(first, tuple | list):
        parts = [
            _merge(list(part), sizes, larger, (*path, index)) for index, part in enumerate(zip(*values, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, Mapping):
        merged = {name: _merge([value[name] for value in values], sizes, larger, (*path, name)) for name in first}
        return _remade(first, merged)
    return first


def _without_caches(output: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an output, also of outputs in it, that are no caches."""
    return {
        name: _remade(value, _without_caches(value)) if isinstance(value, Mapping) else value
        for name, value in output.items()
        if not isinstance(value, Cache)
    }


def _remade(like: Mapping[str, Any], fields: dict[str, Any]) -> Any:
    return type(like)(**fields) if is_dataclass(like) else type(like)(fields)  # type: ignore[call-arg]


def _has_entry_for_each(
    values: Sequence[Any], sizes: Sequence[int], larger: Callable[[Sequence[Any]], Any], path: tuple[Any, ...]
) -> bool:
    """Whether a list in the output has an entry for each sample, or image, and not one for each layer."""
    lengths = [len(value) for value in values]
    if len(set(lengths)) > 1:
        return True
    if lengths != list(sizes) or hasattr(values[0], "_fields"):
        return False
    more = larger(path)
    return more is not None and len(more) != lengths[0]

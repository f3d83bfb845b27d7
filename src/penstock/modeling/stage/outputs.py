"""One output of a whole batch from the outputs of its microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from penstock.modeling.stage.named_output import Shapes, form_of, joint_form, output_of


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
        grown: the shapes of the first output if its microbatch had one sample more. Asked for where two dimensions are
            as large as the microbatch, so that either could be the samples'; by default the first is.
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
        found: Any = shapes()
        for step in path:
            if step not in found and isinstance(step, str):  # the first microbatch lacks it
                return None
            found = found[step]
        return found

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

"""Inputs without samples among those that a forward is tried with: position ids of a diffusion transformer, say.

An input is without samples if each operation of a forward with twice as many samples has the same shapes, but for the
dimensions that follow their number, and nothing made of it has a row for each sample by its size alone, as by a slice.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.data.microbatch import ROWS_PER_SAMPLE_OR_ONE, BatchDims, batch_dim, batch_size_of, rows_of
from penstock.modeling.instrumentation import known_of
from penstock.modeling.placeholders.ghosts import meta_placeholder
from penstock.nested import map_tensors, named_tensors

# What repeats its argument for each sample, or makes a tensor with none of its values.
_REPEAT = frozenset({"expand", "repeat", "new_empty", "new_full", "new_ones", "new_zeros"})
# An operation's name, and the shapes of what it takes and of what it gives.
Operation = tuple[str, list[torch.Size], list[torch.Size]]


def inputs_without_samples(model: nn.Module, dims: BatchDims) -> dict[str, None]:
    """`batch_dim` of those of a model's example inputs that have no samples although inputs of such names have, beside
    `dims`, what the user says. Empty if the operations say otherwise, or there is no forward on the meta device: a
    batch with such inputs is refused then."""
    given = known_of(model).example_inputs or {}
    rows = {name: rows_of(name, value, dims) for name, value in named_tensors(given).items()}
    like_ids = [name for name in rows if name.endswith(ROWS_PER_SAMPLE_OR_ONE)]
    size = next((number for name, number in rows.items() if number is not None and name not in like_ids), None)
    odd = {name: None for name in like_ids if rows[name] not in (None, 1, size)}
    if not odd or not size:
        return {}
    every: BatchDims = {**odd, **dims}

    def repeated(times: int) -> dict[str, Any]:
        def repeat(name: str, tensor: torch.Tensor) -> torch.Tensor:
            meta = tensor.to("meta")
            of_samples = rows_of(name, tensor, every) == size
            return torch.cat([meta] * times, batch_dim(name, tensor, every) or 0) if of_samples else meta

        return {name: map_tensors(repeat, name, value) for name, value in given.items()}

    try:
        batch_size_of(given, dims=every)
        copy, both = meta_placeholder(model), []
        for inputs in (repeated(2), repeated(4)):
            noting = _OperationRecorder()  # type: ignore[no-untyped-call]  # torch's has no types
            with torch.no_grad(), torch.device("meta"), noting:
                noting.operations = []
                copy(**inputs)
            both.append(noting.operations)
    except Exception:  # whatever the model's code says of tensors without values
        return {}
    pairs = zip_longest(*both, fillvalue=("", [], []))
    return odd if all(_same_operation(one, other) for one, other in pairs) else {}


def _same_operation(one: Operation, other: Operation) -> bool:
    """Whether two operations differ as they may with some samples and with twice as many."""
    if one[0] != other[0]:
        return False
    followed = []
    for these, those in zip(one[1:], other[1:], strict=True):
        numbers = [pair for shapes in zip_longest(these, those, fillvalue=()) for pair in zip_longest(*shapes)]
        if len(these) != len(those) or not all(a is not None and b in (a, 2 * a) for a, b in numbers):
            return False
        followed.append(these != those)
    taken, made = followed
    return not made or taken or one[0] in _REPEAT


class _OperationRecorder(TorchDispatchMode):
    operations: list[Operation]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if given := _shapes((args, kwargs)):  # others make a tensor out of none; those that take it show its shape
            self.operations.append((func.overloadpacket.__name__, given, _shapes(output)))
        return output


def _shapes(value: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]

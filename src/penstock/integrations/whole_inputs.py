"""Inputs without samples among those that a forward is tried with: position ids of a diffusion transformer, say.

They are found by following the forward twice, the second time with twice as many samples. An input is without samples
if each operation then has the same shapes, but for the dimensions that follow the number of samples, and if nothing
that is made of it has a row for each sample by its size alone, such as by a slice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.data.microbatch import ROWS_PER_SAMPLE_OR_ONE, BatchDims, batch_dim, batch_size_of, rows_of
from penstock.modeling.graph.dataflow import ReachedInside
from penstock.modeling.graph.shapes import ShapeFunctions
from penstock.modeling.graph.trace import Untraceable
from penstock.modeling.graph.units import trace_units
from penstock.modeling.instrumentation import known_of
from penstock.nested import map_tensors, named_tensors

# What repeats its argument for each sample, or makes a tensor with none of its values.
_REPEAT = frozenset({"expand", "repeat", "new_empty", "new_full", "new_ones", "new_zeros"})


def inputs_without_samples(model: nn.Module, units: Sequence[str], dims: BatchDims) -> dict[str, None]:
    """`batch_dim` of those of a model's example inputs that have no samples although inputs of such names have.

    Empty if following the forward says otherwise, or it cannot be followed. A batch with such inputs is refused then.

    Args:
        dims: of some inputs, the dimension that has the samples, as the user says.
    """
    given = known_of(model).example_inputs or {}
    tensors = {name: value for name, value in named_tensors(given).items() if rows_of(name, value, dims) is not None}
    like_ids = [name for name in tensors if name.endswith(ROWS_PER_SAMPLE_OR_ONE)]
    first = next((name for name in tensors if name not in like_ids), None)
    size = None if first is None else rows_of(first, tensors[first], dims)
    odd = {name: None for name in like_ids if rows_of(name, tensors[name], dims) not in (1, size)}
    if not odd or not size:
        return {}
    every: BatchDims = {**odd, **dims}

    def repeated(times: int) -> dict[str, Any]:
        def repeat(name: str, tensor: torch.Tensor) -> torch.Tensor:
            of_samples = rows_of(name, tensor, every) == size
            return torch.cat([tensor] * times, batch_dim(name, tensor, every) or 0) if of_samples else tensor

        return {name: map_tensors(repeat, name, value) for name, value in given.items()}

    try:
        batch_size_of(given, dims=every)
        both = [_operations(model, units, repeated(times)) for times in (2, 4)]
    except (Untraceable, ReachedInside, NotImplementedError, ValueError):
        return {}
    pairs = zip_longest(*both, fillvalue=("", (), ()))
    return odd if all(_alike(one, other) for one, other in pairs) else {}


Shape = tuple[int, ...]
# An operation's name, and the shapes of what it takes and of what it gives.
Operation = tuple[str, Sequence[Shape], Sequence[Shape]]


def _alike(one: Operation, other: Operation) -> bool:
    """Whether two operations differ as they may with some samples and with twice as many."""
    if one[0] != other[0] or any(len(these) != len(those) for these, those in zip(one[1:], other[1:], strict=True)):
        return False
    pairs = [list(zip(these, those, strict=True)) for these, those in zip(one[1:], other[1:], strict=True)]
    for these, those in (*pairs[0], *pairs[1]):
        if not all(b in (a, 2 * a) for a, b in zip_longest(these, those, fillvalue=-1)):
            return False
    followed = [any(these != those for these, those in each) for each in pairs]
    return not followed[1] or followed[0] or one[0] in _REPEAT


def _operations(model: nn.Module, units: Collection[str], inputs: Mapping[str, Any]) -> list[Operation]:
    """The operations of a forward, those in units too. Nothing is computed in these."""
    functions, found = ShapeFunctions({name: model.get_submodule(name) for name in units}), list[Operation]()
    between, inside = _Noting(found), _Noting(found)

    @contextmanager
    def in_unit(name: str) -> Iterator[None]:
        between.paused = True
        with inside:
            yield
        between.paused = False

    functions.around = in_unit
    with between:
        trace_units(model, functions, inputs)
    return found


class _Noting(TorchDispatchMode):
    """Notes the operations inside in a list."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self.operations, self.paused = operations, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = () if self.paused else _shapes((args, kwargs))
        if given:  # others make a tensor of nothing, for the following too
            self.operations.append((func.overloadpacket.__name__, given, _shapes(output)))
        return output


def _shapes(value: Any) -> list[Shape]:
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]

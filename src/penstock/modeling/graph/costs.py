"""Relative costs of units."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from penstock.modeling.graph.chunked_loss import head_unit
from penstock.modeling.graph.dataflow import ReachedInside, Value
from penstock.modeling.graph.dummy_inputs import dummy_inputs
from penstock.modeling.graph.meta_operations import Untraceable
from penstock.modeling.graph.shapes import ShapeFunctions
from penstock.modeling.graph.units import trace_units, without_cache
from penstock.modeling.libraries import configuration_of

# Sequence length at which costs are compared; attention weighs more in longer sequences, alike in all blocks.
TOKENS = 128

# What reading or writing one element costs, in operations, of which a multiply-add is two. Keeps units without matrix
# products from being free.
FLOPS_PER_ELEMENT = 8.0

# The loss reads the logits about this often (upcast, log-softmax, its gradient).
LOSS_PASSES = 3


def unit_costs(
    model: nn.Module,
    units: Sequence[str],
    tokens: int = TOKENS,
    inputs: Mapping[str, Any] | None = None,
    loss_in_chunks: bool = False,
    functions: ShapeFunctions | None = None,
) -> list[float]:
    """The relative cost of each unit, from the operations its shape function counts; nothing is computed.

    An estimate refuses no model: where the forward takes no sequence of `tokens`, a short one is counted, and where it
    cannot be followed at all, costs are the numbers of parameters.

    Args:
        model: a model whose units are these; left as it was.
        inputs: arguments of a forward, for a model that does not run on inputs made from its configuration.
        loss_in_chunks: whether the backward runs head and loss again.
        functions: the units' shape functions, if there are some already.

    Returns:
        One positive number per unit, 1.0 on average. Comparable within one call only.
    """
    guesses = chain(dummy_inputs(model, batch=1, tokens=tokens), dummy_inputs(model)) if inputs is None else (inputs,)
    functions = functions or ShapeFunctions({name: model.get_submodule(name) for name in units}, model)
    for arguments in guesses:
        with contextlib.suppress(Untraceable, ReachedInside, NotImplementedError):
            counted = _counted(model, functions, tokens, without_cache(model, arguments))
            costs = [counted[name] for name in units]
            head = head_unit(model, functions.units) if loss_in_chunks else None
            # A forward, and a backward that takes as long as two.
            return _relative([cost * (4 / 3 if name == head else 1) for name, cost in zip(units, costs, strict=True)])
    return _relative([sum(p.numel() for p in model.get_submodule(name).parameters()) for name in units])


def counted_samples(model: nn.Module) -> str:
    """For which samples `unit_costs` counts, in words."""
    likeliest: dict[str, Any] = next(iter(dummy_inputs(model, batch=1, tokens=TOKENS)), {})
    tensors = [value for value in likeliest.values() if isinstance(value, torch.Tensor)]
    lengths = [each.shape[1] for each in tensors if each.dim() == 2 and not each.is_floating_point()]
    floats = any(each.is_floating_point() for each in tensors)
    return f"for samples of {lengths[0]} tokens" if lengths and not floats else "for samples of one size"


def _relative(costs: Sequence[float]) -> list[float]:
    positive = [max(float(cost), 1.0) for cost in costs]
    mean = sum(positive) / len(positive)
    return [cost / mean for cost in positive]


def _counted(
    model: nn.Module, functions: ShapeFunctions, tokens: int, arguments: Mapping[str, Any]
) -> dict[str, float]:
    """What one forward on `arguments` costs in each unit, in operations."""
    with mock.patch.object(functions, "meter", _Meter):
        traced = trace_units(model, functions, arguments)
    costs = dict.fromkeys(functions.units, 0.0)
    # Expert layers have no meta kernel; every token passes through some of the experts.
    active = _active_share(configuration_of(model))
    for call in traced.calls:
        costs[call.unit] += call.output.cost + 2 * tokens * active * call.output.kept
    last = traced.calls[-1]
    logits = traced.shapes.get(Value(last.unit, last.index, 0))
    if logits is not None:
        costs[last.unit] += LOSS_PASSES * FLOPS_PER_ELEMENT * math.prod(logits.shape)
    return costs


def _active_share(config: Any) -> float:
    """The share of a mixture's experts that each token uses, 1 if the configuration does not say."""
    used = getattr(config, "num_experts_per_tok", None)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if used and isinstance(experts, int) and experts:
            share: float = min(1.0, used / experts)
            return share
    return 1.0


def operations_of_product(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """The operations of a product, such as a matrix's or a convolution, by torch's own formulas; 0 of all else."""
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


class _Meter(TorchDispatchMode):
    """Counts what operations cost: by torch's own formulas, and the elements that they write."""

    cost = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.cost += operations_of_product(func, args, kwargs, output)
        if not func.is_view:
            leaves = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)  # which takes longer
            written = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.cost += FLOPS_PER_ELEMENT * written
        return output

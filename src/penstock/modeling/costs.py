"""Relative costs of units, and the cut of a chain of units into stages of equal cost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from penstock.modeling.dataflow import ReachedInside, Value
from penstock.modeling.dummy_inputs import dummy_inputs
from penstock.modeling.interception import Switchboard, install, uninstall
from penstock.modeling.shapes import ShapeFunctions
from penstock.modeling.trace import Untraceable, trace
from penstock.modeling.units import floating_modules

# Sequence length at which costs are compared; attention weighs more in longer sequences, alike in all blocks.
TOKENS = 128

# What reading or writing one element costs, in multiply-adds. Keeps units without matrix products from being free.
FLOPS_PER_ELEMENT = 8.0

# The loss reads the logits about this often (upcast, log-softmax, its gradient).
LOSS_PASSES = 3


def unit_costs(
    model: nn.Module, units: Sequence[str], tokens: int = TOKENS, inputs: Mapping[str, Any] | None = None
) -> list[float]:
    """The relative cost of each unit, from the operations its shape function counts; nothing is computed.

    An estimate refuses no model: where the forward takes no sequence of `tokens`, a short one is counted, and where it
    cannot be followed at all, costs are the numbers of parameters.

    Args:
        model: a model whose units are these; left as it was.
        units: from `list_units(model)`.
        tokens: tokens per sample.
        inputs: arguments of a forward, for a model that does not run on inputs made from its configuration.

    Returns:
        One positive number per unit, 1.0 on average. Comparable within one call only.
    """
    guesses = chain(dummy_inputs(model, batch=1, tokens=tokens), dummy_inputs(model)) if inputs is None else (inputs,)
    for arguments in guesses:
        with contextlib.suppress(Untraceable, ReachedInside, NotImplementedError):
            return _relative(_counted(model, units, tokens, arguments))
    return _relative([sum(p.numel() for p in model.get_submodule(name).parameters()) for name in units])


def _relative(costs: Sequence[float]) -> list[float]:
    positive = [max(float(cost), 1.0) for cost in costs]
    mean = sum(positive) / len(positive)
    return [cost / mean for cost in positive]


def _counted(model: nn.Module, units: Sequence[str], tokens: int, arguments: Mapping[str, Any]) -> list[float]:
    """What one forward on `arguments` costs in each unit, in multiply-adds."""
    modules = {name: model.get_submodule(name) for name in units}
    floating = floating_modules(model, modules)
    switchboard = Switchboard()
    functions = ShapeFunctions(modules)
    meter = _Meter(functions)
    install([*modules.items(), *floating.items()], switchboard)
    try:
        with meter.installed():
            found = trace(model, functions, set(floating), switchboard, arguments)
    finally:
        uninstall([*modules.values(), *floating.values()])
    # Expert layers have no meta kernel; every token passes through some of the experts.
    active = _active_share(getattr(model, "config", None))
    last = found.calls[-1]
    logits = found.shapes.get(Value(last.unit, last.index, 0))
    if logits is not None:
        meter.costs[last.unit] = meter.costs.get(last.unit, 0.0) + LOSS_PASSES * FLOPS_PER_ELEMENT * math.prod(
            logits.shape
        )
    experts = {name: 2 * tokens * active * functions.assumed_parameters(name) for name in units}
    return [meter.costs.get(name, 0.0) + experts[name] for name in units]


def _active_share(config: Any) -> float:
    """The share of a mixture's experts that each token uses, 1 if the configuration does not say."""
    used = getattr(config, "num_experts_per_tok", None)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if used and isinstance(experts, int) and experts:
            return min(1.0, used / experts)
    return 1.0


class _Meter:
    """Counts what the shape functions would compute."""

    def __init__(self, functions: ShapeFunctions) -> None:
        self.costs: dict[str, float] = {}
        self._functions = functions

    @contextmanager
    def installed(self) -> Iterator[None]:
        self._functions.around = self._around
        try:
            yield
        finally:
            self._functions.around = None

    @contextmanager
    def _around(self, name: str) -> Iterator[None]:
        traffic = _Traffic()
        with FlopCounterMode(display=False) as flops, traffic:
            yield
        cost = flops.get_total_flops() + FLOPS_PER_ELEMENT * traffic.elements
        self.costs[name] = self.costs.get(name, 0.0) + cost


class _Traffic(TorchDispatchMode):
    """Counts the elements that operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements += sum(x.numel() for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor))
        return output


def balance(costs: Sequence[float], num_stages: int) -> list[int]:
    """Cut a chain of units into stages so that the costliest stage costs as little as possible.

    Among the cuts with that cost, the one whose stages are most equal (least sum of squares) is taken.

    Args:
        costs: of the units, in order, none negative.
        num_stages: stages; each gets at least one unit.

    Returns:
        The number of units on each stage.

    Raises:
        ValueError: there are fewer units than stages, or no stages.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, but is {num_stages}")
    if len(costs) < num_stages:
        raise ValueError(f"{len(costs)} units cannot fill {num_stages} stages: each stage needs at least one")
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost)
    limit = _least_maximum(ends, num_stages) * (1 + 1e-12)
    # best[i]: least sum of squares of the first i units on the stages so far, and where the last of them begins.
    best: list[tuple[float, int] | None] = [(0.0, 0)] + [None] * len(costs)
    starts: list[list[int]] = []
    for stage in range(num_stages):
        nxt: list[tuple[float, int] | None] = [None] * (len(costs) + 1)
        for end in range(stage + 1, len(costs) - (num_stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                cost = ends[end] - ends[start]
                if cost > limit and start < end - 1:
                    break
                before = best[start]
                if before is not None and cost <= limit:
                    total = before[0] + cost * cost
                    if nxt[end] is None or total < nxt[end][0]:  # type: ignore[index]  # it is not None here
                        nxt[end] = (total, start)
        best = nxt
        starts.append([entry[1] if entry else -1 for entry in nxt])
    sizes = []
    end = len(costs)
    for stage in range(num_stages - 1, -1, -1):
        start = starts[stage][end]
        sizes.append(end - start)
        end = start
    return sizes[::-1]


def _least_maximum(ends: Sequence[float], num_stages: int) -> float:
    """The least possible cost of the costliest stage, to within rounding, by bisection and a greedy probe."""

    def fits(limit: float) -> bool:
        """Whether `num_stages` non-empty stages of at most this cost hold all units."""
        start, total = 0, len(ends) - 1
        for stage in range(num_stages):
            end = start + 1
            if ends[end] - ends[start] > limit:
                return False
            while end < total - (num_stages - stage - 1) and ends[end + 1] - ends[start] <= limit:
                end += 1
            start = end
        return start == total

    candidates = max(b - a for a, b in pairwise(ends))
    low, high = max(candidates, ends[-1] / num_stages), ends[-1]
    if fits(low):
        return low
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if fits(middle):
            high = middle
        else:
            low = middle
    return high

"""Runs the stages of a pipeline one after another in one process: the oracle's counterpart in the modeling tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from penstock.modeling.graph.units import list_units
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.weights.whole import unit_of


def cut(units: Sequence[str], num_stages: int) -> list[list[str]]:
    """Units in `num_stages` parts of about equal number."""
    ends = [round(i * len(units) / num_stages) for i in range(num_stages + 1)]
    return [list(units[a:b]) for a, b in pairwise(ends)]


def split(model: nn.Module, num_stages: int, ranks: Sequence[Sequence[int]] | None = None) -> list[SplitModel]:
    """Copies of `model`, one per rank; `ranks` lists the stages of each, one stage each by default."""
    stages = cut(list_units(model), num_stages)
    return [SplitModel(copy.deepcopy(model), stages, local) for local in ranks or [[s] for s in range(num_stages)]]


def tied(split: SplitModel) -> dict[str, dict[int, str]]:
    """Of each parameter with holders on several stages, by its first name: its first name on each of these stages."""
    stage_of = {unit: stage for stage, units in enumerate(split.stages) for unit in units}
    groups = {}
    for names in split.aliases:
        holders: dict[int, str] = {}
        for name in names:
            unit = unit_of(name, stage_of)
            for stage in range(split.num_stages) if unit is None else [stage_of[unit]]:
                holders.setdefault(stage, name)
        if len(holders) > 1:
            groups[names[0]] = dict(sorted(holders.items()))
    return groups


def walk(splits: Sequence[SplitModel], inputs: Sequence[Mapping[str, Any]], calls: Sequence[Any] | None = None) -> Any:
    """Every stage runs the whole forward, or its call, with inputs of its own; the last one's output."""
    values: tuple[torch.Tensor, ...] = ()
    digests = set()
    for stage, part in enumerate(splits):
        call, handed = calls and calls[stage], [()]
        plan = part.plan(inputs[stage], call)
        digests.add(plan.digest)
        output = part.run_to_end(plan, stage, inputs[stage], values, call=call, hand_over=handed.append)
        values = handed[-1]
        assert output is not None
    assert len(digests) == 1
    return output


def rank_of(splits: Sequence[SplitModel], stage: int) -> SplitModel:
    return next(split for split in splits if stage in split.local_stages)


def step(
    splits: Sequence[SplitModel],
    inputs: Mapping[str, Any],
    backward: bool = True,
    loss_of: Callable[[Any], torch.Tensor] = lambda output: output.loss,
    **options: Any,
) -> Any:
    """Forward through all stages, and backward; gradients land in `.grad`. Returns the last stage's output."""
    plans = [split.plan(inputs, criterion=options.get("criterion")) for split in splits]
    assert len({plan.digest for plan in plans}) == 1, "ranks disagree about the plan"
    plan = plans[0]
    values: tuple[torch.Tensor, ...] = ()
    received_by_stage, sent_by_stage = [], []
    output = None
    for stage in range(plan.num_stages):
        received = tuple(value.detach().requires_grad_(backward and value.is_floating_point()) for value in values)
        output, values = rank_of(splits, stage).forward(plan, stage, inputs, received, **options)
        received_by_stage.append(received)
        sent_by_stage.append(values)
    if backward:
        loss_of(output).backward()
        for stage in range(plan.num_stages - 2, -1, -1):
            pairs = [
                (sent, received.grad)
                for sent, received in zip(sent_by_stage[stage], received_by_stage[stage + 1], strict=True)
                if sent.requires_grad and received.grad is not None
            ]
            if pairs:
                torch.autograd.backward([sent for sent, _ in pairs], [gradient for _, gradient in pairs])
    return output


def gradients(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The sum over `models` of each named parameter's gradient, every Parameter object counted once per model."""
    total: dict[str, torch.Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad.clone()
    return total


def split_gradients(splits: Sequence[SplitModel]) -> dict[str, torch.Tensor]:
    """Gradients under the unsplit model's names, tied parameters summed over their holders."""
    total = gradients([split.model for split in splits])
    for first, holders in tied(splits[0]).items():
        parts = [total.pop(name) for name in set(holders.values()) if name in total]
        if parts:
            total[first] = torch.stack(parts).sum(0)
    return total


def largest_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Over all parameters; one that only one side has counts as zeros on the other."""
    worst = 0.0
    for name in {*found, *expected}:
        if name not in found:
            difference = expected[name]
        elif name not in expected:
            difference = found[name]
        else:
            difference = found[name] - expected[name]
        worst = max(worst, float(difference.abs().max()) if difference.numel() else 0.0)
    return worst

"""Whether a model can be split, into what units, what crosses each boundary, and which weights are tied; or why not."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from penstock.modeling.graph.costs import unit_costs
from penstock.modeling.graph.plan import make_plan
from penstock.modeling.graph.trace import Trace
from penstock.modeling.graph.units import traced_units
from penstock.modeling.weights.initialise import meta_model, resolve_model_class
from penstock.modeling.weights.names import alias_groups, unit_of


@dataclass(frozen=True)
class UnitReport:
    """One unit.

    Attributes:
        name: its name, as in a pipeline template.
        kind: its class.
        parameters: elements of its parameters; a tied one counts at each holder.
        cost: its relative cost, 1.0 on average.
    """

    name: str
    kind: str
    parameters: int
    cost: float


@dataclass(frozen=True)
class BoundaryValue:
    """One value that crosses a boundary: where it comes from, and its shape and dtype for the shown inputs."""

    origin: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.origin} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class BoundaryReport:
    """The boundary between two neighbouring units.

    Attributes:
        before: the unit before the boundary.
        crossing: what crosses it in two stages, empty if impossible.
        reason: why no stage can end here, empty if one can.
    """

    before: str
    crossing: tuple[BoundaryValue, ...]
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        model: the model's class.
        parameters: elements of all parameters, tied ones once.
        inputs: name and shape of the arguments that the boundaries were found with.
        units: in forward order; empty if the model cannot be split.
        boundaries: one between each two units.
        ties: names of each parameter that several units hold.
        everywhere: names of the parameters outside of units, which every stage holds.
        reason: why the model cannot be split, empty if it can.
    """

    model: str
    parameters: int
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    units: tuple[UnitReport, ...] = ()
    boundaries: tuple[BoundaryReport, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    everywhere: tuple[str, ...] = ()
    reason: str = ""

    @property
    def splittable(self) -> bool:
        return not self.reason and any(not boundary.reason for boundary in self.boundaries)

    def render(self) -> str:
        """The report as plain text."""
        lines = [f"{self.model}: {self.parameters:,} parameters"]
        if self.reason:
            return "\n".join([*lines, f"cannot be split: {self.reason}"])
        shown = ", ".join(f"{name}{list(shape)}" for name, shape in self.inputs)
        lines.append(f"{len(self.units)} units; boundaries shown for {shown}")
        width = max(len(unit.name) for unit in self.units)
        kinds = max(len(unit.kind) for unit in self.units)
        boundaries: list[BoundaryReport | None] = [*self.boundaries, None]
        for unit, boundary in zip(self.units, boundaries, strict=True):
            lines.append(f"  {unit.name:<{width}}  {unit.kind:<{kinds}}  {unit.parameters:>15,}  cost {unit.cost:6.2f}")
            if boundary is not None:
                crossing = "; ".join(map(str, boundary.crossing)) or "nothing"
                lines.append(f"    | no boundary: {boundary.reason}" if boundary.reason else f"    | {crossing}")
        lines += [f"tied: {' = '.join(names)}" for names in self.ties]
        if self.everywhere:
            lines.append(f"on every stage: {', '.join(self.everywhere)}")
        return "\n".join(lines)


def check(subject: nn.Module | type | PretrainedConfig | str, inputs: dict[str, Any] | None = None) -> Report:
    """Find out how a model can be split. Nothing is computed and no weights are loaded.

    Args:
        subject: a model; a model class of transformers, or its name, with its default configuration; a configuration;
            or the path or name of a checkpoint, of which only the configuration is read.
        inputs: arguments of a forward, for a model that does not run on inputs made from its configuration.

    Raises:
        ValueError: `subject` names no model.
        OSError: a checkpoint was not found.
    """
    model = subject if isinstance(subject, nn.Module) else build_on_meta(subject)
    aliases = alias_groups(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = type(model).__name__
    try:
        units, found, used = traced_units(model, inputs)
    except NotImplementedError as error:
        return Report(name, parameters, reason=str(error).partition("is not implemented... ")[2] or str(error))
    modules = [model.get_submodule(unit) for unit in units]
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in modules]
    costs = unit_costs(model, units, inputs=inputs)
    holders = {names: {unit_of(each, units) for each in names} for names in aliases}
    return Report(
        model=name,
        parameters=parameters,
        inputs=tuple((key, tuple(value.shape)) for key, value in used.items() if isinstance(value, torch.Tensor)),
        units=tuple(
            UnitReport(unit, type(module).__name__, size, cost)
            for unit, module, size, cost in zip(units, modules, sizes, costs, strict=True)
        ),
        boundaries=tuple(_boundary(found, units, index) for index in range(1, len(units))),
        ties=tuple(names for names, stages in holders.items() if len(stages) > 1),
        everywhere=tuple(names[0] for names, stages in holders.items() if None in stages),
    )


def _boundary(found: Trace, units: list[str], index: int) -> BoundaryReport:
    """What crosses the boundary before the unit `index`."""
    stage_of = {unit: int(place >= index) for place, unit in enumerate(units)}
    try:
        plan = make_plan(found, stage_of, 2)
    except NotImplementedError as error:
        return BoundaryReport(units[index - 1], (), str(error))
    crossing = []
    for value in plan.boundaries[0]:
        origin = value.unit + (f" (call {value.call + 1})" if value.call else "")
        origin += f" {value.leaf}" if isinstance(value.leaf, str) else f" output {value.leaf}" if value.leaf else ""
        shape = found.shapes[value]
        crossing.append(BoundaryValue(origin, shape.shape, shape.dtype))
    return BoundaryReport(units[index - 1], tuple(crossing))


def build_on_meta(subject: type | PretrainedConfig | str) -> nn.Module:
    """The model on the meta device."""
    if isinstance(subject, str) and not os.path.exists(subject):
        named = getattr(transformers, subject, None) if subject.isidentifier() else None
        if isinstance(named, type):
            subject = named
    if isinstance(subject, str):
        subject = AutoConfig.from_pretrained(subject)
    if isinstance(subject, PretrainedConfig):
        return meta_model(resolve_model_class(subject), subject)
    config_class = getattr(subject, "config_class", None)
    if isinstance(subject, type) and issubclass(subject, PreTrainedModel) and config_class is not None:
        return meta_model(subject, config_class())
    raise ValueError(f"{subject!r} is no model, model class, configuration, or checkpoint")

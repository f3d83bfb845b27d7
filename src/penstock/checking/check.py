"""Whether a model can be split, into what units, what crosses each boundary, and which weights are tied; or why not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from penstock.layout.announce import compact
from penstock.modeling.graph.costs import counted_samples, unit_costs
from penstock.modeling.graph.crossing import BoundaryReport, boundary_before
from penstock.modeling.graph.dummy_inputs import InputsError, InputsNeeded
from penstock.modeling.graph.units import traced_units
from penstock.modeling.weights.initialise import meta_model, resolve_model_class
from penstock.modeling.weights.whole import alias_groups, names_in_units, unit_with
from penstock.tables import WIDTH, wrapped

NOT_LOOKED_AT = "whether it is exact over stages, which penstock verify says"


@dataclass(frozen=True)
class UnitReport:
    name: str
    kind: str  # its class
    parameters: int  # elements; a tied one counts at each holder
    cost: float  # 1.0 on average


@dataclass(frozen=True)
class Report:
    """The result of `check`."""

    model: str  # its class
    parameters: int  # elements, tied ones once
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()  # that the boundaries were found with
    units: tuple[UnitReport, ...] = ()  # in forward order; empty if the model cannot be split
    boundaries: tuple[BoundaryReport, ...] = ()  # one between each two units
    ties: tuple[tuple[str, ...], ...] = ()  # names of each parameter that several units hold
    samples: str = "relative"  # for which costs are estimated
    everywhere: tuple[str, ...] = ()  # names of the parameters outside of units, which every stage holds
    reason: str = ""  # why it cannot be split
    inputs_needed: str = ""  # why that is not known: its forward fails on inputs that were guessed

    def data(self) -> dict[str, Any]:
        about = {"model": self.model, "splittable": self.splittable, "reason": self.reason}
        about["inputs_needed"] = self.inputs_needed
        return about | {
            "parameters": self.parameters,
            "inputs": {name: list(shape) for name, shape in self.inputs},
            "units": [asdict(unit) for unit in self.units],
            "boundaries": [
                {"after": each.before, "reason": each.reason, "crossing": [value.data() for value in each.crossing]}
                for each in self.boundaries
            ],
            "tied": [list(names) for names in self.ties],
            "on_every_stage": list(self.everywhere),
            "not_looked_at": NOT_LOOKED_AT,
        }

    @property
    def splittable(self) -> bool:
        return not self.reason and any(not boundary.reason for boundary in self.boundaries)

    def render(self) -> str:
        lines = [f"{self.model}: {self.parameters:,} parameters"]
        if self.reason:
            return "\n".join([*lines, wrapped(f"cannot be split: {self.reason}")])
        if self.inputs_needed:
            text = f"needs inputs to be followed (--inputs SCRIPT.py:NAME); on those guessed: {self.inputs_needed}"
            return "\n".join([*lines, wrapped(text)])
        shown = ", ".join(f"{name}{list(shape)}" for name, shape in self.inputs)
        lines += [wrapped(f"{len(self.units)} units; boundaries shown for {shown}"), f"costs are {self.samples}"]
        groups = self._in_groups()
        names = [compact([unit.name for unit in units]) for units, _ in groups]
        width = max(map(len, names))
        kinds = max(len(unit.kind) for unit in self.units)
        for name, (units, below) in zip(names, groups, strict=True):
            first, each = units[0], f"{len(units)} x " if len(units) > 1 else ""
            figures = f"{each + format(first.parameters, ','):>18}  cost {each + format(first.cost, '.2f'):>10}"
            line = f"  {name:<{width}}  {first.kind:<{kinds}}  {figures}"
            lines += [line] if len(line) <= WIDTH else [f"  {name}", f"    {first.kind:<{WIDTH - 45}}{figures}"]
            if below:
                lines.append(wrapped(f"    | {'each ' * (len(units) > 1)}{below}"))
        lines += [wrapped(f"tied: {' = '.join(holders)}") for holders in self.ties]
        if self.everywhere:
            lines.append(wrapped(f"on every stage: {', '.join(self.everywhere)}"))
        return "\n".join([*lines, wrapped(f"not looked at: {NOT_LOOKED_AT}")])

    def _in_groups(self) -> list[tuple[list[UnitReport], str]]:
        """Units, equal ones in a list together, and what crosses after each: with N for the number of several."""
        groups: list[tuple[list[UnitReport], str, str]] = []
        for unit, boundary in zip(self.units, [*self.boundaries, None], strict=True):
            below = "" if boundary is None else boundary.in_words()
            numbered = re.sub(rf"{re.escape(unit.name)}(?![\w.])", unit.name.rpartition(".")[0] + ".N", below)
            if groups and groups[-1][1] == numbered and _follows(groups[-1][0][-1], unit):
                groups[-1][0].append(unit)
            else:
                groups.append(([unit], numbered, below))
        return [(units, numbered if len(units) > 1 else below) for units, numbered, below in groups]


def _follows(unit: UnitReport, after: UnitReport) -> bool:
    """Whether `after` is the next entry of the same list, of the same kind, size and cost."""
    (head, _, number), (other, _, later) = unit.name.rpartition("."), after.name.rpartition(".")
    follows = number.isdigit() and later.isdigit() and head == other and int(later) == int(number) + 1
    figures = ((report.kind, report.parameters, f"{report.cost:.2f}") for report in (unit, after))
    return follows and next(figures) == next(figures)


def check(
    subject: nn.Module | type | PretrainedConfig | str,
    inputs: dict[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
) -> Report:
    """Find out how a model can be split. Nothing is computed, no weights are loaded.

    Args:
        subject: a model; a model class of transformers, or its name, with its default configuration; a configuration;
            or the path or name of a checkpoint, of which only the configuration is read.
        inputs: arguments of a forward, for a model that does not run on inputs made from its configuration.
        trust_remote_code: whether code that comes with a checkpoint, in files beside its configuration, may be run.

    Raises:
        ValueError: `subject` names no model, or its forward does not take `inputs`.
        OSError: a checkpoint was not found.
    """
    try:
        model = subject if isinstance(subject, nn.Module) else build_on_meta(subject, trust_remote_code)
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # of a model's own code
        message = f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(error)
        return Report(str(getattr(subject, "__name__", subject)), 0, reason=f"it cannot be built: {message}")
    aliases = alias_groups(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = type(model).__name__
    try:
        units, traced, _, used = traced_units(model, inputs)
    except InputsNeeded as error:
        return Report(name, parameters, inputs_needed=error.reason)
    except NotImplementedError as error:
        return Report(name, parameters, reason=str(error).partition("is not implemented... ")[2] or str(error))
    except InputsError:
        raise
    except Exception as error:  # whatever a model's own code raises
        return Report(name, parameters, reason=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    modules = [model.get_submodule(unit) for unit in units]
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in modules]
    costs = unit_costs(model, units, inputs=inputs)
    homes = names_in_units(model, units)
    holders = {names: {unit_with(each, homes, units) for each in names} for names in aliases}
    return Report(
        model=name,
        parameters=parameters,
        inputs=tuple((key, tuple(value.shape)) for key, value in used.items() if isinstance(value, torch.Tensor)),
        units=tuple(
            UnitReport(unit, type(module).__name__, size, cost)
            for unit, module, size, cost in zip(units, modules, sizes, costs, strict=True)
        ),
        boundaries=tuple(boundary_before(traced, units, index) for index in range(1, len(units))),
        samples=counted_samples(model),
        ties=tuple(names for names, stages in holders.items() if len(stages) > 1),
        everywhere=tuple(names[0] for names, stages in holders.items() if None in stages),
    )


def build_on_meta(subject: type | PretrainedConfig | str, trust_remote_code: bool = False) -> nn.Module:
    """The model on the meta device."""
    make: Callable[..., nn.Module] = meta_model
    if isinstance(subject, str) and not os.path.exists(subject):
        named = getattr(transformers, subject, None) if subject.isidentifier() else None
        if isinstance(named, type):
            subject = named
    if isinstance(subject, str):
        config = AutoConfig.from_pretrained(subject, trust_remote_code=trust_remote_code)
        return make(_class_beside(config, subject) or resolve_model_class(config), config)
    if isinstance(subject, PretrainedConfig):
        return make(resolve_model_class(subject), subject)
    config_class = getattr(subject, "config_class", None)
    if isinstance(subject, type) and issubclass(subject, PreTrainedModel) and config_class is not None:
        return make(subject, config_class())
    raise ValueError(f"{subject!r} is no model, model class, configuration, or checkpoint")


def _class_beside(config: PretrainedConfig, checkpoint: str) -> type[PreTrainedModel] | None:
    """The model class in a file beside a checkpoint, by what its configuration says; None if there is none."""
    wrote = (config.architectures or [None])[0]
    for reference in (getattr(config, "auto_map", None) or {}).values():
        if isinstance(reference, str) and wrote is not None and reference.endswith(f".{wrote}"):
            cls: type[PreTrainedModel] = get_class_from_dynamic_module(reference, checkpoint)
            return cls
    return None

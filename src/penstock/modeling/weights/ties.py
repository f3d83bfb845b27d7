"""Tied weights: logical parameters that several stages hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from penstock.modeling.placeholders.ghosts import all_parameter_names, is_ghost


@dataclass(frozen=True, slots=True)
class TiedGroup:
    """One logical parameter with holders on several stages.

    Every holder's gradient is a part of the whole; their sum, over all holders, is the unsplit model's gradient. A
    holder whose stage did not use the parameter has no gradient, which counts as zero.

    Attributes:
        name: its first name in the unsplit model.
        holders: (stage, name on that stage) of each stage that holds it, in the order of stages. The name is the
            first one that stage's `named_parameters()` knows it by.
    """

    name: str
    holders: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, _ in self.holders)

    def name_on(self, stage: int) -> str | None:
        """The parameter's name on a stage, None if the stage does not hold it."""
        return next((name for holder, name in self.holders if holder == stage), None)


def alias_groups(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of the unsplit model's parameters, those that are one and the same parameter together.

    In a model without ghosts identity decides. Where a name belongs to a ghost, transformers' own list of ties
    (`all_tied_weights_keys`) does, as the parameter is not there.
    """
    names = all_parameter_names(model)
    parent = {name: name for name in names}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    first_of: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parent[root(name)] = root(first_of.setdefault(id(parameter), name))
    present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if any(is_ghost(module) for module in model.modules()):
        for target, source in ties_of(model).items():
            if target in parent and source in parent and not (target in present and source in present):
                parent[root(target)] = root(source)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(root(name), []).append(name)
    return [tuple(group) for group in groups.values()]


def ties_of(model: nn.Module) -> Mapping[str, str]:
    """`{target: source}` of the names that transformers ties in this model."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def tied_groups(aliases: Sequence[tuple[str, ...]], stage_of: Mapping[str, int], num_stages: int) -> list[TiedGroup]:
    """The parameters with holders on several stages.

    Args:
        aliases: from `alias_groups`.
        stage_of: the stage of each unit; a parameter outside of all units is held by every stage.
    """
    groups = []
    for names in aliases:
        holders: dict[int, str] = {}
        for name in names:
            stage = stage_of_parameter(name, stage_of)
            for holder in range(num_stages) if stage is None else (stage,):
                holders.setdefault(holder, name)
        if len(holders) > 1:
            groups.append(TiedGroup(names[0], tuple(sorted(holders.items()))))
    return groups


def stage_of_parameter(name: str, stage_of: Mapping[str, int]) -> int | None:
    """The stage of the unit that holds a parameter, None for one outside of all units."""
    module = name.rpartition(".")[0]
    while module:
        if module in stage_of:
            return stage_of[module]
        module = module.rpartition(".")[0]
    return None

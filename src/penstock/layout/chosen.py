"""The stages that a user has chosen for equal pipelines, by their modules or by where they begin."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from penstock.layout.template import shown


def chosen_stages(units: Sequence[str], stages: Sequence[Sequence[str]]) -> list[list[str]]:
    """The units of each stage, from the modules of each. A module that holds several units stands for all of them.
    `stages`: for each stage the names of its modules, in forward order."""
    placed: list[list[str]] = []
    for index, names in enumerate(stages):
        placed.append([unit for name in names for unit in _units_of(name, units, f"stages[{index}]")])
    every = [unit for stage in placed for unit in stage]
    if missing := [unit for unit in units if unit not in every]:
        raise ValueError(f"stages must place every unit of the model, but leave out {shown(missing)}")
    if twice := [unit for unit in units if every.count(unit) > 1]:
        raise ValueError(f"stages must place each unit once, but place {shown(twice)} several times")
    wrong = next((place for place, unit in enumerate(units) if every[place] != unit), None)
    if wrong is not None:
        raise ValueError(
            f"stages must be in the order of the forward, but {every[wrong]} stands where {units[wrong]} is due; the "
            f"order is {shown(units)}"
        )
    return placed


def split_stages(units: Sequence[str], split_points: Sequence[str]) -> list[list[str]]:
    """The units of each stage, from the modules with which the second, the third, ... stage begins."""
    starts = [0]
    for name in split_points:
        start = units.index(_units_of(name, units, "split_points")[0])
        if start <= starts[-1]:
            what = "begins the first stage anyway" if start == 0 else f"does not come after {units[starts[-1]]}"
            raise ValueError(
                f"split_points must be in the order of the forward, each beginning a further stage, but {name} {what}; "
                f"the order is {shown(units)}"
            )
        starts.append(start)
    return [list(units[start:end]) for start, end in zip(starts, [*starts[1:], len(units)], strict=True)]


def _units_of(name: str, units: Sequence[str], where: str) -> list[str]:
    """The units that a module's name stands for."""
    if name in units:
        return [name]
    if inside := [unit for unit in units if unit.startswith(f"{name}.")]:
        return inside
    around = next((unit for unit in units if name.startswith(f"{unit}.")), None)
    if around is not None:
        raise ValueError(f"{where} names {name}, which is inside the unit {around}: a unit is placed as a whole")
    close = difflib.get_close_matches(name, units, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"{where} names {name!r}, which is no unit of the model{hint} Its units are {shown(units)}")

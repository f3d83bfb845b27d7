"""The shape of a pipeline: which modules of a model each of its stages holds, as a template or as a user chose them."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# An error names at most this many modules.
SHOWN = 8

# A repeated block: an entry of a module list, such as `transformer.h.3`.
BLOCK = re.compile(r"\.\d+(\.|$)")


@dataclass(frozen=True, init=False, repr=False)
class StageTemplate:
    """The modules of each stage of a pipeline, for one model.

    Templates are immutable, hashable, and equal if they have the same model name and the same modules per stage, so
    they serve as keys: `{template: num_microbatches}`.

    Args:
        model_name: the model's class (`GPT2LMHeadModel`, also with its package), its type (`gpt2`), or any name of your
            own, such as the checkpoint it comes from.
        modules_per_stage: for each stage its modules, in the order of `PipelineTemplate.get_modules(model)`. A
            one-stage template is `[modules]`.

    Raises:
        TypeError: `model_name` is no string, or `modules_per_stage` no list of lists of strings.
        ValueError: there are no stages, or a stage is empty. Whether the modules fit the model is told by `validate`.
    """

    model_name: str
    modules_per_stage: tuple[tuple[str, ...], ...]

    def __init__(self, model_name: str, modules_per_stage: Sequence[Sequence[str]]) -> None:
        if not isinstance(model_name, str):
            raise TypeError(f"model_name must be a string, but is a {type(model_name).__name__}: {model_name!r}")
        object.__setattr__(self, "model_name", model_name)
        object.__setattr__(self, "modules_per_stage", _checked_stages(modules_per_stage))

    @property
    def num_stages(self) -> int:
        return len(self.modules_per_stage)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of all stages, in order."""
        return tuple(module for stage in self.modules_per_stage for module in stage)

    def __repr__(self) -> str:
        sizes = " + ".join(str(len(stage)) for stage in self.modules_per_stage)
        return f"PipelineTemplate({self.model_name!r}, {self.num_stages} stages of {sizes} modules)"

    def check_modules(self, label: str, modules: Sequence[str]) -> None:
        """Check that this template places `modules`, in forward order, each once, the outer ones at the ends."""
        mismatch = f"Modules in the pipeline template do not match the modules in the model {label}"
        count, position = Counter(self.modules), {module: index for index, module in enumerate(modules)}
        faults = {
            "missing from the template": [module for module in modules if module not in count],
            "unknown to the model": [module for module in count if module not in position],
            "duplicated": [
                f"{module} (in stages {', '.join(map(str, self._stages_of(module)))})"
                for module, times in count.items()
                if times > 1
            ],
        }
        if said := [f"{kind}: {_shown(names)}" for kind, names in faults.items() if names]:
            raise ValueError(f"{mismatch}: {'; '.join(said)}.")
        first, last = end_modules(modules)
        for required, which, stage in ((first, "first", 0), (last, "last", self.num_stages - 1)):
            for module in required:
                (found,) = self._stages_of(module)
                if found != stage:
                    raise ValueError(
                        f"The first (or last) stage must contain {module} module: it belongs in the {which} stage "
                        f"(stage {stage}), but is in stage {found}."
                    )
        reordered = [
            f"{later} (stage {self._stages_of(later)[0]}) must come before {earlier}"
            for earlier, later in pairwise(self.modules)
            if position[later] < position[earlier]
        ]
        if reordered:
            raise ValueError(f"{mismatch}: reordered: {_shown(reordered)}.")

    def _stages_of(self, module: str) -> list[int]:
        return [index for index, stage in enumerate(self.modules_per_stage) for name in stage if name == module]


def end_modules(modules: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the modules that the first stage must contain (embeddings), and those that the last must (norm, head).

    These are the ones before the first and after the last repeated block; none if the model repeats nothing.
    """
    blocks = [index for index, module in enumerate(modules) if BLOCK.search(module)]
    if not blocks:
        return [], []
    return list(modules[: blocks[0]]), list(modules[blocks[-1] + 1 :])


def chosen_stages(units: Sequence[str], stages: Sequence[Sequence[str]]) -> list[list[str]]:
    """The units of each stage, from the modules of each. A module that holds several units stands for all of them.
    `stages`: for each stage the names of its modules, in forward order."""
    placed: list[list[str]] = []
    for index, names in enumerate(stages):
        placed.append([unit for name in names for unit in _units_of(name, units, f"stages[{index}]")])
    every = [unit for stage in placed for unit in stage]
    if missing := [unit for unit in units if unit not in every]:
        raise ValueError(f"stages must place every unit of the model, but leave out {_shown(missing)}")
    if twice := [unit for unit in units if every.count(unit) > 1]:
        raise ValueError(f"stages must place each unit once, but place {_shown(twice)} several times")
    wrong = next((place for place, unit in enumerate(units) if every[place] != unit), None)
    if wrong is not None:
        raise ValueError(
            f"stages must be in the order of the forward, but {every[wrong]} stands where {units[wrong]} is due; the "
            f"order is {_shown(units)}"
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
                f"the order is {_shown(units)}"
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
    raise ValueError(f"{where} names {name!r}, which is no unit of the model{hint} Its units are {_shown(units)}")


def _checked_stages(modules_per_stage: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    if isinstance(modules_per_stage, str) or not isinstance(modules_per_stage, Iterable):
        raise TypeError(f"modules_per_stage must be a list of lists of module names, but is {modules_per_stage!r}")
    stages = tuple(modules_per_stage)
    if not stages:
        raise ValueError("A pipeline template needs at least one stage, but modules_per_stage is empty.")
    for index, stage in enumerate(stages):
        if isinstance(stage, str):
            raise TypeError(
                f"modules_per_stage must hold one list of module names per stage, but its item {index} is the string "
                f"{stage!r}. For a one-stage template write [modules]."
            )
        if not isinstance(stage, Iterable):
            raise TypeError(f"Stage {index} must be a list of module names, but is a {type(stage).__name__}: {stage!r}")
    checked = tuple(tuple(stage) for stage in stages)
    for index, names in enumerate(checked):
        if not names:
            raise ValueError(f"Stage {index} of {len(checked)} in the pipeline template holds no modules.")
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"Stage {index} must hold module names, but holds a {type(name).__name__}: {name!r}")
    return checked


def _shown(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

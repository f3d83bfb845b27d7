"""The shape of a pipeline: which modules of a model each of its stages holds."""

from __future__ import annotations

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
        sizes, several = " + ".join(str(len(stage)) for stage in self.modules_per_stage), "s" * (self.num_stages > 1)
        return f"PipelineTemplate({self.model_name!r}, {self.num_stages} stage{several} of {sizes} modules)"

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
        if differences := [f"{kind}: {shown(names)}" for kind, names in faults.items() if names]:
            raise ValueError(f"{mismatch}: {'; '.join(differences)}.")
        first, last = end_modules(modules)
        for required, which, stage in ((first, "first", 0), (last, "last", self.num_stages - 1)):
            for module in required:
                (place,) = self._stages_of(module)
                if place != stage:
                    raise ValueError(
                        f"The first (or last) stage must contain {module} module: it belongs in the {which} stage "
                        f"(stage {stage}), but is in stage {place}."
                    )
        reordered = [
            f"{later} (stage {self._stages_of(later)[0]}) must come before {earlier}"
            for earlier, later in pairwise(self.modules)
            if position[later] < position[earlier]
        ]
        if reordered:
            raise ValueError(f"{mismatch}: reordered: {shown(reordered)}.")

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


def shown(names: Sequence[str]) -> str:
    """Names in an error, not all of them if they are many."""
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

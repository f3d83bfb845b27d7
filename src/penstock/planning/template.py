"""The shape of a pipeline: which modules of a model each of its stages holds."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from penstock.planning.partition import partition

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# An error names at most this many modules of a kind.
SHOWN = 8

# A repeated block: an entry of a module list, such as `transformer.h.3`.
BLOCK = re.compile(r"\.\d+(\.|$)")

# How transformers names its model classes.
MODEL_CLASS = re.compile(r"(.*\.)?[A-Z]\w*(Model|For[A-Z]\w*)$")


@dataclass(frozen=True, init=False, repr=False)
class PipelineTemplate:
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

    @staticmethod
    def get_modules(model: PreTrainedModel) -> list[str]:
        """Return the names of the modules that stages are made of, in forward order.

        Raises NotImplementedError ("Auto policy for <class> is not implemented...") if the model cannot be split.
        """
        from penstock.modeling.graph.units import list_units  # here, because this file is usable without torch

        return list(list_units(model))

    @classmethod
    def balanced(cls, model: PreTrainedModel, num_stages: int) -> PipelineTemplate:
        """The template whose costliest stage costs as little as possible, by an estimate of the modules' costs.

        Raises:
            ValueError: there are fewer modules than stages, or no stages. Those that belong in the first or in the
                last stage count as one.
            NotImplementedError: the model cannot be split.
        """
        from penstock.modeling.adapters import base_of  # here, because this file is usable without torch
        from penstock.modeling.graph.costs import unit_costs

        model = base_of(model)
        modules = cls.get_modules(model)
        first, last = end_modules(modules)
        # What must stay together in the first and in the last stage is placed like one module.
        parts = [first, *([module] for module in modules[len(first) : len(modules) - len(last)]), last]
        parts = [part for part in parts if part]
        cost = dict(zip(modules, unit_costs(model, modules), strict=True))
        ends = accumulate(partition([sum(cost[module] for module in part) for part in parts], [1.0] * num_stages).sizes)
        stages = [parts[begin:end] for begin, end in pairwise([0, *ends])]
        return cls(type(model).__name__, [[module for part in stage for module in part] for stage in stages])

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

    def validate(self, model: PreTrainedModel | str, modules: Sequence[str] | None = None) -> None:
        """Check that this template covers a model: `validate(model)`, or `validate(model_name, modules)`.

        No communication, so every rank finds the same error.

        Raises:
            ValueError: the template is for another model; its modules are not the model's modules in forward order,
                each once; or a module before the first repeated block is not in the first stage, or one after the last
                block not in the last stage.
            NotImplementedError: the model cannot be split.
        """
        if isinstance(model, str):
            if modules is None:
                raise TypeError("validate(model_name, modules) needs the model's modules beside its name.")
            names, label = {model}, model
        else:
            from penstock.modeling.adapters import base_of

            model = base_of(model)
            modules = self.get_modules(model) if modules is None else modules
            names, label = _names_of(model), type(model).__name__
        if _contradicts(self.model_name, names):
            raise ValueError(
                f"The pipeline template is for the model {self.model_name!r}, but the model is {label}. "
                f"Name it one of {', '.join(sorted(names))}."
            )
        self._check_members(label, modules)
        self._check_ends(modules)
        self._check_order(label, modules)

    def _check_members(self, label: str, modules: Sequence[str]) -> None:
        placed = self.modules
        count = dict.fromkeys(placed, 0)
        for module in placed:
            count[module] += 1
        faults = {
            "missing from the template": [module for module in modules if module not in count],
            "unknown to the model": [module for module in count if module not in set(modules)],
            "duplicated": [
                f"{module} (in stages {', '.join(map(str, self._stages_of(module)))})"
                for module, times in count.items()
                if times > 1
            ],
        }
        found = [f"{kind}: {_shown(names)}" for kind, names in faults.items() if names]
        if found:
            raise ValueError(f"{_mismatch(label)}: {'; '.join(found)}.")

    def _check_ends(self, modules: Sequence[str]) -> None:
        first, last = end_modules(modules)
        for required, which, stage in ((first, "first", 0), (last, "last", self.num_stages - 1)):
            for module in required:
                (found,) = self._stages_of(module)
                if found != stage:
                    raise ValueError(
                        f"The first (or last) stage must contain {module} module: it belongs in the {which} stage "
                        f"(stage {stage}), but is in stage {found}."
                    )

    def _check_order(self, label: str, modules: Sequence[str]) -> None:
        position = {module: index for index, module in enumerate(modules)}
        placed = self.modules
        reordered = [
            f"{later} (stage {self._stages_of(later)[0]}) must come before {earlier}"
            for earlier, later in pairwise(placed)
            if position[later] < position[earlier]
        ]
        if reordered:
            raise ValueError(f"{_mismatch(label)}: reordered: {_shown(reordered)}.")

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


def _names_of(model: PreTrainedModel) -> set[str]:
    """Every name under which users know this model."""
    names = set()
    # Splitting may have put a subclass in front of the model's own class.
    for cls in type(model).__mro__:
        if cls.__name__ == "PreTrainedModel":
            break
        if cls.__name__.endswith("PreTrainedModel"):
            continue
        names |= {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
        if cls.__module__.startswith("transformers."):
            break
    config = getattr(model, "config", None)
    for name in (getattr(config, "model_type", None), getattr(config, "_name_or_path", None)):
        if isinstance(name, str) and name:
            names.add(name)
    return names


def _contradicts(template_name: str, names: Collection[str]) -> bool:
    """Whether a template's name is a model class or model type of transformers, and another one than the model's.

    Any other name is the user's own label, which says nothing about the model.
    """
    if template_name in names:
        return False
    short = template_name.rpartition(".")[2]
    if MODEL_CLASS.match(template_name):
        classes = {name.rpartition(".")[2] for name in names if MODEL_CLASS.match(name)}
        if not classes or short in classes:
            return False
        import transformers

        return short in dir(transformers)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return template_name in CONFIG_MAPPING_NAMES and any(name in CONFIG_MAPPING_NAMES for name in names)


def _mismatch(label: str) -> str:
    return f"Modules in the pipeline template do not match the modules in the model {label}"


def _shown(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

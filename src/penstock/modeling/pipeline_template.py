"""`PipelineTemplate`: the shape of a pipeline, checked against a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from penstock.layout.partition import partition, split_into
from penstock.layout.pipelines import num_stages_on
from penstock.layout.template import StageTemplate, end_modules
from penstock.modeling.graph.costs import unit_costs
from penstock.modeling.graph.units import bare_modules, list_units
from penstock.modeling.libraries import base_of, configuration_of
from penstock.modeling.packed_layers import mark_packed

# How transformers names its model classes.
MODEL_CLASS = re.compile(r"(.*\.)?[A-Z]\w*(Model|For[A-Z]\w*)$")


class PipelineTemplate(StageTemplate):
    """The modules of each stage (`modules_per_stage`, in forward order) of a pipeline for one kind of model.

    `model_name` is its class (`GPT2LMHeadModel`), its type (`gpt2`) or a name of your own. Templates are equal, and the
    same key of a dict, if both agree.
    """

    @staticmethod
    def get_modules(model: PreTrainedModel) -> list[str]:
        """Return the names of the modules of `model` that stages are made of, in forward order.

        Raises NotImplementedError ("Auto policy for <class> is not implemented...") if the model cannot be split.
        """
        return list(list_units(mark_packed(model)))

    @classmethod
    def balanced(cls, model: PreTrainedModel, num_stages: int) -> PipelineTemplate:
        """The template of `num_stages` whose costliest stage costs least, by an estimate of the modules' costs.

        Raises:
            ValueError: there are fewer modules than stages, or no stages. Those that belong in the first stage count as
                one, and so do those of the last.
            NotImplementedError: the model cannot be split.
        """
        model = base_of(model)
        modules = cls.get_modules(model)
        first, last = end_modules(modules)
        # What must stay together in the first and in the last stage is placed like one module.
        parts = [first, *([module] for module in modules[len(first) : len(modules) - len(last)]), last]
        parts = [part for part in parts if part]
        cost = dict(zip(modules, unit_costs(model, modules), strict=True))
        sizes = partition([sum(cost[module] for module in part) for part in parts], [1.0] * num_stages).sizes
        return cls(type(model).__name__, [list(chain.from_iterable(run)) for run in split_into(parts, sizes)])

    def validate(self, model: PreTrainedModel | str, modules: Sequence[str] | None = None) -> None:
        """Check that this template covers a model: `validate(model)`, or `validate(model_name, modules)`.

        No communication, so every rank finds the same error.

        Raises:
            ValueError: the template is for another model; its modules, without those that have no parameters, are not
                the model's modules in forward order, each once; or a module before the first repeated block is not in
                the first stage, or one after the last block not in the last stage.
            NotImplementedError: the model cannot be split.
        """
        if not isinstance(model, str):
            self.fitted(model, modules)
        elif modules is None:
            raise TypeError("validate(model_name, modules) needs the model's modules beside its name.")
        else:
            self._check({model}, model, modules)

    def fitted(self, model: PreTrainedModel, modules: Sequence[str] | None = None) -> PipelineTemplate:
        """This template without the names of `modules` of `model` without parameters, which run where they are needed.

        Raises what `validate` raises.
        """
        model = base_of(model)
        modules = self.get_modules(model) if modules is None else modules
        bare = bare_modules(model, modules)
        fitted = self
        if bare & {*self.modules}:
            stages = [[name for name in stage if name not in bare] for stage in self.modules_per_stage]
            fitted = PipelineTemplate(self.model_name, stages)
        fitted._check(_names_of(model), type(model).__name__, modules)
        return fitted

    def _check(self, names: Collection[str], label: str, modules: Sequence[str]) -> None:
        if _contradicts(self.model_name, names):
            raise ValueError(
                f"The pipeline template is for the model {self.model_name!r}, but the model is {label}. "
                f"Name it one of {', '.join(sorted(names))}."
            )
        self.check_modules(label, modules)


def balanced_templates(model: PreTrainedModel, num_ranks: Iterable[int], schedule: str) -> dict[int, PipelineTemplate]:
    """For each number of ranks, the balanced template of a pipeline on so many under a named schedule.

    Raises what `PipelineTemplate.balanced` and `num_stages_on` raise.
    """
    return {ranks: PipelineTemplate.balanced(model, num_stages_on(ranks, schedule)) for ranks in set(num_ranks)}


def _names_of(model: PreTrainedModel) -> set[str]:
    """Every name under which users know this model."""
    names = set()
    # Splitting may have put a subclass in front of the model's own class.
    for cls in type(model).__mro__:
        if cls is nn.Module or cls.__name__ == "PreTrainedModel":
            break
        if cls.__name__.endswith("PreTrainedModel"):
            continue
        names |= {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
        if cls.__module__.startswith("transformers."):
            break
    config = configuration_of(model)
    for name in (getattr(config, "model_type", None), getattr(config, "_name_or_path", None)):
        if isinstance(name, str) and name:
            names.add(name)
    return names


def _contradicts(template_name: str, names: Collection[str]) -> bool:
    """Whether a template's name is a model class or model type of transformers, and another one than the model's. Any
    other name is the user's own label, which says nothing about the model."""
    if template_name in names:
        return False
    short = template_name.rpartition(".")[2]
    if MODEL_CLASS.match(template_name):
        classes = {name.rpartition(".")[2] for name in names if MODEL_CLASS.match(name)}
        if not classes or short in classes:
            return False
        return short in dir(transformers)
    return template_name in CONFIG_MAPPING_NAMES and any(name in CONFIG_MAPPING_NAMES for name in names)

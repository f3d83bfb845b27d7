"""How pipelines are formed, for `initialize`, `from_pretrained`, the plugin and elastic runs alike.

What is accepted as a model: `check_model`, and `check_whole_model` of one that has its weights. The sequence in which
ranks form its pipelines: `plan_and_build`.
An elastic run plans by other means: it calls `require_equal_models`, where it begins, and `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.config.configuration import Configuration
from penstock.context_parallel.apply import sharing_of
from penstock.context_parallel.check import try_parts
from penstock.layout.announce import Announcement, announce
from penstock.layout.layout import Layout
from penstock.model.pipeline_model import USED_NAMES, PipelineModel, attach
from penstock.modeling.graph.costs import counted_samples, unit_costs
from penstock.modeling.graph.dummy_inputs import arguments_by_name
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.graph.shapes import ShapeFunctions
from penstock.modeling.graph.units import units_and_functions
from penstock.modeling.graph.whole_inputs import inputs_without_samples
from penstock.modeling.instrumentation import known_of, record_of
from penstock.modeling.libraries import WRAPPERS, wrapper_of
from penstock.modeling.packed_layers import mark_packed
from penstock.nested import is_record, walkable
from penstock.runtime.comm.devices import device_memory, local_device
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.formation import facts_of, parallelize, require_equal_facts, world_ranks
from penstock.runtime.gradients.weight_gradients import deferring_pays
from penstock.runtime.migration import FillValues
from penstock.runtime.options import EngineOptions
from penstock.runtime.parts import ScheduleMaker
from penstock.schedule.registry import AUTO, resolve_auto
from penstock.tensor_parallel.apply import sharding_of

# What a user gave as the schedule: a name, one written out, or one for each template.
Asked = TypeVar("Asked")


class UnitsAndCosts(NamedTuple):
    """What all ranks know before they plan: the model's units, what each costs in rank 0's estimate, so that all ranks
    balance the same numbers, the bytes that the run may use of each device (None without a limit), and the units' shape
    functions."""

    units: list[str]
    costs: list[float]
    memory: float | None
    functions: ShapeFunctions


@dataclass(frozen=True)
class LayoutPlan:
    """What is to be formed: the engine's layout, schedule and options; for the log the relative cost of each unit, and
    each pipeline's schedule and microbatches in words."""

    layout: Layout
    make_schedule: ScheduleMaker
    options: EngineOptions
    costs: Mapping[str, float] = field(default_factory=dict)
    schedules: Sequence[str] = ()
    microbatches: Sequence[str] = ()

    def announcement(self, model: nn.Module) -> Announcement:
        """What is said of it in the log."""
        words = self.schedules, self.microbatches, self.costs, counted_samples(model)
        return Announcement(type(model).__name__, self.layout, *words)


def plan_and_build(
    model: nn.Module,
    facts: Mapping[str, Any],
    plan: Callable[[UnitsAndCosts, Ranks], LayoutPlan],
    board: FailureBoard,
    *,
    configuration: Configuration | None = None,
    criterion: Criterion | None = None,
    units: Sequence[str] | None = None,
    loss_in_chunks: bool = False,
    make: Callable[[Layout, Ranks], nn.Module] | None = None,
) -> PipelineModel:
    """Form the pipelines of a model that was checked (`check_model`, `check_whole_model`). All ranks call this
    together, inside `new_job()`: they compare what they were given, find the model's units, plan, and `build`.

    Args:
        facts: what else must be the same on all ranks, by name.
        plan: makes the plan of what was found. If it raises, it must do so on all ranks: the others would
            wait for it in vain.
        configuration, criterion: what the model remembers.
        units: the model's, if they are known.
        loss_in_chunks: see `costs.unit_costs`.
        make: makes the model with this rank's weights for a layout, where `model` has none, and marks packed layers.

    Raises:
        ValueError: on every rank, if the ranks were given different models, or found different units.
    """
    require_equal_models(model, facts, board)
    ranks = world_ranks(board)
    units_and_costs = _find(model, units, ranks, loss_in_chunks)
    planned = plan(units_and_costs, ranks)
    planned = replace(planned, options=_with_found_dims(model, planned.options, ranks))
    if ranks.rank == 0:
        announce(planned.announcement(model))
    if make is not None:
        model = make(planned.layout, ranks)
    functions = units_and_costs.functions
    return build(model, planned, board, configuration=configuration, criterion=criterion, functions=functions)


def require_equal_models(model: nn.Module, facts: Mapping[str, Any], board: FailureBoard) -> None:
    """Raise ValueError on every rank if the ranks were given different models, or other `facts` differ."""
    require_equal_facts({**facts_of(mark_packed(model)), **facts}, board)


def build(
    model: nn.Module,
    planned: LayoutPlan,
    board: FailureBoard,
    *,
    configuration: Configuration | None = None,
    criterion: Criterion | None = None,
    functions: ShapeFunctions | None = None,
    fill_values: FillValues | None = None,
) -> PipelineModel:
    """Make the engine that was planned, and a `PipelineModel` of `model`. `functions`, `fill_values`: see
    `parallelize`."""
    engine = parallelize(
        model,
        planned.layout,
        planned.make_schedule,
        board,
        replace(planned.options, share_sequences=sharing_of(planned.layout)),
        make_sharding=sharding_of(planned.layout),
        functions=functions,
        fill_values=fill_values,
    )
    if planned.layout.context_parallel_size > 1:
        try_parts(engine)
    return attach(model, engine, configuration, criterion)


def resolved_schedule(schedule: Asked, model: nn.Module) -> Asked | str:
    """What a user gave as the schedule, with a name in the place of "auto"; the same on all ranks."""
    return resolve_auto(schedule, schedule == AUTO and deferring_pays(model, local_device()))


def _find(model: nn.Module, units: Sequence[str] | None, ranks: Ranks, loss_in_chunks: bool) -> UnitsAndCosts:
    kept: list[tuple[list[str], ShapeFunctions]] = []  # by `find`: shape functions cannot be sent

    def find() -> tuple[list[float], float | None]:
        if units:
            names, functions = list(units), ShapeFunctions({name: model.get_submodule(name) for name in units}, model)
        else:
            names, functions = units_and_functions(model)
        kept.append((names, functions))
        costs = []
        if ranks.rank == 0:
            costs = unit_costs(model, names, loss_in_chunks=loss_in_chunks, functions=functions)
        return costs, device_memory()

    by_rank = ranks.together("finding the model's units and their costs", find)
    names, functions = kept[0]
    ranks.require_equal(names, "comparing units", partial(_different_units, model))
    limits = [limit for _, limit in by_rank if limit is not None]
    return UnitsAndCosts(names, by_rank[0][0], min(limits, default=None), functions)


def _with_found_dims(model: nn.Module, options: EngineOptions, ranks: Ranks) -> EngineOptions:
    """The engine's options; `batch_dim` also says which of the example inputs have no samples."""
    if known_of(model).example_inputs is None:
        return options
    find = partial(inputs_without_samples, model, options.batch_dim)
    dims = ranks.together("looking for inputs without samples", find)[0]
    return replace(options, batch_dim={**dims, **options.batch_dim})


def _different_units(model: nn.Module, first: Sequence[str], theirs: Sequence[str], rank: int) -> str:
    only = sorted({*first} ^ {*theirs})
    return (
        f"{type(model).__name__} has {len(first)} units on rank 0 and {len(theirs)} on rank {rank} (on one of them "
        f"only: {', '.join(only[:5])}{' ...' if len(only) > 5 else ''}): use the same versions of Penstock, torch and "
        "transformers on all ranks, and the same files of the model"
    )


def check_whole_model(model: Any, caller: str) -> None:
    """Refuse what cannot be parallelised whatever its layers are, of a model that has all its weights. No
    communication."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} takes a torch.nn.Module, got {type(model).__name__}")
    if (wrapper := wrapper_of(model)) is not None:
        raise TypeError(f"{caller} was given a {wrapper}: {WRAPPERS[wrapper]}")
    if lazy := next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None):
        raise ValueError(
            f"{lazy} of this {type(model).__name__} has no shape yet, as that of a lazy module: call the model once "
            f"before {caller}, on one sample, so that all ranks have the same weights"
        )
    if absent := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
        raise ValueError(
            f"{absent} of this {type(model).__name__} is on the meta device, without values: build the model on the "
            "CPU, or let penstock.from_pretrained() or penstock.from_config() make each stage where it is held"
        )
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1:
        raise ValueError(
            f"this {type(model).__name__} has parameters on {' and on '.join(sorted(devices))}: build it on the CPU, "
            "without device_map, or let penstock.from_pretrained() make each stage where it is held"
        )
    check_model(model, caller)


def check_model(model: nn.Module, caller: str) -> None:
    """Refuse what cannot be parallelised whatever its layers and its weights are, so also of a model on the meta device
    that is to be made in stages. No communication."""
    if model._compiled_call_impl is not None:
        raise ValueError(
            f"this {type(model).__name__} is compiled as a whole: call model.compile() after {caller} instead, which "
            "compiles the blocks of each stage"
        )
    attributes = {*vars(model), *model._modules, *model._parameters, *model._buffers}
    if taken := sorted(attributes & USED_NAMES):
        raise ValueError(
            f"this {type(model).__name__} has an attribute {taken[0]!r} of its own, which a parallelised model needs "
            "for itself: give it another name"
        )


def remember_example_inputs(model: nn.Module, example_inputs: Any) -> None:
    """Find the units of `model` with these inputs from now on; see `inputs_by_name`. None leaves them to be guessed."""
    if example_inputs is not None:
        record_of(model).example_inputs = inputs_by_name(model, example_inputs)


def inputs_by_name(model: nn.Module, example_inputs: Any) -> dict[str, Any]:
    """The arguments of a forward, which are given by name in a mapping, by position in a tuple or list, or as a tensor
    or data class alone. None is none."""
    if example_inputs is None:
        return {}
    if isinstance(example_inputs, torch.Tensor) or is_record(example_inputs):
        example_inputs = (example_inputs,)
    if isinstance(example_inputs, Mapping):
        named = dict(example_inputs)
    elif isinstance(example_inputs, (tuple, list)):
        named = arguments_by_name(model, tuple(example_inputs), {})
    else:
        kind = type(example_inputs).__name__
        raise TypeError(f"example_inputs must be a mapping, a tuple or a tensor, got a {kind}")
    return {name: walkable(name, value) for name, value in named.items()}

"""`initialize(model, config)` spreads a model over the stages of equal pipelines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from penstock.api.builder import (
    LayoutPlan,
    UnitsAndCosts,
    check_whole_model,
    inputs_by_name,
    plan_and_build,
    remember_example_inputs,
    resolved_schedule,
)
from penstock.config.configuration import SECTION, Configuration, ConfigurationError
from penstock.context_parallel.apply import refuse_model
from penstock.layout.layout import Layout
from penstock.layout.partition import partition, split_into
from penstock.layout.pipelines import chosen_stages, split_stages
from penstock.model.pipeline_model import PipelineModel
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.graph.units import bare_modules
from penstock.modeling.instrumentation import record_of
from penstock.modeling.libraries import is_peft_model
from penstock.modeling.weights.whole import alias_groups
from penstock.planning.auto import auto_pipeline_size
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.engine import DEFAULT_MICROBATCHES_PER_RANK
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.formation import kinds_of_inputs, new_job
from penstock.runtime.options import EngineOptions
from penstock.schedule.registry import AUTO, DEFERRING, PLAIN, ZERO_BUBBLE_V, resolve_auto
from penstock.schedule.registry import build as build_schedule
from penstock.schedule.text import own_or_named, summary_of, written_schedule
from penstock.sharded_optimizer.updates import owner_choice_for
from penstock.simulation.simulate import predicted_steps
from penstock.tensor_parallel.apply import TensorParallel

ConfigLike = Configuration | Mapping[str, Any] | str | os.PathLike[str]


def initialize(
    model: nn.Module,
    config: ConfigLike | None = None,
    criterion: Criterion | None = None,
    *,
    example_inputs: Any = None,
    **keys: Any,
) -> PipelineModel:
    """Spread `model` over the stages of a pipeline, and over replicas where there are more ranks than stages.

    The model is shrunk in place. It stays the same object of the same class and keeps the parameters of this rank's
    stage under their own names. It gives up the storage of all others, also if an optimizer holds them. Every rank
    calls this with an equal model. torch.distributed is initialised from the environment unless it is already.

    Args:
        model: a whole model of transformers, a PeftModel of one, or any other `nn.Module`, on any device; it is moved
            to this rank's.
        config: see `penstock.Configuration`, or the path of a JSON file.
        keys: keys of the configuration, instead of `config` or besides: `pipeline_parallel_size=2`, `stages=...`.
        criterion: `criterion(outputs, inputs)` returns the mean loss of a microbatch, from the model's outputs and the
            keyword arguments of the call, some of which may be for the criterion only. If it has an attribute
            `reduction` that is "sum", it returns a sum. By default the loss is the model's own.
        example_inputs: arguments of a forward, by name or by position, for a model whose inputs cannot be guessed.
            Their values do not matter.

    Returns:
        `model`, which is then also a `penstock.PipelineModel`; untouched if the configuration says `enable: false`.

    Raises:
        ConfigurationError: the configuration is wrong, or asks for sizes that this world or this model do not have.
        ScheduleError, FileNotFoundError: a schedule of one's own cannot run, or is for other ranks; its file is absent.
        NotImplementedError: the model cannot be split; says why. It is not changed then. What depends on the stages
            and the inputs, such as values that flow backwards, the first call of the model refuses.
        TypeError: `model` is no module, or one that wraps another (torch.compile, DistributedDataParallel);
            `example_inputs` are no arguments.
        ValueError: it is parallelised already, with another configuration, criterion or form of example inputs; or it
            is compiled as a whole.
    """
    configuration, known = Configuration.from_any(config, **keys), cast(PipelineModel, model)
    if not configuration.enable:
        return known
    if is_peft_model(known):
        from penstock.integrations.peft import initialize_peft

        initialize_peft(known, lambda base: initialize(base, configuration, criterion, example_inputs=example_inputs))
        return known
    if isinstance(model, PipelineModel):
        _refuse_changes(model, configuration, criterion, example_inputs)
        return known
    check_whole_model(model, "initialize()")
    remember_example_inputs(model, example_inputs)
    with new_job(configuration.time_limit, patience=configuration.patience) as board:
        return build_equal_pipelines(model, configuration, board, criterion)


def _refuse_changes(
    model: PipelineModel, configuration: Configuration, criterion: Criterion | None, example_inputs: Any
) -> None:
    """Raise ValueError if a second call asks for something else than the first."""
    record, changed = record_of(model), ""
    if configuration != model.configuration:
        changed = "configuration"
    elif criterion is not None and criterion != record.criterion:  # a method is made anew each time
        changed = "criterion (model(..., criterion=...) takes one for a call)"
    elif kinds_of_inputs(inputs_by_name(model, example_inputs)) not in ({}, kinds_of_inputs(record.example_inputs)):
        changed = "example_inputs"
    if changed:
        raise ValueError(
            f"this model is parallelised already, with another {changed}: initialize() takes it once"
            ". To change it, make the model anew"
        )


def build_equal_pipelines(
    model: nn.Module,
    configuration: Configuration,
    board: FailureBoard,
    criterion: Criterion | None = None,
    make: Callable[[Layout, Ranks], nn.Module] | None = None,
) -> PipelineModel:
    """Form equal pipelines of a whole model; see `plan_and_build`."""
    settings = {f"{SECTION}.{name}": value for name, value in vars(configuration).items()}
    settings[f"{SECTION}.schedule"] = summary_of(configuration.schedule)
    return plan_and_build(
        model,
        settings,
        partial(_plan, model, configuration),
        board,
        configuration=configuration,
        criterion=criterion,
        loss_in_chunks=configuration.loss_chunk_tokens is not None,
        make=make,
    )


def _plan(model: nn.Module, configuration: Configuration, units_and_costs: UnitsAndCosts, ranks: Ranks) -> LayoutPlan:
    """Equal pipelines, each with the model's units balanced over its stages by cost, unless the configuration has the
    stages."""
    units, costs = units_and_costs.units, units_and_costs.costs
    asked, name = configuration.schedule, resolved_schedule(configuration.schedule, model)
    configuration = _with_size(model, replace(configuration, schedule=name), units_and_costs, ranks)
    if configuration.pipeline_parallel_size == 1:
        configuration = replace(configuration, schedule=resolve_auto(asked, deferring_pays=False))
    elif asked == AUTO and _pays_in_a_v(configuration, costs):
        configuration = replace(configuration, schedule=ZERO_BUBBLE_V)
    if configuration.stages is not None:
        bare = bare_modules(model, units)
        chosen = [[unit for unit in stage if unit not in bare] for stage in configuration.stages]
        configuration = replace(configuration, stages=chosen)
    stages, stage_to_rank, num_pipelines = plan_stages(configuration, units, costs)
    size = configuration.tensor_parallel_size
    if size > 1:
        if not isinstance(model, PreTrainedModel):
            raise ConfigurationError(
                f"{SECTION}.tensor_parallel_size needs a model of transformers, and {type(model).__name__} is none"
                ": leave it out"
            )
        try:
            TensorParallel(model, 0, size, alias_groups(model))
        except ValueError as error:  # which begins with the name of the key, as those of `chosen_stages` do
            raise ConfigurationError(f"{SECTION}.{error}") from error
    parts = configuration.context_parallel_size
    if parts > 1:
        refuse_model(model)
    layout = Layout.place([stages] * num_pipelines, [stage_to_rank] * num_pipelines, size, parts)
    written, number = written_schedule(configuration.schedule), configuration.num_microbatches
    if written is not None and number is None and configuration.microbatch_size is None:
        number = written.num_microbatches
    options = EngineOptions(
        num_microbatches=number,
        microbatch_size=configuration.microbatch_size,
        batch_dim=configuration.batch_dim or {},
        loss_chunk_tokens=configuration.loss_chunk_tokens,
        trace=configuration.trace,
        trace_steps=configuration.trace_steps,
        timeout=configuration.time_limit,
        patience=configuration.patience,
        owner_choice=owner_choice_for(int(configuration.sharded_optimizer)),
    )
    in_use, in_words = _announced(configuration, asked, number, costs)
    return LayoutPlan(
        layout,
        own_or_named(configuration.schedule, layout.pipelines[0].num_ranks),
        options,
        dict(zip(units, costs, strict=True)),
        [in_use] * num_pipelines,
        [in_words] * num_pipelines,
    )


def _announced(
    configuration: Configuration, asked: str | Sequence[str], number: int | None, costs: Sequence[float]
) -> tuple[str, str]:
    """What rank 0 prints of the schedule in use, where `asked` was for it, and of the microbatches."""
    written = written_schedule(configuration.schedule)
    num_ranks = int(configuration.pipeline_parallel_size)
    in_use = build_schedule(str(configuration.schedule), num_ranks, 1).name if written is None else written.name
    if configuration.microbatch_size is not None:
        return in_use, f"microbatches of {configuration.microbatch_size}"
    if asked == AUTO and in_use != PLAIN:
        share = _predicted(in_use, configuration, costs) / _predicted(PLAIN, configuration, costs)
        in_use += f" (predicted {share:.2f} of {PLAIN}'s time)"
    usual = _usual_number(configuration)
    in_words = f"{number or usual} microbatches in a batch" + f" of {usual} samples or more" * (number is None)
    return in_use, in_words


def _pays_in_a_v(configuration: Configuration, costs: Sequence[float]) -> bool:
    """Whether two stages on each rank are chosen (ZB-V for ZB-H1) where a user leaves the schedule and the stages open:
    it holds as much, and is predicted to be at least 1 % faster. Not with tensor parallelism, nor where replicas add up
    gradients, which they do at the end of a step then, nor with so few microbatches that messages, of which it has
    twice as many, might decide."""
    num_ranks = configuration.pipeline_parallel_size
    if configuration.schedule != DEFERRING or configuration.stages or configuration.split_points:
        return False
    if num_ranks != dist.get_world_size() or len(costs) < 2 * num_ranks or _usual_number(configuration) < 2 * num_ranks:
        return False
    return _predicted(ZERO_BUBBLE_V, configuration, costs) < 0.99 * _predicted(DEFERRING, configuration, costs)


def _predicted(name: str, configuration: Configuration, costs: Sequence[float]) -> float:
    """The time of a step, in the unit of the costs; see `predicted_steps`."""
    num_ranks = int(configuration.pipeline_parallel_size)
    stage_to_rank = build_schedule(name, num_ranks, 1).stage_to_rank
    busy = [0.0] * num_ranks
    stages = split_into(costs, partition(costs, [1.0] * len(stage_to_rank)).sizes)
    for rank, stage in zip(stage_to_rank, stages, strict=True):
        busy[rank] += sum(stage)
    return max(busy) * predicted_steps(name, num_ranks, _usual_number(configuration))


def _usual_number(configuration: Configuration) -> int:
    """The number of microbatches in a step, where no batch is at hand."""
    return configuration.num_microbatches or DEFAULT_MICROBATCHES_PER_RANK * int(configuration.pipeline_parallel_size)


def _with_size(
    model: nn.Module, configuration: Configuration, units_and_costs: UnitsAndCosts, ranks: Ranks
) -> Configuration:
    """The configuration with the planner's number of stages in place of "auto"; the same on all ranks."""
    if configuration.pipeline_parallel_size != "auto":
        return configuration
    if written_schedule(configuration.schedule) is not None:
        raise ConfigurationError(
            f'{SECTION}.pipeline_parallel_size "auto" needs a schedule by name: one that is written out has its ranks'
            ": give a name, or the number of ranks"
        )
    size = auto_pipeline_size(
        model,
        ranks.size // configuration.tensor_parallel_size,
        configuration.num_microbatches,
        configuration.microbatch_size or 1,
        str(configuration.schedule),
        units_and_costs.memory,
        configuration.loss_chunk_tokens,
        configuration.context_parallel_size,
        configuration.tensor_parallel_size,
    )
    # Estimates differ between machines: rank 0's counts.
    return replace(configuration, pipeline_parallel_size=ranks.exchange(size, "planning")[0])


def plan_stages(
    configuration: Configuration, units: Sequence[str], costs: Sequence[float]
) -> tuple[list[list[str]], tuple[int, ...], int]:
    """The units of each stage, the rank within the pipeline that holds each stage, and the number of pipelines."""
    num_ranks, world_size = configuration.pipeline_parallel_size, dist.get_world_size()
    assert num_ranks != "auto"  # `_with_size` has replaced it
    key = f"{SECTION}.pipeline_parallel_size"
    if (size := configuration.tensor_parallel_size) > 1:
        if world_size % (num_ranks * size):
            raise ConfigurationError(
                f"{key} {num_ranks} times {SECTION}.tensor_parallel_size {size} makes pipelines of "
                f"{num_ranks * size} processes, but {world_size} processes were started: start a multiple of "
                f"{num_ranks * size} (torchrun --nproc-per-node {num_ranks * size})"
            )
        world_size //= size
    if num_ranks > world_size:
        few = f"{world_size} processes were" if world_size > 1 else "1 process was"
        raise ConfigurationError(
            f"{key} is {num_ranks}, but only {few} started: start at least {num_ranks} "
            f"(torchrun --nproc-per-node {num_ranks}) or set it to {world_size} at most"
        )
    parts = configuration.context_parallel_size
    if world_size % (num_ranks * parts) and parts > 1:
        raise ConfigurationError(
            f"{SECTION}.context_parallel_size {parts} takes {parts} pipelines of {num_ranks} ranks, which is "
            f"{num_ranks * parts * size} processes, but {world_size * size} were started: start a multiple of "
            f"{num_ranks * parts * size}"
        )
    if world_size % num_ranks:
        fitting = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ConfigurationError(
            f"{world_size} processes cannot be shared out over pipelines of {num_ranks} ranks each: {key} must be one "
            f"of {fitting}, or use HeterogeneousParallelPlugin, whose pipelines may differ"
        )
    stage_to_rank = own_or_named(configuration.schedule, num_ranks)(1).stage_to_rank
    if len(stage_to_rank) > len(units):
        per_rank = len(stage_to_rank) // num_ranks
        advice = [f"ask for at most {most}"] if (most := len(units) // per_rank) else []
        advice += ["choose a schedule with one stage per rank"] if per_rank > 1 else []
        raise ConfigurationError(
            f"{key} {num_ranks} under schedule {configuration.schedule!r}, with {per_rank} stage(s) per rank, needs at "
            f"least {len(stage_to_rank)} units, but the model has only {len(units)} units: " + " or ".join(advice)
        )
    num_pipelines = world_size // num_ranks
    if configuration.stages is None and configuration.split_points is None:
        sizes = partition(costs, [1.0] * len(stage_to_rank)).sizes
        return [list(run) for run in split_into(units, sizes)], stage_to_rank, num_pipelines
    try:
        if configuration.stages is not None:
            chosen, stages = "stages", chosen_stages(units, configuration.stages)
        else:
            chosen, stages = "split_points", split_stages(units, configuration.split_points or ())
    except ValueError as error:
        raise ConfigurationError(f"{SECTION}.{error}") from error
    if len(stages) != len(stage_to_rank):
        raise ConfigurationError(
            f"{SECTION}.{chosen} makes {len(stages)} stages, but {key} {num_ranks} under schedule "
            f"{configuration.schedule!r} has {len(stage_to_rank)}"
            ": let both be the same number"
        )
    return stages, stage_to_rank, num_pipelines

"""What a layout of pipelines looks like for a model: with its parameters and the costs of its units."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from penstock.layout.layout import Layout
from penstock.layout.schedules import schedule_maker
from penstock.modeling.graph.costs import unit_costs
from penstock.modeling.weights.names import stage_sizes
from penstock.pictures.describe import LayoutDescription
from penstock.pipeline_template import balanced_templates
from penstock.schedule.actions import Schedule


def describe_pipelines(
    model: PreTrainedModel, pipelines: Sequence[tuple[int, int]], microbatch_size: int, schedule: str
) -> LayoutDescription:
    """What pipelines, each a number of ranks with balanced stages and one of microbatches, look like for a model."""
    templates = balanced_templates(model, (ranks for ranks, _ in pipelines), schedule)
    schedules = tuple(schedule_maker(templates[ranks], schedule)(count) for ranks, count in pipelines)
    stages = [templates[ranks].modules_per_stage for ranks, _ in pipelines]
    layout = Layout.place(stages, [made.stage_to_rank for made in schedules])
    return describe_layout(model, layout, schedules, microbatch_size)


def describe_layout(
    model: PreTrainedModel,
    layout: Layout,
    schedules: tuple[Schedule, ...],
    microbatch_size: int,
    costs: Sequence[float] | None = None,
) -> LayoutDescription:
    """What a layout looks like for a whole model, with its parameters and costs. `costs`: of each unit of the layout;
    None estimates them."""
    sizes = [stage_sizes(model, pipeline.stages) for pipeline in layout.pipelines]
    costs = unit_costs(model, layout.units) if costs is None else costs
    by_unit = dict(zip(layout.units, costs, strict=True))
    return LayoutDescription(type(model).__name__, layout, schedules, microbatch_size, sizes, by_unit)

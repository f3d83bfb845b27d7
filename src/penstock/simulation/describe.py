"""What a layout of pipelines looks like: a table, and a picture with the timeline of a step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from transformers import PreTrainedModel

from penstock.layout.announce import compact, ranks_of
from penstock.layout.layout import Layout, PipelineLayout
from penstock.layout.pipelines import schedule_maker
from penstock.modeling.graph.costs import counted_samples, unit_costs
from penstock.modeling.pipeline_template import balanced_templates
from penstock.modeling.weights.whole import stage_sizes
from penstock.schedule.actions import Schedule
from penstock.simulation.simulate import Costs, LayoutSimulation, simulate_layout
from penstock.simulation.timeline import FAINT, gantt_svg, svg_head, svg_text
from penstock.tables import as_text

# Colours of the pipelines, in turn; pale enough for dark letters.
COLOURS = ("#bbd7ee", "#c5e3cf", "#fbe3a8", "#dccbe8", "#f6cdb8", "#cfd8dc")
LEFT, TOP, ROW, GAP, WIDTH = 150.0, 64.0, 44.0, 12.0, 760.0
# Width of a letter, in font sizes: a box shows the longest of its labels that fits.
LETTER = 0.56


@dataclass(frozen=True)
class LayoutDescription:
    """The pipelines of a run. `str()` of it is the table."""

    model_name: str
    layout: Layout
    schedules: tuple[Schedule, ...]  # of each pipeline in a step, one for those that share its sequences
    microbatch_size: int
    parameters: Sequence[Sequence[int]] | None = None  # per pipeline and stage; None if no model was at hand
    costs: Mapping[str, float] | None = None  # the relative cost of each unit; None if no model was at hand
    samples: str = "relative"  # for which costs are estimated, in words

    @cached_property
    def pipelines(self) -> tuple[PipelineLayout, ...]:
        """One for each batch: where several share its sequences, the first of them."""
        return tuple(self.layout.of_replica(replica)[0] for replica in range(self.layout.num_replicas))

    def _ranks(self, pipeline: int, stage: int) -> str:
        return ", ".join(ranks_of(part, stage) for part in self.layout.of_replica(pipeline))

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        return tuple(schedule.num_microbatches for schedule in self.schedules)

    @property
    def schedule_names(self) -> str:
        return ", ".join(dict.fromkeys(schedule.name for schedule in self.schedules))

    @property
    def global_batch_size(self) -> int:
        return sum(self.num_microbatches) * self.microbatch_size

    def share(self, pipeline: int) -> float:
        return self.num_microbatches[pipeline] / sum(self.num_microbatches)

    def __str__(self) -> str:
        return as_text(self.title, *map(self._table, range(len(self.pipelines))), self.caption)

    def _table(self, index: int) -> Table:
        pipeline, count = self.pipelines[index], self.num_microbatches[index]
        table = Table(
            Column("stage", justify="right"), Column("rank", justify="right"), Column("units", overflow="fold"),
            title=f"pipeline {index}: {count} microbatch{'es' * (count != 1)}, {self.share(index):.1%} of the batch",
            title_justify="left",
        )  # fmt: skip
        if self.parameters is not None:
            table.add_column("parameters", justify="right")
        for stage, units in enumerate(pipeline.stages):
            held = () if self.parameters is None else (f"{self.parameters[index][stage]:,}",)
            table.add_row(str(stage), self._ranks(index, stage), compact(units), *held)
        return table

    def data(self) -> dict[str, Any]:
        pipelines = []
        for index, pipeline in enumerate(self.pipelines):
            stages = []
            for stage, units in enumerate(pipeline.stages):
                firsts = [part.global_rank(stage) for part in self.layout.of_replica(index)]
                about: dict[str, Any] = {
                    "ranks": [first + shard for first in firsts for shard in range(pipeline.tensor_parallel_size)],
                    "units": list(units),
                }
                stages.append(about | ({"parameters": self.parameters[index][stage]} if self.parameters else {}))
            pipelines.append(
                {
                    "schedule": self.schedules[index].name,
                    "microbatches": self.num_microbatches[index],
                    "share_of_batch": self.share(index),
                    "stages": stages,
                }
            )
        return {
            "model": self.model_name,
            "ranks": self.layout.world_size,
            "microbatch_size": self.microbatch_size,
            "global_batch_size": self.global_batch_size,
            "segments": len(segments(self.layout)),
            "pipelines": pipelines,
        }

    @property
    def title(self) -> str:
        return f"{self.model_name}: {len(self.pipelines)} pipeline(s) on {self.layout.world_size} rank(s)"

    @property
    def caption(self) -> str:
        return (
            f"global batch: {sum(self.num_microbatches)} microbatches of {self.microbatch_size} = "
            f"{self.global_batch_size} samples; schedule {self.schedule_names}; gradients are summed in "
            f"{len(segments(self.layout))} segment(s); costs are {self.samples}"
        )

    def simulate(self) -> LayoutSimulation:
        """A step as the modules' costs predict it, or as if all modules cost the same; without communication."""
        pipelines = []
        costs = self.costs or dict.fromkeys(self.layout.units, 1.0)
        for pipeline, schedule in zip(self.pipelines, self.schedules, strict=True):
            stages = [sum(costs[unit] for unit in units) for units in pipeline.stages]
            # Input and weight gradients take about as long as the forward each: the same matrix products.
            pipelines.append((schedule, Costs(forward=stages, backward=stages, weight=stages)))
        return simulate_layout(pipelines)

    def svg(self) -> str:
        """The layout, and below it the timeline of a step, as one SVG document."""
        step = self.simulate()
        timeline = gantt_svg(
            step.events, f"a step under {self.schedule_names}, as the modules' costs predict it", relative=True
        )
        match = re.search(r'viewBox="0 0 (\d+) (\d+)"', timeline)
        assert match is not None  # gantt_svg always has one
        inner_width, inner_height = int(match[1]), int(match[2])
        height = TOP + len(self.pipelines) * (ROW + GAP) + 34
        total_width = max(LEFT + WIDTH + 30, inner_width)
        parts = [
            *svg_head(total_width, height + inner_height, self.title),
            svg_text(LEFT, 24, self.title, size=15, weight="bold"),
            svg_text(LEFT, 44, self.caption, size=12, colour=FAINT),
            *self._segments(height),
            *(part for index in range(len(self.pipelines)) for part in self._row(index)),
            timeline.replace("<svg ", f'<svg y="{height:.0f}" ', 1).rstrip("\n"),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def write_svg(self, path: str | os.PathLike[str]) -> Path:
        """Write `svg()` to a file. Raises ValueError unless it ends in .svg."""
        path = Path(path)
        if path.suffix != ".svg":
            raise ValueError(f"a layout is drawn as .svg, but the path is {path}")
        path.write_text(self.svg(), encoding="utf-8")
        return path

    def _row(self, index: int) -> Iterator[str]:
        pipeline, y = self.pipelines[index], TOP + index * (ROW + GAP)
        count = self.num_microbatches[index]
        yield svg_text(LEFT - 12, y + 18, f"pipeline {index}", size=13, anchor="end", weight="bold")
        share = f"{count} microbatch{'es' * (count != 1)}, {self.share(index):.0%}"
        yield svg_text(LEFT - 12, y + 34, share, size=11, colour=FAINT, anchor="end")
        step, position = WIDTH / len(self.layout.units), 0
        for stage, units in enumerate(pipeline.stages):
            x, width = LEFT + position * step, len(units) * step
            position += len(units)
            yield (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW:.0f}" rx="4" '
                f'fill="{COLOURS[index % len(COLOURS)]}" stroke="{FAINT}">'
                f"<title>{escape(', '.join(units))}</title></rect>"
            )
            size = "" if self.parameters is None else f", {_short(self.parameters[index][stage])} parameters"
            rank, number = self._ranks(index, stage), f"{len(units)} unit{'s' * (len(units) != 1)}"
            for line, labels in ((18, (f"rank {rank}", rank)), (34, (number + size, number, str(len(units))))):
                label = next((text for text in labels if len(text) * LETTER * 12 < width), "")
                yield svg_text(x + width / 2, y + line, label, size=12, anchor="middle")

    def _segments(self, height: float) -> Iterator[str]:
        """Dashed lines where some pipeline has a boundary: between two of them lies a segment."""
        step, position = WIDTH / len(self.layout.units), 0
        for segment in segments(self.layout)[:-1]:
            position += len(segment.units)
            x = LEFT + position * step
            yield (
                f'<line x1="{x:.1f}" y1="{TOP - 8:.0f}" x2="{x:.1f}" y2="{height - 30:.0f}" stroke="{FAINT}" '
                'stroke-dasharray="3 3"/>'
            )


@dataclass(frozen=True)
class Segment:
    """A maximal run of units that every pipeline keeps together, and its holders (global ranks, one per pipeline)."""

    units: tuple[str, ...]
    ranks: tuple[int, ...]


def segments(layout: Layout) -> list[Segment]:
    """The segments in forward order: at most 1 + the sum of (stages - 1) over the pipelines."""
    return [Segment(tuple(units), ranks) for ranks, units in groupby(layout.units, layout.holders)]


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
    """What a layout looks like for a whole model. `costs`: of each unit of the layout; None estimates them."""
    sizes = [stage_sizes(model, layout.of_replica(replica)[0].stages) for replica in range(layout.num_replicas)]
    costs = unit_costs(model, layout.units) if costs is None else costs
    by_unit = dict(zip(layout.units, costs, strict=True))
    return LayoutDescription(
        type(model).__name__, layout, schedules, microbatch_size, sizes, by_unit, counted_samples(model)
    )


def _short(number: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)

"""Plans as tables, and as data for JSON."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from penstock.planning.describe import TABLE_WIDTH, compact
from penstock.planning.memory import readable
from penstock.planning.plan import Plan, PlannedPipeline


def plans_table(plans: Sequence[Plan], equal: Plan | None) -> str:
    """The plans, one a row, and below it the first one's pipelines.

    Args:
        plans: the best first.
        equal: the best plan of equal pipelines, with which the speed is compared.
    """
    job = plans[0].job
    summary = Table(
        "pipelines (ranks x microbatches)",
        "schedule",
        *(Column(name, justify="right") for name in ("step", "bubble", "fullest device", "on links", "speed")),
        title=f"{job.profile.model} on {job.cluster.size} devices: {job.num_microbatches} microbatches a step"
        + (", activations checkpointed" if job.checkpointing else ""),
        caption=f"Seconds are {'measured' if job.profile.measured else 'estimated from operations and bytes'}."
        + " Speed is relative to the best equal pipelines"
        + ("." if equal is not None else ", of which none fit."),
    )
    for plan in plans:
        rank, memory = plan.fullest
        kind = job.cluster.classes[job.cluster.class_of_device[plan.devices[rank]]]
        summary.add_row(
            shape_of(plan),
            plan.schedule_names,
            f"{plan.seconds:.4g} s",
            f"{plan.bubble:.1%}",
            f"{readable(memory.total)} of {readable(kind.memory)} ({kind.name})",
            readable(plan.bytes_on_links),
            "" if equal is None else f"{equal.seconds / plan.seconds:.2f}",
        )
    columns = [Column(name, justify="right") for name in ("pipeline", "rank")]
    details = Table(
        *columns, "device", Column("units", overflow="fold"), Column("memory", justify="right"),
        Column("microbatches", justify="right"), title="The first of them",
    )  # fmt: skip
    for index, pipeline in enumerate(plans[0].pipelines):
        for row in _rows_of(plans[0], index, pipeline):
            details.add_row(*row, end_section=row[1] == _last_rank(plans[0], index))
    file = io.StringIO()
    console = Console(file=file, width=TABLE_WIDTH, color_system=None, legacy_windows=False)
    console.print(summary)
    console.print(details)
    return file.getvalue().rstrip("\n")


def shape_of(plan: Plan) -> str:
    """The pipelines as ranks x microbatches: `1x3, 2x5`; several alike as `4 of 2x5`."""
    shapes = sorted((len(line.devices), line.schedule.num_microbatches) for line in plan.pipelines)
    texts = []
    for (ranks, count), alike in groupby(shapes):
        number = len(list(alike))
        texts.append(f"{ranks}x{count}" if number == 1 else f"{number} of {ranks}x{count}")
    return ", ".join(texts)


def plan_data(plan: Plan, equal: Plan | None) -> dict[str, Any]:
    """A plan for JSON. Seconds and bytes are plain numbers."""
    cluster = plan.job.cluster
    first, pipelines = 0, []
    for line in plan.pipelines:
        kinds = [cluster.classes[cluster.class_of_device[device]].name for device in line.devices]
        pipelines.append(
            {
                "stages": line.stage_names,
                "rank of each stage": list(line.schedule.stage_to_rank),
                "devices": kinds,
                "nodes": [cluster.node_of_device[device] for device in line.devices],
                "microbatches": line.schedule.num_microbatches,
                "bytes of each rank": [memory.total for memory in plan.memory[first : first + len(kinds)]],
            }
        )
        first += len(kinds)
    return {
        "model": plan.job.profile.model,
        "measured": plan.job.profile.measured,
        "schedule": plan.schedule_names,
        "seconds": plan.seconds,
        "bubble": plan.bubble,
        "bytes on links": plan.bytes_on_links,
        "speed over equal pipelines": None if equal is None else equal.seconds / plan.seconds,
        "pipelines": pipelines,
    }


def _first_rank(plan: Plan, index: int) -> int:
    return sum(len(line.devices) for line in plan.pipelines[:index])


def _last_rank(plan: Plan, index: int) -> str:
    return str(_first_rank(plan, index + 1) - 1)


def _rows_of(plan: Plan, index: int, pipeline: PlannedPipeline) -> list[tuple[str, ...]]:
    cluster, first = plan.job.cluster, _first_rank(plan, index)
    rows: list[tuple[str, ...]] = []
    for rank, device in enumerate(pipeline.devices):
        units = [compact([unit.name for unit in pipeline.stages[s]]) for s in pipeline.schedule.stages_of(rank)]
        name = cluster.classes[cluster.class_of_device[device]].name
        rows.append(
            (
                str(index) if rank == 0 else "",
                str(first + rank),
                name if not cluster.node_sizes else f"{name} on node {cluster.node_of_device[device]}",
                "; ".join(units),
                readable(plan.memory[first + rank].total),
                str(pipeline.schedule.num_microbatches) if rank == 0 else "",
            )
        )
    return rows

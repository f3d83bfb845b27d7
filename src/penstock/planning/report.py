"""Plans as tables, and as data for JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table

from penstock.layout.announce import compact
from penstock.planning.fit import Way, best, nearest
from penstock.planning.memory import readable, unit_of
from penstock.planning.plan import Plan
from penstock.tables import WIDTH, as_text


def plans_table(plans: Sequence[Plan], equal: Plan | None, words: Sequence[str] = ()) -> str:
    """The plans, one a row, then `words`, and the first one's pipelines. Speeds are relative to the plan `equal`."""
    job = plans[0].job
    about = job.profile.about
    samples = about.get("microbatch")
    summary = Table(
        Column("pipelines", overflow="fold"), Column("schedule", no_wrap=True),
        *(Column(name, justify="right") for name in ("step", "bubble", "fullest device", "speed")),
        title=f"{job.profile.model} on {job.cluster.size} devices: {job.num_microbatches} microbatches a step"
        + (f" of {samples}" + (f" x {about['length']} tokens" if "length" in about else "") if samples else "")
        + ", activations recomputed" * bool(job.checkpointing)
        + " on some ranks" * (job.checkpointing == "stages")
        + ", optimizer sharded" * bool(job.sharded)
        + f", {job.context_parallel_size} devices to a sequence, which stand as one" * (job.context_parallel_size > 1),
        caption="Pipelines are ranks x microbatches. "
        f"Seconds are {'measured' if job.profile.measured else 'estimated from operations and bytes'}. "
        + "Speed is relative to the best equal pipelines"
        + ("." if equal is not None else ", of which none fit."),
    )  # fmt: skip
    seen = Counter((shape_of(plan), plan.schedule_names) for plan in plans)
    for plan in plans:
        summary.add_row(
            shape_of(plan) + (f": {_shares(plan)} units" if seen[shape_of(plan), plan.schedule_names] > 1 else ""),
            plan.schedule_names,
            f"{plan.seconds:.4g} s",
            f"{plan.bubble:.1%}",
            readable(plan.fullest[1].total),
            "" if equal is None else f"{equal.seconds / plan.seconds:.2f}",
        )
    first = plans[0]
    details = f"The first of them sends {readable(first.bytes_on_links)} a step. Its pipelines:"
    return f"{as_text(summary, *words, details, *_pipelines(first))}\n{to_paste(first)}"


def section_of(plan: Plan) -> dict[str, Any] | None:
    """A plan as the configuration of `initialize`; None if its pipelines differ, as then the plugin forms them."""
    if not plan.has_equal_pipelines:
        return None
    first, about = plan.pipelines[0], plan.job.profile.about
    section: dict[str, Any] = {"pipeline_parallel_size": len(first.devices)}
    if "microbatch" in about:
        section["microbatch_size"] = about["microbatch"]
    if plan.job.sharded:
        section["sharded_optimizer"] = True
    if plan.job.context_parallel_size > 1:
        section["context_parallel_size"] = plan.job.context_parallel_size
    if "loss_chunk_tokens" in about:
        section["loss_chunk_tokens"] = about["loss_chunk_tokens"]
    if len(first.stages) > 1:
        section["split_points"] = [units[0] for units in first.stage_names[1:]]
        section["schedule"] = first.schedule.name
    return {"model_parallelism": section}


def code_of(plan: Plan) -> str:
    """A plan as calls of the plugin."""
    about, named = plan.job.profile.about, {"microbatch": "microbatch_size", "loss_chunk_tokens": "loss_chunk_tokens"}
    options = [f"{option}={about[key]}" for key, option in named.items() if key in about]
    names: dict[tuple[tuple[str, ...], ...], str] = {}
    lines, schedules = ["modules = PipelineTemplate.get_modules(model)"], {}
    for pipeline in plan.pipelines:
        key = tuple(map(tuple, pipeline.stage_names))
        if key in names:
            continue
        name = names[key] = f"template_{len(names)}"
        ends = list(accumulate(map(len, key)))
        bounds = [
            f"{'' if begin == 0 else begin}:{'' if end == ends[-1] else end}" for begin, end in pairwise([0, *ends])
        ]
        lines += [f'{name} = PipelineTemplate("{plan.job.profile.model}", [']
        lines += [f"    modules[{each}]," for each in bounds]
        lines += ["])"]
        schedules[name] = pipeline.schedule.name
    every = ", ".join(f'{name}: "{schedule}"' for name, schedule in schedules.items())
    options += [f"schedule={{{every}}}"]
    options += ["sharded_optimizer=True"] * bool(plan.job.sharded)
    parts = plan.job.context_parallel_size
    options += [f"context_parallel_size={parts}"] * (parts > 1)
    lines += ["plugin = HeterogeneousParallelPlugin(", *(f"    {option}," for option in options), ")"]
    placed = [names[tuple(map(tuple, pipeline.stage_names))] for pipeline in plan.pipelines]
    counts = [pipeline.schedule.num_microbatches for pipeline in plan.pipelines]
    lines += ["plugin.set_pipelines(", f"    [{', '.join(placed)}],", f"    {counts},", ")"]
    return "\n".join(lines)


def to_paste(plan: Plan) -> str:
    """How to have a plan run: on which devices, and the configuration, or code where pipelines differ."""
    cluster, section = plan.job.cluster, section_of(plan)
    lines = []
    if len(cluster.classes) > 1:
        placed = [pipeline.devices for pipeline in plan.pipelines for _ in range(plan.job.context_parallel_size)]
        kinds = (cluster.kind_of(device).name for device in chain(*placed))
        runs = [(kind, len(list(those))) for kind, those in groupby(kinds)]
        order = ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in runs)
        lines.append(
            as_text(
                f"The devices from rank 0 on: {order}. A machine's ranks take its devices in the "
                "order of CUDA_VISIBLE_DEVICES; without it CUDA puts the fastest first."
            )
        )
    if section is None:
        return "\n".join([*lines, "The pipelines differ, so HeterogeneousParallelPlugin forms them:", code_of(plan)])
    flat = json.dumps(section)
    return "\n".join([*lines, flat if len(flat) <= WIDTH else json.dumps(section, indent=1)])


# The columns of what takes a device's memory, by its names in `Way.bytes_by_kind`.
MEMORY_COLUMNS = {
    "weights": "weights", "gradients": "grads", "optimizer": "Adam", "activations": "act.", "logits": "logits",
    "messages": "msgs",
}  # fmt: skip


def fit_text(
    ways: Sequence[Way], about: str, samples: int, tokens: int | None, enable: str, every_way: bool = False
) -> str:
    """The verdict, a row for each recipe or for every way, the devices, and the configuration of the best.

    Args:
        samples: in a step.
        tokens: in a sample; None if it is no sequence of tokens.
        enable: the model's method that has activations recomputed.
    """
    chosen = best(ways)
    of_recipes = [list(those) for _, those in groupby(ways, attrgetter("recipe"))]
    shown = ways if every_way else [best(those) or nearest(those) for those in of_recipes]
    parts = [way.bytes_by_kind() for way in shown]
    unit, scale = unit_of(max(max(row.values()) for row in parts))
    table = Table(
        Column("way", no_wrap=True), Column("with"),
        *(Column(name, justify="right", no_wrap=True) for name in MEMORY_COLUMNS.values()),
        Column("fits", justify="center"), Column("tok/s" if tokens else "samples/s", justify="right"),
        box=None, padding=(0, 1, 0, 0),
    )  # fmt: skip
    title = f"{about}. The fullest device, in {unit}. ckpt: activations recomputed; chunk: loss_chunk_tokens"
    title += "; both: the two" * any(way.checkpointing and way.loss_chunk_tokens is not None for way in shown)
    title += "; sharded: ranks with the same weights divide the optimizer's state" * any(
        way.recipe.sharded for way in shown
    )
    title += "; parts: devices that share every sequence" * any(way.context_parallel_size > 1 for way in shown)
    title += "; the best of each way (--all shows more)" * (len(shown) < len(ways))
    for way, by_kind in zip(shown, parts, strict=True):
        sizes = [f"{by_kind[name] / scale:.2f}" for name in MEMORY_COLUMNS]
        chunks = bool(way.loss_chunk_tokens)
        marks = "both" if way.checkpointing and chunks else "ckpt" * way.checkpointing + "chunk" * chunks
        if way.context_parallel_size > 1:
            marks += ", " * bool(marks) + f"{way.context_parallel_size} parts"
        rate = samples * (tokens or 1) / way.plan.seconds if way.plan else math.nan
        speed = "" if math.isnan(rate) else f"{rate:,.0f}" if tokens else f"{rate:.3g}"
        table.add_row(way.recipe.name, marks, *sizes, "yes" if way.plan else "no", speed)
    if chosen is None or chosen.plan is None:
        least = nearest(ways)
        verdict = f"It does not fit in any of these ways. Nearest is {least.recipe.name}: {least.reason}"
        return as_text(verdict, title, table)
    plan = chosen.plan
    limited = all(math.isfinite(kind.memory) for kind in plan.job.cluster.classes)
    verdict = "It fits: " if limited else "Without a limit of memory (--memory 24GB) the fastest is: "
    verdict += chosen.recipe.name + ", activations recomputed" * chosen.checkpointing
    verdict += ", loss in chunks" * (chosen.loss_chunk_tokens is not None)
    if chosen.context_parallel_size > 1:
        verdict += f", {chosen.context_parallel_size} devices to a sequence, which stand as one rank below"
    verdict += f", {shape_of(plan)} (ranks x microbatches); the fullest device needs {readable(plan.fullest[1].total)}."
    lines = [as_text(verdict, title, table, *_pipelines(plan)), to_paste(plan)]
    lines += [f"dtype={chosen.recipe.dtype} in from_pretrained"] * (chosen.recipe.dtype != torch.float32)
    lines += [f"model.{enable}()"] * chosen.checkpointing
    lines += chosen.recipe.lines
    return "\n".join(lines)


def draw_memory(ways: Sequence[Way], path: Path) -> Path:
    """A bar for each device of the best way, or of the one that needs least."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'penstock[plot]'") from None
    way = best(ways) or nearest(ways)
    unit, scale = unit_of(max(memory.total for memory in way.shown.memory))
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    bottom = [0.0] * len(way.shown.memory)
    for name in ("weights", "gradients", "optimizer", "activations"):
        sizes = [getattr(memory, name) / scale for memory in way.shown.memory]
        axes.bar(range(len(sizes)), sizes, bottom=bottom, label=name)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    axes.set(xlabel="rank", ylabel=unit, title=way.recipe.name, xticks=range(len(bottom)))
    axes.legend()
    figure.savefig(path)
    return path


def _pipelines(plan: Plan) -> Iterator[Table]:
    """A table for each pipeline, or for several alike that follow each other."""
    cluster = plan.job.cluster
    rows: list[list[tuple[str, ...]]] = []
    for first, pipeline in zip(plan.simulation.first_ranks, plan.pipelines, strict=True):
        rows.append([])
        for rank, device in enumerate(pipeline.devices):
            units = [compact([unit.name for unit in pipeline.stages[s]]) for s in pipeline.schedule.stages_of(rank)]
            kind = cluster.kind_of(device)
            limit = f" of {readable(kind.memory)}" if math.isfinite(kind.memory) else ""
            needed = readable(plan.memory[first + rank].total)
            some = plan.job.checkpointing == "stages" and plan.recomputing[first + rank]
            rows[-1].append((str(first + rank), kind.name, "; ".join(units) + " (recomputed)" * some, needed + limit))

    def look(index: int) -> object:
        return plan.pipelines[index].schedule.num_microbatches, [row[1:] for row in rows[index]]

    for _, group in groupby(range(len(rows)), look):
        alike = list(group)
        count = plan.pipelines[alike[0]].schedule.num_microbatches
        which = f"pipeline {alike[0]}" if len(alike) == 1 else f"pipelines {alike[0]} to {alike[-1]}, each"
        nodes = sorted({cluster.node_of_device[device] for index in alike for device in plan.pipelines[index].devices})
        where = f" on node {nodes[0]}" if len(nodes) == 1 else f" on nodes {nodes[0]} to {nodes[-1]}"
        table = Table(
            Column("rank", justify="right"), "device", Column("units", overflow="fold"),
            Column("memory", justify="right"),
            title=f"{which}: {count} microbatch{'es' * (count != 1)}"
            + (where if cluster.node_sizes else "")
            + (" (ranks are the first one's)" if len(alike) > 1 else ""),
            title_justify="left",
        )  # fmt: skip
        for row in rows[alike[0]]:
            table.add_row(*row)
        yield table


def shape_of(plan: Plan) -> str:
    """The pipelines as ranks x microbatches: `1x3, 2x5`; several alike as `4 of 2x5`."""
    shapes = sorted((len(pipeline.devices), pipeline.schedule.num_microbatches) for pipeline in plan.pipelines)
    texts = []
    for (ranks, count), alike in groupby(shapes):
        number = len(list(alike))
        texts.append(f"{ranks}x{count}" if number == 1 else f"{number} of {ranks}x{count}")
    return ", ".join(texts)


def _shares(plan: Plan) -> str:
    """How many units each rank has, and on which device where they are not alike."""
    cluster = plan.job.cluster
    named = len(cluster.classes) > 1
    return ", ".join(
        "-".join(
            str(sum(len(pipeline.stages[stage]) for stage in pipeline.schedule.stages_of(rank)))
            + f" {cluster.kind_of(device).name}" * named
            for rank, device in enumerate(pipeline.devices)
        )
        for pipeline in plan.pipelines
    )


def plan_data(plan: Plan, equal: Plan | None) -> dict[str, Any]:
    """A plan for JSON. Seconds and bytes are plain numbers."""
    cluster = plan.job.cluster
    pipelines = []
    for first, pipeline in zip(plan.simulation.first_ranks, plan.pipelines, strict=True):
        kinds = [cluster.kind_of(device).name for device in pipeline.devices]
        pipelines.append(
            {
                "stages": pipeline.stage_names,
                "rank of each stage": list(pipeline.schedule.stage_to_rank),
                "devices": kinds,
                "nodes": [cluster.node_of_device[device] for device in pipeline.devices],
                "microbatches": pipeline.schedule.num_microbatches,
                "recomputing": list(plan.recomputing[first : first + len(kinds)]),
                "bytes of each rank": [memory.total for memory in plan.memory[first : first + len(kinds)]],
            }
        )
    return {
        "model": plan.job.profile.model,
        "measured": plan.job.profile.measured,
        "sharded optimizer": bool(plan.job.sharded),
        "schedule": plan.schedule_names,
        "seconds": plan.seconds,
        "bubble": plan.bubble,
        "bytes on links": plan.bytes_on_links,
        "configuration": section_of(plan),
        "code": code_of(plan),
        "speed over equal pipelines": None if equal is None else equal.seconds / plan.seconds,
        "pipelines": pipelines,
    }

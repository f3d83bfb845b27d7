"""`penstock simulate` and `penstock draw`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from penstock.schedule.actions import Schedule
from penstock.schedule.registry import SCHEDULES, schedule_names
from penstock.schedule.text import load_schedule, resolve_schedule
from penstock.simulation.simulate import Costs, divide_over_stages, lower_bound
from penstock.simulation.simulate import simulate as simulate_schedule
from penstock.simulation.timeline import write_timeline
from penstock.tables import wrapped

_NAMES = ", ".join(f"{name} ({row.summary})" for name, row in SCHEDULES.items())
SCHEDULE = f"{_NAMES}, or a .csv file in torch's text form (0F0,0F1,0B0,...)"
_ANY = ", ".join(name for name, row in SCHEDULES.items() if row.any_stages_per_rank)
Ranks = Annotated[int | None, typer.Option("--ranks", "-p", help="Ranks of the pipeline (default: 4, or the file's).")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Per step (default: 8, or the file's).")]
StagesPerRank = Annotated[int | None, typer.Option(help=f"For {_ANY} (default: the schedule's own).")]
_PER_RANK = "one number, or one per rank with commas"
Forward = Annotated[str, typer.Option(help=f"Seconds of a forward through all stages of a rank: {_PER_RANK}.")]
Backward = Annotated[str, typer.Option(help=f"Seconds of the backward for the input's gradient: {_PER_RANK}.")]
Weight = Annotated[str, typer.Option(help=f"Seconds of the backward for the weights' gradients: {_PER_RANK}.")]
Latency = Annotated[float, typer.Option(help="Seconds that a message is under way, whatever its size.")]
Bandwidth = Annotated[float, typer.Option(help="Bytes per second of a link, in each direction.")]
MessageBytes = Annotated[float, typer.Option(help="Bytes of the activations of a microbatch at a boundary.")]
ActivationBytes = Annotated[str, typer.Option(help=f"Bytes held for a microbatch until its backward: {_PER_RANK}.")]


def simulate(
    schedules: Annotated[
        list[str] | None, typer.Argument(help=f"{SCHEDULE} (default: all names).", show_default=False)
    ] = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    forward: Forward = "1",
    backward: Backward = "1",
    weight: Weight = "1",
    latency: Latency = 0.0,
    bandwidth: Bandwidth = float("inf"),
    message_bytes: MessageBytes = 0.0,
    activation_bytes: ActivationBytes = "1",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Predict a step's time, bubble and memory under one or several schedules, on the same work.

    Example: penstock simulate 1f1b zb-h1 -p 4 -m 16 --forward 1,1,1,1.3 --latency 0.01
    """
    if stages_per_rank is not None and not schedules:
        raise ValueError(f"--stages-per-rank {stages_per_rank} is of a schedule by name: give {_ANY} too")
    names = schedules or schedule_names()
    ranks, microbatches = _numbers(names, ranks, microbatches)
    table = Table(
        Column("schedule", no_wrap=True), *(Column(name, justify="right") for name in ("seconds", "at best", "bubble")),
        "bubble of each rank", "held by each rank",
        title=f"{ranks} ranks, {microbatches} microbatches",
        caption="at best: no order of these actions is faster; held: "
        + ("microbatches, at most" if activation_bytes == "1" else "bytes of activations, at most"),
    )  # fmt: skip
    data = []
    for name in names:
        schedule = resolve_schedule(name, ranks, microbatches, stages_per_rank)
        numbers = {"forward": forward, "backward": backward, "weight": weight, "activation_bytes": activation_bytes}
        costs = _costs(schedule, numbers, latency=latency, bandwidth=bandwidth, message_bytes=message_bytes)
        result = simulate_schedule(schedule, costs)
        best = lower_bound(schedule.stage_to_rank, microbatches, costs)
        data.append(
            {
                "schedule": schedule.name,
                "ranks": ranks,
                "microbatches": microbatches,
                "seconds": result.makespan,
                "seconds_at_best": best,
                "bubble": result.bubble_fraction,
                "bubble_of_each_rank": list(result.bubble),
                "held_by_each_rank": list(result.peak_bytes),
            }
        )
        figures = f"{result.makespan:.6g}", f"{best:.6g}", f"{result.bubble_fraction:.1%}"
        of_ranks = _each(result.bubble, "{:.0%}"), _each(result.peak_bytes, "{:.4g}")
        table.add_row(schedule.name, *figures, *of_ranks)
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        Console().print(table)


def draw(
    schedule: Annotated[str, typer.Argument(help=f"{SCHEDULE}.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="An .svg picture, or .json for ui.perfetto.dev (default: SCHEDULE.svg)."),
    ] = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    forward: Forward = "1",
    backward: Backward = "1",
    weight: Weight = "1",
    latency: Latency = 0.0,
    bandwidth: Bandwidth = float("inf"),
    message_bytes: MessageBytes = 0.0,
) -> None:
    """Draw the timeline that a schedule has at given costs.

    Example: penstock draw zb-h1 -p 4 -m 8 -o zb-h1.svg
    """
    chosen = resolve_schedule(schedule, *_numbers([schedule], ranks, microbatches), stages_per_rank)
    numbers = {"forward": forward, "backward": backward, "weight": weight}
    costs = _costs(chosen, numbers, latency=latency, bandwidth=bandwidth, message_bytes=message_bytes)
    result = simulate_schedule(chosen, costs)
    relative = (forward, backward, weight, latency, bandwidth) == ("1", "1", "1", 0.0, float("inf"))
    seconds = "" if relative else f"{result.makespan:.4g} s, "
    title = (
        f"{chosen.name}: {chosen.num_ranks} ranks, {chosen.num_microbatches} microbatches, "
        f"{seconds}bubble {result.bubble_fraction:.1%}"
    )
    path = write_timeline(result.events, output or f"{chosen.name}.svg", title, relative)
    print(wrapped(f"{title}: {path}"))


def _numbers(names: Sequence[str], ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """Ranks and microbatches: those given, else those of the first schedule that is a file, else 4 and 8."""
    usual = 4, 8
    if (file := next((name for name in names if name.endswith(".csv")), None)) and None in (ranks, microbatches):
        written = load_schedule(file)
        usual = written.num_ranks, written.num_microbatches
    return usual[0] if ranks is None else ranks, usual[1] if microbatches is None else microbatches


def _costs(schedule: Schedule, numbers: dict[str, str], **of_links: float) -> Costs:
    """Costs per stage from numbers per rank, which the rank's stages share."""
    of_stages = {}
    for name, text in numbers.items():
        option = f"--{name.replace('_', '-')}"
        try:
            given = [float(number) for number in text.split(",")]
        except ValueError:
            raise ValueError(f"{option} must be {_PER_RANK}, but is {text!r}") from None
        per_rank = given * schedule.num_ranks if len(given) == 1 else given
        if len(per_rank) != schedule.num_ranks:
            raise ValueError(
                f"{option} has {len(given)} numbers, but the pipeline has {schedule.num_ranks} ranks"
                ": give one for each rank"
            )
        of_stages[name] = divide_over_stages(per_rank, schedule)
    return Costs(**of_stages, **of_links)


def _each(values: Sequence[float], form: str) -> str:
    """One value for each rank; one for all where they are equal, and their range where they are many."""
    texts = [form.format(value) for value in values]
    if len(set(texts)) == 1:
        return f"{texts[0]} each"
    if len(texts) > 8:
        return f"{form.format(min(values))} to {form.format(max(values))}"
    return " ".join(texts)

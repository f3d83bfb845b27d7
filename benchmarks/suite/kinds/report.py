"""The figures of several runs side by side: a table, two files against each other, a picture. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from kinds.result_files import Run, Runs, flat

# Figures of which more is better and less is better, as `compare` lists them.
COMPARED = {
    "tokens_per_second_per_device": ("tokens/s/device", 1.0, True),
    "samples_per_second_per_device": ("samples/s/device", 1.0, True),
    "seconds": ("ms/step", 1e3, False),
    "mfu": ("MFU %", 100.0, True),
    "peak_memory_bytes": ("peak MB", 1e-6, False),
}
# The phases of a step in the picture.
COLOURS = {"forward": "#4c78a8", "backward": "#9ecae9", "optimizer": "#f58518"}


def tables_of(suite: Mapping[str, Any]) -> tuple[Table, Table]:
    """The tables of a suite, with a row for each run: its figures, and its times. The first has a row for each
    failure, too."""
    runs: Runs = suite["runs"]
    sample = next(iter(runs.values()), None)
    unit = "tokens" if sample is None or _rate(sample)[1] == "tokens" else "samples"
    title = None
    if sample is not None:
        options = sample["options"]
        title = (
            f"{options['model']}, {sample['figures']['parameters'] / 1e6:.4g} M parameters, {options['dtype']}, batch "
            f"{options['batch_size']}, {suite['devices']} devices ({sample['environment']['device']})"
        )
    figures_table = Table(
        Column("mode", overflow="fold"),
        *(Column(name, justify="right") for name in (f"{unit} /s/device", "ms/step", "MFU", "pipeline", "peak MB",
          "last loss")),
        title=title,
        caption=_caption(suite),
    )  # fmt: skip
    times = Table(
        Column("mode", overflow="fold"),
        *(Column(name, justify="right") for name in ("min to max", "forward", "backward", "optimizer")),
        title="ms of a step",
    )
    best = max((_rate(run)[0] for run in runs.values()), default=0.0)
    for name, run in runs.items():
        figures = run["figures"]
        rate = _rate(run)[0]
        efficiency = figures["pipeline_efficiency"]
        figures_table.add_row(
            name,
            Text(f"{rate:.5g}", style="bold green" if rate == best else ""),
            f"{figures['seconds'] * 1e3:.4g}",
            f"{figures['mfu']:.1%}",
            "" if efficiency is None else f"{efficiency:.1%}",
            f"{figures['peak_memory_bytes'] / 1e6:.4g}",
            f"{run['losses'][-1]:.5f}",
        )
        times.add_row(
            name,
            f"{figures['seconds_least'] * 1e3:.4g} to {figures['seconds_most'] * 1e3:.4g}",
            *(f"{figures[f'{phase}_seconds'] * 1e3:.4g}" for phase in ("forward", "backward", "optimizer")),
        )
    for name in suite["failures"]:
        figures_table.add_row(name, Text("failed", style="red"))
    return figures_table, times


def _caption(suite: Mapping[str, Any]) -> str:
    losses = suite["losses"]
    if len(suite["runs"]) < 2:
        return ""
    verdict = "the same losses in all modes" if losses["agree"] else f"LOSSES DIFFER between {losses['between']}"
    return (
        f"times in ms; {verdict} (largest relative difference {losses['largest_difference']:.1e}, allowed "
        f"{losses['tolerance']:.0e}); MFU: share of a measured matrix product's speed; pipeline: share of the time "
        "in which stages computed"
    )


def _rate(run: Run) -> tuple[float, str]:
    tokens = run["figures"]["tokens_per_second_per_device"]
    if tokens is not None:
        return float(tokens), "tokens"
    return float(run["figures"]["samples_per_second_per_device"]), "samples"


def comparison(first: Runs, second: Runs) -> tuple[Table, list[str]]:
    """Two sets of runs: a row for each figure of each run that both have, and what else is different.

    Two single runs are compared whatever their modes are.

    Raises:
        ValueError: they have no run in common.
    """
    if len(first) == len(second) == 1 and first.keys() != second.keys():
        name = f"{next(iter(first))} and {next(iter(second))}"
        first, second = {name: next(iter(first.values()))}, {name: next(iter(second.values()))}
    shared = [name for name in first if name in second]
    if not shared:
        raise ValueError(f"the files have no mode in common: {', '.join(first)} and {', '.join(second)}")
    table = Table(
        "mode",
        "figure",
        Column("a", justify="right"),
        Column("b", justify="right"),
        Column("b / a", justify="right"),
        caption="green: b is better, red: worse; dim: the steps' quartiles overlap, so it may be noise",
    )
    for name in shared:
        mine, theirs = first[name]["figures"], second[name]["figures"]
        for key, (label, scale, more_is_better) in COMPARED.items():
            if mine[key] is None or theirs[key] is None:
                continue
            ratio = theirs[key] / mine[key] if mine[key] else float("nan")
            style = "green" if (ratio > 1) == more_is_better and ratio != 1 else "red" if ratio != 1 else ""
            if key != "peak_memory_bytes" and _overlap(mine, theirs):
                style = "dim"
            cells = (f"{figures[key] * scale:.5g}" for figures in (mine, theirs))
            table.add_row(name, label, *cells, Text(f"{ratio:.3f}", style=style))
        table.add_section()
    return table, _differences(first, second, shared)


def _overlap(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    (low, high), (other_low, other_high) = mine["seconds_quartiles"], theirs["seconds_quartiles"]
    return bool(low <= other_high and other_low <= high)


def _differences(first: Runs, second: Runs, shared: list[str]) -> list[str]:
    """What beside the figures is different between runs of one name, and runs that only one side has."""
    lines: dict[str, None] = {}
    for name in shared:
        for section in ("options", "environment"):
            mine, theirs = (dict(flat(runs[name][section])) for runs in (first, second))
            for key in {**mine, **theirs}:
                if key not in ("date", "load_average", "output") and mine.get(key) != theirs.get(key):
                    lines[f"{name}: {key} is {mine.get(key)} in a, {theirs.get(key)} in b"] = None
    for label, runs in (("a", first), ("b", second)):
        if only := [name for name in runs if name not in shared]:
            lines[f"only in {label}: {', '.join(only)}"] = None
    return list(lines)


def write_plots(suite: Mapping[str, Any], folder: str | os.PathLike[str], stem: str = "results") -> list[Path]:
    """Write `<stem>.svg` and `<stem>.png`: speed with its quartiles, the step's phases, memory, and MFU of every run.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no run to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install penstock[plot]") from error
    runs: Mapping[str, Mapping[str, Any]] = suite["runs"]
    if not runs:
        raise ValueError("there is no run to draw")
    names = list(runs)
    figures = [runs[name]["figures"] for name in names]
    positions = range(len(names))
    picture = Figure(figsize=(11.0, 6.5), layout="constrained")
    FigureCanvasAgg(picture)
    speed, phases, memory, utilisation = picture.subplots(2, 2).flat

    unit = "samples" if figures[0]["tokens_per_second_per_device"] is None else "tokens"
    rates = [entry[f"{unit}_per_second_per_device"] for entry in figures]
    # Where the rates of the slower and the faster quarter of the steps begin, as distances from the median's.
    slower, faster = [], []
    for rate, entry in zip(rates, figures, strict=True):
        low, high = entry["seconds_quartiles"]
        slower.append(max(0.0, rate - rate * entry["seconds"] / high))
        faster.append(max(0.0, rate * entry["seconds"] / low - rate))
    speed.bar(positions, rates, yerr=[slower, faster], capsize=4, color="#4c78a8")
    speed.set_title(f"{unit}/s per device (bars: quartiles of the steps)")

    bottoms = [0.0] * len(names)
    for phase, colour in COLOURS.items():
        heights = [entry[f"{phase}_seconds"] * 1e3 for entry in figures]
        phases.bar(positions, heights, bottom=bottoms, label=phase, color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    rest = [max(0.0, entry["seconds"] * 1e3 - bottom) for entry, bottom in zip(figures, bottoms, strict=True)]
    phases.bar(positions, rest, bottom=bottoms, label="waiting, other", color="#e4e4e4")
    phases.set_title("ms per step")
    phases.legend(fontsize=8)

    memory.bar(positions, [entry["peak_memory_bytes"] / 1e6 for entry in figures], color="#72b7b2")
    memory.set_title("peak memory of the fullest process, MB")
    utilisation.bar(positions, [entry["mfu"] * 100 for entry in figures], color="#54a24b")
    utilisation.set_title("model FLOPs utilisation, % of a measured matrix product")

    for axes in (speed, phases, memory, utilisation):
        axes.set_xticks(positions, names, rotation=20 if max(map(len, names)) > 8 else 0)
        axes.spines[["top", "right"]].set_visible(False)
    options, place = runs[names[0]]["options"], runs[names[0]]["environment"]
    picture.suptitle(
        f"{options['model']}, {figures[0]['parameters'] / 1e6:.4g} M parameters, {options['dtype']}, batch "
        f"{options['batch_size']}, {figures[0]['devices']} devices ({place['device']}), {place['date']}"
    )
    paths = [Path(folder) / f"{stem}.{ending}" for ending in ("svg", "png")]
    for path in paths:
        picture.savefig(path)
    return paths

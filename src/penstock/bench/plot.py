"""All modes side by side as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PHASES = {"forward": "#4c78a8", "backward": "#9ecae9", "optimizer": "#f58518"}


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
    for phase, colour in PHASES.items():
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

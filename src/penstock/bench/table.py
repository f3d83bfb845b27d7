"""The figures of several runs side by side: as a table, as CSV, and two files against each other. Imports no torch."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

Run = Mapping[str, Any]
Runs = Mapping[str, Run]

# Figures of which more is better and less is better, as `compare` lists them.
COMPARED = {
    "tokens_per_second_per_device": ("tokens/s/device", 1.0, True),
    "samples_per_second_per_device": ("samples/s/device", 1.0, True),
    "seconds": ("ms/step", 1e3, False),
    "mfu": ("MFU %", 100.0, True),
    "peak_memory_bytes": ("peak MB", 1e-6, False),
}


def read_runs(path: str | os.PathLike[str]) -> dict[str, Run]:
    """The runs in a result file of `penstock bench`, or the one in a file of the trainer's.

    Raises:
        ValueError: it is neither.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if isinstance(content, dict) and isinstance(content.get("runs"), dict):
        return dict(content["runs"])
    if isinstance(content, dict) and "figures" in content and "options" in content:
        return {content["options"]["mode"]: content}
    raise ValueError(f"{path} is no result file of `penstock bench` or of the trainer")


def table_of(suite: Mapping[str, Any]) -> Table:
    """The table of a suite: a row for each run, and for each failure."""
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
    table = Table(
        Column("mode", no_wrap=True),
        *(Column(name, justify="right") for name in (f"{unit}/s/device", "ms/step", "min to max",
          "forward + backward + optimizer", "MFU", "pipeline", "peak MB", "last loss")),
        title=title,
        caption=_caption(suite),
    )  # fmt: skip
    best = max((_rate(run)[0] for run in runs.values()), default=0.0)
    for name, run in runs.items():
        figures = run["figures"]
        rate = _rate(run)[0]
        efficiency = figures["pipeline_efficiency"]
        table.add_row(
            name,
            Text(f"{rate:.5g}", style="bold green" if rate == best else ""),
            f"{figures['seconds'] * 1e3:.4g}",
            f"{figures['seconds_least'] * 1e3:.4g} to {figures['seconds_most'] * 1e3:.4g}",
            " + ".join(f"{figures[f'{phase}_seconds'] * 1e3:.4g}" for phase in ("forward", "backward", "optimizer")),
            f"{figures['mfu']:.1%}",
            "" if efficiency is None else f"{efficiency:.1%}",
            f"{figures['peak_memory_bytes'] / 1e6:.4g}",
            f"{run['losses'][-1]:.5f}",
        )
    for name in suite["failures"]:
        table.add_row(name, Text("failed", style="red"))
    return table


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


def write_csv(suite: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """One line for each run: its name, its options, its figures."""
    rows = [
        {"name": name} | dict(_flat(run["options"], "")) | dict(_flat(run["figures"], ""))
        for name, run in suite["runs"].items()
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row)) or ["name"]
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", json.dumps(value)
        else:
            yield f"{prefix}{name}", value


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
            mine, theirs = (dict(_flat(runs[name][section], "")) for runs in (first, second))
            for key in {**mine, **theirs}:
                if key not in ("date", "load_average", "output") and mine.get(key) != theirs.get(key):
                    lines[f"{name}: {key} is {mine.get(key)} in a, {theirs.get(key)} in b"] = None
    for label, runs in (("a", first), ("b", second)):
        if only := [name for name in runs if name not in shared]:
            lines[f"only in {label}: {', '.join(only)}"] = None
    return list(lines)

"""Result files: what they record about the run, and how they are written and read. Imports no torch."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import penstock

# Changes when a field of a result file changes its meaning.
FORMAT = 1

Run = Mapping[str, Any]
Runs = Mapping[str, Run]


def environment(device: str | None = None) -> dict[str, Any]:
    """Date, versions, machine, and how busy it was.

    Args:
        device: the name of what computes, if that is not the processor.
    """
    # Penstock's is that of the code that runs: an editable installation keeps the version that it had when it was made.
    versions: dict[str, str | None] = {"penstock": penstock.__version__}
    for package in ("torch", "transformers", "deepspeed"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "device": device or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def speed_figures(
    seconds: Sequence[float], samples: int, tokens: int | None, devices: int, flops: float, peak: float
) -> dict[str, Any]:
    """What follows from the seconds of the steps.

    Args:
        samples, tokens, flops: of a step, over all devices; None tokens where samples have none.
        peak: operations per second that a device can do at best.
    """
    median = statistics.median(seconds)
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [median] * 3
    return {
        "seconds": median,
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "seconds_quartiles": (lower, upper),
        "samples_per_second_per_device": samples / median / devices,
        "tokens_per_second_per_device": None if tokens is None else tokens / median / devices,
        "mfu": flops / median / devices / peak,
    }


def write_json(content: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a result file, whole or not at all; its folder is made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, target)


def write_csv(suite: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """One line for each run: its name, its options, its figures."""
    rows = [
        {"name": name} | dict(flat(run["options"])) | dict(flat(run["figures"])) for name, run in suite["runs"].items()
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row)) or ["name"]
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def read_runs(path: str | os.PathLike[str]) -> dict[str, Run]:
    """The runs in a result file of `penstock bench`, or the one in a file of the trainer's.

    Raises:
        ValueError: it is neither.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if isinstance(content, dict) and isinstance(content.get("runs"), dict):
        return dict(content["runs"])
    if isinstance(content, dict) and "figures" in content and "options" in content:
        return {content["options"]["mode"]: content}
    raise ValueError(f"{path} is not a result file of `penstock bench` or of the trainer")


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by the path of their names, with dots."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", json.dumps(value)
        else:
            yield f"{prefix}{name}", value

"""`penstock simulate --cluster`: goodput of a cluster whose devices fail."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from rich.table import Column, Table

from penstock.pictures.tables import as_text
from penstock.planning.goodput import (
    STRATEGIES,
    Operation,
    best_interval,
    compare,
    expected_share,
    random_failures,
    read_failures,
)

HOUR, DAY = 3600.0, 86400.0
# Of the picture: mean times between failures, as parts of the one asked for.
PARTS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SEEDS = 5


def simulate_cluster(
    devices: int, mtbf_hours: float, checkpoint_minutes: float | None, days: float, saving: float,
    restart_minutes: float, recovery: float, repair_hours: float, spares: int | None, failures: Path | None,
    plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Print the goodput of each strategy, and draw it over the time between failures."""
    mtbf, horizon = mtbf_hours * HOUR, days * DAY
    if not (mtbf > 0 and horizon > 0 and min(saving, restart_minutes, recovery, repair_hours) >= 0):
        raise ValueError("times must be positive")
    best = best_interval(saving, mtbf / devices)
    interval = best if checkpoint_minutes is None else checkpoint_minutes * 60
    if not interval > 0:
        raise ValueError(f"--checkpoint-minutes must be positive, but is {checkpoint_minutes}")
    operation = Operation(
        devices, interval, saving, restart_minutes * 60, recovery, repair=repair_hours * HOUR,
        spares=_enough(devices, mtbf, repair_hours * HOUR) if spares is None else spares,
    )  # fmt: skip
    if not 0 <= operation.spares < devices:
        raise ValueError(f"--spares must be from 0 to {devices - 1}, but is {operation.spares}")
    if failures is not None:
        traces = [read_failures(failures)]
    else:
        traces = [random_failures(devices, mtbf, horizon, seed) for seed in range(SEEDS)]
    shares = _mean(operation, traces, horizon)
    expected = expected_share(best, saving, operation.restart, mtbf / devices)
    if as_json:
        data = {
            "devices": devices,
            "days": days,
            "failures": sum(map(len, traces)) / len(traces),
            "spares": operation.spares,
            "checkpoint_minutes": interval / 60,
            "best_checkpoint_minutes": best / 60,
            "goodput": shares,
            "goodput_of_restarts_by_formula": expected,
        }
        print(json.dumps(data, indent=1))
        if plot is not None:
            _draw(operation, mtbf, horizon, plot)
        return
    table = Table(
        Column("strategy", no_wrap=True), Column("goodput", justify="right"),
        title=f"{devices} devices, {sum(map(len, traces)) / len(traces):.0f} failures in {days:g} days",
        caption=f"goodput: lasting work over that of {devices} devices that never fail nor save; "
        f"{operation.spares} spares",
    )  # fmt: skip
    for strategy, share in shares.items():
        table.add_row(strategy, f"{share:.1%}")
    print(as_text(table))
    sentence = (
        f"checkpoints every {interval / 60:.1f} minutes of work; the best interval by Young and Daly is "
        f"{best / 60:.1f} minutes, with which restarts at full speed would reach {expected:.1%}"
    )
    print(as_text(sentence))
    if plot is not None:
        print(f"drawn to {_draw(operation, mtbf, horizon, plot)}")


def _mean(operation: Operation, traces: list[list[float]], horizon: float) -> dict[str, float]:
    results = [compare(operation, trace, horizon) for trace in traces]
    return {strategy: sum(result[strategy] for result in results) / len(results) for strategy in STRATEGIES}


def _enough(devices: int, mtbf: float, repair: float) -> int:
    """Spares for the mean number of devices in repair at a time, plus three standard deviations."""
    expected = devices * repair / mtbf
    return min(devices - 1, math.ceil(expected + 3 * math.sqrt(expected)))


def _draw(operation: Operation, mtbf: float, horizon: float, path: Path) -> Path:
    """Goodput over the mean time between failures, each with its best checkpoint interval."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'penstock[plot]'") from None
    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    lines: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for part in PARTS:
        now = mtbf * part
        changed = replace(
            operation,
            interval=best_interval(operation.checkpoint, now / operation.devices),
            spares=_enough(operation.devices, now, operation.repair),
        )
        traces = [random_failures(operation.devices, now, horizon, seed) for seed in range(SEEDS)]
        for strategy, share in _mean(changed, traces, horizon).items():
            lines[strategy].append(share)
    figure, axes = plt.subplots(figsize=(7, 4))
    for strategy, shares in lines.items():
        axes.plot([mtbf * part / HOUR for part in PARTS], shares, marker="o", label=strategy)
    axes.set(xscale="log", xlabel="mean hours between failures of a device", ylabel="goodput", ylim=(0, 1.02))
    axes.set_title(f"{operation.devices} devices, each with its best checkpoint interval")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path

"""A model of how much of a cluster's time becomes training, for three ways to live with failing devices.

The model: devices fail one by one, independently, at exponential intervals; each is repaired after a fixed time. A
step's work is lost if a device fails in it. n devices train n / N as fast as all N, or as fast as a plan says.

- **Recovery in the process**: the survivors take up a layout for those that are left within `recovery` seconds, and
  lose the step under way. If another device fails meanwhile, a unit may have no holder left: they restart from the
  last checkpoint.
- **Restart from a checkpoint**: everything since the last checkpoint is lost, `restart` seconds pass, and training goes
  on with the devices that are left.
- **Idle spares**: `spares` devices wait. A failure costs a restart from the checkpoint, but not speed, while spares
  are left; where none is, training waits for a repair.

All three write a checkpoint every `interval` seconds, which takes `checkpoint` seconds.

    python benchmarks/studies/goodput.py 1000 --mtbf-hours 50000 --checkpoint-minutes 30 --plot goodput.svg
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated

import typer

RECOVERY, RESTART, SPARES = STRATEGIES = ("recovery in the process", "restart from a checkpoint", "idle spares")
HOUR, DAY = 3600.0, 86400.0
# Of the picture: mean times between failures, as parts of the one asked for.
PARTS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SEEDS = 5


@dataclass(frozen=True)
class Operation:
    """A cluster in operation. All times are seconds.

    Attributes:
        devices: N.
        interval: between the beginnings of two checkpoints' work.
        checkpoint: that writing one takes.
        restart: from a failure to the first step of a new start.
        recovery: from a failure to the next step in the same processes.
        step: of a step.
        repair: until a failed device is back.
        spares: devices that wait, under "idle spares".
        speed: of n devices, as a share of that of N.
    """

    devices: int
    interval: float
    checkpoint: float = 60.0
    restart: float = 600.0
    recovery: float = 2.0
    step: float = 10.0
    repair: float = 24 * 3600.0
    spares: int = 0
    speed: Callable[[int], float] | None = None

    def speed_of(self, alive: int) -> float:
        return self.speed(alive) if self.speed is not None else alive / self.devices


def random_failures(devices: int, mtbf: float, horizon: float, seed: int = 0) -> list[float]:
    """When one of N devices fails, each with a mean time between failures of `mtbf` seconds, up to `horizon`."""
    draw, now, times = random.Random(seed), 0.0, []
    while (now := now + draw.expovariate(devices / mtbf)) < horizon:
        times.append(now)
    return times


def read_failures(path: str | Path) -> list[float]:
    """Seconds of failures from a file with one time in hours at the beginning of each line.

    Raises:
        ValueError: a line does not begin with a number.
    """
    times = []
    with Path(path).open(newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if row:
                try:
                    times.append(float(row[0]) * 3600)
                except ValueError:
                    if number > 1:  # the first line may be a heading
                        raise ValueError(f"{path}, line {number}: {row[0]!r} is no time in hours") from None
    return sorted(times)


def goodput(operation: Operation, strategy: str, failures: Sequence[float], horizon: float) -> float:
    """Work that lasts up to `horizon`, as a share of what all N devices would do without failures and checkpoints.

    Raises:
        ValueError: an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: known are {', '.join(STRATEGIES)}")
    run = _SimulatedRun(operation, strategy)
    for time in failures:
        if time >= horizon:
            break
        run.advance(time)
        run.fail(time)
    run.advance(horizon)
    return (run.saved + run.unsaved) / horizon


class _SimulatedRun:
    """The state of a simulated run: the work it has done, and when it works again."""

    def __init__(self, operation: Operation, strategy: str) -> None:
        self.operation = operation
        self.strategy = strategy
        self.alive = operation.devices
        self.now = 0.0
        self.busy_until = 0.0  # recovering or restarting
        self.since_checkpoint = 0.0  # seconds of work
        self.saved = self.unsaved = 0.0  # seconds of work of all N devices
        self.repairs: list[float] = []

    def advance(self, until: float) -> None:
        """Work up to `until`."""
        while self.repairs and self.repairs[0] <= until:
            back = heappop(self.repairs)
            self._work(back)
            self.alive += 1
            if self.strategy == RECOVERY:  # a device that joins costs what one that leaves does
                self.busy_until = max(self.busy_until, back + self.operation.recovery)
        self._work(until)

    def _work(self, until: float) -> None:
        operation = self.operation
        now, self.now = max(self.now, min(self.busy_until, until)), until
        rate = self._rate()
        cycle = operation.interval + operation.checkpoint
        while now < until:
            step = min(until - now, cycle - self.since_checkpoint)
            working = max(0.0, min(step, operation.interval - self.since_checkpoint))
            self.unsaved += working * rate
            self.since_checkpoint += step
            now += step
            if self.since_checkpoint >= cycle * (1 - 1e-12):
                self.saved, self.unsaved, self.since_checkpoint = self.saved + self.unsaved, 0.0, 0.0

    def _rate(self) -> float:
        operation = self.operation
        if self.strategy == SPARES:
            needed = operation.devices - operation.spares
            return operation.speed_of(needed) if self.alive >= needed else 0.0
        return operation.speed_of(self.alive) if self.alive else 0.0

    def fail(self, time: float) -> None:
        """A device fails."""
        operation = self.operation
        if not self.alive:
            return
        while_recovering = time < self.busy_until
        self.alive -= 1
        heappush(self.repairs, time + operation.repair)
        spare_failed = self.strategy == SPARES and self._is_spare(time)
        if spare_failed:
            return
        if self.strategy == RECOVERY and not while_recovering:
            self.unsaved = max(0.0, self.unsaved - operation.step / 2 * self._rate())
            self.busy_until = time + operation.recovery
            return
        self.unsaved, self.since_checkpoint = 0.0, 0.0
        self.busy_until = time + operation.restart

    def _is_spare(self, time: float) -> bool:
        """Whether the device that fails was one that waits; drawn by the time, so that a run can be repeated."""
        waiting = max(0, self.alive + 1 - (self.operation.devices - self.operation.spares))
        return random.Random(time).random() < waiting / (self.alive + 1)


def best_interval(checkpoint: float, mtbf: float) -> float:
    """Young's interval of work between checkpoints, sqrt(2 C M), in Daly's better form.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval", equation 37.

    Args:
        checkpoint: seconds C that one takes.
        mtbf: seconds M between failures of the whole cluster: a device's divided by their number.
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(checkpoint / (2 * mtbf))
    return math.sqrt(2 * checkpoint * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - checkpoint


def expected_share(interval: float, checkpoint: float, restart: float, mtbf: float) -> float:
    """The share of time that becomes lasting work with restarts from checkpoints, at full speed after each.

    Daly's expected time of a segment of work and its checkpoint (the same paper, equation 20): M e^(R/M)
    (e^((t + C)/M) - 1).
    """
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf))


def compare(operation: Operation, failures: Sequence[float], horizon: float) -> dict[str, float]:
    """The goodput of each strategy."""
    return {strategy: goodput(operation, strategy, failures, horizon) for strategy in STRATEGIES}


def main(
    devices: Annotated[int, typer.Argument(min=1)] = 1000,
    mtbf_hours: Annotated[float, typer.Option(help="Mean hours between failures of a device.")] = 50000,
    checkpoint_minutes: Annotated[
        float | None, typer.Option(help="Minutes of work between checkpoints (default: the best).")
    ] = None,
    days: Annotated[float, typer.Option(help="Days to simulate.")] = 30,
    saving_seconds: Annotated[float, typer.Option(help="That a checkpoint takes.")] = 60,
    restart_minutes: Annotated[float, typer.Option(help="From a failure to the first step of a new start.")] = 10,
    recovery_seconds: Annotated[float, typer.Option(help="Of a recovery in the process.")] = 2,
    repair_hours: Annotated[float, typer.Option(help="Until a failed device is back.")] = 24,
    spares: Annotated[int | None, typer.Option(help="Devices that wait (default: enough for most times).")] = None,
    failures: Annotated[Path | None, typer.Option(help="A file; each line begins with the hour of a failure.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw goodput over the time between failures.")] = None,
) -> None:
    """Print how much of a cluster's time becomes training while its devices fail, for each strategy."""
    mtbf, horizon = mtbf_hours * HOUR, days * DAY
    best = best_interval(saving_seconds, mtbf / devices)
    interval = best if checkpoint_minutes is None else checkpoint_minutes * 60
    operation = Operation(
        devices, interval, saving_seconds, restart_minutes * 60, recovery_seconds, repair=repair_hours * HOUR,
        spares=_enough(devices, mtbf, repair_hours * HOUR) if spares is None else spares,
    )  # fmt: skip
    if failures is not None:
        traces = [read_failures(failures)]
    else:
        traces = [random_failures(devices, mtbf, horizon, seed) for seed in range(SEEDS)]
    failed = sum(map(len, traces)) / len(traces)
    print(f"{devices} devices, {operation.spares} of them spares, {failed:.0f} failures in {days:g} days")
    for strategy, share in _mean(operation, traces, horizon).items():
        print(f"{strategy:26} {share:.1%}")
    print(
        f"checkpoints every {interval / 60:.1f} minutes of work; the best interval by Young and Daly is "
        f"{best / 60:.1f} minutes, with which restarts at full speed would reach "
        f"{expected_share(best, saving_seconds, operation.restart, mtbf / devices):.1%}"
    )
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
    import matplotlib

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


if __name__ == "__main__":
    typer.run(main)

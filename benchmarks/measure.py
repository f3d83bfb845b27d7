"""Running contestants side by side: one thread for each process, runs interleaved, medians reported."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"

# A GPT-2 of 12 blocks, whose vocabulary is small enough for two stages to balance.
SHAPE = {"vocabulary": 512, "layers": 12, "width": 384, "heads": 6, "length": 128}

# glibc gives large blocks back to the system as they are freed, and every page of them is made anew at its next use:
# 7 to 9 % of a step's processor time on the machine of the result files, and much of its jitter. Here nobody does.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


class Contestant:
    """`world_size` processes of a script in this folder, which build something and then time turns of steps of it.

    They start at the first turn and are suspended between turns, so that many can wait side by side while one has the
    machine to itself. A script calls `turns.serve`. Use it as a context manager, or `close` it.
    """

    def __init__(
        self, script: str, world_size: int, arguments: Mapping[str, Any], threads: int = 1, timeout: float = 600
    ):
        self._script = script
        self._world_size = world_size
        self._arguments = arguments
        self._threads = threads
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen] = []
        self._failure: str | None = None

    def run(self, steps: int) -> dict[str, Any]:
        """The answer of the last rank to a turn of `steps` steps, which knows every figure: a pipeline's loss is made
        there. Its `peak_mib` are those of all ranks.

        Raises:
            RuntimeError: a process failed, now or in an earlier turn, or took longer than the timeout.
        """
        if self._failure is None and not self._processes:
            self._start()
        if self._failure is None:
            self._signal(signal.SIGCONT)
            answers = [self._ask(process, steps) for process in self._processes]
            self._signal(signal.SIGSTOP)
            if None not in answers:
                return {**answers[-1], "peak_mib": [answer["peak_mib"] for answer in answers]}
            self._failure = self._give_up()
        raise RuntimeError(f"{self._script} {dict(self._arguments)} failed:\n{self._failure}")

    def close(self) -> None:
        """End the processes, at the latest after some seconds: what ends slowly is not what is measured."""
        self._signal(signal.SIGCONT)
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._processes = []
        self._folder.cleanup()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self._world_size):
            environment = {
                **os.environ,
                **ALLOCATOR,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(self._threads),
                "PYTHONWARNINGS": "ignore",
            }
            command = [sys.executable, str(HERE / self._script), json.dumps(self._arguments)]
            with self._log(rank).open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                    )
                )

    def _ask(self, process: subprocess.Popen, steps: int) -> dict[str, Any] | None:
        """Send the turn to all processes (with the first), and read the answer of `process`; None if there is none."""
        if process is self._processes[0]:
            for each in self._processes:
                with contextlib.suppress(BrokenPipeError):
                    each.stdin.write(f"{steps}\n")
                    each.stdin.flush()
        if not select.select([process.stdout], [], [], self._timeout)[0]:
            return None
        line = process.stdout.readline()
        return json.loads(line) if line else None

    def _give_up(self) -> str:
        """Kill all processes; return the ends of what they said."""
        # One that failed ends others, whose messages are not the cause: each has a moment for its own.
        time.sleep(2)
        for process in self._processes:
            process.kill()
        return "\n---\n".join(self._log(rank).read_text()[-1500:] for rank in range(self._world_size))

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"


def run_ranks(
    script: str, world_size: int, arguments: Mapping[str, Any], threads: int = 1, timeout: float = 600
) -> dict[str, Any]:
    """One turn of `arguments["steps"]` steps of a contestant that starts for it and ends after it."""
    with Contestant(script, world_size, arguments, threads, timeout) as contestant:
        return contestant.run(arguments["steps"])


def side_by_side(
    contestants: Mapping[str, tuple[str, int, Mapping[str, Any], int]], rounds: int, steps: int
) -> dict[str, list[dict]]:
    """Turns of `steps` steps of all contestants (script, processes, arguments, threads), in turn, `rounds` times.

    All live side by side, so that a machine whose speed drifts is as fast for one as for another.
    """
    with contextlib.ExitStack() as stack:
        turns = {
            name: partial(stack.enter_context(Contestant(*description)).run, steps)
            for name, description in contestants.items()
        }
        return interleave(turns, rounds)


def interleave(
    contestants: Mapping[str, Callable[[], dict]], rounds: int, say: Callable[[str], None] = print
) -> dict[str, list[dict]]:
    """Run every contestant once a round, in an order shuffled anew each round; all results by name."""
    results: dict[str, list[dict]] = {name: [] for name in contestants}
    shuffle = random.Random(0)
    for number in range(rounds):
        names = list(contestants)
        shuffle.shuffle(names)
        for name in names:
            try:
                results[name].append(contestants[name]())
            except RuntimeError as error:
                results[name].append({"error": str(error)[-400:]})
            say(f"round {number + 1}/{rounds} {name}: {_short(results[name][-1])}")
    return results


def median_of(results: Sequence[dict], key: str) -> float:
    """The median over runs of a figure; NaN if no run has it. A figure may be a list of samples."""
    samples: list[float] = []
    for result in results:
        value = result.get(key)
        if value is not None:
            samples.extend(value if isinstance(value, list) else [value])
    return statistics.median(samples) if samples else math.nan


def ratio_of(numerators: Sequence[dict], denominators: Sequence[dict], key: str) -> float:
    """The median over rounds of the ratio of two contestants' figures in the same round, which drift has in common."""
    pairs = zip(numerators, denominators, strict=True)
    ratios = [median_of([upper], key) / median_of([lower], key) for upper, lower in pairs]
    return statistics.median([ratio for ratio in ratios if not math.isnan(ratio)] or [math.nan])


def spread_of(results: Sequence[dict], key: str) -> str:
    """Smallest and largest sample, for a table."""
    samples = [x for result in results for x in result.get(key, [])]
    return f"{min(samples):.3f} - {max(samples):.3f}"


def environment() -> dict[str, Any]:
    """Date, versions and machine, for the head of a result file."""
    versions = {}
    for package in ("penstock", "torch", "transformers", "deepspeed"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "versions": versions,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }


class Comparison:
    """A table of contestants, and what it was made from, to be written as `results/<name>.json` and `.md`."""

    def __init__(self, name: str, title: str, columns: Sequence[str], config: Mapping[str, Any], runs: Mapping):
        self.figures: dict[str, dict[str, Any]] = {}
        self._name = name
        self._title = title
        self._config = config
        self._runs = runs
        self._width = len(columns)
        self._rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]

    def add(self, name: str, cells: Sequence[str], **figures: Any) -> None:
        """A row, and the figures behind it."""
        self.figures[name] = figures
        self._rows.append("| " + " | ".join([name, *cells]) + " |")

    def add_missing(self, name: str) -> None:
        """A row for a contestant that did not run."""
        self._rows.append("| " + " | ".join([name, "did not run", *[""] * (self._width - 2)]) + " |")

    def write(self, note: str = "") -> None:
        """Write both files, with date, versions and configuration, and print the table."""
        RESULTS.mkdir(exist_ok=True)
        facts = environment()
        content = {
            "title": self._title,
            "config": self._config,
            "allocator": ALLOCATOR,
            "figures": self.figures,
            "runs": self._runs,
        }
        (RESULTS / f"{self._name}.json").write_text(json.dumps({"environment": facts, **content}, indent=1) + "\n")
        head = ", ".join(f"{package} {number}" for package, number in facts["versions"].items() if number)
        table = "\n".join(self._rows) + (f"\n\n{note}" if note else "")
        (RESULTS / f"{self._name}.md").write_text(
            f"# {self._title}\n\n{facts['date']}; {head}; Python {platform.python_version()}; "
            f"{os.cpu_count()} cores; medians of interleaved runs.\n\n{table}\n\nConfiguration: "
            f"`{json.dumps(self._config)}`\n"
        )
        print(table)


def _short(result: dict) -> str:
    return ", ".join(
        f"{key}={statistics.median(value):.4g}" if isinstance(value, list) else f"{key}={value}"
        for key, value in result.items()
    )[:160]

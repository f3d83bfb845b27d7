"""Running contestants side by side: fresh processes for every run, one thread each, runs interleaved, medians
reported."""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def run_ranks(
    script: str, world_size: int, arguments: Mapping[str, Any], threads: int = 1, timeout: float = 600
) -> dict:
    """Run `script` (a file of this folder) on `world_size` processes; return what its rank 0 wrote.

    The script is called with the arguments as one JSON text, and the path to write its JSON result to.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        processes = []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
                "PYTHONWARNINGS": "ignore",
            }
            command = [sys.executable, str(HERE / script), json.dumps(arguments), str(output)]
            log = open(Path(folder) / f"rank{rank}.log", "w+")  # noqa: SIM115  # closed with the process below
            processes.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log), log))
        failures = []
        for process, log in processes:
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                code = -1
            log.seek(0)
            text = log.read()
            log.close()
            if code != 0:
                failures.append(text[-1500:])
        if failures:
            raise RuntimeError(f"{script} {arguments} failed:\n" + "\n---\n".join(failures))
        return json.loads(output.read_text())


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


def median_of(results: Sequence[dict], key: str) -> float | None:
    """The median over runs of a figure; None if no run has it. A figure may be a list of samples."""
    samples: list[float] = []
    for result in results:
        value = result.get(key)
        if value is not None:
            samples.extend(value if isinstance(value, list) else [value])
    return statistics.median(samples) if samples else None


def spread_of(results: Sequence[dict], key: str) -> tuple[float, float] | None:
    """Smallest and largest sample."""
    samples = [x for result in results for x in (result.get(key) or [])]
    return (min(samples), max(samples)) if samples else None


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


def write_results(name: str, content: Mapping[str, Any], table: str) -> None:
    """Write `results/<name>.json` and the table a person reads, `results/<name>.md`."""
    RESULTS.mkdir(exist_ok=True)
    whole = {"environment": environment(), **content}
    (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    head = ", ".join(f"{package} {number}" for package, number in whole["environment"]["versions"].items() if number)
    (RESULTS / f"{name}.md").write_text(
        f"# {content['title']}\n\n{whole['environment']['date']}; {head}; Python {platform.python_version()}; "
        f"{os.cpu_count()} cores; medians of interleaved runs.\n\n{table}\n\nConfiguration: "
        f"`{json.dumps(content['config'])}`\n"
    )
    print(table)


def _short(result: dict) -> str:
    return ", ".join(
        f"{key}={statistics.median(value):.4g}" if isinstance(value, list) else f"{key}={value}"
        for key, value in result.items()
    )[:160]

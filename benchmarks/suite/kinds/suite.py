"""All modes one after another, each in fresh processes on this machine, on the same work.

Imports torch only to check options.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite, lcm
from pathlib import Path
from typing import Any

from kinds.result_files import FORMAT, speed_figures
from penstock.layout.pipelines import parse_pipelines

# How far the losses of two modes may differ, relative to their size, by rounding alone.
TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 3e-2}
MODE = re.compile(r"(?P<mode>ddp|fsdp|pdp|pp)(?::(?P<schedule>[\w-]+))?(?:=(?P<pipelines>.+))?")


@dataclass(frozen=True)
class Entry:
    """One row of the table: a name, the number of processes, the trainer's arguments."""

    name: str
    processes: int
    arguments: tuple[str, ...]
    num_microbatches: int = 1


def entries_of(modes: Sequence[str], devices: int) -> list[Entry]:
    """What to run for modes written as `ddp`, `fsdp`, `pdp`, `pp`, `pp:zb-h1`, `pp=1x4,2x8` or `pp:zb-h1=1x4,2x8`.

    Raises:
        ValueError: another spelling, or a schedule or pipelines for a mode other than pp.
    """
    entries = []
    for text in modes:
        match = MODE.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"unknown mode {text!r}: write ddp, fsdp, pdp, pp, pp:SCHEDULE, pp=PIPELINES or pp:SCHEDULE=PIPELINES, "
                "such as pp:zb-h1=1x4,2x8"
            )
        mode, schedule, pipelines = match["mode"], match["schedule"], match["pipelines"]
        if mode != "pp" and (schedule or pipelines):
            raise ValueError(f"mode {text!r}: only pp has a schedule or pipelines")
        arguments = ["--mode", mode]
        processes, num_microbatches = devices, 1
        if mode == "pdp":
            processes = 1
            arguments += ["--ndevice-per-proc", str(devices)]
        if schedule:
            arguments += ["--schedule", schedule]
        if pipelines:
            arguments += ["--pipelines", pipelines]
            num_microbatches = sum(number for _, number in parse_pipelines(pipelines))
        entries.append(Entry(text.strip(), processes, tuple(arguments), num_microbatches))
    return entries


def default_modes(devices: int) -> list[str]:
    """All four modes, and with three devices or more also a pipeline beside one that is a rank longer."""
    modes = ["ddp", "fsdp", "pdp", "pp"]
    if devices >= 3:
        short = devices // 2 if devices % 2 else devices // 2 - 1
        modes.append(f"pp={short}x{4 * short},{devices - short}x{4 * (devices - short)}")
    return modes


def run_suite(
    entries: Sequence[Entry],
    devices: int,
    arguments: Sequence[str],
    *,
    rounds: int = 1,
    timeout: float = 1800.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run every entry once a round.

    Args:
        arguments: the trainer's, for all of them.
        timeout: seconds for each run.
        say: is told of each run as it begins.

    Raises:
        ValueError: no entry can be run with these options; no process was started.

    Returns:
        The content of the suite's result file: "runs" by name, "failures" by name, and under "losses" whether all runs
        computed the same.
    """
    common = list(arguments)
    if not any(word.split("=")[0].replace("-", "_") == "__batch_size" for word in common):
        from kinds.options import SAMPLES_PER_DEVICE

        unit = lcm(devices, *(entry.num_microbatches for entry in entries))
        common += ["--batch-size", str(ceil(SAMPLES_PER_DEVICE * devices / unit) * unit)]
    found: dict[str, list[dict[str, Any]]] = {}
    failures = refused(entries, common)
    if len(failures) == len(entries):
        raise ValueError(next(iter(failures.values())))
    for name, cause in failures.items():
        say(f"{name} failed: {cause}")
    for number in range(rounds):
        for entry in entries:
            if entry.name in failures:
                continue
            say(f"{entry.name}: {' '.join([*entry.arguments, *common])}" + (f" (round {number + 1})" * (rounds > 1)))
            try:
                found.setdefault(entry.name, []).append(run_entry(entry, common, timeout))
            except RuntimeError as error:
                failures[entry.name] = str(error)
                say(f"{entry.name} failed: {error}")
    runs = {name: combine(results) for name, results in found.items() if results and name not in failures}
    return {
        "format": FORMAT,
        "devices": devices,
        "arguments": common,
        "rounds": rounds,
        "runs": runs,
        "failures": failures,
        "losses": compare_losses(runs),
    }


def refused(entries: Sequence[Entry], arguments: Sequence[str]) -> dict[str, str]:
    """By name, the entries whose options the trainer would refuse, and why. Starts nothing."""
    from kinds.options import OptionError, World, read_options

    here = World.find({})
    found = {}
    for entry in entries:
        world = replace(here, size=entry.processes, local_size=entry.processes)
        try:
            read_options([*entry.arguments, *arguments], world)
        except OptionError as error:
            found[entry.name] = str(error)
    return found


def run_entry(entry: Entry, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run the trainer in fresh processes; returns what it wrote.

    Raises:
        RuntimeError: it failed or took too long; says why.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        output = Path(folder) / "result.json"
        command = [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(entry.processes)],
            *["-m", "kinds.trainer", *entry.arguments, *arguments, "--output", str(output)],
        ]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            errors = f"error: it took longer than {timeout:g} s"
        finally:
            _end(process)
        if process.returncode != 0 or not output.exists():
            raise RuntimeError(_cause(errors))
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result


def _end(process: subprocess.Popen[str]) -> None:
    """Stop a launcher that still runs; it stops its workers."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _cause(errors: str) -> str:
    """The line of a failed run's output that says why: the trainer's own error, or the last exception before the
    launcher's."""
    own = errors.split("torch.distributed.elastic", 1)[0]
    lines = [line.strip() for text in (own, errors) for line in text.splitlines()]
    for pattern in (r"error: .+", r".*Error: .+", r".*Exception: .+", r".+"):
        for line in lines:
            if found := re.search(pattern, line):
                return found[0].removeprefix("error: ")
    return "it ended without a word"


def combine(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of one entry made into one: the samples of all, and the medians of all other figures."""
    first = results[0]
    if len(results) == 1:
        return first
    seconds = [value for result in results for value in result["step_seconds"]]
    figures = dict(first["figures"])
    for name, value in figures.items():
        if isinstance(value, float):
            figures[name] = statistics.median(result["figures"][name] for result in results)
    figures["peak_memory_bytes"] = max(result["figures"]["peak_memory_bytes"] for result in results)
    samples, tokens = first["options"]["batch_size"], None
    if figures["tokens_per_second_per_device"] is not None:
        tokens = samples * first["options"]["config"]["block_size"]
    flops, peak = figures["model_flops_per_step"], figures["matmul_peak_flops_per_device"]
    figures |= speed_figures(seconds, samples, tokens, figures["devices"], flops, peak)
    return first | {"figures": figures, "step_seconds": seconds, "rounds": len(results)}


def compare_losses(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Whether all runs computed the same losses, step by step, warm-up included.

    Returns:
        "agree", the "tolerance" (relative), the "largest_difference" seen, and "between" which two runs.
    """
    worst, pair, tolerance = 0.0, None, 0.0
    names = list(runs)
    for name in names:
        tolerance = max(tolerance, TOLERANCES[runs[name]["options"]["dtype"]])
        for mine, theirs in zip(runs[names[0]]["losses"], runs[name]["losses"], strict=False):
            difference = abs(mine - theirs) / max(abs(mine), 1e-12)
            if not isfinite(difference):
                difference = inf
            if difference > worst:
                worst, pair = difference, (names[0], name)
    return {"agree": worst <= tolerance, "tolerance": tolerance, "largest_difference": worst, "between": pair}

"""`penstock bench`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

# Everything the command does not know goes to the trainer.
CONTEXT: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench(
    context: typer.Context,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="A row of the table; may be given several times: ddp, fsdp, pdp, pp, or pp with a schedule and "
            "pipelines, such as pp:zb-h1 or pp=1x4,2x8 (default: the first four, and unlike pipelines from 3 devices).",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Devices of each run (default: GPUs, or 2 cores).")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the results.")] = Path("bench"),
    rounds: Annotated[int, typer.Option(min=1, help="Run every mode this many times, in turns.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds that one run may take.")] = 1800.0,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Run nothing; show two result files side by side.")
    ] = None,
) -> None:
    """Train one model in every mode, in fresh processes, and print one table; write JSON, CSV and a plot.

    Other options are the trainer's (python benchmarks/suite/trainer.py --help) and hold for all modes. The status is 1
    if a run fails or if the modes did not compute the same losses.

    Example: penstock bench --devices 2 --model GPTSmall --batch-size 8 --block-size 256 --iterations 10
    """
    _find()
    from kinds.report import comparison, tables_of, write_plots
    from kinds.result_files import read_runs, write_csv, write_json
    from kinds.suite import default_modes, entries_of, run_suite

    console = Console()
    if compare is not None:
        first, second = (read_runs(path) for path in compare)
        table, differences = comparison(first, second)
        table.title = f"a: {compare[0]}, b: {compare[1]}"
        console.print(table)
        for line in differences:
            console.print(line, highlight=False, markup=False)
        return
    import torch

    count = devices or torch.cuda.device_count() or min(2, len(os.sched_getaffinity(0)))
    suite = run_suite(
        entries_of(mode or default_modes(count), count),
        count,
        context.args,
        rounds=rounds,
        timeout=timeout,
        say=lambda text: console.print(text, highlight=False, markup=False, style="dim"),
    )
    write_json(suite, output / "results.json")
    write_csv(suite, output / "results.csv")
    for table in tables_of(suite):
        console.print(table)
    for name, cause in suite["failures"].items():
        console.print(f"{name} failed: {cause}", style="red", markup=False)
    written = ["results.json", "results.csv"]
    if suite["runs"]:
        try:
            written += [path.name for path in write_plots(suite, output)]
        except ImportError as error:
            console.print(str(error), style="yellow")
    console.print(f"{output}: {', '.join(written)}", highlight=False)
    if suite["failures"] or not suite["losses"]["agree"]:
        raise typer.Exit(1)


def _find() -> None:
    """Make the benchmark's folder importable. It belongs to the sources, not to an installed package."""
    folder = Path(__file__).parents[3] / "benchmarks/suite"
    if not (folder / "kinds").is_dir():
        raise typer.BadParameter("the benchmark is not installed: run it from a clone of the sources")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))

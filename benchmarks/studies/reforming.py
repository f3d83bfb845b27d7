"""How long it takes to form an engine anew in the same processes: 4 ranks, a GPT-2 of 12 blocks, nothing to move.

    python benchmarks/studies/reforming.py                  # 20 re-formations of one layout, and of two in turn
    python benchmarks/studies/reforming.py --rounds 5 --output /tmp/here

Each round gives up the formation, makes a new default process group, and forms the engine again. "Unlike" goes from
pipelines of 1 and 3 stages to 2 and 2 and back, so units are released and taken; their values are left as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import table_of, write_result
from transformers import GPT2Config, GPT2LMHeadModel

from penstock.layout.layout import Layout
from penstock.model.pipeline_model import attach
from penstock.modeling.graph.units import list_units
from penstock.runtime.formation import new_job, parallelize
from penstock.runtime.reforming import change_layout
from penstock.schedule import build

CONFIG = {"n_layer": 12, "n_embd": 384, "n_head": 6, "vocab_size": 512, "n_positions": 128}
LAYOUTS = {"alike": ((4,), (4,)), "unlike": ((1, 3), (2, 2))}
PHASES = ("dissolve", "process group", "form", "total")


def place(units: list[str], depths: tuple[int, ...]) -> Layout:
    """Pipelines of so many stages each, of equally many units."""
    return Layout.place([[units[len(units) * s // d : len(units) * (s + 1) // d] for s in range(d)] for d in depths])


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """On a rank: seconds of each phase of each re-formation."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    seconds: dict[str, dict[str, list[float]]] = {}
    generation = 0

    def meet() -> None:
        nonlocal generation
        generation += 1
        prefix = dist.PrefixStore(f"generation {generation}", store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world)

    for name, layouts in LAYOUTS.items():
        torch.manual_seed(0)
        model: Any = GPT2LMHeadModel(GPT2Config(**CONFIG)).train()
        units = list_units(model)
        batch = {"input_ids": torch.ones(8, 32, dtype=torch.long), "labels": torch.ones(8, 32, dtype=torch.long)}

        def makers(depths: tuple[int, ...], units: list[str] = units) -> tuple[Layout, Any]:
            layout = place(units, depths)
            return layout, partial(build, "1f1b", depths[layout.place_of(rank).pipeline])

        meet()
        with new_job() as board:
            engine = parallelize(model, *makers(layouts[0]), board)
        attach(model, engine)
        phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for number in range(1, rounds + 1):
            for output in model(**batch):
                output.loss.backward()
            dist.barrier()
            times = [time.perf_counter()]
            engine.dissolve()
            times.append(time.perf_counter())
            dist.destroy_process_group()
            meet()
            times.append(time.perf_counter())
            layout, make_schedule = makers(layouts[number % 2])
            change_layout(engine, layout, make_schedule, fill_values=lambda engine, taken, had: None)
            times.append(time.perf_counter())
            for phase, start, end in zip(PHASES, (*times[:3], times[0]), (*times[1:], times[3]), strict=True):
                phases[phase].append(end - start)
        seconds[name] = phases
        engine.close()
        dist.destroy_process_group()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "reforming")
    options = parser.parse_args()
    if "RANK" in os.environ:
        seconds = measure(options.rounds)
        if os.environ["RANK"] == "0":
            print("SECONDS", json.dumps(seconds))
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", __file__]
    done = subprocess.run([*command, "--rounds", str(options.rounds)], capture_output=True, text=True, check=False)
    found = next((line for line in done.stdout.splitlines() if line.startswith("SECONDS ")), None)
    if found is None:
        sys.exit(done.stderr)
    seconds = json.loads(found.removeprefix("SECONDS "))
    rows = [
        [name, *(f"{statistics.median(phases[phase]):.3f}" for phase in PHASES), f"{max(phases['total']):.3f}"]
        for name, phases in seconds.items()
    ]
    lines = [__doc__.splitlines()[0], "", *table_of(["layouts", *PHASES, "worst"], rows)]
    how = f"seconds, medians of {options.rounds} rounds"
    write_result(options.output, "Re-forming an engine", how, lines, {"config": CONFIG, "seconds": seconds})


if __name__ == "__main__":
    main()

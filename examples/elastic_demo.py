"""Four processes train a small GPT-2, two of them are killed, a new one joins: what happens, beside a run left alone.

    python examples/elastic_demo.py --output runs/elastic

Each process is what a device would be. The picture shows the loss of both runs, and their tokens a second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

SEQUENCE_LENGTH, MICROBATCH_SIZE, GLOBAL_BATCH_SIZE = 64, 2, 16
DEVICES = 4
CHARACTERS = 400_000
# After how many steps what happens.
KILLS, JOIN = (20, 40), 45


def train(store: str, steps: int, record: Path, log: Path) -> None:
    """One process of a run: the Booster's loop."""
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    import torch
    import transformers
    from torch.optim.lr_scheduler import OneCycleLR
    from transformers import GPT2Config, GPT2LMHeadModel

    from corpus import read_texts
    from penstock import Booster, Elastic, HeterogeneousParallelPlugin, PipelineTemplate

    transformers.logging.set_verbosity_error()
    text = "".join(read_texts(None, CHARACTERS)).encode()  # bytes are the tokens
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=96, n_layer=6, n_head=4)
    # In single precision training amplifies the rounding of another order of summation, up to 1e-3 in a loss.
    model: Any = GPT2LMHeadModel(config).double()
    templates = [PipelineTemplate.balanced(model, stages) for stages in (1, 2)]
    elastic = Elastic(store, copies=2, start=DEVICES, templates=templates)
    plugin = HeterogeneousParallelPlugin(
        microbatch_size=MICROBATCH_SIZE, global_batch_size=GLOBAL_BATCH_SIZE, elastic=elastic
    )
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler: Any = OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    loader: Any = plugin.prepare_dataloader(dataset, shuffle=True)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    batches = iter(loader)
    with record.open("w", buffering=1) as file:
        while booster.step < steps:
            optimizer.zero_grad()
            loss = float(booster.execute_pipeline(batches, model, None, optimizer)["loss"])
            optimizer.step()
            scheduler.step()
            file.write(json.dumps({"step": booster.step, "loss": loss, "at": time.time()}) + "\n")


def run(folder: Path, steps: int, disturbed: bool) -> tuple[dict[int, tuple[float, float]], list[tuple[float, str]]]:
    """A run's loss and time of each step, and what happened in it when; times are seconds since the first step."""
    import torch.distributed as dist

    folder.mkdir(parents=True, exist_ok=True)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Forks of one process that has imported everything, which saves each its seconds of imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock.api.booster", "transformers.models.gpt2.modeling_gpt2", "corpus"])
    processes: list[Any] = []

    def start() -> None:
        files = folder / f"{len(processes)}.jsonl", folder / f"{len(processes)}.log"
        process = context.Process(target=train, args=(f"tcp://127.0.0.1:{served.port}", steps, *files), daemon=True)
        process.start()
        processes.append(process)

    for old in folder.glob("*.jsonl"):
        old.unlink()
    for _ in range(DEVICES):
        start()
    happened: list[tuple[float, str]] = []
    kills, joins = (list(KILLS), [JOIN]) if disturbed else ([], [])
    try:
        while any(process.is_alive() for process in processes):
            done = max((record["step"] for record in records(folder)), default=0)
            if kills and done >= kills[0]:
                victim = processes[len(kills) % 2 + 1]
                victim.kill()
                happened.append((time.time(), f"process {processes.index(victim)} is killed"))
                print(f"step {kills.pop(0)}: {happened[-1][1]}", flush=True)
            if joins and done >= joins[0]:
                start()
                happened.append((time.time(), "a new process is started"))
                print(f"step {joins.pop(0)}: {happened[-1][1]}", flush=True)
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
    curve: dict[int, tuple[float, float]] = {}
    for record in sorted(records(folder), key=lambda record: record["at"]):
        curve.setdefault(record["step"], (record["loss"], record["at"]))
    if len(curve) < steps:
        raise SystemExit("\n".join(path.read_text()[-2000:] for path in folder.glob("*.log")))
    for log in sorted(folder.glob("*.log")):
        for line in log.read_text().splitlines():
            if line.startswith("generation"):
                print(f"  {line}")
    first = min(at for _, at in curve.values())
    return {step: (loss, at - first) for step, (loss, at) in curve.items()}, [
        (at - first, what) for at, what in happened
    ]


def records(folder: Path) -> list[dict[str, Any]]:
    """What the processes have written."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def draw(runs: dict[str, dict[int, tuple[float, float]]], happened: list[tuple[float, str]], file: Path) -> None:
    """Loss by step, and over time the speed as a share of the first run's median."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, speeds) = plt.subplots(2, 1, figsize=(8, 6))
    usual = None
    for width, (name, curve) in zip((4, 1.5), runs.items(), strict=True):
        steps = sorted(curve)
        losses.plot(steps, [curve[step][0] for step in steps], label=name, linewidth=width)
        times = [curve[step][1] for step in steps]
        usual = usual or statistics.median(b - a for a, b in pairwise(times))
        # Over ten steps, as single ones jump on a busy machine.
        speeds.plot(
            times[10:], [10 * usual / (b - a) for a, b in zip(times, times[10:], strict=False)], linewidth=width
        )
    for index, (at, what) in enumerate(happened):
        speeds.axvline(at, color="grey", linestyle=":")
        speeds.annotate(
            what, (at, 1.02 + 0.09 * (index % 2)), xycoords=("data", "axes fraction"), ha="center", fontsize=8
        )
    losses.set(xlabel="step", ylabel="loss", title="Four processes: left alone, and losing two of them")
    speeds.set(xlabel="seconds", ylabel="share of the usual speed", ylim=(0, None))
    losses.legend()
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output", type=Path, default=Path("runs/elastic"))
    options = parser.parse_args()
    print(f"{DEVICES} processes, left alone")
    alone, _ = run(options.output / "alone", options.steps, disturbed=False)
    print(f"{DEVICES} processes, of which two are killed; then a new one comes")
    disturbed, happened = run(options.output / "disturbed", options.steps, disturbed=True)
    difference = max(abs(alone[step][0] - disturbed[step][0]) for step in alone)
    for name, curve in (("left alone", alone), ("disturbed", disturbed)):
        times = [curve[step][1] for step in sorted(curve)]
        seconds = statistics.median(later - earlier for earlier, later in pairwise(times))
        speed = GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH / seconds
        print(f"{name}: loss {curve[1][0]:.3f} -> {curve[options.steps][0]:.3f}, median {speed:,.0f} tokens/s")
    print(f"largest difference of the losses: {difference:.1e} (double precision)")
    draw({"left alone": alone, "two killed, one joined": disturbed}, happened, options.output / "elastic.svg")
    print(f"plot: {options.output / 'elastic.svg'}")


if __name__ == "__main__":
    main()

"""Checkpoints of the whole training state: how long a step stalls for one, how fast it is written, and random kills.

    python benchmarks/checkpoints.py speed                  # 0.1, 0.3 and 1 GB of state, one process
    python benchmarks/checkpoints.py kills                  # 100 SIGKILLs at random moments of saves on two ranks

`speed` compares, in turns: a synchronous save, an asynchronous one (how long the call takes, and how long until the
checkpoint is whole), torch.distributed.checkpoint's `save` and `async_save`, the tensors in one file without the rest
of a checkpoint, a plain copy of the same bytes to a file, and some steps of training with and without a save before
them. Everything is flushed to disk, but for a second plain copy that is not. `kills` ends one rank of two, or both,
while they save step after step, and then loads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock.bench.result_files import environment, write_json
from penstock.checkpoint.files import write_tensors

RESULTS = Path(__file__).parent / "results"
# Gigabytes of weights and of AdamW's two states: layers and width of a GPT-2.
SIZES = {0.1: (4, 400), 0.3: (6, 576), 1.0: (10, 824)}
# Steps of training that go on beside the writing of that much, for longer than it takes.
STEPS = {0.1: 2, 0.3: 2, 1.0: 1}


# -- speed -------------------------------------------------------------------------------------------------------------


def state(layers: int, width: int) -> tuple[Any, torch.optim.Optimizer, int]:
    """A model, an optimizer with state, and how many bytes both have."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=8, vocab_size=512, n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, 3 * sum(parameter.nbytes for parameter in model.parameters())


def bytes_of(model: Any, optimizer: torch.optim.Optimizer) -> list[memoryview]:
    """The same bytes that a checkpoint has, in memory where they are."""
    states = [value for one in optimizer.state.values() for value in one.values()]
    return [tensor.detach().view(-1).view(torch.uint8).numpy().data for tensor in [*model.parameters(), *states]]


def tensors_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The same, as a checkpoint's writer takes them."""
    states = [value for one in optimizer.state.values() for value in one.values()]
    return {str(number): tensor.detach() for number, tensor in enumerate([*model.parameters(), *states])}


def copy_plainly(folder: Path, content: list[memoryview], flush: bool = True) -> None:
    with (folder / "copy").open("wb", buffering=0) as file:
        for one in content:
            while one:
                one = one[file.write(one) :]
        if flush:
            os.fsync(file.fileno())


def flushed(folder: Path) -> None:
    """Have what DCP wrote on disk, as the others do."""
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    ids = torch.zeros(2, 64, dtype=torch.long)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def speed(folder: Path, rounds: int, sizes: list[float]) -> Iterator[dict[str, Any]]:
    """What was measured, after each size."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results: dict[str, Any] = {}
    for size in sizes:
        model, optimizer, num_bytes = state(*SIZES[size])
        given = {"model": model, "optimizer": optimizer}
        seconds: dict[str, list[float]] = {}
        train(model, optimizer, 1)

        def asynchronous(given: dict[str, Any] = given, seconds: Any = seconds) -> None:
            begin = time.perf_counter()
            penstock.save_checkpoint(folder, **given, step=1, asynchronous=True)
            seconds.setdefault("asynchronous: stall", []).append(time.perf_counter() - begin)
            penstock.finish_saving(given["model"])

        def dcp_asynchronous(given: Any = given, seconds: Any = seconds) -> None:
            begin = time.perf_counter()
            weights, states = get_state_dict(given["model"], given["optimizer"])
            future = dcp.async_save({"model": weights, "optimizer": states}, checkpoint_id=folder / "dcp")
            seconds.setdefault("DCP async_save: stall", []).append(time.perf_counter() - begin)
            future.result()
            flushed(folder / "dcp")

        def dcp_synchronous(given: Any = given) -> None:
            weights, states = get_state_dict(given["model"], given["optimizer"])
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "dcp")
            flushed(folder / "dcp")

        def steps(save: dict[str, bool] | None, given: Any = given, number: int = STEPS[size]) -> None:
            if save is not None:
                penstock.save_checkpoint(folder, **given, step=1, **save)
            train(given["model"], given["optimizer"], number)
            penstock.finish_saving(given["model"])

        contestants: dict[str, Callable[[], Any]] = {
            "synchronous": lambda given=given: penstock.save_checkpoint(folder, **given, step=1),
            "asynchronous: whole": asynchronous,
            "plain copy": lambda given=given: copy_plainly(folder, bytes_of(**given)),
            "plain copy, not flushed": lambda given=given: copy_plainly(folder, bytes_of(**given), flush=False),
            "tensors alone": lambda given=given: write_tensors(str(folder / "all.safetensors"), tensors_of(**given)),
            "DCP save": dcp_synchronous,
            "DCP async_save: whole": dcp_asynchronous,
            "steps": lambda steps=steps: steps(None),
            "steps and a synchronous save": lambda steps=steps: steps({"asynchronous": False}),
            "steps and an asynchronous save": lambda steps=steps: steps({"asynchronous": True}),
        }
        order = random.Random(0)
        for number in range(rounds + 1):
            names = list(contestants)
            order.shuffle(names)
            for name in names:
                # A virtual machine gives memory back that was free for a while, and the first to use it again waits for
                # it. So each finds as much as it needs just freed.
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                copy_plainly(folder, bytes_of(**given))
                shutil.rmtree(folder)
                folder.mkdir()
                os.sync()
                begin = time.perf_counter()
                contestants[name]()
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
            print(
                f"{size} GB, round {number}: " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in seconds.items()), flush=True
            )
        # The first round makes the memory that the others use again.
        results[str(size)] = {"bytes": num_bytes, "seconds": {name: taken[1:] for name, taken in seconds.items()}}
        yield results
    dist.destroy_process_group()


def table_of_speed(results: dict[str, Any]) -> list[str]:
    """A table of stalls, and two of bytes a second: of the medians, and of the fastest of each."""
    stalls = [
        "| state | synchronous: stall | asynchronous: stall | DCP async_save: stall | "
        "steps held up, synchronous | steps held up, asynchronous |",
        "|---|---|---|---|---|---|",
    ]
    rates = [
        "| state, of which rounds | plain copy | not flushed | tensors in one file | synchronous "
        "| asynchronous, stall and all | its writing alone | DCP save | DCP async_save |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size, found in results.items():
        number = found["bytes"]
        taken = found["seconds"] | {
            "writing": [
                whole - stall
                for whole, stall in zip(
                    found["seconds"]["asynchronous: whole"], found["seconds"]["asynchronous: stall"], strict=True
                )
            ]
        }
        medians = {name: statistics.median(each) for name, each in taken.items()}
        held = [medians[f"steps and {kind} save"] - medians["steps"] for kind in ("a synchronous", "an asynchronous")]
        cells = [medians[name] for name in ("synchronous", "asynchronous: stall", "DCP async_save: stall")] + held
        row = " | ".join(f"{cell:.3f} s" for cell in cells)
        stalls.append(f"| {size} GB | {row} |")
        names = ("plain copy", "plain copy, not flushed", "tensors alone", "synchronous", "asynchronous: whole")
        names += ("writing", "DCP save", "DCP async_save: whole")
        for which, of in (("median", medians), ("fastest", {name: min(each) for name, each in taken.items()})):
            row = " | ".join(
                f"{number / of[name] / 1e9:.2f} GB/s ({of['plain copy'] / of[name]:.2f})" for name in names
            )
            rates.append(f"| {size} GB, {which} | {row} |")
    return [*stalls, "", "In brackets: as a share of the plain copy's.", "", *rates]


# -- kills -------------------------------------------------------------------------------------------------------------


def tiny(value: float) -> tuple[Any, torch.optim.Optimizer]:
    """A model and an optimizer all of whose numbers are `value`."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=64, n_positions=16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    fill(model, optimizer, value)
    return model, optimizer


@torch.no_grad()
def fill(model: Any, optimizer: torch.optim.Optimizer, value: float) -> None:
    for parameter in model.parameters():
        parameter.fill_(value)
        if "momentum_buffer" in optimizer.state.get(parameter, {}):
            optimizer.state[parameter]["momentum_buffer"].fill_(value)


def save_on_and_on(rank: int, folder: Path, port: int, asynchronous: bool) -> None:
    """A rank: saves step after step, each with its number everywhere, until it is killed."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    model, optimizer = tiny(0.0)
    model = penstock.initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2}})
    step = penstock.load_checkpoint(folder, model=model, optimizer=optimizer).step
    (folder / f"ready-{rank}").touch()
    while True:
        step += 1
        fill(model, optimizer, float(step))
        penstock.save_checkpoint(
            folder, model=model, optimizer=optimizer, step=step, keep_last=2, asynchronous=asynchronous
        )
        if rank == 0 and not asynchronous:
            (folder / "done.draft").write_text(str(step))
            os.replace(folder / "done.draft", folder / "done")


def kill_once(folder: Path, chance: random.Random, number: int) -> dict[str, Any]:
    """Two ranks save; one or both are killed; the newest checkpoint is loaded and looked at."""
    with __import__("socket").socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    asynchronous = bool(number % 2)
    ranks = []
    for rank in range(2):
        if not (child := os.fork()):
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                save_on_and_on(rank, folder, port, asynchronous)
            finally:
                os._exit(1)
        ranks.append(child)
    while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.5))
    victims = [ranks[number // 2 % 2]] if number % 5 else ranks
    for child in victims:
        os.kill(child, signal.SIGKILL)
    for child in ranks:
        os.waitpid(child, 0)
    for rank in range(2):
        (folder / f"ready-{rank}").unlink()
    model, optimizer = tiny(-1.0)
    found = penstock.load_checkpoint(folder, model=model, optimizer=optimizer)
    buffers = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    whole = all(bool((one == found.step).all()) for one in [*model.parameters(), *buffers])
    acknowledged = int((folder / "done").read_text()) if (folder / "done").exists() else 0
    return {
        "whole": whole,
        "damaged": len(found.damaged),
        "step": found.step,
        "lost": max(0, acknowledged - found.step),
        "asynchronous": asynchronous,
        "both": len(victims) == 2,
    }


def kills(folder: Path, number: int, seed: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    chance, outcomes = random.Random(seed), []
    shutil.rmtree(folder, ignore_errors=True)
    model, optimizer = tiny(1.0)
    penstock.save_checkpoint(folder, model=model, optimizer=optimizer, step=1)
    for one in range(number):
        outcomes.append(kill_once(folder, chance, one))
        print(f"kill {one + 1}: {outcomes[-1]}", flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "kills"])
    parser.add_argument("--rounds", type=int, default=5, help="of speed")
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=list(SIZES), choices=list(SIZES), help="of speed, in GB"
    )
    parser.add_argument("--number", type=int, default=100, help="of kills")
    parser.add_argument("--seed", type=int, default=0, help="of kills")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--output", type=Path, help="of the result files, without extension")
    options = parser.parse_args()
    output = options.output or RESULTS / f"checkpoints_{options.what}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)) / "run"
        if options.what == "speed":
            for measured in speed(folder, options.rounds, options.sizes):
                lines = [
                    f"A GPT-2 with AdamW's states, float32, one process with {torch.get_num_threads()} thread(s). "
                    f"Medians of {options.rounds} rounds in turns; everything is flushed to disk. A stall is how long "
                    "the call took; held up is what some steps of training took longer with a save before them, its "
                    "writing beside them, and the wait for its end.",
                    "",
                    *table_of_speed(measured),
                ]
                write(options, output, measured, lines)
        else:
            found = kills(folder, options.number, options.seed)
            bad = [one for one in found if not one["whole"] or one["damaged"] or one["lost"]]
            waited, both = (sum(one[key] for one in found) for key in ("asynchronous", "both"))
            lines = [
                f"{len(found)} kills at random moments of saves on two ranks ({waited} of them asynchronous, {both} "
                "of both ranks): "
                f"{len(found) - len(bad)} times the newest checkpoint was whole, no older than the last one whose save "
                f"had returned, and nothing was damaged; {len(bad)} times not."
            ]
            write(options, output, found, lines)
    print("\n".join(lines))
    sys.exit(0)


def write(options: argparse.Namespace, output: Path, found: Any, lines: list[str]) -> None:
    """The record and the tables."""
    about = environment()
    config = {name: value for name, value in vars(options).items() if name not in ("folder", "output")}
    write_json({"environment": about, "config": config, "results": found}, output.with_suffix(".json"))
    ending = [f"Configuration: `{json.dumps(config)}`", "", f"Environment: {about}"]
    output.with_suffix(".md").write_text("\n".join(["# Checkpoints", "", *lines, "", *ending]) + "\n")


if __name__ == "__main__":
    main()

"""Checkpoints of the whole training state: how long a step stalls for one, how fast it is written, and random kills.

    python benchmarks/studies/checkpoints.py speed       # 0.1, 0.3 and 1 GB of state, one process
    python benchmarks/studies/checkpoints.py kills       # 100 SIGKILLs at random moments of saves on two ranks

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
from measure import RESULTS, table_of, write_result
from processes import free_port
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock.checkpoint.files import write_tensors

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
        results[str(size)] = speed_of(folder, rounds, size)
        yield results
    dist.destroy_process_group()


def speed_of(folder: Path, rounds: int, size: float) -> dict[str, Any]:
    """The bytes of a state of about `size` GB, and the seconds of each way to save it."""
    model, optimizer, num_bytes = state(*SIZES[size])
    seconds: dict[str, list[float]] = {}
    train(model, optimizer, 1)

    def save(asynchronous: bool = False) -> None:
        penstock.save_checkpoint(folder, model=model, optimizer=optimizer, step=1, asynchronous=asynchronous)

    def asynchronous() -> None:
        begin = time.perf_counter()
        save(asynchronous=True)
        seconds.setdefault("asynchronous: stall", []).append(time.perf_counter() - begin)
        penstock.finish_saving(model)

    def dcp_state() -> dict[str, Any]:
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states}

    def dcp_asynchronous() -> None:
        begin = time.perf_counter()
        future = dcp.async_save(dcp_state(), checkpoint_id=folder / "dcp")
        seconds.setdefault("DCP async_save: stall", []).append(time.perf_counter() - begin)
        future.result()
        flushed(folder / "dcp")

    def dcp_synchronous() -> None:
        dcp.save(dcp_state(), checkpoint_id=folder / "dcp")
        flushed(folder / "dcp")

    def steps() -> None:
        train(model, optimizer, STEPS[size])
        penstock.finish_saving(model)

    contestants: dict[str, Callable[[], Any]] = {
        "synchronous": save,
        "asynchronous: whole": asynchronous,
        "plain copy": lambda: copy_plainly(folder, bytes_of(model, optimizer)),
        "plain copy, not flushed": lambda: copy_plainly(folder, bytes_of(model, optimizer), flush=False),
        "tensors alone": lambda: write_tensors(str(folder / "all.safetensors"), tensors_of(model, optimizer)),
        "DCP save": dcp_synchronous,
        "DCP async_save: whole": dcp_asynchronous,
        "steps": steps,
        "steps and a synchronous save": lambda: (save(), steps()),
        "steps and an asynchronous save": lambda: (save(asynchronous=True), steps()),
    }
    order = random.Random(0)
    for number in range(rounds + 1):
        names = list(contestants)
        order.shuffle(names)
        for name in names:
            # A virtual machine gives memory back that was free for a while, and the first to use it again waits for it.
            # So each finds as much as it needs just freed.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            copy_plainly(folder, bytes_of(model, optimizer))
            shutil.rmtree(folder)
            folder.mkdir()
            os.sync()
            begin = time.perf_counter()
            contestants[name]()
            seconds.setdefault(name, []).append(time.perf_counter() - begin)
        print(f"{size} GB, round {number}: " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in seconds.items()), flush=True)
    # The first round makes the memory that the others use again.
    return {"bytes": num_bytes, "seconds": {name: taken[1:] for name, taken in seconds.items()}}


def table_of_speed(results: dict[str, Any]) -> list[str]:
    """A table of stalls, and two of bytes a second: of the medians, and of the fastest of each."""
    ways = {
        "plain copy": "plain copy",
        "plain copy, not flushed": "not flushed",
        "tensors alone": "tensors in one file",
        "synchronous": "synchronous",
        "asynchronous: whole": "asynchronous, stall and all",
        "writing": "its writing alone",
        "DCP save": "DCP save",
        "DCP async_save: whole": "DCP async_save",
    }
    stalls, rates = [], []
    for size, found in results.items():
        taken = dict(found["seconds"])
        pairs = zip(taken["asynchronous: whole"], taken["asynchronous: stall"], strict=True)
        taken["writing"] = [whole - stall for whole, stall in pairs]
        medians = {name: statistics.median(each) for name, each in taken.items()}
        held = [medians[f"steps and {kind} save"] - medians["steps"] for kind in ("a synchronous", "an asynchronous")]
        cells = [medians[name] for name in ("synchronous", "asynchronous: stall", "DCP async_save: stall")] + held
        stalls.append([f"{size} GB", *(f"{cell:.3f} s" for cell in cells)])
        for which, of in (("median", medians), ("fastest", {name: min(each) for name, each in taken.items()})):
            row = [f"{found['bytes'] / of[way] / 1e9:.2f} GB/s ({of['plain copy'] / of[way]:.2f})" for way in ways]
            rates.append([f"{size} GB, {which}", *row])
    columns = ["synchronous: stall", "asynchronous: stall", "DCP async_save: stall"]
    columns += ["steps held up, synchronous", "steps held up, asynchronous"]
    return [
        *table_of(["state", *columns], stalls),
        *["", "In brackets: as a share of the plain copy's.", ""],
        *table_of(["state, of which rounds", *ways.values()], rates),
    ]


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
    port = free_port()
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
    sys.exit(0)


def write(options: argparse.Namespace, output: Path, found: Any, lines: list[str]) -> None:
    """The record and the tables."""
    config = {name: value for name, value in vars(options).items() if name not in ("folder", "output")}
    lines = [*lines, "", f"Configuration: `{json.dumps(config)}`"]
    write_result(output, "Checkpoints", f"`{options.what}`", lines, {"config": config, "results": found})


if __name__ == "__main__":
    main()

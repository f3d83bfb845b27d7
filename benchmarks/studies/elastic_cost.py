"""What surviving a loss costs: while nothing happens, when state moves, and beside starting the job again.

    python benchmarks/studies/elastic_cost.py cost    # a step with elastic= and without, in turn, in the same processes
    python benchmarks/studies/elastic_cost.py move    # 0.5 GB of weights and optimizer state, beside a plain send
    python benchmarks/studies/elastic_cost.py restart # a killed process: elastic=, and torchrun --max-restarts, in turn
    python benchmarks/studies/elastic_cost.py restart --rounds 2 --output /tmp/here

All of it on this machine: CPU, gloo, one thread a process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import table_of, write_result
from transformers import GPT2Config, GPT2LMHeadModel

from penstock import Booster, CheckpointManager, Elastic, HeterogeneousParallelPlugin, PipelineTemplate
from penstock.elastic.moving import from_live_ranks
from penstock.layout.layout import Layout
from penstock.model.pipeline_model import attach
from penstock.modeling.graph.units import list_units
from penstock.runtime.formation import new_job, parallelize
from penstock.runtime.reforming import change_layout
from penstock.schedule import build

# Of a step that is timed, and of a run that loses a process.
SMALL = {"n_layer": 6, "n_embd": 256, "n_head": 4, "vocab_size": 1024, "n_positions": 64}
# With AdamW's state some 0.5 GB.
LARGE = {"n_layer": 12, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 64}
BATCH, MICROBATCH = 16, 4
# Steps between two checkpoints of a run that is started again, and the steps in which a process may be killed.
EVERY, KILLS = 20, (21, 40)


def model_of(config: dict[str, int]) -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**config)).train()


class Tokens:
    """A data set of random sequences."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(1024, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Training:
    """A model, and what trains it by a plugin."""

    def __init__(self, stages: int, elastic: Elastic | None = None, pipelines: int = 1) -> None:
        model = model_of(SMALL)
        template = PipelineTemplate.balanced(model, stages)
        if elastic is None:
            self.plugin = HeterogeneousParallelPlugin(microbatch_size=MICROBATCH)
            self.plugin.set_pipelines([template] * pipelines, [BATCH // MICROBATCH // pipelines] * pipelines)
        else:
            self.plugin = HeterogeneousParallelPlugin(
                microbatch_size=MICROBATCH, global_batch_size=BATCH, elastic=elastic
            )
        self.booster = Booster(plugin=self.plugin)
        loader = self.plugin.prepare_dataloader(Tokens(), shuffle=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model, self.optimizer, _, self.loader, _ = self.booster.boost(model, optimizer, None, loader, None)
        self._batches: Iterator[Any] = iter(self.loader)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.booster.execute_pipeline(self._batches, self.model, None, self.optimizer)
        self.optimizer.step()


# -- what a step costs -------------------------------------------------------------------------------------------------


def cost_rank(folder: Path, rounds: int) -> None:
    """On a rank: both ways in turn, one step of each."""
    # Templates of two stages only: the same pipeline as without.
    templates = [PipelineTemplate.balanced(model_of(SMALL), 2)]
    ways = {"with elastic=": Training(2, Elastic((folder / "store").as_uri(), 1, start=2, templates=templates))}
    ways["without"] = Training(2)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 3):
        for name in (list(ways), list(ways)[::-1])[number % 2]:
            dist.barrier()
            started = time.perf_counter()
            ways[name].step()
            dist.barrier()
            if number >= 3:
                seconds[name].append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))


def cost(rounds: int) -> tuple[dict[str, Any], list[str]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _end([_start(["cost-rank", "--folder", name, "--rounds", str(rounds)]) for _ in range(2)])
        seconds = json.loads((folder / "seconds.json").read_text())
    ratios = [a / b for a, b in zip(seconds["with elastic="], seconds["without"], strict=True)]
    low, high = statistics.quantiles(ratios, n=20)[0], statistics.quantiles(ratios, n=20)[-1]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    lines = [
        "## While nothing happens",
        "",
        f"Two stages, {BATCH // MICROBATCH} microbatches, {rounds} steps of each in turn. Medians: "
        + ", ".join(f"{name} {value * 1000:.1f} ms" for name, value in medians.items())
        + f". Ratio of the medians {medians['with elastic='] / medians['without']:.4f}; of the pairs "
        f"{statistics.median(ratios):.4f} (90 % of them {low:.3f} to {high:.3f}).",
        "",
    ]
    return {"seconds": seconds}, lines


# -- how fast state moves ----------------------------------------------------------------------------------------------


def move_rank(folder: Path, rounds: int) -> None:
    """On a rank: nearly the whole model goes from one rank to the other and back, each time beside a plain send."""
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(folder / "meeting"), -1)
    model = model_of(LARGE)
    optimizer = torch.optim.AdamW(model.parameters())
    units = list_units(model)
    layouts = [Layout.place([[units[:-1], units[-1:]]]), Layout.place([[units[:1], units[1:]]])]
    generation = 0

    def meet() -> None:
        nonlocal generation
        generation += 1
        dist.init_process_group("gloo", store=dist.PrefixStore(str(generation), store), rank=rank, world_size=2)

    meet()
    with new_job() as board:
        engine = parallelize(model, layouts[0], partial(build, "1f1b", 2), board)
    attach(model, engine)
    batch = {"input_ids": torch.ones(4, 16, dtype=torch.long), "labels": torch.ones(4, 16, dtype=torch.long)}
    for output in model(**batch):
        output.loss.backward()
    optimizer.step()
    seconds: dict[str, list[float]] = {"move": [], "plain send": []}
    sizes: list[int] = []
    for number in range(1, rounds + 1):
        engine.dissolve()
        dist.destroy_process_group()
        meet()
        size = torch.zeros(1, dtype=torch.long)

        def fill(engine: Any, taken: Any, had: Any, size: torch.Tensor = size) -> None:
            dist.barrier()
            started = time.perf_counter()
            from_live_ranks(optimizer)(engine, taken, had)
            dist.barrier()
            seconds["move"].append(time.perf_counter() - started)
            known = engine.known
            size += sum(tensor.nbytes for tensor in taken.values())
            size += sum(
                value.nbytes
                for name in taken
                for value in optimizer.state.get(known.get(name), {}).values()
                if isinstance(value, torch.Tensor)
            )

        change_layout(engine, layouts[number % 2], fill_values=fill)
        dist.all_reduce(size, dist.ReduceOp.MAX)
        sends = rank == (number + 1) % 2
        plain = torch.ones(int(size) if sends else 0, dtype=torch.uint8)
        dist.barrier()
        started = time.perf_counter()
        if sends:
            dist.send(plain, 1 - rank)
        else:  # into new memory, as a move has it
            dist.recv(torch.empty(int(size), dtype=torch.uint8), 1 - rank)
        dist.barrier()
        seconds["plain send"].append(time.perf_counter() - started)
        sizes.append(int(size))
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps({"seconds": seconds, "bytes": sizes}))


def move(rounds: int) -> tuple[dict[str, Any], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["move-rank", "--folder", folder, "--rounds", str(rounds)]
        _end([_start(arguments, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)])
        found = json.loads((Path(folder) / "seconds.json").read_text())
    seconds = found["seconds"]
    ratios = [b / a for a, b in zip(seconds["move"], seconds["plain send"], strict=True)]
    lines = [
        "## How fast state moves",
        "",
        f"{statistics.median(found['bytes']) / 1e9:.2f} GB of weights and AdamW's state from one process to another, "
        f"{rounds} times, each time beside one `send` of as many bytes into new memory. The move reaches "
        f"{statistics.median(ratios):.2f} of the plain send's bytes a second (median; {min(ratios):.2f} to "
        f"{max(ratios):.2f}).",
        "",
    ]
    return found, lines


# -- beside starting again ---------------------------------------------------------------------------------------------


def train_rank(folder: Path, elastic: bool) -> None:
    """A process of a run that loses another: notes each step that it has done, and when."""
    store = Elastic((folder / "store").as_uri(), start=4, hang_timeout=60) if elastic else None
    training = Training(2, store, 2)
    manager = None
    step = 0
    if not elastic:
        arguments = {"optimizer": training.optimizer, "dataloader": training.loader}
        manager = CheckpointManager(folder / "run", model=training.model, every=EVERY, keep_last=2, **arguments)
        step = manager.resume()
    with (folder / f"{os.getpid()}.log").open("w", buffering=1) as log:
        while True:
            training.step()
            step = training.booster.step if elastic else step + 1
            log.write(json.dumps({"step": step, "at": time.time()}) + "\n")
            if manager is not None:
                manager.save(step)


def lose_one(elastic: bool, kill_at: int) -> dict[str, float]:
    """A run of four processes that loses one: what it took until a step was finished that was not done before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if elastic:
            started = [_start(["train-rank", "--folder", name, "--elastic"]) for _ in range(4)]
        else:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--max-restarts", "3"]
            started = [_start(["train-rank", "--folder", name], launcher)]
        try:
            deadline = time.monotonic() + 240
            while _last(done := _done(folder)) < kill_at:
                _in_time(deadline, started)
                time.sleep(0.002)
            victim = random.Random(kill_at).choice(sorted(done))
            os.kill(victim, signal.SIGKILL)
            killed_at = time.time()
            before = _last(_done(folder))
            while _last(after := _done(folder)) < before + 3:
                _in_time(deadline, [] if elastic else started)
                time.sleep(0.002)
        finally:
            for process in started:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for pid in _done(folder):  # torchrun's workers have groups of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        new = min(at for steps in after.values() for step, at in steps if step == before + 1)
        first = {
            pid: min(step for step, at in steps if at > killed_at)
            for pid, steps in after.items()
            if any(at > killed_at for _, at in steps)
        }
        return {"seconds": new - killed_at, "repeated": max(0, before + 1 - min(first.values())), "step": kill_at}


def restart(rounds: int) -> tuple[dict[str, Any], list[str]]:
    draw = random.Random(0)
    found: dict[str, list[dict[str, float]]] = {"elastic=": [], "torchrun --max-restarts": []}
    for number in range(rounds):
        kill_at = draw.randint(*KILLS)
        for name in (list(found), list(found)[::-1])[number % 2]:
            found[name].append(lose_one(name == "elastic=", kill_at))
            print(name, found[name][-1], flush=True)
    lines = [
        "## Beside starting again",
        "",
        f"Four processes, two pipelines of two stages; one is killed, {rounds} times each way, in turn, in the same "
        f"step of {KILLS[0]} to {KILLS[1]}. torchrun starts all again from the checkpoint of each {EVERY}th step.",
        "",
    ]
    rows = []
    for name, each in found.items():
        seconds = [one["seconds"] for one in each]
        repeated = statistics.mean(one["repeated"] for one in each)
        rows.append([f"`{name}`", f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", f"{repeated:.1f}"])
    columns = ["", "seconds from the kill to the next new step", "worst", "steps repeated, mean"]
    lines += table_of(columns, rows)
    return {"kills": found}, lines


def _done(folder: Path) -> dict[int, list[tuple[int, float]]]:
    """The steps that each process has done, and when."""
    found = {}
    for path in folder.glob("*.log"):
        notes = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if notes:
            found[int(path.stem)] = [(note["step"], note["at"]) for note in notes]
    return found


def _last(done: dict[int, list[tuple[int, float]]]) -> int:
    return max((step for steps in done.values() for step, _ in steps), default=0)


def _in_time(deadline: float, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
        raise RuntimeError("a run did not get on")


def _start(arguments: Sequence[str], launcher: Sequence[str] = (), **variables: str) -> subprocess.Popen[bytes]:
    environment_of_it = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *launcher, __file__, *arguments]
    return subprocess.Popen(command, env=environment_of_it, start_new_session=True)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    statuses = [process.wait() for process in processes]
    if any(statuses):
        sys.exit("a process failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "move", "restart", "cost-rank", "move-rank", "train-rank"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--elastic", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    if options.what == "cost-rank":
        cost_rank(options.folder, options.rounds)
    elif options.what == "move-rank":
        move_rank(options.folder, options.rounds)
    elif options.what == "train-rank":
        train_rank(options.folder, options.elastic)
    else:
        measure, usual = {"cost": (cost, 200), "move": (move, 10), "restart": (restart, 6)}[options.what]
        content, lines = measure(options.rounds or usual)
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"elastic_{options.what}"
        write_result(path, __doc__.splitlines()[0], "written by `benchmarks/studies/elastic_cost.py`", lines, content)


if __name__ == "__main__":
    main()

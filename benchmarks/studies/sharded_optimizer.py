"""Optimizer state divided among holders, beside today's engine, DDP, ZeroRedundancyOptimizer and FSDP2:
`python benchmarks/studies/sharded_optimizer.py`.

For each layout a GPT-2 with AdamW: seconds a step, in turn; in a second pass, with an allocator that gives memory back,
the bytes of optimizer state and of gradients by rank, and the peak of resident memory over steps. A step is everything:
forwards, backwards, sums, the optimizer's step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants import build, mean_over_ranks, own_microbatches, tokens
from measure import ALLOCATOR, RESULTS, SHAPE, interleave, median_of, ratio_of, table_of, write_result
from processes import Contestant
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from turns import Step, serve

# Each layout: the numbers of stages, and of microbatches, of its pipelines. The peers run beside the first one.
LAYOUTS = {
    "[1] + [1]": ([1, 1], [4, 4]),
    "[2] + [2]": ([2, 2], [4, 4]),
    "[2] + [1]": ([2, 1], [5, 3]),
    "[1] + [1] + [1] + [1]": ([1, 1, 1, 1], [2, 2, 2, 2]),
}
TODAY, SHARDED = "Penstock", "Penstock, sharded_optimizer"
ZERO = "DDP + ZeroRedundancyOptimizer"
PEERS = {"DDP": "ddp", ZERO: "zero", "FSDP2, reshard_after_forward=False": "fsdp"}
# Blocks of this size come from the system, and go back when they are freed.
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}


# -- a contestant's rank -----------------------------------------------------------------------------------------------


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def figures(model: nn.Module, optimizer: torch.optim.Optimizer, seen: dict[str, Any]) -> dict[str, Any]:
    """Of all ranks, once: bytes of gradients, as storages, and of the optimizer's state. Between backward and step."""
    inner = getattr(optimizer, "optim", optimizer)
    if not seen and inner.state:
        local = [getattr(one, "_local_tensor", one) for one in (p.grad for p in model.parameters()) if one is not None]
        gradients = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in local}
        values = [value for state in inner.state.values() for value in state.values()]
        held = sum(getattr(one, "_local_tensor", one).nbytes for one in values if isinstance(one, torch.Tensor))
        mine = torch.tensor([sum(gradients.values()), held])
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        seen["gradient_bytes"], seen["state_bytes"] = (list(column) for column in torch.stack(every).T.tolist())
        Path("/proc/self/clear_refs").write_text("5")  # from here on
    return seen


def peak() -> list[float]:
    """The peak of each rank's resident memory since then, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    mine = torch.tensor([int(line.split()[1]) / 1024])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [float(one) for one in every]


def training(model: nn.Module, optimizer: torch.optim.Optimizer, backwards: Callable[[], float]) -> Step:
    seen: dict[str, Any] = {}

    def step() -> dict[str, Any]:
        used = time.process_time()
        model.zero_grad()
        loss = backwards()
        found = figures(model, optimizer, seen)
        start, used_before = time.perf_counter(), time.process_time()
        optimizer.step()
        took, now = time.perf_counter() - start, time.process_time()
        times = {"cpu": now - used, "update": took, "update_cpu": now - used_before}
        return {"loss": loss, **times, **found, **({"peak": peak()} if found else {})}

    return step


def penstock_pipelines(arguments: dict[str, Any]) -> Step:
    import penstock

    stages, counts = arguments["layout"]
    model, ids = build(arguments), tokens(arguments).chunk(arguments["num_microbatches"])
    templates = [penstock.PipelineTemplate.balanced(model, number) for number in stages]
    plugin = penstock.HeterogeneousParallelPlugin(
        microbatch_size=arguments["micro_batch_size"], sharded_optimizer=arguments["sharded"]
    )
    plugin.set_pipelines(templates, counts)
    optimizer = adamw(model.parameters())
    model, optimizer, *_ = penstock.Booster(plugin=plugin).boost(model, optimizer)
    first = sum(counts[: plugin.pipeline_index])
    mine = torch.cat(ids[first : first + counts[plugin.pipeline_index]])

    def backwards() -> float:
        for out in model(input_ids=mine, labels=mine):
            out.loss.backward()
        return float(model.pipeline.last_step.global_loss)

    return training(model, optimizer, backwards)


def data_parallel(arguments: dict[str, Any], zero: bool) -> Step:
    dist.init_process_group("gloo")
    model, mine = build(arguments), own_microbatches(arguments)
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-4) if zero else adamw(parameters)

    def backwards() -> float:
        with replica.no_sync():
            loss = sum_of(replica, mine[:-1], len(mine))
        last = replica(input_ids=mine[-1], labels=mine[-1], use_cache=False).loss / len(mine)
        last.backward()
        return mean_over_ranks(loss + last.item())

    return training(model, optimizer, backwards)


def sum_of(call: nn.Module, microbatches: Iterable[torch.Tensor], total: int) -> float:
    losses = []
    for ids in microbatches:
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss / total
        loss.backward()
        losses.append(loss.item())
    return sum(losses)


def fully_sharded(arguments: dict[str, Any]) -> Step:
    """Weights are gathered once a step: they stay after each backward but the last one."""
    dist.init_process_group("gloo")
    model, mine = build(arguments), own_microbatches(arguments)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    sharded: Any = model

    def backwards() -> float:
        loss = 0.0
        for index, ids in enumerate(mine):
            is_last = index == len(mine) - 1
            sharded.set_requires_gradient_sync(is_last)
            sharded.set_reshard_after_backward(is_last)
            loss += sum_of(model, [ids], len(mine))
        return mean_over_ranks(loss)

    return training(model, adamw(model.parameters()), backwards)


KINDS = {
    "penstock": penstock_pipelines,
    "ddp": partial(data_parallel, zero=False),
    "zero": partial(data_parallel, zero=True),
    "fsdp": fully_sharded,
}


# -- side by side ------------------------------------------------------------------------------------------------------


def contestants_of(layout: str, shape: dict[str, Any]) -> dict[str, dict[str, Any]]:
    stages, counts = LAYOUTS[layout]
    shape = {**shape, "num_microbatches": sum(counts), "layout": (stages, counts)}
    found = {name: {**shape, "kind": "penstock", "sharded": name == SHARDED} for name in (TODAY, SHARDED)}
    if stages == [1, 1]:
        found |= {name: {**shape, "kind": kind} for name, kind in PEERS.items()}
    return found


def measured(layout: str, shape: dict[str, Any], rounds: int, steps: int) -> dict[str, list[dict]]:
    """Times in turn, then memory one by one; the latter is the last entry of each."""
    found, size = contestants_of(layout, shape), sum(LAYOUTS[layout][0])
    running = {name: Contestant(Path(__file__).name, size, arguments) for name, arguments in found.items()}
    try:
        results = interleave({name: partial(one.run, steps) for name, one in running.items()}, rounds)
    finally:
        for one in running.values():
            one.close()
    for name, arguments in found.items():
        with Contestant(Path(__file__).name, size, {**arguments, "warmup": 1}, environment=GIVING_BACK) as one:
            results[name].append(one.run(2))
            print(f"{layout}, {name}: {results[name][-1]}")
    losses = [result["loss"][0] for runs in results.values() for result in runs[:1]]
    assert max(losses) - min(losses) < 1e-3, f"{layout}: they train on other things: {losses}"
    return results


def rows_of(layout: str, results: dict[str, list[dict]]) -> list[list[str]]:
    size, rows = sum(LAYOUTS[layout][0]), []
    timed = {name: runs[:-1] for name, runs in results.items()}
    for name, runs in results.items():
        memory = runs[-1]

        def by_rank(values: list[float], unit: float = 2**20) -> str:
            return ", ".join(f"{value / unit:.1f}" for value in values)

        rows.append([
            layout, name, f"{median_of(timed[name], 'seconds'):.3f}",
            *(f"{ratio_of(timed[name], timed[TODAY], figure):.3f}" for figure in ("seconds", "cpu")),
            *(f"{median_of(timed[name], figure):.3f}" for figure in ("update", "update_cpu")),
            by_rank(memory["state_bytes"][0]), by_rank(memory["gradient_bytes"][0]),
            ", ".join(f"{max(peaks[rank] for peaks in memory['peak']):.0f}" for rank in range(size)),
        ])  # fmt: skip
    return rows


def hidden_at_most(layout: str, results: dict[str, list[dict]]) -> str:
    """What sending new weights beside later work could save: the time of an update that is no processor's time."""
    times = {figure: median_of(results[SHARDED][:-1], figure) for figure in ("seconds", "update", "update_cpu")}
    share = max(0.0, times["update"] - times["update_cpu"]) / times["seconds"]
    return f"- {layout}: sending beside what follows the update would hide at most {100 * share:.1f} % of a step."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--length", type=int, default=SHAPE["length"], help="tokens of a sample")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--to", type=Path, default=RESULTS / "sharded_optimizer")
    arguments = parser.parse_args()
    shape = {**SHAPE, "length": arguments.length, "micro_batch_size": 2, "warmup": 2}
    results = {layout: measured(layout, shape, arguments.rounds, arguments.steps) for layout in arguments.layouts}
    columns = [
        "layout",
        "",
        "seconds a step",
        "of today's",
        "CPU time, of today's",
        "its update, s",
        "CPU time of that",
    ]
    columns += ["state, MiB by rank", "gradients, MiB", "peak, MiB"]
    lines = table_of(columns, [row for layout, found in results.items() for row in rows_of(layout, found)])
    lines += ["", *map(hidden_at_most, results, results.values())]
    lines += ["", f"Shape: `{shape}`; {arguments.rounds} rounds of {arguments.steps} steps, AdamW, float32."]
    about = "medians of interleaved runs; ratios are medians over rounds"
    content = {"shape": shape, "allocator": ALLOCATOR, "runs": results}
    write_result(arguments.to, "A sharded optimizer", about, lines, content)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        serve(KINDS)
    else:
        main()

"""One run of the benchmark: build the model in one mode, train it on made-up tokens, measure, write the figures.

Runs under torchrun on every rank, as `trainer.py` of the folder benchmarks/suite/ or `-m kinds.trainer`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from kinds import figures
from kinds.configs import GPTConfig
from kinds.measure import Clock, forget_peak_memory, matmul_peak, memory_in_use, peak_memory
from kinds.memory import check_memory, estimate
from kinds.models import mix_seed
from kinds.modes import Batch, Contestant, PipelinedReplicas, Pipelines, Replicas
from kinds.options import OptionError, Options, World, read_options
from kinds.result_files import write_json
from penstock.runtime.comm.bootstrap import ensure_process_group

LEARNING_RATE = 1e-4
# Squares of gradients underflow in half precision; an ordinary epsilon would then make steps of any size.
HALF_EPSILON = 1e-4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on this rank; returns the exit status."""
    world = World.find()
    try:
        options = read_options(arguments, world)
        if options.check_memory:
            check_memory(options, world)
    except OptionError as error:
        if world.rank == 0 or world.local_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    torch.set_num_threads(options.threads_per_device)
    devices = choose_devices(options, world)
    ensure_process_group()
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    try:
        result = measure(options, world, devices)
        if world.rank == 0:
            print(figures.summary(result), flush=True)
            if options.output is not None:
                write_json(result, options.output)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def choose_devices(options: Options, world: World) -> list[torch.device]:
    """The devices that this process drives."""
    if world.device_type == "cpu":
        return [torch.device("cpu")] * options.ndevice_per_proc
    first = world.local_rank * options.ndevice_per_proc
    return [torch.device("cuda", first + index) for index in range(options.ndevice_per_proc)]


def build_contestant(options: Options, devices: Sequence[torch.device]) -> Contestant:
    """This rank's part of the mode."""
    if options.mode == "pdp":
        return PipelinedReplicas(options, devices)
    if options.mode == "pp":
        return Pipelines(options, devices[0])
    return Replicas(options, devices[0])


def build_optimizer(options: Options, contestant: Contestant) -> torch.optim.Optimizer:
    """AdamW, or plain SGD, with state of the parameters' type."""
    if options.optimizer == "sgd":
        return torch.optim.SGD(contestant.parameters, lr=LEARNING_RATE)
    epsilon = HALF_EPSILON if options.dtype == "fp16" else 1e-8
    return torch.optim.AdamW(contestant.parameters, lr=LEARNING_RATE, eps=epsilon)


def make_batch(options: Options, step: int) -> Batch:
    """The global batch of a step, on the CPU: the same on all ranks and in all modes."""
    generator = torch.Generator().manual_seed(mix_seed(options.seed, step))
    config, size = options.config, options.batch_size
    if isinstance(config, GPTConfig):
        ids = torch.randint(config.vocab_size, (size, config.block_size), generator=generator)
        return {"input_ids": ids, "labels": ids}
    pixels = torch.randn(size, 3, config.image_size, config.image_size, generator=generator)
    labels = torch.randint(config.num_classes, (size,), generator=generator)
    return {"pixel_values": pixels.to(options.torch_dtype), "labels": labels}


def measure(options: Options, world: World, devices: Sequence[torch.device]) -> dict[str, Any]:
    """Train; returns the result on rank 0, and an incomplete one on the others."""
    control = dist.new_group(backend="gloo")
    dist.barrier(control)
    peak = matmul_peak(devices, options.torch_dtype)
    before = memory_in_use(devices)
    contestant = build_contestant(options, devices)
    optimizer = build_optimizer(options, contestant)
    clock = Clock(devices)
    samples: list[figures.Sample] = []
    for number in range(options.warmup + options.iterations):
        batch = make_batch(options, number)
        if number == options.warmup:
            forget_peak_memory(devices)
        dist.barrier(control)
        samples.append(train_step(contestant, optimizer, batch, clock))
    mine = figures.RankFigures(
        samples=samples[options.warmup :],
        losses=[sample.loss for sample in samples],
        peak_memory=peak_memory(devices),
        memory_before=before,
        matmul_peak=peak,
        parameters=sum(parameter.numel() for parameter in contestant.parameters),
    )
    if options.profile is not None:
        profile_step(options, contestant, optimizer, clock, world)
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, mine, group=control)
    contestant.close()
    return figures.assemble(options, world, estimate(options, world), gathered)


def train_step(contestant: Contestant, optimizer: torch.optim.Optimizer, batch: Batch, clock: Clock) -> figures.Sample:
    """One step, timed."""
    clock.start()
    optimizer.zero_grad()
    loss = contestant.step(batch, clock)
    with clock.phase("optimizer"):
        optimizer.step()
    seconds, phases = clock.stop()
    efficiency = contestant.efficiency(phases)
    return figures.Sample(seconds, phases, efficiency, float(loss))


def profile_step(
    options: Options, contestant: Contestant, optimizer: torch.optim.Optimizer, clock: Clock, world: World
) -> None:
    """One more step, whose Chrome trace goes to `<folder>/<mode>_rank<rank>.json`."""
    assert options.profile is not None
    folder = Path(options.profile)
    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    # The devices of "pdp" are other threads of this process.
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every_thread) as profiler:
        train_step(contestant, optimizer, make_batch(options, options.warmup + options.iterations), clock)
    profiler.export_chrome_trace(str(folder / f"{options.mode}_rank{world.rank}.json"))


def run() -> NoReturn:
    """Run `main` and end the process at once, because threads of a failed run might hold up the end."""
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()

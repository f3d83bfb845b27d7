"""How much memory a run needs on its fullest device, estimated before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import ResNetForImageClassification

from kinds.configs import GPTConfig, ResNetSize
from kinds.models import CHECKPOINT, GPT, NOOP, layer_costs
from kinds.options import OptionError, Options, World
from penstock.layout.partition import partition
from penstock.layout.template import end_modules
from penstock.modeling.instrumentation import record_of
from penstock.planning.memory import MemoryEstimate, memory_of_ranks, readable
from penstock.planning.profile import UnitCost, held_by_stages, stages_of
from penstock.planning.profiling import profile_model
from penstock.schedule import build


def estimate(options: Options, world: World) -> MemoryEstimate:
    """What the run needs on its fullest device, without the libraries' own memory."""
    if options.mode in ("ddp", "fsdp"):
        return _replicated(options, world)
    return max(_of_stages(options, world), key=lambda stage: stage.total)


def check_memory(options: Options, world: World) -> None:
    """Refuse a run that cannot fit.

    Raises:
        OptionError: with what it needs, part by part, what is free, and what would need less.
    """
    needed, free = estimate(options, world), free_memory(options, world)
    if needed.total > free:
        raise OptionError(
            f"{options.model} with --mode {options.mode} and --batch-size {options.batch_size} needs about "
            f"{readable(needed.total)} on a device ({needed}), but {readable(free)} are free: {_advice(options)}, or a "
            "smaller --model or --batch-size (--no-memory-check starts it all the same)"
        )


def free_memory(options: Options, world: World) -> float:
    """Bytes free on the fullest of this process's devices; CPU devices share the machine's memory equally."""
    if world.device_type == "cuda":
        first = world.local_rank * options.ndevice_per_proc
        return min(torch.cuda.mem_get_info(first + index)[0] for index in range(options.ndevice_per_proc))
    return _free_host_memory() / (world.local_size * options.ndevice_per_proc)


# ---------------------------------------------------------------- the parts


def _states(options: Options) -> int:
    """Numbers the optimizer keeps for each parameter."""
    return 2 if options.optimizer == "adamw" else 0


def _replicated(options: Options, world: World) -> MemoryEstimate:
    """Every device runs all layers, one microbatch after another."""
    samples, size = math.ceil(options.batch_size / world.size / options.chunks), options.torch_dtype.itemsize
    if isinstance(options.config, ResNetSize):
        with torch.device("meta"):
            model = ResNetForImageClassification(options.config.to_transformers()).to(options.torch_dtype)
        image = torch.empty(samples, 3, *[options.config.image_size] * 2)
        record_of(model).example_inputs = {"pixel_values": image}
        units, blocks = profile_model(model, samples, optimizer_states=_states(options)).units, 0.0
        own = float(sum(parameter.numel() for parameter in model.parameters()))
    else:
        embedding, block, head = _units(options, samples)
        units = (*embedding, *block * options.config.n_layer, *head)
        # Beside its shards a device holds one gathered block and the next, and the embeddings, which are the root's.
        blocks = sum(unit.weights for unit in (*block, *block, *embedding)) / size
        own = float(options.config.num_parameters)  # a tied weight is held once
    whole = 0.0
    if options.mode == "fsdp":
        whole = blocks if world.size > 1 else 0.0
        own = 0.0 if options.cpu_offload and world.device_type == "cuda" else own / world.size
    (found,) = memory_of_ranks(build("1f1b", 1, 1), held_by_stages([units]))
    return MemoryEstimate(
        (own + whole) * size, (own + whole / 2) * size, own * size * _states(options), found.activations
    )  # fmt: skip


def _of_stages(options: Options, world: World) -> list[MemoryEstimate]:
    """What each device of a pipeline needs, from the planner's profile of the same model with one block."""
    found = []
    config = options.config
    assert isinstance(config, GPTConfig)
    pipelines = options.pipelines or [(options.ndevice_per_proc, options.chunks)]
    for ranks, microbatches in pipelines:
        schedule = build(options.schedule, ranks, microbatches)
        whole = options.batch_size / (options.num_microbatches if options.pipelines else world.size * microbatches)
        sizes = partition(layer_costs(config), [1.0] * schedule.num_stages).sizes
        embedding, block, head = _units(options, math.ceil(whole))
        layers = [embedding, *[block] * config.n_layer, head]
        found += memory_of_ranks(schedule, held_by_stages(stages_of(layers, sizes)))
    return found


def _units(options: Options, samples: int) -> tuple[list[UnitCost], list[UnitCost], list[UnitCost]]:
    """The units before the blocks, of a block, and after the blocks, for microbatches of `samples`."""
    assert isinstance(options.config, GPTConfig)
    small = GPTConfig(**{**options.config.sizes(), "n_layer": 1})
    model = GPT(small, "meta", options.torch_dtype)
    units = profile_model(model, samples, small.block_size, optimizer_states=_states(options)).units
    first, last = end_modules([unit.name for unit in units])
    before, block, after = units[: len(first)], units[len(first) : -len(last)], units[-len(last) :]
    if options.activation == CHECKPOINT:
        block = tuple(unit.checkpointed() for unit in block)
    elif options.activation != NOOP:  # what a microbatch keeps is on the host until its backward
        block = tuple(replace(unit, kept=0.0, working=unit.working + unit.kept) for unit in block)
    return list(before), list(block), list(after)


def _advice(options: Options) -> str:
    ways = {
        "ddp": ["--mode fsdp or pp on more devices"],
        "fsdp": ["more devices", "--cpu-offload"],
        "pdp": ["a larger --ndevice-per-proc"],
        "pp": ["pipelines with more ranks"],
    }[options.mode]
    more = ["--activation checkpoint"] if options.activation == NOOP else []
    return ", ".join(ways + more)


def _free_host_memory() -> float:
    """Bytes that new processes can have: what the machine and, where one is set, the container's limit leave."""
    fields = dict(_fields(Path("/proc/meminfo")))
    free = float(fields.get("MemAvailable", "inf kB").split()[0]) * 1024
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return min(free, limit - used) if limit is not None and used is not None else free


def _fields(path: Path) -> Sequence[tuple[str, str]]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ()
    return [(name, value) for name, _, value in (line.partition(":") for line in lines)]


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None

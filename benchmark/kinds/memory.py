"""How much memory a run needs on its fullest device, estimated before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import ResNetForImageClassification

from kinds.configs import GPTConfig, ResNetSize
from kinds.models import CHECKPOINT, GPT, NOOP, layer_costs
from kinds.options import OptionError, Options, World
from penstock.layout.partition import partition
from penstock.layout.template import end_modules
from penstock.planning.memory import MemoryEstimate, memory_of_ranks, readable
from penstock.planning.profile import UnitCost, held_by_stages, stages_of
from penstock.planning.profiling import profile_model
from penstock.schedule.generators import build

# Elements of (tokens x width) that a block keeps for its backward: inputs of the two norms, of the four products, of
# attention (q, k, v) and of GELU, the latter and the last product's four times as wide; attention itself keeps nothing
# of tokens x tokens (Korthikanti et al. 2022, section 4, without its dropout masks and with fused attention).
ELEMENTS_KEPT = 17


@dataclass(frozen=True)
class _Layer:
    """Parameters of a layer, and bytes that one microbatch keeps there until its backward."""

    parameters: float
    kept: float


def estimate(options: Options, world: World) -> MemoryEstimate:
    """What the run needs on its fullest device, without the libraries' own memory."""
    if isinstance(options.config, ResNetSize):
        return _of_resnet(options, world)
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


def _layers(options: Options, samples: float) -> list[_Layer]:
    """Embedding, blocks and head of a GPT, for microbatches of `samples`."""
    config = options.config
    assert isinstance(config, GPTConfig)
    size = options.torch_dtype.itemsize
    hidden = samples * config.block_size * config.n_embd
    block = 12 * config.n_embd**2 + 13 * config.n_embd
    vocabulary = config.vocab_size * config.n_embd
    # The log-probabilities that the loss keeps are in single precision.
    logits = samples * config.block_size * config.vocab_size * max(size, 4)
    kept = size * hidden * (ELEMENTS_KEPT if options.activation == NOOP else 1)
    return [
        _Layer(vocabulary + config.block_size * config.n_embd, 0),
        *[_Layer(block, kept if options.activation in (NOOP, CHECKPOINT) else 0)] * config.n_layer,
        _Layer(vocabulary + 2 * config.n_embd, logits + size * hidden),
    ]


def _transient(options: Options, samples: float, has_head: bool) -> float:
    """What exists once, while a microbatch is at work: a block's activations that are not kept, and the logits."""
    config = options.config
    assert isinstance(config, GPTConfig)
    size = options.torch_dtype.itemsize
    block = size * samples * config.block_size * config.n_embd * ELEMENTS_KEPT
    logits = samples * config.block_size * config.vocab_size * (size + max(size, 4))
    return (block if options.activation != NOOP else 0) + (logits if has_head else 0)


def _replicated(options: Options, world: World) -> MemoryEstimate:
    """Every device runs all layers, one microbatch after another."""
    samples = options.batch_size / world.size / options.chunks
    config, size = options.config, options.torch_dtype.itemsize
    assert isinstance(config, GPTConfig)
    layers = _layers(options, samples)
    activations = sum(layer.kept for layer in layers) + _transient(options, samples, has_head=True)
    own = float(config.num_parameters)
    whole = 0.0
    if options.mode == "fsdp":
        own /= world.size
        # Beside its shards a device holds one gathered block and the next, and the embeddings, which are the root's.
        whole = 2 * layers[1].parameters + layers[0].parameters if world.size > 1 else 0.0
        if options.cpu_offload and world.device_type == "cuda":
            own = 0.0
    return MemoryEstimate(
        (own + whole) * size, (own + whole / 2) * size, own * size * _states(options), activations
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


def _of_resnet(options: Options, world: World) -> MemoryEstimate:
    """Parameters are counted; kept are the outputs of all leaf modules of a forward."""
    assert isinstance(options.config, ResNetSize)
    outputs = [0]

    def count(module: torch.nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and not list(module.children()):
            outputs[0] += output.numel()

    with torch.device("meta"):
        model = ResNetForImageClassification(options.config.to_transformers())
        for module in model.modules():
            module.register_forward_hook(count)
        model(torch.empty(1, 3, *[options.config.image_size] * 2))
    size = options.torch_dtype.itemsize
    own = sum(parameter.numel() for parameter in model.parameters()) * size
    samples = options.batch_size / world.size / options.chunks
    shards = world.size if options.mode == "fsdp" else 1
    return MemoryEstimate(own, own, own * _states(options) / shards, outputs[0] * samples * size)


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

"""The trainer's command line, read and checked against the machine before anything is allocated or communicated."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, NoReturn

import torch

from kinds.configs import GPT_CONFIGS, MODEL_NAMES, ModelConfig, ResNetSize, canonical_name, is_resnet
from kinds.models import POLICIES
from penstock.layout.pipelines import parse_pipelines
from penstock.runtime.comm.bootstrap import find_place
from penstock.schedule.registry import default_stages_per_rank, schedule_names

MODES = ("ddp", "pdp", "fsdp", "pp")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = ("adamw", "sgd")
SAMPLES_PER_DEVICE = 4
MICROBATCHES_PER_RANK = 4

# Options that only some modes, or only one kind of model, know.
MODE_OPTIONS = {
    "ndevice_per_proc": ("pdp",),
    "pipelines": ("pp",),
    "schedule": ("pp",),
    "cpu_offload": ("fsdp",),
    "prefetch": ("fsdp",),
}
GPT_OPTIONS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
RESNET_MODES = ("ddp", "fsdp")


class OptionError(ValueError):
    """Options that cannot be used; the message says what can."""


@dataclass(frozen=True)
class World:
    """The processes of the job and the devices of this machine.

    Attributes:
        size, local_size, local_rank, rank: as torchrun numbers them.
        device_type: "cuda" or "cpu".
        num_devices: GPUs, or CPU cores this process may use, of this machine.
    """

    size: int
    local_size: int
    rank: int
    local_rank: int
    device_type: str
    num_devices: int

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> World:
        """From a launcher's environment; one process without any."""
        place = find_place(environment) or {"RANK": "0", "WORLD_SIZE": "1"}
        local_size = environment.get("LOCAL_WORLD_SIZE") or place["WORLD_SIZE"]
        cuda = torch.cuda.is_available()
        return cls(
            size=int(place["WORLD_SIZE"]),
            local_size=int(local_size),
            rank=int(place["RANK"]),
            local_rank=int(place.get("LOCAL_RANK", "0")),
            device_type="cuda" if cuda else "cpu",
            num_devices=torch.cuda.device_count() if cuda else len(os.sched_getaffinity(0)),
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run of the trainer, with every default resolved.

    Attributes:
        batch_size: samples of the global batch, over all replicas.
        chunks: microbatches of each replica's share; under "pp" see `pipelines`.
        pipelines: under "pp", of each pipeline its ranks and its microbatches.
        schedule: of the pipelines; "gpipe" under "pdp", empty where there is none.
        The others are the options of the same names.
    """

    mode: str
    model: str
    config: ModelConfig
    dtype: str
    batch_size: int
    chunks: int
    ndevice_per_proc: int
    pipelines: tuple[tuple[int, int], ...]
    schedule: str
    activation: str
    cpu_offload: bool
    prefetch: int
    optimizer: str
    iterations: int
    warmup: int
    seed: int
    threads_per_device: int
    check_memory: bool
    profile: str | None
    output: str | None

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the global batch, over all pipelines or replicas' pipelines; under "pp" only."""
        return sum(microbatches for _, microbatches in self.pipelines)

    def num_devices(self, world: World) -> int:
        """Devices that compute, over all processes."""
        return world.size * self.ndevice_per_proc

    def record(self) -> dict[str, Any]:
        """The whole configuration, for a result file."""
        return asdict(self) | {"config": self.config.sizes(), "model": self.model}


def read_options(arguments: Sequence[str] | None, world: World) -> Options:
    """Options from a command line.

    Raises:
        OptionError: they cannot be parsed, or contradict each other, the world or the machine.
    """
    given = build_parser().parse_args(arguments)
    try:
        given.model = canonical_name(given.model or ("GPTSmall" if world.device_type == "cuda" else "GPTTiny"))
        if given.mode not in MODES:
            raise OptionError(f"unknown mode {given.mode!r}: known are {', '.join(MODES)}")
        for name, known in (("dtype", DTYPES), ("activation", POLICIES), ("optimizer", OPTIMIZERS)):
            if getattr(given, name) not in known:
                raise OptionError(f"unknown {name} {getattr(given, name)!r}: known are {', '.join(known)}")
        for name in ("batch_size", "chunks", "ndevice_per_proc", "iterations", "threads_per_device"):
            if (value := getattr(given, name)) is not None and value < 1:
                raise OptionError(f"{_option(name)} must be at least 1, but is {value}")
        for name in ("warmup", "prefetch"):
            if (value := getattr(given, name)) is not None and value < 0:
                raise OptionError(f"{_option(name)} must not be negative, but is {value}")
        _check_combination(given)
        _check_devices(given, world)
        return _resolve(given, world)
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(str(error)) from error


def _check_combination(given: argparse.Namespace) -> None:
    for name, modes in MODE_OPTIONS.items():
        if getattr(given, name) not in (None, False) and given.mode not in modes:
            if name == "ndevice_per_proc" and given.ndevice_per_proc == 1:
                continue
            raise OptionError(
                f"{_option(name)} has no meaning with --mode {given.mode}: it is for {' and '.join(modes)}"
            )
    if given.pipelines is not None and given.chunks is not None:
        raise OptionError("--pipelines says how many microbatches each pipeline has: leave out --chunks")
    if given.schedule is not None and given.schedule not in schedule_names():
        raise OptionError(f"unknown schedule {given.schedule!r}: known are {', '.join(schedule_names())}")
    if is_resnet(given.model):
        if given.mode not in RESNET_MODES:
            gpts = ", ".join(name for name in MODEL_NAMES if not is_resnet(name))
            raise OptionError(
                f"{given.model} has no meaning with --mode {given.mode}: its batch normalisation takes statistics over "
                f"the whole batch, which a pipeline splits into microbatches. Use --mode {' or '.join(RESNET_MODES)}, "
                f"or one of {gpts}"
            )
        for name in GPT_OPTIONS:
            if getattr(given, name) is not None:
                raise OptionError(f"{_option(name)} is a size of a GPT, not of {given.model}: that has --image-size")
        if given.cpu_offload or given.prefetch:
            raise OptionError(f"--cpu-offload and --prefetch are for GPT models, not for {given.model}")
    elif given.image_size is not None:
        raise OptionError(f"--image-size is a size of a ResNet, not of {given.model}: that has --block-size")


def _check_devices(given: argparse.Namespace, world: World) -> None:
    wanted = given.ndevice_per_proc or 1
    here = world.num_devices
    if world.device_type == "cuda" and wanted * world.local_size > here:
        raise OptionError(
            f"--ndevice-per-proc {wanted} with {world.local_size} process(es) on this machine needs "
            f"{wanted * world.local_size} GPUs, but it has {here}: at most {here // world.local_size} for each process"
        )
    if world.device_type == "cpu" and wanted > here:
        raise OptionError(f"--ndevice-per-proc {wanted} is more than the {here} CPU core(s) of this machine")


def _resolve(given: argparse.Namespace, world: World) -> Options:
    devices_per_process = given.ndevice_per_proc or 1
    batch_size, chunks, pipelines = _shares(given, world, devices_per_process)
    cuda = world.device_type == "cuda"
    return Options(
        mode=given.mode,
        model=given.model,
        config=_config(given, max((ranks for ranks, _ in pipelines), default=devices_per_process)),
        dtype=given.dtype,
        batch_size=batch_size,
        chunks=chunks,
        ndevice_per_proc=devices_per_process,
        pipelines=pipelines,
        schedule={"pp": given.schedule or "1f1b", "pdp": "gpipe"}.get(given.mode, ""),
        activation=given.activation,
        cpu_offload=given.cpu_offload,
        prefetch=given.prefetch or 0,
        optimizer=given.optimizer,
        iterations=given.iterations if given.iterations is not None else (10 if cuda else 5),
        warmup=given.warmup if given.warmup is not None else (3 if cuda else 1),
        seed=given.seed,
        threads_per_device=given.threads_per_device,
        check_memory=not given.no_memory_check,
        profile=given.profile,
        output=given.output,
    )


def _config(given: argparse.Namespace, ranks: int) -> ModelConfig:
    """The model's size, checked against the ranks, or devices, of the longest pipeline."""
    if is_resnet(given.model):
        return ResNetSize(int(given.model.removeprefix("ResNet")), given.image_size or 224)
    sizes = {name: getattr(given, name) for name in GPT_OPTIONS if getattr(given, name) is not None}
    config = GPT_CONFIGS[given.model](**sizes)
    if given.untied:
        config.tie_embeddings = False
    # The embedding, the final norm and the head are layers too, but a device with nothing else makes no sense.
    stages = ranks * (default_stages_per_rank(given.schedule or "1f1b") if given.mode == "pp" else 1)
    if stages > config.n_layer:
        raise OptionError(f"{stages} stages need at least {stages} layers, but {given.model} has {config.n_layer}")
    return config


def _shares(
    given: argparse.Namespace, world: World, devices_per_process: int
) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """The global batch, each replica's chunks, and the pipelines."""
    devices = world.size * devices_per_process
    if given.mode == "pp":
        pipelines = given.pipelines or _equal_pipelines(given, world)
        ranks = sum(size for size, _ in pipelines)
        if ranks != world.size:
            raise OptionError(
                f"--pipelines {_text(pipelines)} needs {ranks} processes, but {world.size} were started: "
                f"start {ranks} or choose pipelines with {world.size} ranks in all"
            )
        total = sum(microbatches for _, microbatches in pipelines)
        batch = given.batch_size or ceil(SAMPLES_PER_DEVICE * devices / total) * total
        _check_divides(batch, total, f"the {total} microbatches of --pipelines {_text(pipelines)}")
        return batch, pipelines[0][1], tuple(pipelines)
    replicas = world.size
    if given.batch_size is not None:
        _check_divides(given.batch_size, replicas, f"{replicas} processes")
        share = given.batch_size // replicas
    else:
        unit = given.chunks or 1
        share = ceil(SAMPLES_PER_DEVICE * devices_per_process / unit) * unit
    default = 1 if given.mode != "pdp" else _divisor(share, MICROBATCHES_PER_RANK * devices_per_process)
    chunks = given.chunks or default
    _check_divides(share * replicas, chunks * replicas, f"{replicas} process(es) with --chunks {chunks}")
    return share * replicas, chunks, ()


def _equal_pipelines(given: argparse.Namespace, world: World) -> list[tuple[int, int]]:
    """A pipeline over the processes of each machine."""
    ranks = world.local_size if world.size % world.local_size == 0 else world.size
    replicas = world.size // ranks
    batch = given.batch_size or SAMPLES_PER_DEVICE * world.size
    _check_divides(batch, replicas, f"{replicas} pipelines")
    return [(ranks, given.chunks or _divisor(batch // replicas, MICROBATCHES_PER_RANK * ranks))] * replicas


def _check_divides(batch_size: int, parts: int, what: str) -> None:
    if batch_size % parts:
        below = batch_size // parts * parts
        fitting = f"{below} or {below + parts}" if below else str(parts)
        raise OptionError(
            f"a batch of {batch_size} samples cannot be divided equally over {what}: "
            f"--batch-size must be a multiple of {parts}, such as {fitting}"
        )


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)


def _text(pipelines: Sequence[tuple[int, int]]) -> str:
    return ",".join(f"{ranks}x{microbatches}" for ranks, microbatches in pipelines)


# ---------------------------------------------------------------- as a user types them


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Parser(argparse.ArgumentParser):
    """A mistake is an `OptionError`, as all other mistakes in options are."""

    def error(self, message: str) -> NoReturn:
        for word in re.findall(r"--[\w-]+", message) if "unrecognized" in message else ():
            known = [option for option in self._option_string_actions if "_" not in option]
            if close := difflib.get_close_matches(word.replace("_", "-"), known, n=1):
                message += f"; did you mean {close[0]}?"
        raise OptionError(message)


EPILOG = """\
Launch it with torchrun, in the folder benchmarks/suite/ or as -m kinds.trainer:
  torchrun --nproc-per-node=2 trainer.py
  torchrun --nproc-per-node=1 trainer.py --ndevice-per-proc=2 --mode=pdp
  torchrun --nproc-per-node=3 trainer.py --mode=pp --pipelines=1x4,2x8
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser. Options of several words are written with dashes; underscores are known, too."""
    parser = _Parser(
        prog="trainer.py",
        description="Train one model in one of several parallel modes and measure it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, kind: Callable[[str], Any] = int, default: object = None, **rest: Any) -> None:
        # argparse shows all names of an option; the old ones, with underscores, are known but not shown.
        parser.add_argument(_option(name), type=kind, default=default, dest=name, **rest)
        if "_" in name:
            rest["help"] = argparse.SUPPRESS
            parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, dest=name, **rest)

    def flag(name: str, help: str) -> None:
        parser.add_argument(_option(name), action="store_true", dest=name, help=help)
        if "_" in name:
            parser.add_argument(f"--{name}", action="store_true", default=argparse.SUPPRESS, dest=name,
                                help=argparse.SUPPRESS)  # fmt: skip

    add("mode", str, "ddp", help="ddp, fsdp; pdp: each process drives a pipeline over its devices, DDP across; "
        "pp: pipelines of processes (default: ddp)")  # fmt: skip
    add("model", str, help="a size by name, such as GPTSmall or ResNet50 (default: GPTSmall, on a CPU GPTTiny)")
    add("dtype", str, "fp32", help="fp32, bf16 or fp16: of parameters, activations and gradients (default: fp32)")
    add("vocab_size", help="tokens in the vocabulary")
    add("block_size", help="tokens in a sequence")
    add("n_layer", help="layers, instead of the model's")
    add("n_head", help="attention heads, instead of the model's")
    add("n_embd", help="width, instead of the model's")
    add("image_size", help="pixels on a side, for a ResNet (default: 224)")
    flag("untied", "an output layer of its own, not the token embedding")
    add("batch_size", help="samples of the global batch, over all processes, so that equal options mean equal work in "
        "every mode (default: about 4 for each device)")  # fmt: skip
    add("chunks", help="microbatches of each process's share; ddp and fsdp accumulate gradients over them "
        "(default: 1, or up to 4 for each device of a pipeline)")  # fmt: skip
    add("ndevice_per_proc", help="devices that each process drives, for pdp (default: 1)")
    add("pipelines", _pipelines, metavar="RANKSxMICROBATCHES,...", help="for pp, such as 1x4,2x8 (default: one "
        "over the processes of each machine)")  # fmt: skip
    add("schedule", str, help="for pp, a name that `penstock simulate` lists (default: 1f1b)")
    add("activation", str, "noop", help="noop, checkpoint (recompute) or offload (to host memory) (default: noop)")
    flag("cpu_offload", "for fsdp: keep parameters and optimizer in host memory")
    add("prefetch", nargs="?", const=1, metavar="BLOCKS", help="for fsdp: gather so many blocks ahead (no number: 1)")
    add("optimizer", str, "adamw", help="adamw or sgd (default: adamw)")
    add("iterations", help="measured steps (default: 10, on a CPU 5)")
    add("warmup", help="unmeasured steps before them (default: 3, on a CPU 1)")
    add("seed", default=0, help="random seed of weights and data")
    add("threads_per_device", default=1, help="threads of a CPU device (default: 1)")
    flag("no_memory_check", "start even if the estimate says that it does not fit")
    add("profile", str, nargs="?", const="profile", metavar="FOLDER", help="write a Chrome trace of one more step, a "
        "file for each process (to the folder profile if none is given)")  # fmt: skip
    add("output", str, metavar="FILE", help="write the figures as JSON")
    # What `python -m torch.distributed.launch` passes.
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    return parser


def _pipelines(text: str) -> list[tuple[int, int]]:
    try:
        return parse_pipelines(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None

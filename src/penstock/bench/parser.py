"""The trainer's options as a user types them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from penstock.planning.pipelines import parse_pipelines

EPILOG = """\
Launch it with torchrun, from the folder benchmark/ or as -m penstock.bench.trainer:
  torchrun --nnodes=1 --nproc_per_node=2 trainer.py
  torchrun --nnodes=1 --nproc_per_node=1 trainer.py --ndevice_per_proc=2 --mode=pdp
  torchrun --nnodes=1 --nproc_per_node=3 trainer.py --mode=pp --pipelines=1x4,2x8
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser. Options of several words are known with underscores and with dashes."""
    parser = argparse.ArgumentParser(
        prog="trainer.py",
        description="Train one model in one of several parallel modes and measure it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, kind: Callable[[str], Any] = int, default: object = None, **rest: Any) -> None:
        names = [f"--{name}", *([f"--{name.replace('_', '-')}"] if "_" in name else [])]
        parser.add_argument(*names, type=kind, default=default, dest=name, **rest)

    add("mode", str, "ddp", help="ddp, fsdp; pdp: each process drives a pipeline over its devices, DDP across; "
        "pp: pipelines of processes (default: ddp)")  # fmt: skip
    add("model", str, help="a size by name, such as GPTSmall or ResNet50 (default: GPTSmall, on a CPU GPTTiny)")
    add("dtype", str, "fp32", help="fp32, bf16 or fp16: of parameters, activations and gradients (default: fp32)")
    add("vocab_size", help="tokens in the vocabulary")
    add("block_size", help="tokens in a sequence")
    add("n_layer", help="layers, in place of the model's")
    add("n_head", help="attention heads, in place of the model's")
    add("n_embd", help="width, in place of the model's")
    add("image_size", help="pixels on a side, for a ResNet (default: 224)")
    parser.add_argument("--untied", action="store_true", help="an output layer of its own, not the token embedding")
    add("batch_size", help="samples of the global batch, over all processes, so that equal options are equal work in "
        "every mode (default: about 4 for each device)")  # fmt: skip
    add("chunks", help="microbatches of each process's share; ddp and fsdp accumulate gradients over them "
        "(default: 1, or up to 4 for each device of a pipeline)")  # fmt: skip
    add("ndevice_per_proc", help="devices that each process drives, for pdp (default: 1)")
    add("pipelines", _pipelines, metavar="RANKSxMICROBATCHES,...", help="for pp, such as 1x4,2x8 (default: one "
        "over the processes of each machine)")  # fmt: skip
    add("schedule", str, help="for pp, a name that `penstock simulate` lists (default: 1f1b)")
    add("activation", str, "noop", help="noop, checkpoint (recompute) or offload (to host memory) (default: noop)")
    parser.add_argument("--cpu-offload", "--cpu_offload", action="store_true", dest="cpu_offload",
                        help="for fsdp: keep parameters and optimizer in host memory")  # fmt: skip
    add(
        "prefetch", nargs="?", const=1, metavar="BLOCKS", help="for fsdp: gather so many blocks ahead (1 if none given)"
    )
    add("optimizer", str, "adamw", help="adamw or sgd (default: adamw)")
    add("iterations", help="measured steps (default: 10, on a CPU 5)")
    add("warmup", help="steps before them (default: 3, on a CPU 1)")
    add("seed", default=0, help="of weights and data")
    add("threads_per_device", default=1, help="threads of a CPU device (default: 1)")
    parser.add_argument("--no-memory-check", "--no_memory_check", action="store_true", dest="no_memory_check",
                        help="start even if the estimate says that it does not fit")  # fmt: skip
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

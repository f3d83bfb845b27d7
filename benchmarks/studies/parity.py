"""Penstock beside the systems that its users would take otherwise, on the same models, batches and losses.

    python benchmarks/studies/parity.py                 # all of it, in some minutes
    python benchmarks/studies/parity.py --rounds 0      # without the speeds

Two processes over gloo on the CPU, single precision. Losses and gradients against the unsplit model's; speeds in turn.
Writes results/parity.md, which the site shows on the page *Compared*, and .json. DeepSpeed takes part where it is
installed, also in a folder of its own:

    python -m pip install --target /tmp/peers --no-deps deepspeed hjson ninja py-cpuinfo msgpack einops
    PYTHONPATH=/tmp/peers python benchmarks/studies/parity.py
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from measure import RESULTS, SHAPE, median_of, ratio_of, table_of, write_result
from parity_systems import BY_HAND, DECODERS, SYSTEMS, Batch, Found, unsplit
from processes import free_port, side_by_side

SECONDS = 90.0  # for one run
# Rounding in single precision, in parts of the loss or of the largest gradient.
EQUAL = 1e-5
SMALL = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **SMALL,
}


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "tie_word_embeddings": False, **changes}))


def gpt2() -> Any:
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_layer=4, n_embd=32, n_head=4, n_positions=64, **still, **SMALL)
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, num_local_experts=4))


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_ff=48, d_kv=8, num_layers=3, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, **SMALL
        )
    )


MODELS: dict[str, Callable[[], Any]] = {"Llama": llama, "GPT-2": gpt2, "Mixtral": mixtral, "T5": t5}


def batches(samples: int = 8, number: int = 1, padded: bool = False) -> list[Batch]:
    """With uneven padding: one microbatch has far fewer tokens than another."""
    generator, made = torch.Generator().manual_seed(1), []
    for _ in range(number):
        ids = torch.randint(2, 96, (samples, 12), generator=generator)
        mask = torch.ones_like(ids)
        for sample in range(samples if padded else 0):
            mask[sample, 12 - sample :] = 0
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return made


# What is trained: the model, and the batches before the optimizer's step.
CASES: dict[str, tuple[Callable[[], Any], list[Batch]]] = {
    "plain": (llama, batches()),
    "uneven padding": (llama, batches(padded=True)),
    "tied weights": (lambda: llama(tie_word_embeddings=True), batches()),
    "two batches accumulated": (llama, batches(number=2)),
    "short last microbatch": (llama, batches(samples=7)),
}


def compare(system: str, build: Callable[[], Any], given: list[Batch]) -> str:
    """What comes out, in words: `equal`, the largest differences, `forward only: ...` or the error's first line."""
    function, options, _ = SYSTEMS[system]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = build().train()
        model.save_pretrained(folder)
        expected = unsplit(copy.deepcopy(model), given, Path(folder))
        with torch.no_grad():
            logits = copy.deepcopy(model).eval()(**given[0]).logits
        world = 1 if system == "accelerate, device_map" else 2
        found = on_ranks(world, lambda: function(model, given, Path(folder), **options))
    if isinstance(found, str):
        return found
    if found[0].gradients is None:
        apart = difference(found[-1].logits, logits)
        return f"forward only: {'equal' if apart <= EQUAL else f'logits differ by {apart:.1e}'}"
    total, losses = sum(expected.losses), [each.losses for each in reversed(found) if each.losses]
    loss = abs(sum(losses[0]) - total) / abs(total) if losses else None  # of DDP each process has its own part
    scale = max(float(each.abs().max()) for each in expected.gradients.values())
    apart, where = max(
        (float((gradient - expected.gradients[name]).abs().max()) / scale, name)
        for each in found
        for name, gradient in each.gradients.items()
    )
    missing = expected.gradients.keys() - set().union(*(each.gradients for each in found))
    if missing:
        return f"no gradient of {sorted(missing)[0]}"
    if (loss or 0.0) <= EQUAL and apart <= EQUAL:
        return "equal"
    return f"loss {'-' if loss is None else f'{loss:.0e}'}, gradient {apart:.0e} ({short_name(where)})"


def short_name(name: str) -> str:
    return name.removeprefix("model.").removesuffix(".weight")


def difference(ours: Any, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")


def on_ranks(world: int, function: Callable[[], Found]) -> list[Found] | str:
    """What a function returns on each rank of a group, in forks; or the first error's first line."""
    fork, port = multiprocessing.get_context("fork"), free_port()
    pipes = [fork.Pipe(duplex=False) for _ in range(world)]

    def rank(index: int) -> None:
        os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        null = os.open(os.environ.get("PARITY_LOG", os.devnull), os.O_WRONLY | os.O_APPEND)
        os.dup2(null, 1), os.dup2(null, 2)
        torch.set_num_threads(1)
        try:
            if world > 1:
                dist.init_process_group("gloo")
            answer: Any = function()
        except BaseException as error:
            cause = error.__cause__ or error
            lines = str(cause).strip().splitlines() or [""]
            answer = f"{type(cause).__name__}: {lines[0]}"[:200]
        pipes[index][1].send_bytes(pickle.dumps(answer))
        time.sleep(2 * SECONDS)  # others may still receive from this rank, which is ended from outside

    processes = [fork.Process(target=rank, args=(index,)) for index in range(world)]
    for process in processes:
        process.start()
    answers: list[Any] = [f"no answer in {SECONDS:.0f} s"] * world
    waiting, end = {receiving: index for index, (receiving, _) in enumerate(pipes)}, time.monotonic() + SECONDS
    while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
        for receiving in ready:
            index = waiting.pop(receiving)
            answers[index] = pickle.loads(receiving.recv_bytes())
            if isinstance(answers[index], str):  # one that waits for this rank says nothing more
                end = min(end, time.monotonic() + 3)
    for process in processes:
        process.kill()
        process.join()
    errors = [answer for answer in answers if isinstance(answer, str)]
    told = [error for error in errors if not re.match("no answer|RuntimeError: .*(Connection|connection)", error)]
    return (told or errors)[0] if errors else answers


def lines_of(system: str) -> int:
    """The lines that a user of `system` writes and a user of the unsplit model does not."""
    function, _, besides = SYSTEMS[system]
    plain = {line.strip() for line in user_lines(function=unsplit)}
    own = [line for line in user_lines(function) if line.strip() not in plain]
    return len(own) + sum(len(code_lines(inspect.getsource(each))) for each in besides)


def user_lines(function: Callable[..., Any]) -> list[str]:
    parts = re.split(r"^ +# --$", inspect.getsource(function), flags=re.M)
    return [line for part in parts[1::2] for line in code_lines(part)]


def code_lines(source: str) -> list[str]:
    source = re.sub(r'"""[\s\S]*?"""', "", source)
    return [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]


def exactness(only: str) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """For each system what came out in each case, and with each model."""
    cases: dict[str, dict[str, str]] = {}
    models: dict[str, dict[str, str]] = {}
    installed = importlib.util.find_spec("deepspeed") is not None
    for system, (function, _, _) in SYSTEMS.items():
        if not re.search(only, system):
            continue
        for row, each in ((cases, CASES), (models, {name: (build, batches()) for name, build in MODELS.items()})):
            row[system] = {}
            for name, (build, given) in each.items():
                by_hand = row is models and function in BY_HAND
                if system.startswith("DeepSpeed") and not installed:
                    said = "not measured: not installed"
                elif by_hand and name != "Llama":
                    said = "not measured: stages are written by hand"
                elif name == "T5" and function in DECODERS:
                    said = "not measured"
                elif row is models and name == "Llama":
                    said = cases[system]["plain"]
                else:
                    said = compare(system, build, given)
                row[system][name] = said
                print(f"{system:44} {name:24} {said}", flush=True)
    return cases, models


def build_deepspeed() -> None:
    """DeepSpeed compiles what it sends with on a CPU at its first use, which takes minutes: once, before its ranks."""
    if importlib.util.find_spec("deepspeed") is not None:
        load = "import deepspeed.ops.op_builder.cpu as cpu; cpu.ShareMemCommBuilder().load()"
        subprocess.run([sys.executable, "-c", load], env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=True)


OURS = "Penstock, its default"
SPEEDS: dict[str, tuple[dict[str, Any], int]] = {
    OURS: ({"kind": "penstock", "schedule": "auto"}, 2),
    "Penstock, 1f1b": ({"kind": "penstock", "schedule": "1f1b"}, 2),
    "Penstock, zb-v": ({"kind": "penstock", "schedule": "zb-v"}, 2),
    "torch pipelining, 1F1B": ({"kind": "torch", "schedule": "Schedule1F1B"}, 2),
    "torch pipelining, interleaved": ({"kind": "torch", "schedule": "ScheduleInterleaved1F1B"}, 2),
    "torch pipelining, zero bubble": ({"kind": "torch", "schedule": "ScheduleInterleavedZeroBubble"}, 2),
    "DeepSpeed PipelineModule": ({"kind": "deepspeed"}, 2),
    "DDP": ({"kind": "ddp"}, 2),
    "one process": ({"kind": "one process"}, 1),
}


def speeds(rounds: int, steps: int) -> Mapping[str, list[dict]]:
    """Seconds of a training step of a 12-block GPT-2, in turn."""
    common = {**SHAPE, "num_microbatches": 8, "micro_batch_size": 2, "warmup": 1}
    installed = importlib.util.find_spec("deepspeed") is not None
    return side_by_side(
        {
            name: ("contestants.py", processes, {**common, **arguments}, 1)
            for name, (arguments, processes) in SPEEDS.items()
            if installed or not name.startswith("DeepSpeed")
        },
        rounds,
        steps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of the speeds; 0: none")
    parser.add_argument("--steps", type=int, default=1, help="in a turn of one contestant")
    parser.add_argument("--only", default="", help="systems whose name this pattern matches; writes no result")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    build_deepspeed()
    torch.set_num_threads(1)
    cases, models = exactness(options.only)
    if options.only:
        return
    runs = speeds(options.rounds, options.steps) if options.rounds else {}
    lines = ["## Exact or not", ""]
    rows = [[system, *said.values(), str(lines_of(system))] for system, said in cases.items()]
    lines += table_of(["system", *CASES, "lines"], rows)
    lines += ["", "## Which models run", ""]
    lines += table_of(["system", *MODELS], [[system, *said.values()] for system, said in models.items()])
    if runs:
        tokens = 16 * SHAPE["length"]
        rows = [
            [name, f"{tokens / median_of(each, 'seconds'):.0f}", f"{ratio_of(runs[OURS], each, 'seconds'):.3f}"]
            for name, each in runs.items()
        ]
        lines += ["", "## Speed in training", ""]
        lines += table_of(["system", "tokens a second", "of Penstock's default"], rows)
    peers = ", ".join(f"{name} {installed_version(name)}" for name in ("accelerate", "deepspeed"))
    how = f"{peers}; `python benchmarks/studies/parity.py --rounds {options.rounds} --steps {options.steps}`"
    content = {"cases": cases, "models": models, "lines": {s: lines_of(s) for s in SYSTEMS}, "speeds": runs}
    write_result(RESULTS / "parity", "Compared with other systems", how, lines, content)


def installed_version(name: str) -> str:
    return version(name) if importlib.util.find_spec(name) is not None else "not installed"


if __name__ == "__main__":
    main()

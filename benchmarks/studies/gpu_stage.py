"""A stage on one GPU beside the plain loop, `fit` beside the peaks, long runs and kills, on one card.

    python benchmarks/studies/gpu_stage.py                     # one GPU of 80 GB; writes results/gpu_stage.json and .md
    python benchmarks/studies/gpu_stage.py --device emulated   # the same path with a tiny model, where there is no GPU
    python benchmarks/studies/gpu_stage.py --sections stage    # stage, memory, exact, kills, sanitizer

- **stage**: 8 layers and the head of an 8B Llama in bf16 with random weights. Penstock's engine and a plain loop run
  forward and backward of the same microbatches in turn, in one process; `neighbour`: the embedding is a stage of its
  own, on another rank that shares the card. Overhead is the engine's step over the loop's; MFU is FLOPs of the model
  over those of the card. FLOPs of a token: 6 for each weight of a product, and 6 x layers x width x length for causal
  attention; with a frozen base 4 in place of the first 6, as it has no gradient. A step in which the host reads the
  device is an error.
- **memory**: the peak of ranks that train in six ways of `penstock fit`, over what `fit` says.
- **exact**: every schedule after 200 steps against the unsplit model. **kills**: a killed rank is named, 20 times.
- **sanitizer**: a short run under `compute-sanitizer --tool racecheck`, if it is there.

Whatever would begin after `--minutes` is left out, and the result says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fit
import torch
from gpu_check import CHECKS, SHARED, run, show, use_emulated_device, wait_for_device, work
from measure import RESULTS, table_of, write_result
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import penstock
from penstock.planning.cluster import operations_of_card
from penstock.planning.memory import readable
from penstock.schedule import schedule_names

LIMIT = 200.0  # seconds for one check: the first step under torch.compile is in it
LARGEST_OVERHEAD, LARGEST_ERROR, PROMISED_SECONDS = 0.01, 0.10, 2.0
EIGHT_BILLION = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
MEMORY_ON_A_CARD = {**EIGHT_BILLION, "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192}
MEMORY_WAYS = ("bf16", "bf16, ckpt", "bf16, ckpt, chunk", "LoRA 8", "nf4, LoRA 8", "bf16, sharded")


# -- what a rank does --------------------------------------------------------------------------------------------------


def stage(way: str, length: int, num_microbatches: int, small: bool, rounds: int) -> dict[str, Any]:
    """Seconds of steps of the engine and of the plain loop, in turn; on the last rank if there is a neighbour."""
    neighbour = int(os.environ["WORLD_SIZE"]) > 1
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    config = LlamaConfig(**(TINY if small else EIGHT_BILLION), attn_implementation="sdpa", use_cache=False)
    with _folder(config, way) as folder:
        plain, model = (_model(config, way, device, folder) for _ in range(2))
    ids = torch.randint(0, config.vocab_size, (num_microbatches, length), generator=torch.Generator().manual_seed(0))
    prefix = "base_model.model." if way.startswith(("LoRA", "nf4")) else ""
    split = {"split_points": [f"{prefix}model.layers.0"]} if neighbour else {}
    stages = 2 if neighbour else 1
    model = penstock.initialize(model, pipeline_parallel_size=stages, microbatch_size=1, schedule="1f1b", **split)
    if way == "compiled":
        model.compile()
        for layer in plain.model.layers:
            layer.compile()
    is_measured = int(os.environ["RANK"]) == stages - 1
    rows, tokens = ids.to(device), torch.tensor(num_microbatches * (length - 1), device=device)

    def by_engine() -> None:
        for out in model(input_ids=ids, labels=ids):
            out.loss.backward()

    def by_loop() -> None:
        for row in rows.split(1):
            plain(input_ids=row, labels=row, num_items_in_batch=tokens).loss.backward()

    found: dict[str, list[tuple[float, float]]] = {"engine": [], "loop": []}
    steps = {"engine": (by_engine, model), "loop": (by_loop, plain)}
    for number in range(rounds + 2):  # shapes are learned in the first, and kernels loaded
        for name, (step, owner) in steps.items():
            if name == "loop" and not is_measured:
                continue
            wait_for_device()
            start = time.perf_counter()
            step()
            returned = time.perf_counter()
            wait_for_device()
            if number > 1:
                found[name].append((returned - start, time.perf_counter() - start))
            owner.zero_grad()
    if not is_measured:
        with _no_host_reads(not neighbour):
            by_engine()
        return {"passed": True, "said": ""}
    with _no_host_reads(not neighbour) as reads:
        by_engine()
    engine, loop = (statistics.median(seconds for _, seconds in found[name]) for name in ("engine", "loop"))
    host = statistics.median(returned for returned, _ in found["engine"])
    overhead, speed = engine / loop - 1, num_microbatches * length / engine
    flops = _flops_of_a_token(plain, config, length)
    peak = _peak_of(device)
    share = f", MFU {speed * flops / peak:.3f}" if peak else ""
    said = f"{speed:.0f} tokens/s{share}; overhead {overhead:+.2%}; the host is busy for {host / engine:.2f} of a step"
    # On a CPU two steps of a tiny model tell nothing of speed.
    passed = not reads and (small or neighbour or overhead <= LARGEST_OVERHEAD)
    figures = {"engine": engine, "loop": loop, "host": host, "tokens_per_second": speed, "flops_of_a_token": flops}
    return {"passed": passed, "said": said + f"; the host reads: {dict(reads)}" * bool(reads), **figures, "peak": peak}


@contextlib.contextmanager
def _folder(config: LlamaConfig, way: str) -> Iterator[str | None]:
    """Where the model is saved, if it is packed while it is loaded."""
    if way != "nf4":
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        _built(config, torch.device("cpu")).save_pretrained(folder)
        yield folder


def _built(config: LlamaConfig, device: torch.device) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def _model(config: LlamaConfig, way: str, device: torch.device, folder: str | None) -> Any:
    if folder is None:
        model = _built(config, device if device.type == "cuda" else torch.device("cpu")).to(device)
    else:
        bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        model = LlamaForCausalLM.from_pretrained(
            folder, quantization_config=bits, dtype=torch.bfloat16, device_map={"": device}
        )
    if way in ("LoRA", "nf4"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.train()


def _flops_of_a_token(model: Any, config: LlamaConfig, length: int) -> float:
    """As the module's text says. A packed weight has two numbers in a byte."""
    flops = 6.0 * config.num_hidden_layers * config.hidden_size * length
    for module in model.modules():
        if isinstance(module, nn.Linear):
            flops += (6 if module.weight.requires_grad else 4) * module.in_features * module.out_features
    return flops


def _peak_of(device: torch.device) -> float | None:
    return operations_of_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@contextlib.contextmanager
def _no_host_reads(strict: bool) -> Iterator[dict[str, int]]:
    """Inside, a host that waits for the device is an error on CUDA, and counted on the emulated device. Not strict:
    messages that go through the host's memory are read there."""
    if torch.cuda.is_available() and strict:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield {}
        finally:
            torch.cuda.set_sync_debug_mode("default")
    elif torch.accelerator.is_available() and strict:
        from tests.support.emulated_gpu.emulated_device import host_waits

        with host_waits() as found:
            yield found
    else:
        yield {}


def memory(index: int, small: bool) -> dict[str, Any]:
    """The most that this rank's device has in a step, over what `fit` says of the way."""
    _configure_fit(small)
    way, plan = _ways()[index]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(fit._saved("llama")) if way.recipe.startswith("nf4") else ""
        if torch.cuda.is_available():
            training = fit.Training("llama", way, folder)
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                training.step()
            taken = float(torch.cuda.max_memory_allocated())
        else:  # what the host holds; what libraries load at first use is in it
            taken = fit.measured("llama", vars(way), folder)
    said = plan.memory[int(os.environ["RANK"])].total
    passed = small or abs(said / taken - 1) <= LARGEST_ERROR
    words = f"rank {os.environ['RANK']}: {readable(taken)}, predicted {said / taken:.3f} of it"
    return {"passed": passed, "said": words, "taken": taken, "predicted": said}


def _configure_fit(small: bool) -> None:
    if not small:
        fit.CONFIGS["llama"] = LlamaConfig(**MEMORY_ON_A_CARD, tie_word_embeddings=False)
        fit.BATCH, fit.LENGTH, fit.CHUNK = 1, 2048, 1024


def _ways() -> list[tuple[fit.Way, Any]]:
    """Those of `fit` that are measured, in the order of `MEMORY_WAYS`."""
    found = {re.sub(r", Adam f32", "", str(way)): (way, plan) for way, plan in fit.predicted("llama")}
    return [found[name] for name in MEMORY_WAYS if name in found]


# -- the sections ------------------------------------------------------------------------------------------------------

Row = tuple[str, str, int, dict[str, Any], dict[str, str], tuple[str, ...]]
OWN: dict[str, Callable[..., dict[str, Any]]] = {"stage": stage, "memory": memory}


def rows_of(section: str, device: str, small: bool) -> Iterator[Row]:
    """Each check of a section: what it is, its name, the number of ranks, arguments, environment, words before it."""
    packs = find_spec("bitsandbytes") is not None and device != "emulated"
    shared = {SHARED: "host" if device == "emulated" else "nccl"} if device != "cpu" else {}
    match section:
        case "stage":
            ways = [("eager", 8), ("compiled", 8), ("LoRA", 8), *([("nf4", 8)] if packs else [])]
            if device == "emulated":
                ways.remove(("compiled", 8))  # inductor does not know this device
            for length, some in ((2048, ways), *([] if small else [(8192, [("eager", 4)])])):
                for way, count in some:
                    arguments = {"way": way, "length": 64 if small else length, "num_microbatches": count}
                    arguments |= {"small": small, "rounds": 2 if small else 5}
                    yield f"stage, {way}, {arguments['length']} tokens", "stage", 1, arguments, {}, ()
            arguments |= {"way": "eager", "length": 64 if small else 2048, "num_microbatches": 8}
            yield f"stage and a neighbour, eager, {arguments['length']} tokens", "stage", 2, arguments, shared, ()
        case "memory":
            for index, name in enumerate(MEMORY_WAYS):
                if packs or not name.startswith("nf4"):
                    yield f"memory, {name}", "memory", 2, {"index": index, "small": small}, shared, ()
        case "exact":
            for name in schedule_names():
                steps = 4 if small else 200
                yield f"{name}, {steps} steps", "exact", 2, {"schedule": name, "steps": steps}, shared, ()
        case "kills":
            for number in range(1 if small else 20):
                yield f"kill {number + 1}", "killed", 2, {"waits": bool(number % 2)}, shared, ()
        case "sanitizer":
            if found := shutil.which("compute-sanitizer"):
                words = (found, "--tool", "racecheck", "--error-exitcode", "9", "--target-processes", "all")
                yield "1f1b under racecheck", "exact", 2, {"schedule": "1f1b"}, shared, words
        case name:
            raise ValueError(f"there is no section {name!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu", "emulated"), default="cuda")
    sections = ["stage", "memory", "exact", "kills", "sanitizer"]
    parser.add_argument("--sections", nargs="*", default=sections)
    parser.add_argument("--only", default="", help="run the checks whose name has this in it")
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing begins later than this after the start")
    parser.add_argument("--output", help="the result files, without their ending; nothing is written where it is ''")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        if options.device == "emulated":
            use_emulated_device()
        return work(options.worker, options.device, CHECKS | OWN)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no GPU: try --device emulated, or --device cpu")
        return 2
    small = options.device != "cuda"
    card = options.device if small else torch.cuda.get_device_name()
    output = options.output if options.output is not None else "" if small else str(RESULTS / "gpu_stage")
    print(f"penstock {penstock.__version__}, torch {torch.__version__}, {card}\n\n| check | result | seconds | |")
    print("|---|---|---|---|")
    figures: dict[str, Any] = {}
    cells: list[list[str]] = []
    try:
        failed = check_all(options, small, figures, cells)
    finally:  # also of what was seen until it was stopped
        if output:
            table = table_of(["check", "result", "seconds", "what it found"], cells)
            content = {"card": card, "figures": figures}
            write_result(Path(output), f"A stage on one {card}", "medians of steps in turn", table, content)
    print(f"\n{failed} failed" if failed else "\nall passed")
    return failed


def check_all(options: argparse.Namespace, small: bool, figures: dict[str, Any], cells: list[list[str]]) -> int:
    """Run the sections, and fill in the figures and the cells of the table. Returns the number that failed."""
    began, failed = time.monotonic(), 0
    limit = 3 * LIMIT if small else LIMIT  # where there is no card, other work may be on the machine
    for section in options.sections:
        rows = [row for row in rows_of(section, options.device, small) if options.only in row[0]]
        if not rows and not options.only:
            cells.append([section, "not here", "", ""])
        for what, check, ranks, arguments, environment, before in rows:
            if time.monotonic() - began > options.minutes * 60:
                cells.append([what, "left out: no time", "", ""])
                continue
            answers, seconds = run(
                check, ranks, options.device, arguments, environment, script=__file__, limit=limit, before=before
            )
            passed = show(what, answers, seconds) and (section != "kills" or _in_time(answers))
            failed += not passed
            figures[what] = {"passed": passed, "seconds": seconds, "answers": answers}
            said = [each["said"] if isinstance(each, dict) else str(each) for each in answers if each]
            cells.append([what, "passed" if passed else "FAILED", f"{seconds:.1f}", "; ".join(filter(None, said))])
    return failed


def _in_time(answers: list[Any]) -> bool:
    """Whether who lived named the killed rank within the seconds that are promised on GPUs."""
    said = " ".join(answer["said"] for answer in answers if isinstance(answer, dict))
    found = re.search(r"after ([\d.]+) s", said)
    return found is not None and float(found[1]) <= PROMISED_SECONDS


if __name__ == "__main__":
    sys.exit(main())

"""A stage on one GPU beside the plain loop, `fit` beside the peaks, long runs and kills, on one card.

    python benchmarks/studies/gpu_stage.py                     # one GPU of 80 GB; writes results/gpu_stage.json and .md
    python benchmarks/studies/gpu_stage.py --device emulated   # every row with tiny models, where there is no GPU
    python benchmarks/studies/gpu_stage.py --sections stage    # stage, memory, exact, kills, sanitizer

- **stage**: 8 layers and the head of an 8B Llama in bf16 with random weights. Penstock's engine and a plain loop run
  forward and backward of the same microbatches in turn, in one process; `neighbour`: the embedding is a stage of its
  own, on another rank that shares the card. Overhead is the engine's step over the loop's; MFU is FLOPs of the model
  over those of the card. FLOPs of a token: 6 for each weight of a product, and 6 x layers x width x length for causal
  attention; with a frozen base 4 in place of the first 6, as it has no gradient. A step in which the host reads the
  device is an error.
- **memory**: the peak of ranks that train in six ways of `penstock fit`, over what `fit` says.
- **exact**: every schedule after 200 updates against the unsplit model. **kills**: a killed rank is named, 20 times.
- **sanitizer**: a short run under `compute-sanitizer --tool racecheck`, if it is there.

The most important comes first. Nothing goes on after `--minutes`: what could not begin is left out, and the result says
so. Each check is processes of its own, so one that fails costs no other.

`--device emulated` is the path of one GPU on the emulated device of the tests, whose messages have NCCL's rules. What
that device cannot do runs on the CPU, and its name says so. Figures of speed mean nothing there, and a rank is killed 4
times.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fit
import torch
from gpu_check import CHECKS, PROMISED_SECONDS, SHARED, run, wait_for_device, work
from measure import RESULTS, table_of, write_result
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import penstock
from penstock.planning.cluster import operations_of_card
from penstock.planning.memory import readable
from penstock.schedule import schedule_names

LIMIT = 200.0  # seconds for one check: the first step under torch.compile is in it
SHORTEST = 20.0  # with less left nothing begins
# Of a section so many checks run at once: not where seconds of steps are measured. Where there is no card, two.
AT_ONCE = {"memory": 3, "exact": 4, "kills": 4}
LARGEST_OVERHEAD, LARGEST_ERROR, KILLED_SECONDS = 0.01, 0.10, 2.0
NUM_KILLS, KILLS_WITHOUT_CARD = 20, 4
EIGHT_BILLION = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
# Smaller ones are mostly what `fit` does not count, such as small tensors between units.
MEMORY_WITHOUT_CARD = {**TINY, "vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
MEMORY_ON_A_CARD = {**EIGHT_BILLION, "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192}
MEMORY_WAYS = ("bfloat16", "bfloat16, ckpt", "bfloat16, ckpt, chunk", "LoRA 8", "nf4, LoRA 8", "bf16, sharded")


# -- what a rank does --------------------------------------------------------------------------------------------------


def stage(way: str, length: int, num_microbatches: int, small: bool, rounds: int) -> dict[str, Any]:
    """Seconds of steps of the engine and of the plain loop, in turn; on the last rank if there is a neighbour."""
    neighbour = int(os.environ["WORLD_SIZE"]) > 1
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    config = LlamaConfig(**(TINY if small else EIGHT_BILLION), attn_implementation="sdpa", use_cache=False)
    with _folder(config, way, device) as folder:
        plain, model = (_model(config, way, device, folder) for _ in range(2))
    ids = torch.randint(0, config.vocab_size, (num_microbatches, length), generator=torch.Generator().manual_seed(0))
    prefix = "base_model.model." if way.startswith(("LoRA", "nf4")) else ""
    split = {"split_points": [f"{prefix}model.layers.0"]} if neighbour else {}
    stages = 2 if neighbour else 1
    model = penstock.initialize(model, pipeline_parallel_size=stages, microbatch_size=1, schedule="1f1b", **split)
    if way == "compiled":  # inductor does not know the emulated device
        compiler = "inductor" if device.type in ("cuda", "cpu") else "aot_eager"
        model.compile(backend=compiler)
        for layer in plain.model.layers:
            layer.compile(backend=compiler)
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
    with _no_host_reads() as reads:
        by_engine()
    said = f"; the host reads: {dict(reads)}" * bool(reads)
    if not is_measured:
        return {"passed": not reads, "said": said}
    engine, loop = (statistics.median(seconds for _, seconds in found[name]) for name in ("engine", "loop"))
    host = statistics.median(returned for returned, _ in found["engine"])
    overhead, speed = engine / loop - 1, num_microbatches * length / engine
    flops = _flops_of_a_token(plain, config, length)
    peak = _peak_of(device)
    share = f"MFU {speed * flops / peak:.3f}" if peak else "no MFU, as the device's peak is not known"
    busy = f"the host is busy for {host / engine:.2f} of a step"
    said = f"{speed:.0f} tokens/s; {share}; overhead {overhead:+.2%}; {busy}{said}"
    # On a CPU two steps of a tiny model tell nothing of speed.
    passed = not reads and (small or neighbour or overhead <= LARGEST_OVERHEAD)
    figures = {"engine": engine, "loop": loop, "host": host, "tokens_per_second": speed, "flops_of_a_token": flops}
    return {"passed": passed, "said": said, **figures, "peak": peak}


@contextlib.contextmanager
def _folder(config: LlamaConfig, way: str, device: torch.device) -> Iterator[str | None]:
    """Where the model is saved, if it is packed while it is loaded."""
    if way != "nf4":
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        _built(config, device).save_pretrained(folder)
        yield folder


def _built(config: LlamaConfig, device: torch.device) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device if device.type == "cuda" else "cpu"):  # where billions of numbers are drawn at once
            return LlamaForCausalLM(config).to(device)
    finally:
        torch.set_default_dtype(before)


def _model(config: LlamaConfig, way: str, device: torch.device, folder: str | None) -> Any:
    if folder is None:
        model = _built(config, device)
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
def _no_host_reads() -> Iterator[dict[str, int]]:
    """Inside, a host that waits for the device is an error on CUDA, and counted on the emulated device."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield {}
        finally:
            torch.cuda.set_sync_debug_mode("default")
    elif torch.accelerator.is_available():
        from tests.support.emulated_gpu.emulated_device import host_waits

        with host_waits() as found:
            yield found
    else:
        yield {}


def memory(way: dict[str, Any], predicted: list[float], small: bool) -> dict[str, Any]:
    """The most that this rank's device has in a step, over what `fit` says of the way."""
    _configure_fit(small)
    with fit._saved("llama") if way["recipe"].startswith("nf4") else contextlib.nullcontext("") as folder:
        if torch.accelerator.is_available():
            device: Any = torch.get_device_module()
            training = fit.Training("llama", fit.Way(**way), folder)
            for _ in range(2):  # shapes are learned in the first
                device.reset_peak_memory_stats()
                training.step()
            taken = float(device.max_memory_allocated())
        else:  # what the host holds; what libraries load at first use is in it
            taken = fit.measured("llama", way, folder)
    rank = int(os.environ["RANK"])
    ratio = predicted[rank] / taken
    passed = not torch.accelerator.is_available() or abs(ratio - 1) <= LARGEST_ERROR
    said = f"rank {rank}: {readable(taken)}, predicted {ratio:.3f} of it"
    return {"passed": passed, "said": said, "taken": taken, "predicted": predicted[rank]}


def _configure_fit(small: bool) -> None:
    config = MEMORY_WITHOUT_CARD if small else MEMORY_ON_A_CARD
    fit.CONFIGS["llama"] = LlamaConfig(**config, tie_word_embeddings=False)
    fit.BATCH, fit.LENGTH, fit.CHUNK = (1, 64, 16) if small else (1, 2048, 1024)


# -- the sections ------------------------------------------------------------------------------------------------------

OWN: dict[str, Callable[..., dict[str, Any]]] = {"stage": stage, "memory": memory}


@dataclass(frozen=True)
class Row:
    """A check: its name, what ranks run with which arguments, where, in which environment, after which words. `missing`
    says why it cannot run here."""

    what: str
    check: str
    ranks: int
    arguments: dict[str, Any]
    device: str
    environment: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    missing: str = ""


def rows_of(section: str, device: str) -> list[Row]:
    """The checks of a section, the most important first."""
    small = device != "cuda"
    shared = {} if device == "cpu" else {SHARED: "nccl"}
    match section:
        case "stage":
            return _rows_of_stages(device, small, shared)
        case "memory":
            return _rows_of_memory(device, small, shared)
        case "exact":
            steps = 4 if small else 200
            return [
                Row(f"{name}, {steps} steps", "exact", 2, {"schedule": name, "steps": steps}, device, shared)
                for name in schedule_names()
            ]
        case "kills":
            return [
                Row(f"kill {number + 1}", "killed", 2, {"waits": bool(number % 2)}, device, shared)
                for number in range(KILLS_WITHOUT_CARD if small else NUM_KILLS)
            ]
        case "sanitizer":
            found = shutil.which("compute-sanitizer")
            words = (found or "", "--tool", "racecheck", "--error-exitcode", "9", "--target-processes", "all")
            missing = "" if found else "there is no compute-sanitizer"
            return [Row("1f1b under racecheck", "exact", 2, {"schedule": "1f1b"}, device, shared, words, missing)]
        case name:
            raise ValueError(f"there is no section {name!r}")


def _rows_of_stages(device: str, small: bool, shared: dict[str, str]) -> list[Row]:
    def row(way: str, length: int, count: int = 8, ranks: int = 1) -> Row:
        arguments = {"way": way, "length": length, "num_microbatches": count, "small": small}
        arguments["rounds"] = 2 if small else 5
        what = f"stage{' and a neighbour' * (ranks > 1)}, {way}, {length} tokens"
        return _of_bits(Row(what, "stage", ranks, arguments, device, shared if ranks > 1 else {}), way == "nf4")

    short, long = (64, 128) if small else (2048, 8192)
    return [
        row("eager", short),
        row("eager", long, count=4),
        row("eager", short, ranks=2),
        *(row(way, short) for way in ("LoRA", "nf4", "compiled")),
    ]


def _rows_of_memory(device: str, small: bool, shared: dict[str, str]) -> list[Row]:
    _configure_fit(small)
    plans = {str(way): (way, plan) for way, plan in fit.predicted("llama")}
    rows = []
    for name in MEMORY_WAYS:
        way, plan = plans[name]
        arguments = {"way": vars(way), "predicted": [each.total for each in plan.memory], "small": small}
        rows.append(_of_bits(Row(f"memory, {name}", "memory", 2, arguments, device, shared), "nf4" in name))
    return rows


def _of_bits(row: Row, packs: bool) -> Row:
    """The row where bitsandbytes, if it `packs` with that, has kernels: on the CPU and on CUDA."""
    if packs and find_spec("bitsandbytes") is None:
        return replace(row, missing="bitsandbytes is not installed")
    if packs and row.device == "emulated":
        return replace(row, what=f"{row.what}, on the CPU", device="cpu", environment={})
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu", "emulated"), default="cuda")
    sections = ["stage", "memory", "exact", "kills", "sanitizer"]
    parser.add_argument("--sections", nargs="*", choices=sections, default=sections)
    parser.add_argument("--only", default="", help="run the checks whose name has this in it")
    parser.add_argument("--minutes", type=float, default=9.5, help="all ends by then")
    parser.add_argument("--output", help="the result files, without their ending; nothing is written where it is ''")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
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
        failed = check_all(options, figures, cells)
    finally:  # also of what was seen until it was stopped
        if output:
            table = table_of(["check", "result", "seconds", "what it found"], cells)
            content = {"card": card, "figures": figures}
            write_result(Path(output), f"A stage on one {card}", "medians of steps in turn", table, content)
    print(f"\n{failed} failed" if failed else "\nall passed")
    return failed


def check_all(options: argparse.Namespace, figures: dict[str, Any], cells: list[list[str]]) -> int:
    """Run the sections, and fill in the figures and the cells of the table. Returns the number that failed."""
    deadline, failed = time.monotonic() + options.minutes * 60, 0
    small = options.device != "cuda"

    def tell(*row: str) -> None:
        cells.append([*row])
        print(f"| {' | '.join(row)} |", flush=True)

    for section in options.sections:
        try:
            rows = [row for row in rows_of(section, options.device) if options.only in row.what]
        except Exception as error:  # it must not cost the other sections
            failed += 1
            tell(section, "FAILED", "", f"{type(error).__name__}: {error}")
            continue
        at_once, ran, named = AT_ONCE.get(section, 1), 0, list[float]()
        with ThreadPoolExecutor(min(at_once, 2) if small else at_once) as threads:
            for row, (answers, seconds, why_not) in zip(rows, threads.map(partial(_run, deadline), rows), strict=True):
                if why_not:
                    tell(row.what, "left out", "", why_not)
                    continue
                ran += 1
                answered = [answer for answer in answers if answer is not None]  # none by one that was killed
                passed = bool(answered) and all(map(_is_good, answered))
                failed += not passed
                figures[row.what] = {"passed": passed, "seconds": seconds, "answers": answers}
                said = [each["said"] if isinstance(each, dict) else str(each) for each in answered]
                tell(row.what, "passed" if passed else "FAILED", f"{seconds:.1f}", "; ".join(filter(None, said)))
                named += [answer["seconds"] for answer in answered if section == "kills" and _is_good(answer)]
        if section == "kills" and ran:
            within = PROMISED_SECONDS if small else KILLED_SECONDS
            good = sum(seconds <= within for seconds in named)
            failed += good < len(named)  # those that nobody named have failed above
            words = f"{good} of {ran} named within {within:g} s; the slowest took {max(named, default=0.0):.2f} s"
            tell("kills", "passed" if good == ran else "FAILED", "", words)
    return failed


def _is_good(answer: Any) -> bool:
    return isinstance(answer, dict) and answer["passed"]


def _run(deadline: float, row: Row) -> tuple[list[Any], float, str]:
    """Every rank's answer and the seconds; or why the check was not run."""
    left = deadline - time.monotonic()
    if row.missing or left < SHORTEST:
        return [], 0.0, row.missing or "no time"
    try:
        limit = min(LIMIT, left)
        answers, seconds = run(
            row.check, row.ranks, row.device, row.arguments, row.environment, __file__, limit, row.before
        )
    except Exception as error:
        return [f"{type(error).__name__}: {error}"], 0.0, ""
    return answers, seconds, ""


if __name__ == "__main__":
    sys.exit(main())

"""Each row of `penstock fit` beside what a run takes: `python benchmarks/studies/fit.py peaks llama gpt2 flux`.

Two ranks on CPUs train a small model in every way that the table has. What a rank takes is the most that is resident in
a step, without what was before the model was built. Each model adds its rows to the result file.

`python benchmarks/studies/fit.py levers` is what each lever of docs/memory.md saves of that, and what it costs:
seconds of steps, in turn.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Comparison

sys.path.insert(0, str(Path(__file__).parents[2]))
import transformers
from torch.nn import functional
from transformers import GPT2Config, LlamaConfig

import penstock
from penstock.cli.plans import recipes_of
from penstock.modeling.instrumentation import record_of
from penstock.planning import fit
from penstock.planning.cluster import Cluster, DeviceClass
from penstock.planning.memory import readable
from penstock.planning.plan import Job
from penstock.planning.planner import equal_pipelines

MICROBATCHES, BATCH, LENGTH, RANK, CHUNK = 4, 2, 256, 8, 64
SIDE = 24  # of Flux's latents, in patches
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(
        vocab_size=16384, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        max_position_embeddings=LENGTH, tie_word_embeddings=False,
    ),
    "gpt2": GPT2Config(
        vocab_size=12288, n_embd=448, n_layer=4, n_head=7, n_positions=LENGTH, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "flux": {
        "in_channels": 64, "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 64, "num_attention_heads": 4,
        "joint_attention_dim": 256, "pooled_projection_dim": 64, "axes_dims_rope": [16, 24, 24],
    },
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to train a model, over two ranks."""

    recipe: str
    checkpointing: bool
    chunk: int | None
    stages: int
    split_points: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.recipe + ", ckpt" * self.checkpointing + ", chunk" * (self.chunk is not None)

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"pipeline_parallel_size": self.stages, "loss_chunk_tokens": self.chunk}
        settings |= {"split_points": [*self.split_points]} if self.split_points else {}
        return settings | ({"sharded_optimizer": True} if "sharded" in self.recipe else {})


# -- what is predicted -------------------------------------------------------------------------------------------------


def predicted(name: str) -> list[tuple[Way, Any]]:
    """The ways, and the plan of each on two devices: a pipeline of two stages, or with shared states two of one."""
    fit.CHUNK = CHUNK
    with torch.device("meta"):
        subject = _of_config(name)
    if name == "flux":
        record_of(subject).example_inputs = _batch(name, BATCH, torch.float32)
    found = []
    for recipe, chunk, profile in fit.profiles_of(subject, recipes_of(RANK), BATCH, LENGTH, 1e12):
        for checkpointing in (False, True):
            cluster = Cluster((DeviceClass("cpu", 2),))
            job = Job(profile, cluster, MICROBATCHES * (2 if recipe.sharded else 1), checkpointing=checkpointing)
            plan = equal_pipelines(replace(job, sharded=2 * recipe.sharded), depth=1 if recipe.sharded else 2)
            assert plan is not None
            stages = plan.pipelines[0].stage_names
            points = tuple(names[0] for names in stages[1:])
            found.append((Way(recipe.name, checkpointing, chunk, len(stages), points), plan))
    return found


# -- a rank of a run ---------------------------------------------------------------------------------------------------


class Training:
    """A model and its optimizer, on this rank."""

    def __init__(self, name: str, way: Way, folder: str) -> None:
        self.inputs = _batch(name, BATCH * MICROBATCHES, _dtype(way))
        model: Any = _built(name, way, folder)
        example, criterion = None, None
        if name == "flux":
            example, criterion = _batch(name, BATCH, _dtype(way)), _to_zero
        if way.checkpointing and name == "flux":
            model.enable_gradient_checkpointing()
        elif way.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = penstock.initialize(
            model, microbatch_size=BATCH, schedule="1f1b", criterion=criterion, example_inputs=example, **way.settings
        )
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # On a CPU bitsandbytes updates by operations of torch, with copies that its kernels for GPUs do not make.
        self.counts_update = way.recipe != "bf16, Adam f32"
        if not self.counts_update:
            import bitsandbytes

            self.optimizer: Any = bitsandbytes.optim.AdamW(trained, lr=1e-4)
        else:
            self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        self.model.train()

    def step(self) -> None:
        self.backward()
        self.update()

    def backward(self) -> None:
        for out in self.model(**self.inputs):
            out.loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def measured(name: str, way: dict[str, Any], folder: str) -> float:
    """Bytes that this rank takes at most in a step that is not the first, without what was before the model."""
    ctypes.CDLL(None).mallopt(-3, 1 << 15)  # tensors are mapped, and given back when they are freed
    before = _resident()
    training = Training(name, Way(**way), folder)
    peak = 0.0
    for _ in range(2):  # shapes are learned in the first
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        training.backward()
        if training.counts_update:
            training.update()
        peak = float(_status("VmHWM") - _status("RssFile"))
        if not training.counts_update:
            training.update()
    return peak - before


def timed(name: str, ways: list[dict[str, Any]], folder: str, rounds: int) -> list[list[float]]:
    """Seconds of steps of each way, one after another in each round."""
    trainings = [Training(name, Way(**way), folder) for way in ways]
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for training, own in zip(trainings, seconds, strict=True):
            torch.distributed.barrier()
            start = time.perf_counter()
            training.step()
            if number:
                own.append(time.perf_counter() - start)
    return seconds


def _of_config(name: str) -> Any:
    if name == "flux":
        from diffusers import FluxTransformer2DModel

        return FluxTransformer2DModel(**CONFIGS[name])
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name])


def _dtype(way: Way) -> torch.dtype:
    return torch.float32 if way.recipe.startswith("float32") else torch.bfloat16


def _built(name: str, way: Way, folder: str) -> Any:
    torch.manual_seed(0)
    if way.recipe.startswith("nf4"):
        four = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        kind = transformers.AutoModelForCausalLM
        model: Any = kind.from_pretrained(folder, quantization_config=four, dtype=_dtype(way))
        for parameter in model.parameters():  # what is not packed is still in the file, which is mapped
            parameter.data = parameter.data.clone() if parameter.is_floating_point() else parameter.data
    else:
        model = _of_config(name).to(_dtype(way))
    if "LoRA" in way.recipe:
        from peft import LoraConfig, get_peft_model

        if name == "flux":
            model.requires_grad_(False)
            model.add_adapter(LoraConfig(r=RANK, target_modules="all-linear"))
            for parameter in model.parameters():
                parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
        else:
            model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def _batch(name: str, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if name != "flux":
        ids = torch.ones(size, LENGTH, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}
    config, places = CONFIGS[name], torch.stack(torch.meshgrid(*map(torch.arange, (1, SIDE, SIDE)), indexing="ij"), -1)
    return {
        "hidden_states": torch.ones(size, SIDE * SIDE, config["in_channels"], dtype=dtype),
        "encoder_hidden_states": torch.ones(size, 64, config["joint_attention_dim"], dtype=dtype),
        "pooled_projections": torch.ones(size, config["pooled_projection_dim"], dtype=dtype),
        "timestep": torch.ones(size, dtype=dtype),
        "img_ids": places.reshape(-1, 3).to(dtype),
        "txt_ids": torch.zeros(64, 3, dtype=dtype),
    }


def _to_zero(outputs: Any, inputs: Any) -> torch.Tensor:
    return functional.mse_loss(outputs[0].float(), torch.zeros((), dtype=torch.float32).expand_as(outputs[0]))


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS") - _status("RssFile")


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) * 1024


# -- the two tables ----------------------------------------------------------------------------------------------------


@contextmanager
def _saved(name: str) -> Iterator[str]:
    """A folder with the model, for what is packed while it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        if name != "flux":
            torch.manual_seed(0)
            _of_config(name).to(torch.bfloat16).save_pretrained(folder)
        yield folder


def peaks(names: list[str], only: str) -> None:
    file = RESULTS / "fit.json"
    runs = json.loads(file.read_text())["runs"] if file.exists() else {}
    try:
        for name in names:
            _run(name, only, runs)
    finally:  # also of what was seen until it was stopped
        _write(runs)


def _run(name: str, only: str, runs: dict[str, Any]) -> None:
    import fit as here  # a name that other processes can import

    from tests.support.pool import Pool

    pool, warm = Pool(), set[str]()
    with _saved(name) as folder:
        for way, plan in predicted(name):
            if only not in way.recipe or (name == "flux" and way.recipe.startswith("nf4")):
                continue  # diffusers packs by bitsandbytes on a GPU only
            if way.recipe not in warm:  # what a library loads at its first use is not the model's
                pool.run(2, here.measured, name, vars(way), folder, timeout=200)
                warm.add(way.recipe)
            ranks = pool.run(2, here.measured, name, vars(way), folder, timeout=200)
            runs[f"{name}, {way}"] = found = [[one, of.total] for one, of in zip(ranks, plan.memory, strict=True)]
            said = ", ".join(f"{taken / 1e6:.0f} MB, predicted {total / taken:.3f}" for taken, total in found)
            print(f"{name}, {way}: {said}", flush=True)
    pool.close()


def _write(runs: dict[str, Any]) -> None:
    columns = ("model, way", "rank 0", "predicted", "ratio", "rank 1", "predicted", "ratio")
    config = {name: each if name == "flux" else each.to_diff_dict() for name, each in CONFIGS.items()}
    config |= {"microbatches": MICROBATCHES, "samples": BATCH, "tokens": LENGTH, "chunk": CHUNK, "rank": RANK}
    config |= {"patches of a side": SIDE}
    table = Comparison("fit", "Rows of `penstock fit`, and what runs took", columns, config, runs)
    ratios = []
    for key, ranks in sorted(runs.items()):
        cells = []
        for taken, total in ranks:
            cells += [readable(taken), readable(total), f"{total / taken:.3f}"]
            ratios.append(total / taken)
        table.add(key, cells)
    table.write(
        f"Of {len(ratios)} ratios the least is {min(ratios):.3f}, the greatest {max(ratios):.3f}. Taken is the "
        "resident memory at the second step's peak, without that before the model; ckpt: activations recomputed, "
        "chunk: the loss in chunks. Sharded: two pipelines of one stage; all else: one of two. AdamW is torch's, "
        "fused; with float32 numbers bitsandbytes', whose update is not counted.",
        "one run of each",
    )


@cache
def _ways() -> dict[str, tuple[Way, Way]]:
    """What is compared for each lever, without and with it: each beside those above it."""
    found = {str(way): way for way, _ in predicted("llama")}
    both = found["float32, ckpt, chunk"]
    order = {
        "loss in chunks": "float32, chunk", "activations recomputed": "float32, ckpt, chunk",
        "bfloat16": "bfloat16, ckpt, chunk", f"LoRA {RANK}": f"LoRA {RANK}, ckpt, chunk",
        f"nf4, LoRA {RANK}": f"nf4, LoRA {RANK}, ckpt, chunk",
    }  # fmt: skip
    pairs, before = {}, found["float32"]
    for lever, name in order.items():
        pairs[lever] = (before, before := found[name])
    # The stages are always the same: only the lever differs.
    pairs = {name: tuple(replace(one, split_points=both.split_points) for one in ways) for name, ways in pairs.items()}
    copies = replace(both, stages=1, split_points=())
    return {**pairs, "sharded optimizer": (copies, found["float32, sharded, ckpt, chunk"])}


def levers(rounds: int) -> None:
    import fit as here

    from tests.support.pool import Pool

    columns = ("lever", "fuller rank without", "with", "both ranks without", "with", "seconds, with / without")
    config = {"llama": CONFIGS["llama"].to_diff_dict(), "microbatches": MICROBATCHES, "samples": BATCH}
    config |= {"tokens": LENGTH, "chunk": CHUNK, "rank": RANK, "rounds": rounds}
    table = Comparison("levers", "What each lever of memory saves and costs", columns, config, {})
    pool, taken = Pool(), dict[Way, list[float]]()
    with _saved("llama") as folder:
        for lever, ways in _ways().items():
            for way in ways:
                if way not in taken:
                    if way.recipe not in {one.recipe for one in taken}:
                        pool.run(2, here.measured, "llama", vars(way), folder, timeout=200)
                    taken[way] = pool.run(2, here.measured, "llama", vars(way), folder, timeout=200)
            pair = [vars(way) for way in ways]
            seconds = pool.run(2, here.timed, "llama", pair, folder, rounds, timeout=400)[0] if rounds else [[], []]
            ratio = statistics.median([b / a for a, b in zip(*seconds, strict=True)] or [math.nan])
            less, more = (taken[way] for way in ways)
            cells = [readable(of(one)) for of in (max, sum) for one in (less, more)]
            table.add(lever, [*cells, f"{ratio:.2f}"], bytes=[less, more], seconds=seconds, ratio=ratio)
            print(lever, *cells, f"{ratio:.3f}", flush=True)
            table.write(  # also of what was seen until it is stopped
                "Each lever beside those above it; the last one over two pipelines of one stage, with the first two. "
                "Seconds: the median over rounds of the ratio of two steps, one after the other. A CPU unpacks 4 bits "
                "by code that no GPU runs.",
                "one run of each peak; steps in turn",
            )
    pool.close()


def main() -> None:
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # bitsandbytes compiles its optimizer for CPUs, which takes memory
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_peaks = commands.add_parser("peaks")
    of_peaks.add_argument("models", nargs="*", default=[*CONFIGS])
    of_peaks.add_argument("--only", default="", help="ways in whose name this stands")
    commands.add_parser("levers").add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.command == "peaks":
        peaks(options.models, options.only)
    else:
        levers(options.rounds)


if __name__ == "__main__":
    main()

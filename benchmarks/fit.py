"""Each row of `penstock fit` beside what a run takes: `python benchmarks/fit.py llama gpt2`.

Two ranks on CPUs train a small model in every way that the table has. What a rank takes is the most that is resident in
a step, without what was before the model was built. A result file in benchmarks/results; each model adds its rows.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Comparison

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import transformers
from transformers import GPT2Config, LlamaConfig

import penstock
from penstock.cli.plans import _recipes
from penstock.planning import fit
from penstock.planning.cluster import Cluster, DeviceClass
from penstock.planning.memory import readable
from penstock.planning.plan import Job
from penstock.planning.planner import equal_pipelines

MICROBATCHES, BATCH, LENGTH, RANK, CHUNK = 4, 2, 256, 8, 64
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(
        vocab_size=16384, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        max_position_embeddings=LENGTH, tie_word_embeddings=False,
    ),
    "gpt2": GPT2Config(
        vocab_size=12288, n_embd=448, n_layer=4, n_head=7, n_positions=LENGTH, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip


def predicted(name: str) -> list[tuple[Any, int | None, bool, Any]]:
    """The ways, and the plan of each on two devices: a pipeline of two stages, or with shared states two of one."""
    fit.CHUNK = CHUNK
    with torch.device("meta"):
        subject = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    found = []
    for recipe, chunk, profile in fit.profiles_of(subject, _recipes(RANK), BATCH, LENGTH, 1e12):
        for checkpointing in (False, True):
            cluster = Cluster((DeviceClass("cpu", 2),))
            job = Job(profile, cluster, MICROBATCHES * (2 if recipe.sharded else 1), checkpointing=checkpointing)
            plan = equal_pipelines(replace(job, sharded=2 * recipe.sharded), depth=1 if recipe.sharded else 2)
            assert plan is not None
            found.append((recipe, chunk, checkpointing, plan))
    return found


def measured(name: str, recipe: str, settings: dict[str, Any], checkpointing: bool) -> float:
    """Bytes that this rank takes at most in a step that is not the first, without what was before the model."""
    ctypes.CDLL(None).mallopt(-3, 1 << 15)  # tensors are mapped, and given back when they are freed
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS") - _status("RssFile")
    model: Any = _built(name, recipe)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = penstock.initialize(model, micro_batch_size=BATCH, schedule="1f1b", **settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if recipe == "bf16, Adam f32":
        import bitsandbytes

        optimizer: Any = bitsandbytes.optim.AdamW(trained, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.ones(BATCH * MICROBATCHES, LENGTH, dtype=torch.long)
    model.train()
    peak = 0.0
    for _ in range(3):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        for out in model(input_ids=ids, labels=ids):
            out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = float(_status("VmHWM") - _status("RssFile"))
    return peak - before


def _built(name: str, recipe: str) -> Any:
    torch.manual_seed(0)
    dtype = torch.float32 if recipe.startswith("float32") else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype)
    if recipe.startswith("nf4"):
        four = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = type(model).from_pretrained(folder, quantization_config=four, dtype=dtype)
    if "LoRA" in recipe:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) * 1024


def main(names: list[str]) -> None:
    import fit as here  # a name that other processes can import

    from pool import Pool

    file = RESULTS / "fit.json"
    runs = json.loads(file.read_text())["runs"] if file.exists() else {}
    for name in names:
        pool = Pool()
        pool.run(2, here.measured, name, "float32", {"pipeline_parallel_size": 2}, False, timeout=200)  # warms up
        for recipe, chunk, checkpointing, plan in predicted(name):
            stages = plan.pipelines[0].stage_names
            settings = {"pipeline_parallel_size": len(stages), "loss_chunk_tokens": chunk}
            settings |= {"split_points": [names[0] for names in stages[1:]]} if len(stages) > 1 else {}
            settings |= {"sharded_optimizer": True} if recipe.sharded else {}
            ranks = pool.run(2, here.measured, name, recipe.name, settings, checkpointing, timeout=200)
            key = f"{name}, {recipe.name}" + ", ckpt" * checkpointing + ", chunk" * (chunk is not None)
            runs[key] = [[taken, memory.total] for taken, memory in zip(ranks, plan.memory, strict=True)]
            said = ", ".join(f"{taken / 1e6:.0f} MB, predicted {total / taken:.3f}" for taken, total in runs[key])
            print(f"{key}: {said}", flush=True)
        pool.close()
    columns = ("model, way", "rank 0", "predicted", "ratio", "rank 1", "predicted", "ratio")
    config = {name: each.to_diff_dict() for name, each in CONFIGS.items()}
    config |= {"microbatches": MICROBATCHES, "samples": BATCH, "tokens": LENGTH, "chunk": CHUNK, "rank": RANK}
    table = Comparison("fit", "Rows of `penstock fit`, and what runs took", columns, config, runs)
    ratios = []
    for key, ranks in runs.items():
        cells = []
        for taken, total in ranks:
            cells += [readable(taken), readable(total), f"{total / taken:.3f}"]
            ratios.append(total / taken)
        table.add(key, cells)
    table.write(
        f"Of {len(ratios)} ratios the least is {min(ratios):.3f}, the greatest {max(ratios):.3f}. Taken is the "
        "resident memory at the third step's peak, without that before the model; ckpt: activations recomputed, "
        "chunk: the loss in chunks. AdamW is torch's, fused; with float32 numbers bitsandbytes'.",
        "one run of each",
    )


if __name__ == "__main__":
    main(sys.argv[1:] or list(CONFIGS))

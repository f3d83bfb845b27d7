"""One training script with transformers' (or TRL's) own trainer and over pipelines: by how much the two runs differ.

    python benchmarks/studies/trainer_matrix.py                    # everything, 40 minutes on two busy cores
    python benchmarks/studies/trainer_matrix.py --only "T5|ViT"    # these rows anew, the others from the last result

Tiny models on CPU processes over gloo, with accumulation, clipping, weight decay, warm-up and a cosine schedule, labels
of unequal number in each sample, and three evaluations on the way. Two pipelines are held to one process that
accumulates the batches of both; with TRL, whose metrics depend on the number of processes, to two under DDP. The
scripts are those that the tests use: `trainer_runs.py`, `preference_runs.py` and `feedback_runs.py` in
`tests/support/`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Comparison

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.feedback_runs import approve, judge
from tests.support.pool import Pool
from tests.support.preference_runs import prefer, reinforce
from tests.support.trainer_runs import BATCH, differences, fine_tune, train

# A loss that sorts the batch is that of the whole batch over one microbatch only.
WHOLE: dict[str, Any] = {"parallelism": {"num_microbatches": 1}}
# Of DPOTrainer. Two of the losses need smoothing, and the others of its list may have it.
SMOOTHED: dict[str, Any] = {"label_smoothing": 0.1}
PREFERENCES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": [name]} for name in (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
        "sft", "sigmoid_norm",
    )},
    # With Adam, the plain trainer's own figures in single precision are 5e-5 apart for other microbatches.
    "discopop": {"loss_type": ["discopop"], "optim": "sgd"},
    **{name: {"loss_type": [name], **WHOLE} for name in ("aot", "aot_unpaired")},
    "a weighted sum": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "ld_alpha": {"ld_alpha": 0.5},
    "use_weighting": {"use_weighting": True},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "forward_kl": {"f_divergence_type": "forward_kl"},
}  # fmt: skip
# Of GRPOTrainer, with completions of an earlier policy.
POLICIES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
ROWS: dict[str, dict[str, Any]] = {
    "GPT-2": {"name": "GPT-2"},
    "Llama": {"name": "Llama"},
    "BERT": {"name": "BERT"},
    "T5": {"name": "T5"},
    "ViT": {"name": "ViT"},
    "GPT-2, LoRA": {"name": "GPT-2", "lora": True},
    "Llama, LoRA": {"name": "Llama", "lora": True},
    "SFTTrainer": {"packing": False},
    "SFTTrainer, packing": {"packing": True},
    "SFTTrainer, packing, LoRA": {"packing": True, "lora": True},
    **{f"DPOTrainer, {name}": {**SMOOTHED, **case} for name, case in PREFERENCES.items()},
    "DPOTrainer, LoRA": {"lora": True},
    "RewardTrainer": {},
    "RewardTrainer, margins, centred, LoRA": {"margin": True, "center_rewards_coefficient": 0.1, "lora": True},
    "KTOTrainer, kto": {"desirable_weight": 1.3},
    "KTOTrainer, apo_zero_unpaired": {"loss_type": "apo_zero_unpaired"},
    "KTOTrainer, LoRA": {"lora": True},
    **{f"GRPOTrainer, {name}": {"loss_type": name, "num_iterations": 2} for name in POLICIES},
    "GRPOTrainer, LoRA, beta": {"lora": True, "beta": 0.1},
}
# TRL's trainers, and their scripts; all other rows are of transformers' Trainer.
SCRIPTS: dict[str, Callable[..., list[dict[str, float]]]] = {
    "SFTTrainer": fine_tune, "DPOTrainer": prefer, "GRPOTrainer": reinforce, "RewardTrainer": judge,
    "KTOTrainer": approve,
}  # fmt: skip
# Stages and pipelines.
LAYOUTS = {"2 stages": (2, 1), "3 stages": (3, 1), "2 pipelines of 2": (2, 2)}
TYPES = {"float64": torch.float64, "float32": torch.float32}
# How far losses and logged figures may be apart.
TARGETS = {"float64": 1e-10, "float32": 1e-5}
# SFTTrainer divides its counts of tokens in single precision.
COUNTS = 1e-8
# How the pool runs a script.
ALONE: dict[str, Any] = {"init": False, "timeout": 600.0}

NOTE = """\
Each number is the largest difference over all optimizer steps and ranks: of the losses and all other figures that are
logged in training and in evaluations (norms, rewards, accuracies, sums of predictions or of generated tokens), for
figures above 1 relative to them; in the columns of weights, over all numbers in the two saved files at the end, and all
layouts. T5 is trained by Seq2SeqTrainer with `predict_with_generate`. The Trainer adds up the losses that it logs in
single precision; here it adds them up in double, with and without pipelines. TRL's SFTTrainer divides its counts of
tokens in single precision: its rows in float64 are held to 1e-8. The optimizer is AdamW; that of discopop is SGD, as
with AdamW the plain trainer's own figures in float32 were 5e-5 apart for another size of microbatches.
The norm of discopop's gradients in float32 depends on the order of sums: on 2026-11-27 the plain trainer's own was
1.8e-5 from that in float64, and 3.5e-5 from its own with batches of 4 rather than 2 times 2. Rows of a page may be of
several runs of one day (`--only`).

The last column is of single precision, where another order of the same sums is enough for other weights: Adam divides
small gradients by their own size."""


def run(
    pool: Pool, folder: Path, row: str, dtype: torch.dtype, steps: int, **options: Any
) -> dict[str, dict[str, float]]:
    """The differences of each layout's run from the plain trainer's. `options` are further ones of the script."""
    case = {"steps": steps, **ROWS[row], "dtype": dtype, **options}
    script = SCRIPTS.get(row.partition(",")[0], train)
    plain, found = {}, {}
    for layout, (stages, pipelines) in LAYOUTS.items():
        processes = 1 if script is train else pipelines
        where = folder / f"plain-{processes}"
        if processes not in plain:
            runs = pool.run(processes, script, where, stages=0, pipelines=processes, **case, **ALONE)
            plain[processes] = runs[0]
        mine, ranks = folder / layout, stages * pipelines
        logs = pool.run(ranks, script, mine, stages=stages, pipelines=pipelines, **case, **ALONE)
        worst = [differences((log, mine), (plain[processes], where), relative=True) for log in logs]
        found[layout] = {name: max(one[name] for one in worst) for name in worst[0]}
    return found


def summed_up(found: Mapping[str, float]) -> dict[str, float]:
    """The largest difference of losses and figures, and that of weights."""
    figures = {name: value for name, value in found.items() if name != "weights"}
    return {"figures": max(figures.values()), "weights": found["weights"]}


def target(row: str, dtype: str) -> float:
    """How far losses and logged figures of a row may be apart."""
    return max(TARGETS[dtype], COUNTS if row.startswith("SFTTrainer") else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a pattern of rows")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps (default: 6)")
    options = parser.parse_args()
    config = {"steps": options.steps, "samples_per_pipeline": BATCH, "layouts": LAYOUTS, "rows": ROWS}
    runs, beyond = known_runs(options.steps), list[str]()
    pool = Pool()
    try:
        for row in [name for name in ROWS if re.search(options.only, name)]:
            for name, dtype in TYPES.items():
                with tempfile.TemporaryDirectory(prefix="penstock-matrix-") as folder:
                    runs.setdefault(row, {})[name] = run(pool, Path(folder), row, dtype, options.steps)
            print(f"{row}: {runs[row]}", flush=True)
            beyond = write(config, runs)
    finally:
        pool.close()
    if beyond:
        sys.exit(f"beyond their targets: {', '.join(beyond)}")


def known_runs(steps: int) -> dict[str, Any]:
    """Those of the last result, if they took as many steps."""
    path = RESULTS / "trainer_matrix.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return known["runs"] if known and known["config"]["steps"] == steps else {}


def write(config: Mapping[str, Any], runs: Mapping[str, Any]) -> list[str]:
    """Write the table; returns the names of what is beyond its target."""
    columns = ["script", *(f"{name}: {layout}" for name in TYPES for layout in (*LAYOUTS, "weights"))]
    table = Comparison("trainer_matrix", "The Trainer with and without pipelines", columns, config, runs)
    beyond, largest = [], dict.fromkeys(TYPES, 0.0)
    for row in [row for row in ROWS if row in runs]:
        cells, figures = [], {}
        for name in TYPES:
            by_layout = {layout: summed_up(found) for layout, found in runs[row][name].items()}
            figures[name] = by_layout
            apart = [found["figures"] for found in by_layout.values()]
            weights = max(found["weights"] for found in by_layout.values())
            cells += [f"{value:.0e}" for value in (*apart, weights)]
            if max(apart) > target(row, name):
                beyond.append(f"{row} in {name}")
            if not row.startswith("SFTTrainer"):
                largest[name] = max(largest[name], *apart)
        table.add(row, cells, **figures)
    said = " and ".join(f"{value:.1e} in {name} (target: {TARGETS[name]:g})" for name, value in largest.items())
    table.write(
        f"{NOTE}\n\nBeyond their targets: {', '.join(beyond) or 'none'}.",
        how=f"losses and figures, but for SFTTrainer's counts, differ by at most {said}",
    )
    return beyond


if __name__ == "__main__":
    main()

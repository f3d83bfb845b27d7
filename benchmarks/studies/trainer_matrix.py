"""One training script with transformers' (or TRL's) own trainer and over pipelines: by how much the two runs differ.

    python benchmarks/studies/trainer_matrix.py                    # everything, about half an hour on two cores
    python benchmarks/studies/trainer_matrix.py --only "T5|ViT"    # these rows anew, the others from the last result

Tiny models on CPU processes over gloo, with accumulation, clipping, weight decay, warm-up and a cosine schedule, labels
of unequal number in each sample, and three evaluations on the way. Two pipelines are held to one process that
accumulates the batches of both; with TRL, whose metrics depend on the number of processes, to two under DDP. The
scripts are those that the tests use: `trainer_runs.py` and `feedback_runs.py` in `tests/support/`.
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
from tests.support.preference_runs import LOSSES, prefer, reinforce
from tests.support.trainer_runs import BATCH, differences, fine_tune, train

# Optimizer steps of the rows that generate, or have a second model.
FEW = 6
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
    "DPOTrainer, LoRA": {"lora": True, "steps": FEW},
    "DPOTrainer, each loss in turn": {
        "losses": LOSSES,
        "steps": len(LOSSES),
        "label_smoothing": 0.1,
        "use_weighting": True,
    },
    "GRPOTrainer": {"steps": FEW},
    "GRPOTrainer, bnpo, LoRA, beta": {"loss_type": "bnpo", "lora": True, "beta": 0.1, "steps": FEW},
    "GRPOTrainer, dr_grpo, 2 iterations": {"loss_type": "dr_grpo", "num_iterations": 2, "steps": FEW},
    "GRPOTrainer, grpo": {"loss_type": "grpo", "steps": FEW},
    "RewardTrainer": {},
    "RewardTrainer, margins, centred, LoRA": {"margin": True, "center_rewards_coefficient": 0.1, "lora": True},
    "KTOTrainer": {"desirable_weight": 1.3},
    "KTOTrainer, LoRA": {"lora": True},
    "KTOTrainer, apo_zero_unpaired": {"loss_type": "apo_zero_unpaired"},
}
# TRL's trainers, and their scripts; all other rows are of transformers' Trainer.
SCRIPTS: dict[str, Callable[..., list[dict[str, float]]]] = {
    "SFTTrainer": fine_tune, "DPOTrainer": prefer, "GRPOTrainer": reinforce, "RewardTrainer": judge,
    "KTOTrainer": approve,
}  # fmt: skip
# Stages and pipelines.
LAYOUTS = {"2 stages": (2, 1), "3 stages": (3, 1), "2 pipelines of 2": (2, 2)}
TYPES = {"float64": torch.float64, "float32": torch.float32}
TARGET = 1e-6
# How the pool runs a script.
ALONE: dict[str, Any] = {"init": False, "timeout": 600.0}
FIGURES = ("loss", "norm", "learning rate", "metrics", "weights")
KINDS = {"loss": "loss", "grad_norm": "norm", "learning_rate": "learning rate", "weights": "weights"}

NOTE = """\
Each number is the largest absolute difference over all optimizer steps and ranks; of weights, over all numbers in the
two saved files at the end. Metrics are everything else that is logged: the loss and the metrics of evaluations, whether
accuracy, sums of predictions or of generated tokens, and all figures that TRL logs. T5 is trained by
Seq2SeqTrainer with `predict_with_generate`. The Trainer itself adds up the losses that it logs in float32.
Rows of DPOTrainer and GRPOTrainer are of 6 steps, or of one for each loss.

The last column is the largest difference of the same runs in single precision. There another order of the same sums is
enough for other weights after 30 steps, as Adam divides small gradients by their own size.

A run with `--only` leaves the other rows as they were: those of RewardTrainer and KTOTrainer are of the date above, the
others of 2026-11-23."""


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
        worst = [differences((log, mine), (plain[processes], where)) for log in logs]
        found[layout] = {name: max(one[name] for one in worst) for name in worst[0]}
    return found


def summed_up(found: Mapping[str, float]) -> dict[str, float]:
    """The largest difference of each kind of figure."""
    largest = dict.fromkeys(FIGURES, 0.0)
    for name, value in found.items():
        kind = KINDS.get(name, "metrics")
        largest[kind] = max(largest[kind], value)
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a pattern of rows")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default: 30)")
    options = parser.parse_args()
    config = {"steps": options.steps, "samples_per_pipeline": BATCH, "layouts": LAYOUTS, "rows": ROWS}
    runs = known_runs(options.steps)
    pool = Pool()
    try:
        for row in [name for name in ROWS if re.search(options.only, name)]:
            for name, dtype in TYPES.items():
                with tempfile.TemporaryDirectory(prefix="penstock-matrix-") as folder:
                    runs.setdefault(row, {})[name] = run(pool, Path(folder), row, dtype, options.steps)
            print(f"{row}: {runs[row]}", flush=True)
            write(config, runs)
    finally:
        pool.close()
    if (largest := write(config, runs)) > TARGET:
        sys.exit(f"{largest:.1e} is more than {TARGET:g}")


def known_runs(steps: int) -> dict[str, Any]:
    """Those of the last result, if they took as many steps."""
    path = RESULTS / "trainer_matrix.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return known["runs"] if known and known["config"]["steps"] == steps else {}


def write(config: Mapping[str, Any], runs: Mapping[str, Any]) -> float:
    """Write the table; returns the largest difference in double precision."""
    columns = ["script and layout", *FIGURES, "largest in float32"]
    table = Comparison("trainer_matrix", "The Trainer with and without pipelines", columns, config, runs)
    largest = 0.0
    for row, layout in ((row, layout) for row in ROWS if row in runs for layout in LAYOUTS):
        double, single = (summed_up(runs[row][name][layout]) for name in TYPES)
        largest = max(largest, *double.values())
        cells = [f"{double[figure]:.0e}" for figure in FIGURES]
        table.add(f"{row}: {layout}", [*cells, f"{max(single.values()):.0e}"], float64=double, float32=single)
    table.write(NOTE, how=f"the largest difference in float64 is {largest:.1e}, the target {TARGET:g}")
    return largest


if __name__ == "__main__":
    main()

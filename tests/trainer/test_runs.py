"""transformers' Trainer over pipelines, beyond test_trainer.py: more models, layouts and options."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import trainer_matrix as matrix
from accelerate import Accelerator
from transformers import GPT2Config, Trainer, TrainingArguments

from penstock import HeterogeneousParallelPlugin, PipelineTemplate
from penstock.trainer.pipeline_trainer import PipelineTrainer
from tests.support.families import FAMILIES
from tests.support.launch import ROOT, run_python, torchrun
from tests.support.local_hub import local_hub
from tests.support.pool import Pool
from tests.support.trainer_runs import NUM_EVALUATED, defaults, differences, metrics, over, samples, train, train_all

pytestmark = pytest.mark.slow

TOLERANCE = 1e-6

FEW: dict[str, Any] = {"sizes": (24, 8)}  # samples: an epoch ends after three steps, an evaluation has two batches
THREE_LAYERS = {"num_hidden_layers": 3}
CASES: dict[str, dict[str, Any]] = {
    "images": {"name": "ViT", "settings": THREE_LAYERS},
    "adapters": {"name": "Llama", "settings": THREE_LAYERS, "lora": True, "label_smoothing_factor": 0.1},
    "checkpointing": {"name": "Llama", "settings": THREE_LAYERS, "gradient_checkpointing": True},
    "lengths": {"name": "GPT-2", "settings": {"n_layer": 3}, "train_sampling_strategy": "group_by_length"},
    "stopping": {"name": "BERT", "settings": THREE_LAYERS, "patience": 1, "metric_for_best_model": "eval_loss"}
    | {"greater_is_better": False, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    | {"eval_steps": 1},
}
CASES = {name: {"eval_steps": 2, **FEW, **case} for name, case in CASES.items()}
Plain = tuple[dict[str, list[dict[str, float]]], Path]


@pytest.fixture(scope="module")
def plain_runs(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """The plain Trainer's, which all layouts are held to."""
    folder = tmp_path_factory.mktemp("plain")
    return train_all(folder, 0, 1, 4, CASES), folder


@pytest.mark.parametrize(
    ("stages", "pipelines", "cases"),
    [(3, 1, ["checkpointing", "lengths", "stopping"]), (2, 2, ["images", "adapters"])],
    ids=["stages", "pipelines"],
)
def test_the_script_gives_the_same_run(
    pool: Pool, plain_runs: Plain, tmp_path: Path, stages: int, pipelines: int, cases: list[str]
) -> None:
    chosen = {case: CASES[case] for case in cases}
    plain, folder = plain_runs
    for run in pool.run(stages * pipelines, train_all, tmp_path, stages, pipelines, 4, chosen, init=False, timeout=240):
        for case in cases:
            entries = [True, False] if case == "stopping" else [True, True, False]
            assert ["loss" in entry for entry in plain[case]] == entries * 2
            found = differences((run[case], tmp_path / case), (plain[case], folder / case))
            assert {"loss", "grad_norm", "learning_rate", "eval_loss", "eval_labels", "weights"} <= found.keys()
            assert not {name: value for name, value in found.items() if value > TOLERANCE}, case


@pytest.mark.parametrize(
    ("row", "layout"),
    [("BERT", "3 stages"), ("T5", "2 pipelines of 2"), ("SFTTrainer, packing", "2 pipelines of 2")],
)
def test_a_row_of_the_matrix_is_within_its_target(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, layout: str
) -> None:
    """Two steps of benchmarks/studies/trainer_matrix.py that change the weights, over one of its layouts."""
    monkeypatch.setattr(matrix, "LAYOUTS", {layout: matrix.LAYOUTS[layout]})
    options = {} if "packing" in row else FEW
    (found,) = matrix.run(pool, tmp_path, row, torch.float64, steps=2, warmup_steps=0, **options).values()
    assert {"loss", "grad_norm", "eval_loss", "weights"} <= found.keys()
    assert not {name: value for name, value in found.items() if value > matrix.target(row, "float64")}
    assert matrix.summed_up({"eval_sum": 2.0, "epoch": 1.0, "weights": 3.0}) == {"figures": 2.0, "weights": 3.0}


def test_adapters_are_resumed(pool: Pool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lora": True, "steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_steps": 4}
    options |= {"settings": {"n_layer": 2}, **FEW}
    whole = pool.run(2, train, tmp_path / "whole", "GPT-2", 2, init=False, **options)[0]
    for stages, tolerance in ((2, 0.0), (1, TOLERANCE)):
        folder = tmp_path / str(stages)
        shutil.copytree(tmp_path / "whole/checkpoint-2", folder / "checkpoint-2")
        for run in pool.run(stages, train, folder, "GPT-2", stages, init=False, resume=True, **options):
            found = differences((run, folder), (whole, tmp_path / "whole"))
            assert not {name: value for name, value in found.items() if value > tolerance}, stages


def test_a_run_goes_on_as_one_pipeline_of_as_many_ranks_and_back(pool: Pool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_steps": 6} | FEW
    options |= {"settings": {"n_layer": 4}, "init": False, "timeout": 120}
    before, step = tmp_path / "whole", 2
    whole = pool.run(4, train, before, "GPT-2", 2, 2, **options)[0]
    for stages, pipelines in ((4, 1), (2, 2)):
        folder = tmp_path / f"{stages} stages"
        shutil.copytree(before / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        for run in pool.run(4, train, folder, "GPT-2", stages, pipelines, resume=True, **options):
            found = differences((run, folder), (whole, tmp_path / "whole"))
            assert not {name: value for name, value in found.items() if value > 1e-10}, stages
        before, step = folder, 4


def test_a_sharded_optimizer_gives_the_same_run_and_is_resumed(pool: Pool, tmp_path: Path) -> None:
    """From its checkpoint on the same pipelines to the last bit, and without them."""
    options: dict[str, Any] = {"steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_steps": 2} | FEW
    options["settings"] = {"n_layer": 2}
    plain = train(tmp_path / "plain", "GPT-2", pipelines=1, **options)
    split: dict[str, Any] = {"pipelines": 2, "parallelism": {"sharded_optimizer": True}, "init": False}
    whole = pool.run(2, train, tmp_path / "whole", "GPT-2", 1, **split, **options)[0]
    found = differences((whole, tmp_path / "whole"), (plain, tmp_path / "plain"))
    assert not {name: value for name, value in found.items() if value > TOLERANCE}
    for ranks, stages, how, tolerance in ((2, 1, split, 0.0), (2, 2, {"init": False}, TOLERANCE)):
        folder = tmp_path / f"{ranks} ranks, {stages} stages"
        shutil.copytree(tmp_path / "whole/checkpoint-2", folder / "checkpoint-2")
        for run in pool.run(ranks, train, folder, "GPT-2", stages, resume=True, **how, **options):
            found = differences((run, folder), (whole, tmp_path / "whole"))
            assert not {name: value for name, value in found.items() if value > tolerance}, stages


def train_in_bfloat16(folder: Path, stages: int, bf16: bool, num_microbatches: int | None) -> list[dict[str, float]]:
    """The first step has a learning rate of 0."""
    parallelism = {"num_microbatches": num_microbatches} if num_microbatches else {}
    return train(folder, "Llama", stages, steps=3, bf16=bf16, dtype=torch.float32, parallelism=parallelism)


@pytest.fixture(scope="module")
def plain_in_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, float]]]:
    """The plain Trainer's run, and the same in single precision."""
    return [train_in_bfloat16(tmp_path_factory.mktemp("plain"), 0, bf16, None) for bf16 in (True, False)]


@pytest.mark.parametrize("num_microbatches", [1, None])
def test_bfloat16_is_that_of_the_plain_trainer(
    pool: Pool, plain_in_bfloat16: list[list[dict[str, float]]], tmp_path: Path, num_microbatches: int | None
) -> None:
    """With one microbatch to the last digits until the weights change, with several the losses are; from then on, and
    between sums of gradients, half precision may round neighbours apart."""
    half, single = plain_in_bfloat16
    assert half[0]["loss"] != pytest.approx(single[0]["loss"], abs=5 * TOLERANCE), "bfloat16 changes the losses"
    given = tmp_path / "split", 2, True, num_microbatches
    for run in pool.run(2, train_in_bfloat16, *given, init=False, timeout=120):
        assert len(run) == len(half)
        for mine, theirs in zip(run, half, strict=True):
            same, exact = theirs["step"] <= 2 and "loss" in theirs, num_microbatches == 1
            losses, norms = (TOLERANCE if same else 1e-3), (TOLERANCE if same and exact else 1e-2)
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                assert mine[name] == pytest.approx(value, abs=norms if name == "grad_norm" else losses), (name, mine)


def evaluate_in_half(folder: Path, stages: int, half: str) -> tuple[dict[str, float], dict[str, float], str, float]:
    """Metrics of an evaluation and a prediction before any training, the model's type then, and its first loss."""
    data = samples("text", 8, 1), samples("text", NUM_EVALUATED, 2)
    trainer: Any = (PipelineTrainer if stages else Trainer)(
        FAMILIES["llama"].build(dtype=torch.float32),
        TrainingArguments(**{**defaults(folder, 1, 1), "eval_strategy": "no", **({half: True} if half else {})}),
        train_dataset=data[0],
        eval_dataset=data[1],
        compute_metrics=metrics,
        **over(stages),
    )
    evaluated, predicted = trainer.evaluate(), trainer.predict(data[1]).metrics
    kind = str(trainer.model.dtype)
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    chosen = ("loss", "sum", "labels")
    return {n: evaluated[f"eval_{n}"] for n in chosen}, {n: predicted[f"test_{n}"] for n in chosen}, kind, loss


@pytest.fixture(scope="module")
def evaluated_in_single(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return evaluate_in_half(tmp_path_factory.mktemp("single"), 0, "")


@pytest.mark.parametrize("half", ["bf16_full_eval", "fp16_full_eval"])
def test_evaluation_in_half_precision_is_that_of_the_plain_trainer(
    pool: Pool, evaluated_in_single: Any, tmp_path: Path, half: str
) -> None:
    expected, single = evaluate_in_half(tmp_path / "plain", 0, half), evaluated_in_single
    assert expected[0]["loss"] != pytest.approx(single[0]["loss"], abs=5 * TOLERANCE), "half precision changes the loss"
    for ranks, stages in ((2, 2), (2, 1)):
        for found in pool.run(ranks, evaluate_in_half, tmp_path / str(stages), stages, half, init=False, timeout=120):
            assert found[2] == expected[2] == f"torch.{'bfloat16' if half.startswith('b') else 'float16'}"
            for mine, theirs in zip(found[:2], expected[:2], strict=True):
                assert mine == pytest.approx(theirs, abs=TOLERANCE)
            if stages == 2:  # the other pipeline has samples of its own in a step
                assert found[3] == pytest.approx(expected[3], abs=1e-3)


SMALL: dict[str, Any] = {"eval_steps": 2, "settings": {"num_hidden_layers": 2}}
TENSOR_PARALLEL: dict[str, dict[str, Any]] = {
    "Trainer": {"name": "Llama", "save_strategy": "steps", "save_steps": 2, **FEW, **SMALL}
    | {"settings": {"num_hidden_layers": 2, "vocab_size": 98}},
    "SFTTrainer": {"packing": True, **SMALL},
}


def test_tensor_parallel_stages_give_the_plain_trainers_run(pool: Pool, tmp_path: Path) -> None:
    plain = train_all(tmp_path / "plain", 0, 1, 4, TENSOR_PARALLEL)
    cases = {name: {**case, "parallelism": {"tensor_parallel_size": 2}} for name, case in TENSOR_PARALLEL.items()}
    given: dict[str, Any] = {"init": False, "timeout": 240}
    whole = pool.run(4, train_all, tmp_path / "split", 2, 1, 4, cases, **given)
    for run in whole:
        for case in cases:
            found = differences((run[case], tmp_path / "split" / case), (plain[case], tmp_path / "plain" / case))
            assert {"loss", "grad_norm", "learning_rate", "eval_loss", "weights"} <= found.keys()
            assert not {name: value for name, value in found.items() if value > TOLERANCE}, case
    shutil.copytree(tmp_path / "split/Trainer/checkpoint-2", tmp_path / "again/checkpoint-2")
    resumed = {**cases["Trainer"], "steps": 4, "resume": True}
    for run in pool.run(4, train, tmp_path / "again", stages=2, **resumed, **given):
        found = differences((run, tmp_path / "again"), (whole[0]["Trainer"], tmp_path / "split/Trainer"))
        assert not any(found.values()), found


def train_in_float16(folder: Path, stages: int, scaled: bool) -> list[dict[str, float]]:
    """With one microbatch, so that products in half precision are the same. `scaled`: as accelerate has it on a GPU."""
    original = Accelerator.__init__

    def with_scaler(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if scaled:
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=3)

    with mock.patch.object(Accelerator, "__init__", with_scaler):
        return train(
            folder, "Llama", stages, steps=12, parallelism={"num_microbatches": 1}, dtype=torch.float32, fp16=True,
            optim="sgd", learning_rate=0.1,
        )  # fmt: skip


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "as on a CPU"])
def test_float16_is_that_of_the_plain_trainer(pool: Pool, tmp_path: Path, scaled: bool) -> None:
    """To the last digits until the weights change; from then on half precision may round neighbours apart."""
    expected = train_in_float16(tmp_path / "plain", 0, scaled)
    norms = [entry["grad_norm"] for entry in expected if "loss" in entry]
    assert (0 < sum(not math.isfinite(norm) for norm in norms) < len(norms)) == scaled, norms
    for run in pool.run(2, train_in_float16, tmp_path / "split", 2, scaled, init=False, timeout=120):
        assert len(run) == len(expected)
        for mine, theirs in zip(run, expected, strict=True):
            assert mine["step"] == theirs["step"] and mine.get("learning_rate") == theirs.get("learning_rate")
            tolerance = 1e-4 if scaled and theirs["step"] > 2 else TOLERANCE
            assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance, nan_ok=True)


def train_overflowing(folder: Path, steps: int) -> tuple[list[float], int]:
    """A run's learning rates and skipped steps; its first losses are scaled out of half precision's range."""
    model = FAMILIES["gpt2"].build(dtype=torch.float32)
    plugin = HeterogeneousParallelPlugin(microbatch_size=2, precision="fp16", initial_scale=2.0**21, hysteresis=1)
    plugin.set_pipelines([PipelineTemplate.balanced(model, 1)], [2])
    given = {**defaults(folder, steps, 2), "per_device_train_batch_size": 2, "eval_strategy": "no", "warmup_steps": 0}
    arguments = TrainingArguments(**{**given, "lr_scheduler_type": "linear"})
    trainer = PipelineTrainer(model, arguments, train_dataset=samples("text", 40, 1), parallelism=plugin)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    return rates, trainer.optimizer.num_skipped_steps


def test_a_step_that_is_skipped_with_a_plugin_leaves_the_learning_rate(pool: Pool, tmp_path: Path) -> None:
    steps = 8
    ((rates, skipped),) = pool.run(1, train_overflowing, tmp_path, steps, init=False)
    assert 0 < skipped < steps
    taken = [max(0, step - skipped) for step in range(steps)]  # it is the first ones that overflow
    assert rates == pytest.approx([1e-2 * (1 - number / steps) for number in taken])


# What the user of a peer's script changes: the import, and one argument.
CHANGES = {
    "    Trainer,\n": "",
    "from transformers.trainer_utils": "from penstock.trainer.pipeline_trainer import PipelineTrainer as Trainer\n"
    "from transformers.trainer_utils",
    "        model=model,\n": '        model=model,\n        parallelism={"pipeline_parallel_size": 2},\n',
}


def test_a_script_like_run_clm_needs_two_changes(tmp_path: Path) -> None:
    local_hub(tmp_path)
    config = GPT2Config.from_pretrained(tmp_path / "gpt2")
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0  # masks depend on the microbatches
    config.save_pretrained(tmp_path / "gpt2")
    script = (ROOT / "tests" / "support" / "clm_script.py").read_text()
    changed = script
    for line, other in CHANGES.items():
        assert changed.count(line) == 1
        changed = changed.replace(line, other)
    results = {}
    options = ["--model_name_or_path", "gpt2", "--train_file", "squad/train.jsonl", "--block_size", "16", "--max_steps"]
    options += ["4", "--use_cpu", "--report_to", "none", "--learning_rate", "1e-2", "--logging_steps", "1"]
    options += ["--cache_dir", str(tmp_path / "cache")]
    options += ["--adam_epsilon", "1e-4", "--per_device_train_batch_size", "8", "--save_steps", "2", "--output_dir"]
    for name, text in (("plain", script), ("pipelined", changed)):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        arguments = [str(path), *options, name]
        start = run_python if name == "plain" else partial(torchrun, 2)
        ran = start(*arguments, cwd=tmp_path, timeout=200)
        assert ran.returncode == 0, ran.stderr[:8000]
        assert ran.stdout.count("perplexity") == 1, "one rank prints"
        results[name] = {
            file: json.loads((tmp_path / name / f"{file}.json").read_text())
            for file in ("all_results", "trainer_state")
        }
    logs = [result["trainer_state"]["log_history"] for result in results.values()]
    steps = [[(e["step"], e["loss"], e["grad_norm"]) for e in log if "loss" in e] for log in logs]
    assert len(steps[0]) == 4
    for mine, theirs in zip(steps[1], steps[0], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)  # single precision
    for name in ("perplexity", "eval_accuracy", "train_loss", "train_samples"):
        assert results["pipelined"]["all_results"][name] == pytest.approx(
            results["plain"]["all_results"][name], rel=1e-5
        )
    assert (tmp_path / "pipelined/checkpoint-4/model.safetensors").exists()

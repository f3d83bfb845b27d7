"""What scripts for the Trainer do besides training, by public reports: over two stages it is what one process does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from penstock.trainer.pipeline_trainer import PipelineTrainer
from tests.support.families import VOCABULARY, gpt2
from tests.support.pool import Pool
from tests.support.trainer_runs import defaults
from tests.support.training import kept_in_double


def ragged(count: int, without_labels: range = range(0)) -> list[dict[str, torch.Tensor]]:
    """Rows of unlike lengths; some have no label that counts."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for number in range(count):
        length = int(torch.randint(4, 16, (1,), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        made.append({"input_ids": ids, "labels": torch.full_like(ids, -100) if number in without_labels else ids})
    return made


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    fills = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([one[name] for one in samples], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
    }
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


class EvaluatesBetween(TrainerCallback):
    """Evaluates between the batches of an accumulation."""

    trainer: Any

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.evaluate()


class Unfreezes(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("h.3." in name or state.global_step >= 2)


class Averages(TrainerCallback):
    """Keeps a moving average of the weights, and leaves it in the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._average = {name: value.detach().clone() for name, value in model.named_parameters()}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, value in model.named_parameters():
            self._average[name].lerp_(value.detach(), 0.5)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(self._average[name])


def resized() -> Any:
    """A tied vocabulary that grew, and is trained beside LoRA."""
    model = gpt2()
    torch.manual_seed(1)
    model.resize_token_embeddings(VOCABULARY + 4)
    options: Any = {"modules_to_save": ["wte"], "ensure_weight_tying": True, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", **options)).double()


def with_muon(model: Any) -> Any:
    """Muon for the blocks' matrices."""
    matrices = [value for name, value in model.named_parameters() if value.ndim == 2 and ".h." in name]
    return torch.optim.Muon(matrices, lr=1e-2), None


# Of each habit: the arguments of the training, and what the Trainer is given. What is called is called with the model.
BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
BEST |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
HABITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unlike lengths in an accumulation": ({"gradient_accumulation_steps": 3}, {}),
    "evaluation between its batches": ({}, {"callbacks": lambda _: [EvaluatesBetween()]}),
    "a microbatch without labels": (
        {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 8},
        {"train_dataset": lambda _: ragged(32, range(6))},
    ),
    "layers unfrozen later": ({}, {"callbacks": lambda _: [Unfreezes()]}),
    "a moving average": ({}, {"callbacks": lambda _: [Averages()]}),
    "early stopping, the best model": (BEST, {"callbacks": lambda _: [EarlyStoppingCallback(1, 0.5)]}),
    "a resized tied vocabulary": ({}, {"model": resized}),
    "activations kept of every second layer": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
        {},
    ),
    "Muon": ({}, {"optimizers": with_muon}),
}


def run(folder: Path, name: str, stages: int) -> list[float]:
    """Losses, norms and evaluations of a run, and the evaluation after it."""
    changes, given = HABITS[name]
    make: Callable[[], Any] = given.get("model", gpt2)
    options = {**defaults(folder, 4, 1), "eval_strategy": "no", **changes}
    with kept_in_double(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Nobody is told not to use what they have not used.
        warnings.filterwarnings("error", message="`gradient_checkpointing_enable` is deprecated")
        model = make()
        made = {key: value(model) for key, value in given.items() if key != "model"}
        data = {"train_dataset": ragged(32), "eval_dataset": ragged(8), "data_collator": padded}
        over = {"parallelism": {"pipeline_parallel_size": stages}} if stages else {}
        kind: Any = PipelineTrainer if stages else Trainer
        trainer = kind(model, TrainingArguments(**options), **{**data, **made}, **over)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, EvaluatesBetween):
                callback.trainer = trainer
        trainer.train()
        logged = [
            one[key] for one in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in one
        ]
        return [*logged, float(trainer.state.global_step), trainer.evaluate()["eval_loss"]]


def run_all(folder: Path, stages: int = 0) -> dict[str, list[float]]:
    return {name: run(folder / str(number), name, stages) for number, name in enumerate(HABITS)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return run_all(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def split(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    return pool.run(2, run_all, tmp_path_factory.mktemp("split"), 2, init=False, timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_gives_the_same_run(plain: Any, split: Any, name: str) -> None:
    assert len(plain[name]) >= 4
    for found in split:
        assert found[name] == pytest.approx(plain[name], abs=1e-6, rel=1e-6)

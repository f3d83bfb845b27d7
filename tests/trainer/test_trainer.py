"""transformers' Trainer with and without pipelines: the same script must give the same run."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np
import peft
import pytest
import torch
import trl
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.nn import functional
from torch.utils.data import IterableDataset
from transformers import Adafactor, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput
from transformers.optimization import AdafactorSchedule
from trl.experimental.online_dpo import OnlineDPOTrainer

import penstock
from penstock.trainer.pipeline_trainer import PipelineTrainer, PipelineTrainerMixin
from penstock.trainer.plugin_pipelines import NOT_CALLED
from tests.support.families import FAMILIES
from tests.support.launch import run_python
from tests.support.own_models import MappedRegression
from tests.support.pool import Pool
from tests.support.trainer_runs import BATCH, defaults, samples

TOLERANCE = 1e-6


def gpt2(dropout: float = 0.0) -> Any:
    return FAMILIES["gpt2"].build(dropout, torch.float32, n_layer=3)


def texts(count: int) -> list[dict[str, Any]]:
    return samples("text", count, 1)


def bert() -> Any:
    return FAMILIES["bert_classification"].build(dtype=torch.float32, num_hidden_layers=2)


def sentences(count: int) -> list[dict[str, Any]]:
    return samples("classes", count, 2)


def accuracy(predicted: Any) -> dict[str, float]:
    return {
        "accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean()),
        "samples": float(len(predicted.label_ids)),
        "mean_logit": float(np.mean(predicted.predictions)),
    }


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Of 8 steps, of which the learning rate rises in 2."""
    return TrainingArguments(**{**defaults(folder, 8, 1), "eval_strategy": "no", "warmup_steps": 2, **changes})


def kind_of(stages: int) -> tuple[Any, dict[str, Any]]:
    """The class, and the one argument that differs."""
    return (PipelineTrainer, {"parallelism": {"pipeline_parallel_size": stages}}) if stages else (Trainer, {})


def causal(
    folder: Path, stages: int = 0, dropout: float = 0.0, resume: bool = False, loss: Any = None, **changes: Any
) -> dict[str, Any]:
    """The script: with `stages`, only the class and one argument change."""
    kind, parallelism = kind_of(stages)
    options = arguments(folder, **changes)
    data = {"train_dataset": texts(40), "eval_dataset": texts(10)}
    trainer = kind(gpt2(dropout), options, compute_loss_func=loss, **data, **parallelism)
    result = trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()
    trainer.save_model(str(folder / "final"))
    return {
        "log": trainer.state.log_history,
        "train_loss": result.training_loss,
        "flos": trainer.state.total_flos,
        "trainable": trainer.get_num_trainable_parameters(),
        "eval_loss": evaluated["eval_loss"],
    }


def assert_same_log(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    steps = [entry for entry in expected if "loss" in entry]
    assert len(steps) == 8 and [entry["step"] for entry in got if "loss" in entry] == list(range(1, 9))
    for mine, theirs in zip((entry for entry in got if "loss" in entry), steps, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "epoch"):
            assert mine[name] == pytest.approx(theirs[name], abs=TOLERANCE, rel=TOLERANCE), (mine, theirs, name)


def assert_same_weights(one: Path, other: Path, tolerance: float = TOLERANCE) -> None:
    mine, theirs = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (one, other))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], atol=tolerance, rtol=0)


def focal(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """A loss made by hand, of none of torch's loss functions."""
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    log_probabilities = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    losses = -((1 - log_probabilities.exp()) ** 2) * log_probabilities
    return (losses * (targets != -100)).sum() / num_items_in_batch


def mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """What many write: the Trainer then adds up the means of an accumulation's batches."""
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Of the plain Trainer."""
    folder = tmp_path_factory.mktemp("plain")
    return causal(folder), folder


@pytest.mark.parametrize("changes", [{}, {"loss": focal}, {"loss": mean}], ids=["plain", "compute_loss_func", "a mean"])
def test_the_same_run_with_and_without_pipelines(
    pool: Pool, plain_run: tuple[dict[str, Any], Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    expected, folder = (causal(tmp_path / "plain", **changes), tmp_path / "plain") if changes else plain_run
    runs = pool.run(2, causal, tmp_path / "split", 2, init=False, **changes)
    for run in runs:
        assert_same_log(run["log"], expected["log"])
        for name in ("train_loss", "eval_loss", "flos", "trainable"):
            assert run[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=TOLERANCE)
    assert_same_weights(folder / "final", tmp_path / "split/final")


def shifted(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def masked_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    logits, targets = shifted(outputs, labels)
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return losses.sum() / (targets != -100).sum()


def focal_of_the_model(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    number = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return focal(CausalLMOutput(logits=logits), labels, number)


# What `compute_loss_func` may return; None: the model's own loss, which is the user's.
OWN_LOSSES: dict[str, Any] = {
    "weights": lambda outputs, labels, num_items_in_batch: functional.cross_entropy(
        *shifted(outputs, labels), weight=torch.linspace(0.1, 3, outputs.logits.shape[-1])
    ),
    "scaled": lambda outputs, labels, num_items_in_batch: 0.5 * mean(outputs, labels, num_items_in_batch),
    "two terms": lambda outputs, labels, num_items_in_batch: (
        mean(outputs, labels, num_items_in_batch) + 0.01 * outputs.logits.logsumexp(-1).pow(2).mean()
    ),
    "a sum and a mean": lambda outputs, labels, num_items_in_batch: (
        functional.cross_entropy(*shifted(outputs, labels), reduction="sum") / num_items_in_batch
        + 0.01 * outputs.logits.logsumexp(-1).pow(2).mean()
    ),
    "poisson": lambda outputs, labels, num_items_in_batch: functional.poisson_nll_loss(
        outputs.logits[..., 0], labels.clamp(min=0).to(outputs.logits)
    ),
    "by the model": None,
    "a masked mean": masked_mean,
}


def own_losses(folder: Path, stages: int = 0) -> dict[str, tuple[list[tuple[float, float]], bool]]:
    """Losses and norms of two steps with each, and whether it was said that a loss is no mean."""
    kind, parallelism = kind_of(stages)
    found = {}
    for name, loss in OWN_LOSSES.items():
        model = gpt2(0.0)
        if loss is None:
            model.loss_function = focal_of_the_model
        options = arguments(folder, max_steps=2)
        trainer = kind(model, options, compute_loss_func=loss, train_dataset=texts(40), **parallelism)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        log = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        found[name] = log, any("no mean" in str(warning.message) for warning in caught)
    return found


def test_any_loss_by_compute_loss_func_is_that_of_one_process_or_warned_of(pool: Pool, tmp_path: Path) -> None:
    expected = own_losses(tmp_path / "plain")
    for rank, run in enumerate(pool.run(2, own_losses, tmp_path / "split", 2, init=False)):
        assert {name for name, (_, warned) in run.items() if warned} == ({"a masked mean"} if rank else set())
        for name, (log, _) in run.items():
            # As averaged over microbatches of other numbers of labels, nearly the same.
            tolerance = 0.1 if name == "a masked mean" else TOLERANCE
            assert len(log) == 2 and log == [pytest.approx(step, rel=tolerance) for step in expected[name][0]], name


def adapt(folder: Path, stages: int = 0) -> tuple[list[dict[str, float]], float]:
    """Adafactor with rates of its own, which a scheduler only shows."""
    kind, parallelism = kind_of(stages)
    options = arguments(folder)
    model = bert()
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    both = optimizer, AdafactorSchedule(optimizer)
    trainer = kind(model, options, train_dataset=sentences(40), optimizers=both, **parallelism)
    trainer.train()
    return trainer.state.log_history, trainer.optimizer.state_dict()["param_groups"][0]["lr"]


def test_adafactors_own_rates_are_shown_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    """Those of a rank's first parameter; on the first rank that is the model's."""
    expected, rate = adapt(tmp_path / "plain")
    (log, first), (_, other) = pool.run(2, adapt, tmp_path / "split", 2, init=False)
    assert_same_log(log, expected)
    assert float(first) == pytest.approx(float(rate), rel=1e-5) and other > 0


def test_resuming_continues_bit_for_bit_from_the_newest_whole_checkpoint(pool: Pool, tmp_path: Path) -> None:
    options = {"dropout": 0.1, "save_strategy": "steps", "save_steps": 3}
    whole = pool.run(2, causal, tmp_path, 2, init=False, **options)[0]
    (tmp_path / "final").rename(tmp_path / "whole")
    # Back to the third step, in the middle of an epoch: the sixth's save did not come to its end.
    (tmp_path / "checkpoint-8").rename(tmp_path / "later-8")
    (tmp_path / "checkpoint-6/trainer_state.json").unlink()
    resumed = pool.run(2, causal, tmp_path, 2, init=False, resume=True, **options)[0]
    losses = [[(e["step"], e["loss"], e["grad_norm"]) for e in run["log"] if "loss" in e] for run in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert_same_weights(tmp_path / "whole", tmp_path / "final", tolerance=0)


def classify(folder: Path, stages: int = 0) -> dict[str, Any]:
    kind, parallelism = kind_of(stages)
    options = arguments(
        folder, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    )  # fmt: skip
    data = {"train_dataset": sentences(40), "eval_dataset": sentences(11)}
    trainer = kind(bert(), options, compute_metrics=accuracy, **data, **parallelism)
    trainer.train()
    predicted = trainer.predict(sentences(7))
    return {
        "log": trainer.state.log_history,
        "best": trainer.state.best_global_step,
        "predictions": predicted.predictions,
        "metrics": predicted.metrics,
    }


def test_classification_with_metrics_and_the_best_model(pool: Pool, tmp_path: Path) -> None:
    expected = classify(tmp_path / "plain")
    for run in pool.run(2, classify, tmp_path / "split", 2, init=False):
        assert_same_log(run["log"], expected["log"])
        assert run["best"] == expected["best"] and run["predictions"].shape == (7, 2)
        np.testing.assert_allclose(run["predictions"], expected["predictions"], atol=1e-5)
        evaluations = [[entry for entry in one["log"] if "eval_loss" in entry] for one in (run, expected)]
        assert len(evaluations[1]) == 4
        for mine, theirs in zip(*evaluations, strict=True):
            assert theirs["eval_samples"] == 11
            for name in ("eval_loss", "eval_accuracy", "eval_samples", "eval_mean_logit"):
                assert mine[name] == pytest.approx(theirs[name], abs=1e-5), name


class Stream(IterableDataset[dict[str, Any]]):
    """Without a length."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(sentences(self._count))


def classify_streams(folder: Path, stages: int = 0) -> list[Any]:
    """Losses of a run on a stream of 13 and of a resumed one; predictions and losses for 10 and for 13 samples."""
    kind, parallelism = kind_of(stages)
    options = arguments(folder, gradient_accumulation_steps=1, save_strategy="steps", save_steps=3)
    losses = []
    for resume in (False, True):
        trainer = kind(bert(), options, train_dataset=Stream(13), **parallelism)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
        losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.args.average_tokens_across_devices = False  # with it the plain one doubles the loss over two processes
    found = [trainer.predict(Stream(count)) for count in (10, 13)]
    return [losses, [one.metrics["test_loss"] for one in found], *(one.predictions for one in found)]


@pytest.mark.parametrize(("stages", "processes"), [(2, 1), (1, 2)], ids=["one pipeline", "two"])
def test_iterable_data_are_shared_out_and_weighed_as_in_the_plain_trainer(
    pool: Pool, tmp_path: Path, stages: int, processes: int
) -> None:
    """Two pipelines are held to two processes."""
    expected = pool.run(processes, classify_streams, tmp_path / "plain", init=False)[0]
    assert [len(part) for part in expected] == [16, 2, 10, 13]
    for run in pool.run(2, classify_streams, tmp_path / "split", stages, init=False):
        for mine, theirs in zip(run, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


class OwnLoss(PipelineTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"optim": "lomo"}, "optim='lomo'"),
        ({"debug": "underflow_overflow"}, "debug"),
    ],
)
def test_arguments_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"{named}.* does not work over pipelines"):
        PipelineTrainer(gpt2(), arguments(tmp_path, **changes), parallelism={"pipeline_parallel_size": 2})


@pytest.mark.parametrize("name", ["RLOOTrainer", "DistillationTrainer"])
def test_trainers_without_an_adapter_are_refused_with_what_to_do(name: str) -> None:
    kind = type("Own", (PipelineTrainerMixin, getattr(trl, name)), {})
    with pytest.raises(ValueError, match=rf"{name}\.compute_loss .*loop of your own.*docs/your_own_loss\.md"):
        kind(model=gpt2(), parallelism={"pipeline_parallel_size": 2})


def test_a_trainer_of_trl_that_makes_the_whole_step_itself_is_refused() -> None:
    kind: Any = type("Own", (PipelineTrainerMixin, OnlineDPOTrainer), {})
    with pytest.raises(ValueError, match=r"OnlineDPOTrainer\.training_step does not .* Penstock has no adapter"):
        kind(model=gpt2(), parallelism={"pipeline_parallel_size": 2})


@pytest.mark.parametrize("base", [trl.DPOTrainer, trl.GRPOTrainer, trl.SFTTrainer], ids=lambda base: base.__name__)
@pytest.mark.parametrize("method", ["compute_loss", "_compute_loss", "get_batch_loss_metrics"])
def test_another_loss_in_a_class_derived_from_trls_is_refused_by_name(base: Any, method: str) -> None:
    """The adapter names the means that TRL's loss is the sum of: another loss, as GMPO's, would be scaled wrongly."""
    changed = type("Changed", (base,), {method: lambda *_: None})
    kind: Any = type("Own", (PipelineTrainerMixin, changed), {})
    with pytest.raises(
        ValueError, match=rf"Changed\.{method} does not .* not the loss of {base.__name__}\. Write a loop"
    ):
        kind(model=gpt2(), parallelism={"pipeline_parallel_size": 2})


def test_a_class_with_the_name_of_one_of_trls_is_not_taken_for_it() -> None:
    other = type("DPOTrainer", (Trainer,), {"compute_loss": lambda *_: None, "__module__": "trl.experimental.other"})
    kind: Any = type("Own", (PipelineTrainerMixin, other), {})
    with pytest.raises(
        ValueError, match=r"DPOTrainer\.compute_loss does not work over pipelines: Penstock has no adapter"
    ):
        kind(model=gpt2(), parallelism={"pipeline_parallel_size": 2})


def test_losses_that_training_would_not_call_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"OwnLoss\.compute_loss does not work .*put PipelineTrainerMixin before"):
        OwnLoss(gpt2(), arguments(tmp_path), parallelism={"pipeline_parallel_size": 2})
    with pytest.raises(ValueError, match="model_init does not work"):
        PipelineTrainer(args=arguments(tmp_path), model_init=gpt2)
    with pytest.raises(ValueError, match="needs parallelism="):
        PipelineTrainer(gpt2(), arguments(tmp_path))
    with pytest.raises(ValueError, match=r"unknown key 'pipeline_size'"):
        PipelineTrainer(gpt2(), arguments(tmp_path), parallelism={"pipeline_size": 2})


# An event of a callback, and what is asked for there: on rank 0 alone, once two steps were made.
ASKED = [
    ("on_step_end", "should_training_stop"),
    ("on_step_end", "should_save"),
    ("on_step_end", "should_evaluate"),
    ("on_substep_end", "should_epoch_stop"),
    ("on_log", "should_evaluate"),
    ("on_log", "should_training_stop"),
    ("on_evaluate", "should_save"),
    ("on_save", "should_training_stop"),
]


class Asking(TrainerCallback):
    def __init__(self, event: str, flag: str, rank: int = 0):
        setattr(self, event, self._ask)
        self._flag, self._rank = flag, rank

    def _ask(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == self._rank and state.global_step == 2:
            setattr(control, self._flag, True)


def asked(folder: Path, stages: int = 0, rank: int = 0) -> list[tuple[Any, ...]]:
    """What each run logged, and which checkpoints it saved."""
    kind, parallelism = kind_of(stages)
    found = []
    for number, (event, flag) in enumerate(ASKED[: len(ASKED) if rank == 0 else 1]):
        saves = "steps" if event == "on_save" else "no"
        evaluates = "steps" if event == "on_evaluate" else "no"
        into = folder / str(number)
        options = arguments(
            into, max_steps=4, save_strategy=saves, save_steps=2, eval_strategy=evaluates, eval_steps=2,
            save_only_model=True,
        )  # fmt: skip
        data = {"train_dataset": texts(16), "eval_dataset": texts(4)}
        trainer = kind(gpt2(), options, callbacks=[Asking(event, flag, rank)], **data, **parallelism)
        trainer.train()
        logs = [(one["step"], one.get("loss"), one.get("eval_loss")) for one in trainer.state.log_history[:-1]]
        saved = sorted(path.name for path in into.glob("checkpoint-*"))
        found.append((trainer.state.global_step, logs, saved))
    return found


@pytest.mark.slow
def test_what_callbacks_ask_for_on_rank_0_alone_is_done_on_all(pool: Pool, tmp_path: Path) -> None:
    expected = asked(tmp_path / "plain")
    assert len({(steps, len(logs), *saved) for steps, logs, saved in expected}) >= 5
    for found in pool.run(2, asked, tmp_path / "split", 2, init=False):
        for case, mine, theirs in zip(ASKED, found, expected, strict=True):
            assert mine[0] == theirs[0] and mine[2] == theirs[2], case
            assert mine[1] == [tuple(pytest.approx(one, abs=TOLERANCE) for one in entry) for entry in theirs[1]], case


def ask_on_rank_1(folder: Path) -> tuple[int, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ((steps, *_),) = asked(folder, 2, rank=1)
    return steps, [str(one.message) for one in caught if "rank 0 did not" in str(one.message)]


def test_what_callbacks_ask_for_on_another_rank_is_warned_of(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, ask_on_rank_1, tmp_path, init=False)
    assert first[0] == second[0] == 4
    assert any("rank 1 asked for should_training_stop, but rank 0 did not" in one for one in first[1])


def differing_metrics(folder: Path) -> tuple[int | None, list[str]]:
    """Rank 0 finds the first step the best, the others each later one better."""
    rank = int(os.environ["RANK"])
    measured = iter(range(8))
    trainer = PipelineTrainer(
        gpt2(),
        arguments(
            folder, max_steps=4, save_strategy="best", save_only_model=True, eval_strategy="steps", eval_steps=2,
            metric_for_best_model="found", greater_is_better=True,
        ),
        train_dataset=texts(16),
        eval_dataset=texts(4),
        compute_metrics=lambda _: {"found": next(measured) * (1 if rank else -1)},
        parallelism={"pipeline_parallel_size": 2},
    )  # fmt: skip
    trainer.train()
    return trainer.state.best_global_step, sorted(path.name for path in folder.glob("checkpoint-*"))


def test_the_best_step_is_rank_0s_if_metrics_differ(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, differing_metrics, tmp_path, init=False) == [(2, ["checkpoint-2"])] * 2


def noting_every_method(called: set[str], leaving_out: Collection[str] = ()) -> type[Trainer]:
    """A class derived from `Trainer` that defines each of its methods, notes that it is called, and calls `super()`."""

    def noting(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(super(kind, self), name)(*args, **kwargs)

        return method

    # A `compute_loss` of one's own is refused.
    names = {name for name, value in vars(Trainer).items() if isinstance(value, FunctionType) and name[:2] != "__"}
    kind: Any = type("Own", (Trainer,), {one: noting(one) for one in names - {"compute_loss", *leaving_out}})
    return kind


def methods_called(folder: Path, stages: int = 0, plugin: bool = False) -> set[str]:
    """Those of a class of one's own, in two runs, of which the second goes on from the first's checkpoint."""
    called: set[str] = set()
    own = noting_every_method(called, NOT_CALLED if plugin else ())
    kind: Any = type("Split", (PipelineTrainerMixin, own), {}) if stages else own
    options = arguments(
        folder, max_steps=2, save_steps=1, save_strategy="steps", eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, gradient_accumulation_steps=1,
    )  # fmt: skip
    for checkpoint in (None, str(folder / "checkpoint-1")):
        model, parallelism = gpt2(), kind_of(stages)[1]
        if plugin:
            parallelism = {"parallelism": penstock.HeterogeneousParallelPlugin(microbatch_size=BATCH)}
            parallelism["parallelism"].set_pipelines([penstock.PipelineTemplate.balanced(model, stages)], [1])
        trainer = kind(model, options, train_dataset=texts(16), eval_dataset=texts(4), **parallelism)
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.predict(texts(4))
    return called


# What only the plain Trainer's own loading and its parallelism over sequences ask for.
OF_THE_PLAIN_TRAINER = {"_issue_warnings_after_load", "_prepare_context_parallel_inputs"}


def test_every_method_that_the_trainer_calls_is_called_over_pipelines(pool: Pool, tmp_path: Path) -> None:
    """A class between the mixin and the Trainer may define any, in its own way."""
    expected = methods_called(tmp_path / "plain") - OF_THE_PLAIN_TRAINER
    assert {"training_step", "_save", "_load_from_checkpoint", "compute_loss_context_manager"} <= expected
    for called in pool.run(2, methods_called, tmp_path / "split", 2, init=False):
        assert expected <= called, expected - called
    for called in pool.run(2, methods_called, tmp_path / "plugin", 2, True, init=False):
        assert expected - {*NOT_CALLED} <= called, expected - called


def test_methods_that_a_plugin_would_not_call_are_refused(tmp_path: Path) -> None:
    kind = type("Split", (PipelineTrainerMixin, noting_every_method(set())), {})
    options = arguments(tmp_path, gradient_accumulation_steps=1)
    with pytest.raises(ValueError, match=r"Own\.\w+ does not work with a plugin: it would not be called"):
        kind(gpt2(), options, parallelism=penstock.HeterogeneousParallelPlugin(microbatch_size=BATCH))


class HalfGradients(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        Path(str(output_dir), "note.txt").touch()


def train_with_half_gradients(folder: Path, stages: int = 0) -> list[dict[str, float]]:
    bases = (PipelineTrainerMixin, HalfGradients) if stages else (HalfGradients,)
    parallelism = kind_of(stages)[1]
    # SGD, as an Adam's step does not depend on the gradients' size.
    options = arguments(folder, gradient_accumulation_steps=1, max_grad_norm=0, optim="sgd", learning_rate=0.5)
    trainer = type("Own", bases, {})(gpt2(), options, train_dataset=texts(40), **parallelism)
    trainer.train()
    trainer.save_model(str(folder / "final"))
    return trainer.state.log_history


def test_a_training_step_and_a_save_of_ones_own_are_called(pool: Pool, tmp_path: Path) -> None:
    plain, split = tmp_path / "plain", tmp_path / "split"
    expected = train_with_half_gradients(plain)
    for log in pool.run(2, train_with_half_gradients, split, 2, init=False):
        assert_same_log(log, expected)
    assert_same_weights(split / "final", plain / "final")
    assert (split / "final" / "note.txt").exists()


def train_a_module_of_ones_own(folder: Path, stages: int = 0, resume: bool = False) -> list[float]:
    """A module that is no model of transformers, and has no configuration. Its first step is declared its best."""
    torch.manual_seed(0)
    model: Any = MappedRegression()
    model.dummy_inputs = {"x": torch.zeros(2, 6), "y": torch.zeros(2, 6)}
    rows = torch.randn(12, 2, 6, generator=torch.Generator().manual_seed(1))
    data = [{"x": x, "y": y} for x, y in rows]
    options = arguments(
        folder, max_steps=3, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        label_names=["y"], load_best_model_at_end=True, greater_is_better=True, learning_rate=0.05,
    )  # fmt: skip
    kind, parallelism = kind_of(stages)
    trainer = kind(model, options, train_dataset=data, eval_dataset=data[:6], **parallelism)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    assert trainer.state.best_global_step == 1
    return [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]]


def test_a_module_of_ones_own_is_saved_whole_and_loaded_again(pool: Pool, tmp_path: Path) -> None:
    plain, split = tmp_path / "plain", tmp_path / "split"
    expected = train_a_module_of_ones_own(plain)
    assert len(set(expected)) == 6 and expected[1] > expected[3] > expected[5]
    for again in (False, True):
        for losses in pool.run(2, train_a_module_of_ones_own, split, 2, again, init=False):
            assert losses == pytest.approx(expected, rel=1e-5)
        for name in ("final", "checkpoint-1", "checkpoint-3"):
            theirs, found = (load_file(folder / name / "model.safetensors") for folder in (plain, split))
            assert found.keys() == theirs.keys() and len(found) == 8
            for key, value in theirs.items():
                torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
        (split / "checkpoint-3").rename(split / f"checkpoint of {again}")


def with_replicas(folder: Path) -> tuple[list[dict[str, float]], dict[str, float], str]:
    """What is logged of the run and evaluated after it, and what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        trainer = PipelineTrainer(
            gpt2(),
            arguments(folder, gradient_accumulation_steps=1, per_device_eval_batch_size=2, disable_tqdm=False),
            train_dataset=texts(40),
            eval_dataset=texts(11),
            compute_metrics=lambda predicted: {"samples": len(predicted.predictions), "sum": predicted.label_ids.sum()},
            parallelism={"pipeline_parallel_size": 1},
        )
        trainer.train()
        with pytest.raises(NotImplementedError, match=r"trainer\.save_model.*upload_folder"):
            trainer.push_to_hub()
        return trainer.state.log_history, trainer.evaluate(), printed.getvalue()


def test_several_pipelines_share_out_the_data_and_one_rank_talks(
    pool: Pool, plain_run: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    expected, _ = plain_run
    labels = sum(sum(sample["labels"]) for sample in texts(11))
    runs = pool.run(2, with_replicas, tmp_path / "replicas", init=False)
    for log, evaluated, _ in runs:
        assert_same_log(log, expected["log"])
        assert evaluated["eval_samples"] == 11 and evaluated["eval_sum"] == labels
    first, second = (printed for *_, printed in runs)
    assert "8/8" in first and "'grad_norm'" in first
    assert "8/8" not in second and "grad_norm" not in second


def train_the_head(folder: Path, stages: int = 0) -> tuple[list[dict[str, float]], list[str]]:
    """Only the last layer norm is trained, and losses are scaled, as with fp16 on a GPU."""
    original = Accelerator.__init__

    def with_scaler(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)

    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "ln_f" in name
    kind, parallelism = kind_of(stages)
    with mock.patch.object(Accelerator, "__init__", with_scaler):
        trainer = kind(model, arguments(folder), train_dataset=texts(40), **parallelism)
        trainer.train()
    names = [name for name, _ in trainer.model.named_parameters(remove_duplicate=bool(stages))]
    assert all(trainer.model.get_parameter(name).numel() for name in names)
    return trainer.state.log_history, names


def test_a_rank_with_nothing_to_train_names_no_parameter_that_the_model_does_not_have(
    pool: Pool, tmp_path: Path
) -> None:
    expected, names = train_the_head(tmp_path / "plain")
    runs = pool.run(2, train_the_head, tmp_path / "split", 2, init=False)
    for log, _ in runs:
        assert_same_log(log, expected)
    assert all(mine and set(mine) < set(names) for _, mine in runs)


def one_training_step(folder: Path, stages: int = 0) -> float:
    kind, parallelism = kind_of(stages)
    trainer = kind(gpt2(), arguments(folder), train_dataset=texts(8), **parallelism)
    batch = next(iter(trainer.get_train_dataloader()))
    return float(trainer.training_step(trainer.model, batch, (batch["labels"][:, 1:] != -100).sum()))


def test_a_training_step_can_be_made_outside_of_train(pool: Pool, tmp_path: Path) -> None:
    expected = one_training_step(tmp_path / "plain")
    assert pool.run(2, one_training_step, tmp_path, 2, init=False) == [pytest.approx(expected, abs=TOLERANCE)] * 2


def give_to_others(folder: Path) -> None:
    """A parallelised model, where DistributedDataParallel would be put around it."""
    model = penstock.initialize(gpt2(), {"model_parallelism": {"pipeline_parallel_size": 2}})
    instead = "Leave the model out of accelerator.prepare.*write PipelineTrainer.*class PipelineSFTTrainer"
    trainer = Trainer(model, arguments(folder), train_dataset=texts(8))
    with pytest.raises(TypeError, match=instead):
        trainer.train()
    with pytest.raises(TypeError, match=instead):
        Accelerator(cpu=True).prepare(model)

    class PipelineSFTTrainer(PipelineTrainerMixin, trl.SFTTrainer):
        pass

    with pytest.raises(ValueError, match=r"peft_config does not work.*Give the whole model"):
        PipelineSFTTrainer(model, train_dataset=texts(8), peft_config=peft.LoraConfig())


def test_accelerate_and_the_plain_trainer_refuse_a_parallelised_model(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, give_to_others, tmp_path)


def prepared_rates(stages: int = 0) -> list[list[float]]:
    """The rates of a scheduler that accelerate has prepared: of a pipelined model, if any, and of a plain module."""
    AcceleratorState._reset_state(True)
    accelerator, found = Accelerator(cpu=True), []
    models: list[Any] = [torch.nn.Linear(2, 2)]
    if stages:
        models.insert(0, penstock.initialize(gpt2(), {"model_parallelism": {"pipeline_parallel_size": stages}}))
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        optimizer, scheduler = accelerator.prepare(optimizer), accelerator.prepare(scheduler)
        rates = []
        for _ in range(3):
            optimizer.step()
            scheduler.step()
            rates += scheduler.get_last_lr()
        found.append(rates)
    return found


def test_a_prepared_scheduler_steps_once_for_each_pipeline(pool: Pool) -> None:
    """As accelerate steps once for each process, which takes a batch of its own."""
    (alone,) = prepared_rates()
    for of_one_pipeline, of_two_processes in pool.run(2, prepared_rates, 2):
        assert of_one_pipeline == alone != of_two_processes
    for of_two_pipelines, of_two_processes in pool.run(2, prepared_rates, 1):
        assert of_two_pipelines == of_two_processes


def test_without_accelerate_the_error_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys\nsys.modules['accelerate'] = None\nimport penstock.trainer.pipeline_trainer"
    ran = run_python("-c", script)
    assert ran.returncode == 1 and "ImportError: " in ran.stderr
    assert 'needs accelerate, as transformers\' Trainer does: pip install "penstock[trainer]"' in ran.stderr

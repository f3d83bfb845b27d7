"""Trainers with a `compute_loss` of their own, with and without pipelines."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from penstock import HeterogeneousParallelPlugin
from penstock.integrations.transformers import PipelineTrainerMixin
from tests.support.families import FAMILIES
from tests.support.pool import Pool
from tests.support.trainer_runs import defaults, differences, over, precisely, run, samples


class Shifted(Trainer):
    """A mean over the tokens that have a label; the model is given no labels, and its ids by position."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(inputs["input_ids"])
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


class Counted(Trainer):
    """A sum, divided by the number that the Trainer has counted for the accumulation."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        if num_items_in_batch is None:
            loss = functional.cross_entropy(logits, labels)
        else:
            loss = functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class Doubled(Trainer):
    """The model's own loss, and more."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class Twice(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**inputs).loss + model(**inputs).loss


class Noting(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        self.last = loss.detach()
        return loss


class Logging(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        self.log({"own": loss.item()})
        return loss


class NotingByName(Trainer):
    _metrics: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self._metrics["own"].append(0.0)
        return model(**inputs).loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._metrics = {"own": []}
        return super().training_step(*args, **kwargs)


class Modelless(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return inputs["labels"].float().mean()


class Changing(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(input_ids=inputs["input_ids"] + 0, labels=inputs["labels"]).loss


class Gathering(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        return self.accelerator.gather(loss).mean()


class Penalty(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**inputs).loss + self.model.get_input_embeddings().weight.pow(2).sum()


def train(folder: Path, own: type[Trainer], stages: int, pipelines: int, steps: int = 3) -> list[dict[str, float]]:
    kind: Any = type(f"Pipeline{own.__name__}", (PipelineTrainerMixin, own), {}) if stages else own
    data = [samples("causal", count, seed) for seed, count in enumerate((24, 8), start=1)]
    with precisely(torch.float64):
        trainer = kind(
            FAMILIES["llama"].build(dtype=torch.float64, num_hidden_layers=3),
            TrainingArguments(**defaults(folder, steps, pipelines)),
            train_dataset=data[0],
            eval_dataset=data[1],
            **over(stages),
        )
        return run(trainer, folder)


def train_each(folder: Path, stages: int, pipelines: int) -> list[list[dict[str, float]]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no mean.*")
        return [train(folder / own.__name__, own, stages, pipelines) for own in ACCEPTED]


ACCEPTED = (Shifted, Counted, Doubled)


@pytest.mark.parametrize(
    ("stages", "pipelines"),
    [(2, 1), pytest.param(3, 1, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_a_loss_of_outputs_and_inputs_gives_the_run_of_the_plain_trainer(
    pool: Pool, tmp_path: Path, stages: int, pipelines: int
) -> None:
    plain = pool.run(pipelines, train_each, tmp_path / "plain", 0, pipelines, init=False, timeout=180)[0]
    for runs in pool.run(stages * pipelines, train_each, tmp_path, stages, pipelines, init=False, timeout=240):
        for own, logs, expected in zip(ACCEPTED, runs, plain, strict=True):
            found = differences((logs, tmp_path / own.__name__), (expected, tmp_path / "plain" / own.__name__))
            assert {"loss", "eval_loss", "grad_norm"} < found.keys()
            assert found["weights"] < 1e-10, (own, found)
            assert not {name: value for name, value in found.items() if value > 1e-6}, own


REFUSED: list[tuple[type[Trainer], str]] = [
    (Twice, "it calls the model a second time"),
    (Noting, "it changes last"),
    (NotingByName, "it changes _metrics"),
    (Modelless, "it does not call the model"),
    (Changing, "it gives the model another input_ids. Change it in data_collator"),
    (Logging, "it calls log"),
    (Gathering, "it calls accelerator.gather"),
    (Penalty, "it needs more than"),
]


def refusals(folder: Path) -> list[str]:
    found = []
    for own, _ in REFUSED:
        with pytest.raises(ValueError, match=rf"{own.__name__}\.compute_loss does not work over pipelines") as refused:
            train(folder / own.__name__, own, 2, 1)
        found.append(str(refused.value))
    return found


def test_a_loss_that_needs_more_is_refused_by_name_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for texts in pool.run(2, refusals, tmp_path, init=False, timeout=180):
        for (own, reason), text in zip(REFUSED, texts, strict=True):
            assert reason in text, (own, text)


@pytest.mark.slow
def test_a_plugin_is_refused_by_name() -> None:
    kind: Any = type("Own", (PipelineTrainerMixin, Shifted), {})
    with pytest.raises(ValueError, match=r"HeterogeneousParallelPlugin with Shifted\.compute_loss does not work over"):
        kind(None, parallelism=HeterogeneousParallelPlugin(microbatch_size=2))

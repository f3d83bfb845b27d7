"""Dropout depends on the step, the microbatch and the unit, not on the layout: any layout trains the same run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.runtime.evaluation import evaluate
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import kept_in_double, parallelize, rows, run_step

STEPS, MICROBATCHES = 2, 4


def train_with_dropout(family: str, stages: int, seed: int, **options: Any) -> list[float]:
    """The global batch's loss at every step, with updates between."""
    torch.manual_seed(seed)
    with kept_in_double():
        model = FAMILIES[family].build(dropout=0.3)
        model = parallelize(model, stages, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for number in range(STEPS):
            optimizer.zero_grad()
            inputs = batch(FAMILIES[family].kind, MICROBATCHES, seed=number)
            run_step(model, rows(inputs, model.data_parallel_rank, model.data_parallel_size))
            losses.append(model.pipeline.last_step.global_loss)
            optimizer.step()
        return losses


def curve(pool: Pool, family: str, ranks: int, stages: int, seed: int = 1, **options: Any) -> list[float]:
    found = pool.run(ranks, train_with_dropout, family, stages, seed, **options)
    assert all(losses == found[0] for losses in found)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("gpt2", [(2, 2, "zb-v"), (3, 3, "1f1b"), (4, 2, "1f1b")]),
        ("bart", [(2, 2, "gpipe"), (3, 3, "1f1b")]),
    ],
)
def test_the_run_is_the_same_on_every_layout_and_schedule(
    pool: Pool, family: str, layouts: list[tuple[int, int, str]]
) -> None:
    whole = curve(pool, family, 1, 1, num_microbatches=MICROBATCHES)
    for ranks, stages, schedule in layouts:
        count = MICROBATCHES * stages // ranks
        split = curve(pool, family, ranks, stages, num_microbatches=count, schedule=schedule)
        assert split == pytest.approx(whole, rel=1e-10), (ranks, stages, schedule)


def test_the_seed_decides_the_run(pool: Pool) -> None:
    options = {"num_microbatches": MICROBATCHES}
    one, other = (curve(pool, "gpt2", 2, 2, seed, **options) for seed in (1, 2))
    assert one == curve(pool, "gpt2", 2, 2, 1, **options)
    assert one != pytest.approx(other, rel=1e-3)
    without = pool.run(1, train_without_dropout)[0]
    assert one != pytest.approx(without, rel=1e-3), "dropout dropped nothing"


def train_without_dropout() -> list[float]:
    with kept_in_double():
        model = FAMILIES["gpt2"].build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = model(**batch("causal", MICROBATCHES, seed=number)).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        return losses


def train_with_evaluations(evaluating: int | None) -> list[float]:
    """A pipeline that evaluates between its steps, and trains under gradients all the same afterwards."""
    torch.manual_seed(1)
    with kept_in_double():
        model = parallelize(FAMILIES["gpt2"].build(dropout=0.3), 2, num_microbatches=MICROBATCHES)
        losses = []
        for number in range(STEPS):
            inputs = rows(batch("causal", 2 * MICROBATCHES, seed=number), model.data_parallel_rank, 2)
            if model.data_parallel_rank == evaluating:
                model.eval()
                evaluate(model.pipeline, inputs)
                model.train()
            model.zero_grad()
            run_step(model, inputs)
            losses.append(model.pipeline.last_step.global_loss)
        for output in model(**inputs):  # all ranks leave at the same place
            output.loss.backward()
            break
        model.zero_grad()
        run_step(model, inputs)
        return [*losses, model.pipeline.last_step.global_loss]


def test_an_evaluation_changes_neither_the_dropout_nor_what_the_other_pipelines_expect(pool: Pool) -> None:
    without, with_one = (pool.run(4, train_with_evaluations, evaluating) for evaluating in (None, 1))
    assert all(losses == without[0] for losses in [*without, *with_one])

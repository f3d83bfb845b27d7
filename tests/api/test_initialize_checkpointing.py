"""Gradient checkpointing on every stage changes no result, of either kind, whatever a stage shares with itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import (
    Batch,
    Step,
    assert_steps_equal,
    gradients_of,
    kept_in_double,
    parallelize,
    rows,
    run_step,
    unsplit_step,
)


def build(family: str) -> Any:
    """A model; `"shared"` is a GPT-2 of which two layers share a weight."""
    model = FAMILIES[family if family != "shared" else "gpt2"].build()
    if family == "shared":
        model.transformer.h[2].mlp.c_fc.weight = model.transformer.h[1].mlp.c_fc.weight
    return model


def train(
    family: str, stages: int, reentrant: bool, batches: Sequence[Batch], only: int | None = None, **options: Any
) -> list[Step]:
    """Steps with checkpointing on all ranks, or on one of them only."""
    with kept_in_double():
        model = parallelize(build(family), stages, **options)
        if only in (None, torch.distributed.get_rank()):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        steps = []
        for inputs in batches:
            model.zero_grad()
            losses = run_step(model, rows(inputs, model.data_parallel_rank, model.data_parallel_size))
            steps.append(Step(losses, gradients_of(model)))
        return steps


def offloaded(schedule: str, checkpointed: bool, inputs: Batch) -> list[Step]:
    """Two steps with what autograd saves moved to the host, around the whole loop or each backward's recomputation."""
    with kept_in_double(), torch.autograd.graph.save_on_cpu():
        model = parallelize(build("gpt2"), 2, schedule=schedule, loss_chunk_tokens=5)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return [Step(run_step(model, inputs), gradients_of(model))]


def oracle(family: str, inputs: Batch) -> Step:
    """Checkpointing recomputes what it does not keep, so the model without it is the oracle."""
    return unsplit_step(build(family), (inputs, 1.0))


@pytest.mark.parametrize(
    ("family", "stages", "reentrant"),
    [("gpt2", 2, False), ("llama", 2, True), ("t5", 3, True), ("bart", 3, False)],
)
def test_checkpointing_changes_no_gradient(pool: Pool, family: str, stages: int, reentrant: bool) -> None:
    inputs = batch(FAMILIES[family].kind, 4)
    found = pool.run(stages, train, family, stages, reentrant, [inputs])
    assert_steps_equal([steps[0] for steps in found], oracle(family, inputs))


@pytest.mark.parametrize(("microbatches", "reentrant"), [(2, True), (1, True), (2, False)])
def test_checkpointed_weights_that_a_stage_uses_several_times_are_summed_once_complete(
    pool: Pool, reentrant: bool, microbatches: int
) -> None:
    """A reentrant checkpoint accumulates a shared weight's gradient piece by piece."""
    first, second = batch("causal", 4), batch("causal", 4, seed=1)
    found = pool.run(2, train, "shared", 1, reentrant, [first, second], num_microbatches=microbatches)
    for number, inputs in enumerate((first, second)):
        assert_steps_equal([steps[number] for steps in found], oracle("shared", inputs), replicas=2)


@pytest.mark.parametrize(("schedule", "reentrant"), [("zb-h1", True), ("zb-v", False)])
def test_checkpointing_goes_with_deferred_weight_gradients(pool: Pool, schedule: str, reentrant: bool) -> None:
    inputs = batch("causal", 4)
    found = pool.run(2, train, "gpt2", 2, reentrant, [inputs], schedule=schedule)
    assert_steps_equal([steps[0] for steps in found], oracle("gpt2", inputs))


@pytest.mark.parametrize(
    ("schedule", "only", "reentrant"), [("1f1b", 0, True), ("zb-h1", 1, False), ("zb-v", 0, False)]
)
def test_some_ranks_may_recompute_alone(pool: Pool, schedule: str, only: int, reentrant: bool) -> None:
    inputs = batch("causal", 4)
    found = pool.run(2, train, "gpt2", 2, reentrant, [inputs], only=only, schedule=schedule)
    assert_steps_equal([steps[0] for steps in found], oracle("gpt2", inputs))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_activations_may_be_kept_on_the_host(pool: Pool, schedule: str) -> None:
    """With and without checkpointing, beside deferred weight gradients and a loss over chunks."""
    inputs = batch("causal", 4)
    for checkpointed in (False, True):
        found = pool.run(2, offloaded, schedule, checkpointed, inputs)
        assert_steps_equal([steps[0] for steps in found], oracle("gpt2", inputs))

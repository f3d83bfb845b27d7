"""What hosts wait for: nothing in a training step, and one value for each token that is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.schedule import schedule_names
from tests.support.emulated_gpu.emulated_ranks import Case, sums_of_steps, waits_of_generation, waits_of_steps

pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]
# What the host may wait for in a step of shapes that were seen before, when the batch is on the CPU. Keep it empty.
ALLOWED: dict[str, int] = {}


@pytest.mark.parametrize("schedule", schedule_names())
def test_no_host_waits_in_a_step(gpus: Run, schedule: str) -> None:
    case = Case(2, options={"schedule": schedule, "num_microbatches": 4}, dtype=torch.float32)
    for steps in gpus(2, waits_of_steps, case):
        assert sum(steps[0].values()) > 0, "the first step plans, which asks for values"
        assert steps[-1] == ALLOWED


@pytest.mark.parametrize("family", ["llama", "gemma3", "t5", "bert_mlm", "opt"])
def test_no_host_waits_for_the_masks_of_other_families(gpus: Run, family: str) -> None:
    for steps in gpus(2, waits_of_steps, Case(2, family, options={"num_microbatches": 2}, dtype=torch.float32)):
        assert steps[-1] == ALLOWED


@pytest.mark.parametrize("stages", [1, 2])
def test_no_host_waits_to_see_that_no_sequences_are_packed(gpus: Run, stages: int) -> None:
    """transformers reads that of positions which it has counted itself, where there is no mask."""
    case = Case(stages, "llama", options={"num_microbatches": 2}, dtype=torch.float32)
    for steps in gpus(stages, waits_of_steps, case, without="attention_mask"):
        assert steps[-1] == ALLOWED


@pytest.mark.parametrize("stages", [2, (2, 1)])
def test_no_host_waits_where_pipelines_sum_their_losses(gpus: Run, stages: Any) -> None:
    options = {"num_microbatches": 2} if stages == 2 else {"microbatch_size": 1}
    for steps in gpus(4 if stages == 2 else 3, waits_of_steps, Case(stages, options=options, dtype=torch.float32)):
        assert steps[-1] == ALLOWED


def test_dropout_and_autocast_wait_for_nothing(gpus: Run) -> None:
    case = Case(2, dropout=0.1, autocast=torch.bfloat16, options={"num_microbatches": 4}, dtype=torch.float32)
    for steps in gpus(2, waits_of_steps, case):
        assert steps[-1] == ALLOWED


def test_a_batch_on_the_device_is_read_once(gpus: Run) -> None:
    case = Case(2, options={"num_microbatches": 4}, dtype=torch.float32)
    for steps in gpus(2, waits_of_steps, case, where="gpu"):
        assert sum(steps[-1].values()) == 1
        assert next(iter(steps[-1])).startswith("synchronize a stream < data/batch.py:place")


def test_a_wait_that_is_added_is_seen(gpus: Run) -> None:
    """A model whose block reads a value in its forward."""
    case = Case(2, options={"num_microbatches": 4}, dtype=torch.float32)
    for steps in gpus(2, waits_of_steps, case, item=True):
        assert {what.split(" < ")[0]: number for what, number in steps[-1].items()} == {"item()": 4}


def test_a_token_costs_one_wait(gpus: Run) -> None:
    """transformers' own, whether all sequences have ended."""
    for few, many in gpus(2, waits_of_generation, Case(2, dtype=torch.float32)):
        added = {what: many[what] - few.get(what, 0) for what in many if many[what] != few.get(what, 0)}
        assert sum(added.values()) == 10, f"10 tokens more cost {added}"


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_step_sums_nothing_for_overflows(gpus: Run, scale: float) -> None:
    """The sums are those of the tied weight and of the loss: a GradScaler shares overflows when it unscales."""
    case = Case(2, options={"num_microbatches": 4}, dtype=torch.float32)
    assert gpus(2, sums_of_steps, case, scale) == [[2, 2, 2, 2]] * 2

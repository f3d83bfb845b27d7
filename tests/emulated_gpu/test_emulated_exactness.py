"""On accelerators that share no memory with the host, everything equals the unsplit model on the CPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.schedule import schedule_names
from tests.support.emulated_gpu.emulated_ranks import (
    REAL,
    Case,
    evaluate_and_generate,
    refused_on_two_devices,
    save_and_load,
    told_of_unlike_copies,
    train,
    unsplit,
)
from tests.support.pool import Pool
from tests.support.training import EXACT, Step, assert_same_gradients, assert_steps_equal

pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]


def oracle(gpus: Run, case: Case) -> list[Step]:
    """Of the unsplit model on the CPU, or on the GPU if that is real: transformers turns positions in float32."""
    return gpus(1, unsplit, case)[0] if REAL in os.environ else unsplit(case)


def assert_exact(gpus: Run, world: int, case: Case, replicas: int = 1) -> None:
    ranks = gpus(world, train, case)
    for number, expected in enumerate(oracle(gpus, case)):
        assert_steps_equal([steps[number] for steps in ranks], expected, replicas=replicas)


@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule_is_exact_and_lets_the_loop_wait_for_the_device(gpus: Run, schedule: str) -> None:
    case = Case(3, options={"schedule": schedule, "num_microbatches": 4}, synchronize=True)
    assert_exact(gpus, 3, case)


def test_replicas_are_exact(gpus: Run) -> None:
    case = Case(2, options={"num_microbatches": 2})
    assert_exact(gpus, 4, case, replicas=2)


def test_unlike_pipelines_are_exact(gpus: Run) -> None:
    case = Case((2, 1), options={"microbatch_size": 1})
    ranks = gpus(3, train, case)
    for number, expected in enumerate(oracle(gpus, case)):
        assert abs(sum(ranks[0][number].losses) + sum(ranks[2][number].losses) - sum(expected.losses)) < EXACT * 10
        for steps in ranks:
            assert_same_gradients(steps[number].gradients, expected.gradients)


def test_tensor_parallel_stages_compute_what_they_compute_on_the_cpu(gpus: Run, pool: Pool) -> None:
    case = Case(2, "llama", settings={"vocab_size": 98}, options={"tensor_parallel_size": 2, "num_microbatches": 2})
    # Positions are turned in float32, whose rounding is not the same on a real GPU; see `oracle`.
    tolerance = 1e-8 if REAL in os.environ else EXACT
    for found, expected in zip(gpus(4, train, case), pool.run(4, train, case), strict=True):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.losses == pytest.approx(theirs.losses, rel=tolerance)
            assert_same_gradients(mine.gradients, theirs.gradients, tolerance)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_dropout_is_that_of_the_cpu(gpus: Run, pool: Pool, schedule: str) -> None:
    case = Case(2, dropout=0.2, options={"schedule": schedule, "num_microbatches": 4})
    plain = unsplit(dataclasses.replace(case, dropout=0.0))
    for found, expected in zip(gpus(2, train, case), pool.run(2, train, case), strict=True):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.losses == pytest.approx(theirs.losses, rel=EXACT)
            assert_same_gradients(mine.gradients, theirs.gradients)
        assert abs(sum(found[0].losses) - sum(plain[0].losses)) > 1e-3, "there is dropout"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_is_exact(gpus: Run, use_reentrant: bool) -> None:
    case = Case(2, checkpointing=use_reentrant, options={"num_microbatches": 4})
    assert_exact(gpus, 2, case)


@pytest.mark.parametrize("family", ["t5", "bert_mlm", "mixtral"])
def test_other_families_are_exact(gpus: Run, family: str) -> None:
    case = Case(2, family, options={"num_microbatches": 2})
    if family == "mixtral":  # its balance loss is no mean over tokens
        case = dataclasses.replace(case, settings={"output_router_logits": False})
    assert_exact(gpus, 2, case)


def test_autocast_computes_what_one_stage_computes(gpus: Run) -> None:
    case = Case(2, dtype=torch.float32, autocast=torch.bfloat16, options={"num_microbatches": 4})
    (whole,) = gpus(1, train, dataclasses.replace(case, stages=1))
    exact = oracle(gpus, case)
    for steps in gpus(2, train, case):
        for mine, theirs, plain in zip(steps, whole, exact, strict=True):
            assert mine.losses == theirs.losses
            assert_same_gradients(mine.gradients, theirs.gradients, tolerance=1e-6)
            assert sum(mine.losses) != pytest.approx(sum(plain.losses), rel=1e-6), "products were taken in bfloat16"


@pytest.mark.parametrize(("family", "stages"), [("gpt2", 3), ("llama", 2)])
def test_evaluation_and_generation_equal_the_unsplit_model(gpus: Run, family: str, stages: int) -> None:
    """Of 3 samples in one group, and of 7 in as many as stages."""
    case = Case(stages, family, settings={"num_hidden_layers": 3} if family == "llama" else {})
    loss, logits, generations = evaluate_and_generate(case)
    for its_loss, its_logits, its_generations in gpus(stages, evaluate_and_generate, case):
        assert its_loss == pytest.approx(loss, rel=EXACT)
        assert (its_logits - logits).abs().max() < EXACT
        for (groups, tokens, state), (_, expected, after) in zip(its_generations, generations, strict=True):
            assert torch.equal(tokens, expected)
            assert torch.equal(state, after)
            assert groups == (1 if len(tokens) < 7 else stages)


def test_unlike_copies_of_a_tied_weight_are_told_by_saves_and_evaluations(gpus: Run, tmp_path: Path) -> None:
    """Not by the training step between, for which the host would wait."""
    for both in gpus(2, told_of_unlike_copies, Case(2, dtype=torch.float32), str(tmp_path)):
        assert all("copies of the tied weight transformer.wte.weight" in words for words in both)


def test_a_saved_model_loads_on_gpus_and_in_one_piece(gpus: Run, tmp_path: Path) -> None:
    case = Case(2, dtype=torch.float32)
    whole = dict(case.build().named_parameters(remove_duplicate=False))
    for saved, loaded in gpus(2, save_and_load, case, str(tmp_path)):
        assert saved and saved.keys() == loaded.keys()
        for name, tensor in saved.items():
            assert torch.equal(tensor, loaded[name]) and torch.equal(tensor, whole[name] + 1.5)
    merged = type(case.build()).from_pretrained(tmp_path / "merged")
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, whole[name] + 1.5)


def test_a_model_on_several_devices_is_refused(gpus: Run) -> None:
    (refusal,) = gpus(1, refused_on_two_devices, Case())
    assert "has parameters on cpu and on" in refusal and "without device_map" in refusal

"""Mixed precision: autocast gives what the unsplit model gives under it, and all ranks share a GradScaler's verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.elastic.run import ElasticRun
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import Step, cut, gradients_of, parallelize, rows, run_step, weigh

SIZES = (2, 1, 1)


def build(family: str) -> Any:
    return FAMILIES[family].build(dtype=torch.float32)


def train_under_autocast(family: str, stages: int, around_loop: bool, **options: Any) -> Step:
    model = parallelize(build(family), stages, num_microbatches=len(SIZES), **options)
    inputs = batch(FAMILIES[family].kind, sum(SIZES), dtype=torch.float32)
    if around_loop:
        with torch.autocast("cpu", torch.bfloat16):
            losses = run_step(model, inputs)
    else:  # as torch advises: only the forward is under autocast
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(**inputs)
        losses = []
        for output in outputs:
            output.loss.backward()
            losses.append(output.loss.item())
    return Step(losses, gradients_of(model))


def unsplit_gradients(family: str, dtype: torch.dtype) -> Step:
    """The oracle: the unsplit model accumulating over the same microbatches, its products computed in `dtype`."""
    model = build(family)
    kind = FAMILIES[family].kind
    losses = []
    for piece, share in weigh(kind, cut(batch(kind, sum(SIZES), dtype=torch.float32), SIZES)):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(**piece).loss * share
        loss.backward()
        losses.append(loss.item())
    return Step(losses, gradients_of(model))


@pytest.mark.parametrize(
    ("family", "stages", "around_loop", "options"),
    [
        ("gpt2", 3, False, {}),
        ("llama", 2, False, {}),
        ("t5", 2, True, {}),
        ("gpt2", 2, True, {"schedule": "zb-h1"}),
    ],
)
def test_autocast_gives_the_unsplit_loss_and_gradients_under_autocast(
    pool: Pool, family: str, stages: int, around_loop: bool, options: dict[str, str]
) -> None:
    """Forwards are the same to the last bit; backwards may add bfloat16 gradients of several uses in another order."""
    half, single = unsplit_gradients(family, torch.bfloat16), unsplit_gradients(family, torch.float32)
    for step in pool.run(stages, train_under_autocast, family, stages, around_loop, **options):
        assert step.losses == pytest.approx(half.losses, rel=1e-6)
        for name, gradient in step.gradients.items():
            # Half of what autocast itself changes: a cast in the wrong place would show.
            rounding = float((half.gradients[name] - single.gradients[name]).norm())
            assert float((gradient - half.gradients[name]).norm()) <= 0.5 * rounding, name
    assert half.losses != pytest.approx(single.losses, rel=1e-6), "autocast changed nothing"


def train_with_autocast_around_next() -> list[Step]:
    """Two steps that are called without autocast; the first one's microbatches are taken under it."""
    model = parallelize(build("gpt2"), 2, num_microbatches=len(SIZES))
    steps = []
    for enabled in (True, False):
        outputs = model(**batch("causal", sum(SIZES), dtype=torch.float32))
        losses = []
        while True:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output = next(outputs, None)
            if output is None:
                break
            output.loss.backward()
            losses.append(output.loss.item())
        steps.append(Step(losses, gradients_of(model)))
        model.zero_grad()
    return steps


def test_autocast_that_the_call_did_not_have_changes_no_forward(pool: Pool) -> None:
    expected = unsplit_gradients("gpt2", torch.float32)
    for steps in pool.run(2, train_with_autocast_around_next):
        for step in steps:
            assert step.losses == pytest.approx(expected.losses, rel=1e-6)
            for name, gradient in step.gradients.items():
                torch.testing.assert_close(gradient, expected.gradients[name], atol=1e-6, rtol=1e-4)


def train_with_scaler(stages: int, overflowing_rank: int, steps: int, bad_step: int) -> list[dict[str, Any]]:
    """Steps under a GradScaler; at one of them a gradient of one rank overflows inside the backward."""
    model = parallelize(build("gpt2"), stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    rank = torch.distributed.get_rank()
    spoiled = next(p for name, p in model.named_parameters() if "ln_" in name)
    history = []
    for number in range(steps):
        optimizer.zero_grad()
        handle = None
        if number == bad_step and rank == overflowing_rank:
            handle = spoiled.register_hook(lambda gradient: gradient * torch.inf)
        inputs = batch("causal", 4, seed=number, dtype=torch.float32)
        for output in model(**rows(inputs, model.data_parallel_rank, model.data_parallel_size)):
            scaler.scale(output.loss).backward()
        if handle is not None:
            handle.remove()
        before = spoiled.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        history.append({"scale": scaler.get_scale(), "moved": not torch.equal(before, spoiled)})
    history.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return history


@pytest.mark.parametrize(("ranks", "stages", "overflowing"), [(3, 3, 1), (4, 2, 3)])
def test_an_overflow_on_one_rank_makes_all_ranks_skip_and_halve_the_scale(
    pool: Pool, ranks: int, stages: int, overflowing: int
) -> None:
    found = pool.run(ranks, train_with_scaler, stages, overflowing, steps=3, bad_step=1)
    for history in found:
        assert [entry["scale"] for entry in history[:3]] == [1024.0, 512.0, 512.0]
        assert [entry["moved"] for entry in history[:3]] == [True, False, True]
    # The oracle: the same steps on the unsplit model, without the one that was skipped. The scale is a power of two.
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in (0, 2):
        optimizer.zero_grad()
        model(**batch("causal", 4, seed=number, dtype=torch.float32)).loss.backward()
        optimizer.step()
    expected = dict(model.named_parameters(remove_duplicate=False))
    for history in found:
        for name, parameter in history[3].items():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6)


def overflow_at_scale_one() -> list[bool]:
    """A scaler that has backed off to 1 scales by nothing, but its verdict is still everyone's."""
    model = parallelize(build("gpt2"), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    spoiled = next(p for name, p in model.named_parameters() if "ln_" in name)
    moved = []
    for _ in range(3):
        optimizer.zero_grad()
        handle = spoiled.register_hook(lambda g: g * (torch.inf if torch.distributed.get_rank() == 0 else 1.0))
        for output in model(**batch("causal", 4, dtype=torch.float32)):
            scaler.scale(output.loss).backward()
        handle.remove()
        before = spoiled.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, spoiled))
    return [*moved, scaler.get_scale() == 0.25]


def test_a_scale_of_one_still_shares_overflows(pool: Pool) -> None:
    assert pool.run(2, overflow_at_scale_one) == [[False, False, False, True]] * 2


def scaler_in_an_elastic_run() -> str:
    model = parallelize(build("gpt2"), 1)
    model.pipeline.recovery = ElasticRun.__new__(ElasticRun)  # unlike other calls, unscaling is not repeated
    with pytest.raises(NotImplementedError) as caught:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        scaler.unscale_(torch.optim.SGD(model.parameters()))
    return str(caught.value)


def test_a_scaler_is_refused_in_an_elastic_run(pool: Pool) -> None:
    (message,) = pool.run(1, scaler_in_an_elastic_run)
    assert "a GradScaler in an elastic run" in message and "precision='fp16'" in message


def scale_where_the_output_is() -> dict[str, torch.Tensor | None]:
    """Only the last stage has logits to look at, so a loop may scale the loss there and nowhere else."""
    model = parallelize(build("gpt2"), 2, num_microbatches=len(SIZES))
    for output in model(**batch("causal", sum(SIZES), dtype=torch.float32)):
        (output.loss * 0.5 if "logits" in output else output.loss).backward()
    assert model.clip_grad_norm_(1e9).isfinite()
    return gradients_of(model)


def test_the_last_stage_alone_may_scale_the_loss(pool: Pool) -> None:
    model = build("gpt2")
    (model(**batch("causal", sum(SIZES), dtype=torch.float32)).loss * 0.5).backward()
    expected = gradients_of(model)
    for found in pool.run(2, scale_where_the_output_is):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)

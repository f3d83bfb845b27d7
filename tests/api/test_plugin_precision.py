"""bf16 and fp16: the gradients are autocast's, and an overflow anywhere makes all ranks skip the step together."""

import functools
import math
from functools import partial
from typing import Any

import pytest
import torch

from penstock import Booster, HeterogeneousParallelPlugin
from penstock.runtime.optimizer import LossScale
from tests.support.families import FAMILIES
from tests.support.hetero import batch_size, make_plugin, pad, samples
from tests.support.pool import Pool
from tests.support.training import gradients_of, in_turn

pytestmark = pytest.mark.slow

PIPELINES = "1x2,1x1,2x3"
NUMBER = batch_size(PIPELINES) + 2  # the second pipeline has no sample of the second batch


def boosted(**options: Any) -> tuple[Booster, Any, Any, Any]:
    model: Any = FAMILIES["gpt2"].build(dtype=torch.float32)
    plugin = make_plugin(model, PIPELINES, **options)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(samples("gpt2", NUMBER), collate_fn=pad)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _, loader, _ = booster.boost(model, sgd, None, loader)
    return booster, model, optimizer, loader


def steps_in(precision: str, by_hand: bool, schedule: str) -> list[tuple[float, dict[str, Any]]]:
    booster, model, optimizer, loader = boosted(precision=precision, schedule=schedule)
    batches = iter(loader)
    seen = []
    for _ in range(len(loader)):
        if by_hand:
            for output in model(**next(batches)):
                output.loss.backward()
            loss = model.pipeline.last_step.global_loss
        else:
            loss = booster.execute_pipeline(batches, model, None, optimizer)["loss"].item()
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        seen.append((loss, gradients_of(model)))
        optimizer.zero_grad()  # both steps from the same weights
    return seen


@functools.cache
def autocast(precision: str) -> list[tuple[float, dict[str, Any]]]:
    """The oracle accumulates over the same microbatches, so both round alike but for the order of sums."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    every, size = samples("gpt2", NUMBER), batch_size(PIPELINES)
    first, second = every[:size], every[size:]
    seen = []
    for cuts in ([first[start : start + 2] for start in range(0, size, 2)], [[sample] for sample in second]):
        model = FAMILIES["gpt2"].build(dtype=torch.float32)
        tokens = [sum(len(sample["input_ids"]) - 1 for sample in part) for part in cuts]
        total = 0.0
        for part, count in zip(cuts, tokens, strict=True):
            with torch.autocast("cpu", dtype=dtype):
                loss = model(**pad(part)).loss * (count / sum(tokens))
            (loss * 2.0**16).backward()
            total += loss.item()
        seen.append((total, {name: grad / 2.0**16 for name, grad in gradients_of(model).items() if grad is not None}))
    return seen


def test_half_precision_gives_the_gradients_of_autocast(pool: Pool) -> None:
    cases = [("bf16", False, "zb-v"), ("fp16", False, "1f1b"), ("fp16", True, "1f1b")]
    found = pool.run(4, in_turn, [partial(steps_in, *case) for case in cases])
    for case, ranks in zip(cases, zip(*found, strict=True), strict=True):
        print(case)  # for a failure to name
        for steps in ranks:
            for (loss, gradients), (total, expected) in zip(steps, autocast(case[0]), strict=True):
                assert loss == pytest.approx(total, abs=1e-5)
                for name, gradient in gradients.items():
                    scale = float(expected[name].abs().max())
                    torch.testing.assert_close(gradient, expected[name], atol=scale * 2e-2, rtol=0)


def with_an_overflow(rank: int, max_norm: float, sharded: bool) -> dict[str, Any]:
    """Two steps, the first with an infinite gradient on one rank only."""
    booster, model, optimizer, loader = boosted(
        precision="fp16", max_norm=max_norm, initial_scale=2.0**10, hysteresis=1, growth_interval=1,
        sharded_optimizer=sharded,
    )  # fmt: skip
    before = [parameter.detach().clone() for parameter in model.parameters()]
    spoilt = []
    if torch.distributed.get_rank() == rank:
        parameter = next(iter(model.parameters()))
        spoilt.append(parameter.register_hook(lambda gradient: torch.full_like(gradient, math.inf)))
    batches = iter(loader)
    booster.execute_pipeline(batches, model, None, optimizer)
    optimizer.step()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    scales = [model.pipeline.loss_scale]
    for handle in spoilt:
        handle.remove()
    booster.execute_pipeline(batches, model, None, optimizer)
    optimizer.step()
    changed = not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    scales.append(model.pipeline.loss_scale)
    return {"unchanged": unchanged, "changed": changed, "scales": scales, "skipped": optimizer.num_skipped_steps}


def test_an_overflow_on_one_rank_makes_all_skip_and_lower_their_scale(pool: Pool) -> None:
    cases = [(0, 0.0, False), (2, 1.0, False), (3, 1.0, True)]
    for found in pool.run(4, in_turn, [partial(with_an_overflow, *case) for case in cases]):
        for case, seen in zip(cases, found, strict=True):
            expected = {"unchanged": True, "changed": True, "scales": [2.0**9, 2.0**10], "skipped": 1}
            assert seen == expected, case


def with_a_scaler_of_the_users_own() -> tuple[list[float], list[bool]]:
    """A GradScaler in a loop by hand; in the second batch one pipeline has no sample, and another an overflow."""
    _, model, optimizer, loader = boosted()
    inner = optimizer.unwrap()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scales, moved = [], []
    for number, batch in enumerate(loader):
        parameter = next(iter(model.parameters()))
        before = parameter.detach().clone()
        if number == 1 and torch.distributed.get_rank() == 3:
            parameter.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        for output in model(**batch):
            scaler.scale(output.loss).backward()
        scaler.step(inner)
        scaler.update()
        inner.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(parameter, before))
    return scales, moved


def test_a_grad_scaler_agrees_on_all_ranks_where_a_pipeline_has_no_sample(pool: Pool) -> None:
    assert pool.run(4, with_a_scaler_of_the_users_own) == [([2.0**8, 2.0**7], [True, False])] * 4


def test_gradients_left_from_a_step_keep_their_size_in_fp16(pool: Pool) -> None:
    """Without zero_grad the second step adds to the first one's, which have lost their scale by then."""
    for single, double in pool.run(4, twice_in_fp16):
        for name, gradient in single.items():
            torch.testing.assert_close(double[name], 2 * gradient, atol=1e-6, rtol=1e-3)


def twice_in_fp16() -> tuple[dict[str, Any], dict[str, Any]]:
    booster, model, optimizer, loader = boosted(precision="fp16")
    seen = []
    for _ in range(2):
        booster.execute_pipeline(iter(loader), model, None, optimizer)
        seen.append(gradients_of(model))
    return seen[0], seen[1]


def test_the_loss_scale_backs_off_and_grows() -> None:
    scale = LossScale(scale=8.0, min_scale=2.0, max_scale=16.0, growth_interval=3, hysteresis=2)
    history = []
    for overflow in (True, True, True, True, False, False, False, False, False, False, False, False, False, True):
        scale.update(overflow)
        history.append(scale.scale)
    # The first overflow is forgiven, until the scale has grown again.
    assert history == [8.0, 4.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]


@pytest.mark.parametrize(
    "options",
    [{"initial_scale": 0.5}, {"max_scale": 2.0}, {"growth_factor": 0.5}, {"backoff_factor": 0.0}, {"hysteresis": 0},
     {"growth_interval": 0}],
)  # fmt: skip
def test_impossible_scales_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).removeprefix("initial_")):
        HeterogeneousParallelPlugin(precision="fp16", **options)

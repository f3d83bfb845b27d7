"""Every schedule gives the gradients of the unsplit model: schedules change when things happen, not what comes out."""

from __future__ import annotations

import signal
from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock import HeterogeneousParallelPlugin, PipelineTemplate
from penstock.schedule import schedule_names
from penstock.simulation.simulate import predicted_steps
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import (
    EXACT,
    Step,
    assert_steps_equal,
    gradients_of,
    kept_in_double,
    parallelize,
    run_step,
    train_family,
    unsplit_step,
)

SAMPLES = 6
# What models as small as those of the other tests get by default is "1f1b".
SCHEDULES = [name for name in schedule_names() if name != "1f1b"]


@cache
def oracle(family: str) -> Step:
    return unsplit_step(FAMILIES[family].build(), (batch(FAMILIES[family].kind, SAMPLES), 1.0))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_unsplit_gradients(pool: Pool, schedule: str) -> None:
    """Every second one with an encoder and a decoder."""
    family = ("llama", "bart")[SCHEDULES.index(schedule) % 2]
    inputs = batch(FAMILIES[family].kind, SAMPLES)
    found = pool.run(3, train_family, family, 3, [inputs], num_microbatches=SAMPLES, schedule=schedule)
    assert_steps_equal([steps[0] for steps in found], oracle(family))


@pytest.mark.parametrize("schedule", ["1f1b", *SCHEDULES])
def test_fewer_microbatches_than_stages_are_enough(pool: Pool, schedule: str) -> None:
    inputs = batch("causal", SAMPLES)
    found = pool.run(3, train_family, "gpt2", 3, [inputs], num_microbatches=2, schedule=schedule)
    assert_steps_equal([steps[0] for steps in found], oracle("gpt2"))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_one_rank_runs_every_schedule(pool: Pool, schedule: str) -> None:
    (steps,) = pool.run(1, train_family, "gpt2", 1, [batch("causal", SAMPLES)], schedule=schedule)
    assert_steps_equal(steps, oracle("gpt2"))


def deferred_in_a_step(schedule: str) -> int:
    """How many weight gradients this rank left for later."""
    model: Any = FAMILIES["gpt2"].build(dropout=0.0)
    section = {"pipeline_parallel_size": 2, "schedule": schedule, "num_microbatches": SAMPLES}
    model = penstock.initialize(model, {"model_parallelism": section})
    queues, count = model.pipeline.weight_gradients, 0
    defer = queues.defer

    def counting(deferred: Any) -> None:
        nonlocal count
        defer(deferred)
        count += queues.awaits(deferred.parameters[0])

    queues.defer = counting
    for out in model(**batch("causal", SAMPLES)):
        out.loss.backward()
    return count


def test_only_a_stage_that_is_waited_for_defers(pool: Pool) -> None:
    first, second = pool.run(2, deferred_in_a_step, "zb-h1")
    assert first == 0 and second > 0 and second % SAMPLES == 0
    assert all(pool.run(2, deferred_in_a_step, "zb-v")), "here the first rank also has the last stage"


def hooked_step(schedule: str) -> tuple[dict[str, torch.Tensor | None], dict[str, int], bool]:
    """Gradients with a hook on some weights that triples them; how often hooks that come after saw each gradient, and
    whether the last sight was the final one."""
    model = parallelize(FAMILIES["gpt2"].build(), 2, schedule=schedule, num_microbatches=SAMPLES)
    latest: dict[str, torch.Tensor] = {}
    sights: Counter[str] = Counter()
    hooked = {name: p for name, p in model.named_parameters() if name.endswith(("c_fc.weight", "c_proj.bias"))}

    def see(name: str, parameter: torch.Tensor) -> None:
        latest[name] = parameter.grad.clone()
        sights[name] += 1

    for name, parameter in hooked.items():
        if name.endswith("weight"):
            parameter.register_hook(lambda gradient: 3 * gradient)
        parameter.register_post_accumulate_grad_hook(partial(see, name))
    with kept_in_double():
        run_step(model, batch("causal", SAMPLES))
    final = all(torch.equal(latest[name], parameter.grad) for name, parameter in hooked.items())
    return gradients_of(model), dict(sights), final


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_hooks_on_a_parameter_see_its_gradients(pool: Pool, schedule: str) -> None:
    expected = {
        name: gradient * 3 if name.endswith("c_fc.weight") else gradient
        for name, gradient in oracle("gpt2").gradients.items()
        if gradient is not None
    }
    for gradients, sights, final in pool.run(2, hooked_step, schedule):
        assert final and sights and set(sights.values()) == {SAMPLES}
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=EXACT, atol=EXACT)


def step_after_an_interrupt() -> dict[str, torch.Tensor | None]:
    """Gradients of a step after one that was interrupted in its first W, on a pipeline of one rank."""
    model = parallelize(FAMILIES["gpt2"].build(), 1, schedule="zb-v", num_microbatches=SAMPLES)
    queues = model.pipeline.weight_gradients
    # Whoever started the tests may have had it ignored, as shells do in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    queues.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run_step(model, batch("causal", SAMPLES))
    del queues.run
    model.zero_grad()
    with kept_in_double():
        run_step(model, batch("causal", SAMPLES))
    return gradients_of(model)


def test_an_interrupted_step_leaves_no_weight_gradients_for_the_next(pool: Pool) -> None:
    (gradients,) = pool.run(1, step_after_an_interrupt)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, oracle("gpt2").gradients[name], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("schedule", ["zb-v"])
def test_deferred_weight_gradients_are_summed_over_replicas(pool: Pool, schedule: str) -> None:
    """Four ranks: two pipelines that are given half of the batch each."""
    inputs = batch("causal", SAMPLES)
    found = pool.run(4, train_family, "gpt2", 2, [inputs], schedule=schedule)
    assert_steps_equal([steps[0] for steps in found], oracle("gpt2"), replicas=2)


# -- "auto", the default -----------------------------------------------------------------------------------------------


def gpt2_of(width: int, layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "vocab_size": 128, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


def train_by_default(
    width: int, layers: int, checkpointing: bool, stages: int, by_plugin: bool, options: dict[str, Any]
) -> tuple[str, Step]:
    """The schedule that a model gets where nobody asks for one, and a step under it."""
    model, inputs = gpt2_of(width, layers), batch("causal", SAMPLES)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if by_plugin:
        plugin = HeterogeneousParallelPlugin(microbatch_size=1)
        plugin.set_pipelines([PipelineTemplate.balanced(model, stages)], [SAMPLES])
        model, *_ = plugin.configure(model)
    else:
        model = parallelize(model, stages, **options)
    with kept_in_double():
        losses = run_step(model, inputs)
    return model.pipeline.make_schedule(SAMPLES).name, Step(losses, gradients_of(model))


EACH = {"num_microbatches": SAMPLES}


@pytest.mark.parametrize(
    ("width", "layers", "checkpointing", "stages", "by_plugin", "options", "wanted"),
    [
        (256, 4, False, 2, False, EACH, "zb-v"),
        (256, 4, False, 2, False, {"num_microbatches": 2}, "zb-h1"),  # too few of them
        (256, 4, False, 2, False, {**EACH, "split_points": ["transformer.h.2"]}, "zb-h1"),
        (256, 2, False, 2, False, EACH, "zb-h1"),  # its four stages would be unequal
        (256, 4, False, 2, True, {}, "zb-h1"),
        (32, 4, False, 2, False, EACH, "1f1b"),
        (256, 2, True, 2, True, {}, "1f1b"),
        (256, 4, True, 2, False, EACH, "1f1b"),
        (256, 4, False, 1, False, EACH, "1f1b"),
    ],
)
def test_weight_gradients_are_put_off_by_default_where_it_pays(
    pool: Pool,
    width: int,
    layers: int,
    checkpointing: bool,
    stages: int,
    by_plugin: bool,
    options: dict[str, Any],
    wanted: str,
) -> None:
    found = pool.run(stages, train_by_default, width, layers, checkpointing, stages, by_plugin, options)
    assert {name for name, _ in found} == {wanted}
    assert_steps_equal(
        [step for _, step in found], unsplit_step(gpt2_of(width, layers), (batch("causal", SAMPLES), 1.0))
    )


def test_replicas_have_one_stage_each_by_default(pool: Pool) -> None:
    found = pool.run(4, train_by_default, 256, 4, False, 2, False, EACH)
    assert {name for name, _ in found} == {"zb-h1"}


def test_the_predicted_time_is_that_of_the_papers() -> None:
    for ranks in range(1, 6):
        for count in range(ranks, 16):
            for name, share in (("1f1b", 1), ("zb-h1", 3), ("zb-v", 6)):  # F, or half of one, of a rank's whole time
                assert predicted_steps(name, ranks, count) == pytest.approx(count + (ranks - 1) / share)

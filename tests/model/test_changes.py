"""What is done to a model after it was parallelised: other types, copies, moving averages; and what is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import penstock
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
    unsplit_step,
)

FAMILY = "gpt2"


def build(dtype: torch.dtype = torch.float64) -> Any:
    return FAMILIES[FAMILY].build(dtype=dtype)


def convert(stages: int) -> tuple[list[Step], float]:
    """A step and an evaluation in half precision, then both in double precision, of whose plans nothing may be left."""
    with kept_in_double():
        model = parallelize(build(torch.bfloat16), stages, num_microbatches=2)
        run_step(model, batch("causal", 4))
        with torch.no_grad():
            model(**batch("causal", 4))
        model.zero_grad()
        model.to(torch.float64)
        steps = [Step(run_step(model, batch("causal", 4)), gradients_of(model))]
        model.zero_grad()
        model.transformer.h.requires_grad_(False)
        steps.append(Step(run_step(model, batch("causal", 4, seed=1)), gradients_of(model)))
        with torch.no_grad():
            return steps, model(**batch("causal", 4)).loss.item()


def test_another_type_and_freezing_between_steps_are_followed(pool: Pool) -> None:
    found = pool.run(3, convert, 3)
    model = build(torch.bfloat16).to(torch.float64)
    expected = unsplit_step(model, (batch("causal", 4), 1.0))
    assert_steps_equal([steps[0] for steps, _ in found], expected)
    model.transformer.h.requires_grad_(False)
    assert_steps_equal([steps[1] for steps, _ in found], unsplit_step(model, (batch("causal", 4, seed=1), 1.0)))
    for _, loss in found:
        assert loss == pytest.approx(expected.losses[0], rel=EXACT)


def train_with_an_average(model: Any, parameters: Any, step: Any) -> Any:
    """Three steps of SGD, and the exponential moving average of the weights."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        step(seed)
        optimizer.step()
        average.update_parameters(model)
    return average


def average(folder: str) -> tuple[float, float, bool, str]:
    """The average's loss, that of a copy that is trained on, whether the original stayed, and how the copy prints."""
    with kept_in_double():
        model = parallelize(build(), 2, schedule="zb-h1")
        batches = [batch("causal", 4, seed=seed) for seed in range(3)]
        averaged = train_with_an_average(model, model.parameters(), lambda seed: run_step(model, batches[seed]))
        loss = evaluate(averaged, batches[0])
        averaged.module.save_pretrained(folder)
        before = [parameter.clone() for parameter in model.parameters()]
        other = copy.deepcopy(averaged.module)
        run_step(other, batches[0])
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        return loss, evaluate(other, batches[0]), all(map(torch.equal, before, model.parameters())), repr(other)


def test_copies_and_moving_averages_run_over_stages_like_the_unsplit_ones(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, average, str(tmp_path))
    with kept_in_double():
        model, batches = build(), [batch("causal", 4, seed=seed) for seed in range(3)]
        averaged = train_with_an_average(
            model, model.parameters(), lambda seed: model(**batches[seed]).loss.backward()
        ).module
        fresh = copy.deepcopy(averaged)
        fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)  # a tied weight is there once
        loss = averaged(**batches[0]).loss
        loss.backward()
        torch.optim.SGD(averaged.parameters(), lr=0.1).step()
        trained = evaluate(averaged, batches[0])
        assert evaluate(fresh, batches[0]) == pytest.approx(loss.item(), rel=EXACT)
    for found_loss, found_trained, kept, printed in found:
        assert found_loss == pytest.approx(loss.item(), rel=EXACT)
        assert found_trained == pytest.approx(trained, rel=EXACT)
        assert kept
        assert "of 2 (counted from 0)" in printed


def adapted() -> Any:
    torch.manual_seed(1)
    options = {"r": 2, "target_modules": ["c_attn", "wte"], "init_lora_weights": False, "fan_in_fan_out": True}
    return get_peft_model(build(), LoraConfig(task_type="CAUSAL_LM", **options)).double()


def story(model: Any, optimizer: Any, step: Any, evaluate: Any) -> list[float]:
    """Steps with a moving average, of which two with a block frozen; the losses, and then those of both models."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    losses = []
    for seed in range(4):
        for name, parameter in model.named_parameters():
            if ".h.3." in name and ("lora" in name or not isinstance(model, PeftModel)):
                parameter.requires_grad = seed not in (1, 2)
        losses.append(step(seed))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return [*losses, evaluate(model), evaluate(average.module)]


def story_over_unlike_pipelines(with_adapters: bool) -> list[float]:
    """Of 2 stages and of 1, with 4 and 2 of a batch's 6 samples, in the user's own loop."""
    with kept_in_double():
        model = adapted() if with_adapters else build()
        plugin = penstock.HeterogeneousParallelPlugin(microbatch_size=1)
        plugin.set_pipelines([penstock.PipelineTemplate.balanced(model, stages) for stages in (2, 1)], [4, 2])
        given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        model, optimizer, *_ = penstock.Booster(plugin).boost(model, given)
        mine = slice(0, 4) if model.data_parallel_rank == 0 else slice(4, 6)

        def step(seed: int) -> float:
            run_step(model, {name: value[mine] for name, value in batch("causal", 6, seed=seed).items()})
            return float(model.pipeline.last_step.global_loss)

        return story(model, optimizer, step, lambda one: evaluate(one, batch("causal", 6, seed=9)))


@pytest.mark.parametrize("with_adapters", [False, True], ids=["model", "adapters"])
def test_a_moving_average_and_freezing_over_unlike_pipelines(pool: Pool, with_adapters: bool) -> None:
    found = pool.run(3, story_over_unlike_pipelines, with_adapters)
    with kept_in_double():
        model = adapted() if with_adapters else build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

        def step(seed: int) -> float:
            loss = model(**batch("causal", 6, seed=seed)).loss
            loss.backward()
            return float(loss.detach())

        expected = story(model, optimizer, step, lambda one: evaluate(one, batch("causal", 6, seed=9)))
    assert len(set(expected)) == 6
    for losses in found:
        assert losses == pytest.approx(expected, rel=EXACT)


def misuse() -> dict[str, str]:
    model = parallelize(build(torch.float32), 2)
    inputs, other = batch("causal", 4), model.transformer.h[2 if model.pipeline.rank == 0 else 0]
    uses: dict[str, Any] = {
        "forward": lambda: model.forward(**inputs),
        "part": lambda: model.transformer(inputs["input_ids"]),
        "unit": lambda: other(torch.zeros(1, 2, 32)),
        "unit's forward": lambda: other.forward(torch.zeros(1, 2, 32)),
        "inside a unit": lambda: other.mlp.c_fc(torch.zeros(1, 2, 32)),
        "pickle": lambda: pickle.dumps(model),
        "save": lambda: torch.save(model, "/dev/null"),
        "resize": lambda: model.resize_token_embeddings(200),
    }
    found = {}
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    for name, use in uses.items():
        with pytest.raises((RuntimeError, TypeError, NotImplementedError)) as caught:
            use()
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    vocabulary = model.config.vocab_size
    assert model.resize_token_embeddings(vocabulary) is model.get_input_embeddings()
    with torch.no_grad():
        found["loss"] = str(model(**inputs).loss.item())
    sharded = parallelize(FAMILIES[FAMILY].build(vocab_size=98), 1, tensor_parallel_size=2)
    with pytest.raises(NotImplementedError, match="sharded"), torch.no_grad(), warnings.catch_warnings():
        copy.deepcopy(sharded)(**inputs)
    return found


def test_what_cannot_be_done_to_a_stage_is_refused_by_name(pool: Pool) -> None:
    loss = build(torch.float32)(**batch("causal", 4)).loss.item()
    for found in pool.run(2, misuse):
        for name in ("forward", "part", "unit", "unit's forward", "inside a unit"):
            assert "is on another stage" in found[name] and "call the whole model, model(...)" in found[name]
        for name in ("pickle", "save"):
            assert "TypeError: a parallelised GPT2LMHeadModel cannot be pickled" in found[name]
            assert "save_pretrained()" in found[name]
        assert "resize_token_embeddings(200)" in found["resize"] and "before initialize()" in found["resize"]
        assert float(found["loss"]) == pytest.approx(loss, rel=1e-5)


def move_away(on: int | None) -> dict[str, str]:
    """What each use says after a step, once the model, or a block of the rank `on`, is on the meta device."""
    model = parallelize(build(torch.float32), 2)
    inputs = batch("causal", 4)
    run_step(model, inputs)
    if on is None:
        model.to("meta")
    elif on == model.pipeline.rank:
        model.transformer.h[3].to("meta")
    uses: dict[str, Any] = {
        "train": lambda: run_step(model, inputs),
        "evaluate": lambda: evaluate(model, inputs),
        "generate": lambda: model.generate(inputs["input_ids"][:2, :4], max_new_tokens=2, do_sample=False),
        "clip": lambda: model.clip_grad_norm_(1.0),
        "copy": lambda: run_step(copy.deepcopy(model), inputs),
    }
    found = {}
    for name, use in uses.items():
        try:
            found[name] = f"nothing, but {use()}"
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {error}"
            if isinstance(error, penstock.PipelineFailure):
                break
    return found


def evaluate(model: Any, inputs: Any) -> float:
    with torch.no_grad():
        return float(model(**inputs).loss)


def test_a_model_that_was_moved_is_refused_before_anything_is_sent(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(2, move_away, None, timeout=30)):
        assert len(found) == 5
        for said in found.values():
            assert said.startswith(f"RuntimeError: transformer.{'h.2.ln_1' if rank else 'wte'}.weight is on meta")
            assert "compute on cpu" in said and "initialize() another model, as this one has lost its values" in said


def test_the_rank_whose_part_was_moved_says_so_and_the_others_hear_of_it(pool: Pool) -> None:
    waiting, moved = pool.run(2, move_away, 1, timeout=60)
    assert all("RuntimeError: transformer.h.3." in said and "is on meta" in said for said in moved.values()), moved
    assert len(moved) == 5 and len(waiting) == 1 and "PipelineFailure" in waiting["train"]

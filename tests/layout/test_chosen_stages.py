"""Stages that the user chooses, with `stages` or `split_points`: taken as they are, or refused by name on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import GPT2LMHeadModel

import penstock
from penstock.config.configuration import Configuration, ConfigurationError
from penstock.layout.pipelines import chosen_stages, split_stages
from tests.support.families import FAMILIES, batch
from tests.support.own_models import OWN_MODELS
from tests.support.pool import Pool
from tests.support.training import (
    Step,
    assert_steps_equal,
    gradients_of,
    kept_in_double,
    parallelize,
    run_step,
    unsplit_step,
)

UNITS = ["stem", "body.0", "body.1", "body.2", "head.norm", "head.out"]


def test_a_module_stands_for_the_units_in_it() -> None:
    wanted = [["stem", "body.0"], ["body.1", "body.2"], ["head.norm", "head.out"]]
    assert chosen_stages(UNITS, [["stem", "body.0"], ["body.1", "body.2"], ["head"]]) == wanted
    assert chosen_stages(UNITS, [["stem"], ["body", "head"]]) == [["stem"], UNITS[1:]]
    assert split_stages(UNITS, ["body.1", "head"]) == wanted
    assert split_stages(UNITS, []) == [UNITS]


WRONG: list[tuple[Any, Any, str]] = [
    ([["stem"], ["body"]], None, r"leave out head\.norm, head\.out"),
    ([["stem", "body"], ["body.1", "head"]], None, r"place body\.1 several times"),
    ([["body", "stem"], ["head"]], None, r"body\.0 stands where stem is due"),
    ([["stem"], ["bodi.0", "head"]], None, r"stages\[1\] names 'bodi\.0', .* did you mean body\.0\?"),
    ([["stem", "body.0.linear"], ["head"]], None, r"body\.0\.linear, which is inside the unit body\.0"),
    (None, ["body.1", "body.0"], r"body\.0 does not come after body\.1"),
    (None, ["body", "body.0"], r"does not come after body\.0"),
    (None, ["stem"], r"stem begins the first stage anyway"),
    (None, ["neck"], r"split_points names 'neck', which is no unit of the model\. Its units are stem"),
]


@pytest.mark.parametrize(("stages", "split_points", "words"), WRONG)
def test_wrong_names_are_refused(stages: Any, split_points: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        if stages is not None:
            chosen_stages(UNITS, stages)
        else:
            split_stages(UNITS, split_points)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"stages": [["a"], []]}, r"model_parallelism\.stages must be a list with a list of names for each stage"),
        ({"stages": "ab"}, r"model_parallelism\.stages must be"),
        ({"stages": [["a"], "b"]}, r"model_parallelism\.stages must be"),
        ({"split_points": []}, r"model_parallelism\.split_points must be a list of names, not empty"),
        ({"split_points": [1]}, r"model_parallelism\.split_points must be"),
        ({"split_points": ["a"], "stages": [["a"]]}, "give only one"),
        ({"split_points": ["a"], "pipeline_parallel_size": "auto"}, '"auto"'),
    ],
)
def test_a_configuration_with_wrong_stages_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Configuration.from_any({"model_parallelism": {"pipeline_parallel_size": 2, **section}})


def held(model: Any) -> list[tuple[str, ...]]:
    return [model.pipeline.split.stages[stage] for stage in model.pipeline.split.local_stages]


def choose() -> tuple[list[Any], list[Step], list[str]]:
    """What each rank holds after each way to choose, steps with such stages, and what is refused."""
    section = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    config = {"model_parallelism": section}
    build, found, steps = FAMILIES["gpt2"].build, [], []
    with kept_in_double():
        chosen = parallelize(build(), 2, num_microbatches=2, split_points=["transformer.h.1"])
        found.append(held(chosen))
        steps.append(Step(run_step(chosen, batch("causal", 4)), gradients_of(chosen)))
        stages = [["transformer.wte"], ["transformer.wpe", "transformer.h", "transformer.ln_f", "lm_head"]]
        uneven: Any = penstock.initialize(build(), **section, stages=stages)
        found.append(held(uneven))
        steps.append(Step(run_step(uneven, batch("causal", 4)), gradients_of(uneven)))
    small = FAMILIES["gpt2"].build().config
    made: Any = penstock.from_config(
        small,
        model_class=GPT2LMHeadModel,
        config=section,
        schedule="interleaved-1f1b",
        split_points=["transformer.h.0", "transformer.h.2", "lm_head"],
        example_inputs={"input_ids": torch.zeros(1, 3, dtype=torch.long)},
        criterion=lambda outputs, _: functional.mse_loss(outputs.logits, torch.ones_like(outputs.logits)),
    )
    found.append(held(made))
    losses = [out.loss.item() for out in made(input_ids=torch.ones(2, 3, dtype=torch.long)) if not out.loss.backward()]
    assert len(losses) == 2
    refused = []
    wrong: list[dict[str, Any]] = [
        {"split_points": ["transformer.h.9"]},
        {"split_points": ["transformer.h.1", "transformer.h.2"]},
        {"stages": [["transformer.h"], ["lm_head"]]},
        {"split_points": ["transformer.h.1" if made.pipeline.rank else "transformer.h.2"]},
    ]
    for options in wrong:
        with pytest.raises(ValueError) as caught:  # the words are looked at below
            penstock.initialize(build(), config, **options)
        refused.append(str(caught.value))
    return found, steps, refused


def test_chosen_stages_are_held_and_exact_and_wrong_ones_are_refused_on_all_ranks(pool: Pool) -> None:
    ranks = pool.run(2, choose)
    blocks = [f"transformer.h.{i}" for i in range(4)]
    first, last = ["transformer.wte", "transformer.wpe"], ["transformer.ln_f", "lm_head"]
    for rank, (found, _, refused) in enumerate(ranks):
        assert found[0] == [((*first, blocks[0]), (*blocks[1:], *last))[rank]]
        assert found[1] == [((first[0],), (first[1], *blocks, *last))[rank]]
        assert found[2] == [[tuple(first), (*blocks[2:], last[0])], [tuple(blocks[:2]), (last[1],)]][rank]
        unknown, number, missing, unlike = refused
        assert "model_parallelism.split_points names 'transformer.h.9', which is no unit" in unknown
        assert "split_points makes 3 stages, but" in number and "pipeline_parallel_size 2" in number
        assert "leave out transformer.wte, transformer.wpe, transformer.ln_f" in missing
        assert "model_parallelism.split_points is ('transformer.h.2',) on rank 0" in unlike
    expected = unsplit_step(FAMILIES["gpt2"].build(), (batch("causal", 4), 1.0))
    for index in range(2):
        assert_steps_equal([steps[index] for _, steps, _ in ranks], expected)


def describe_a_sequential() -> list[Any]:
    own = OWN_MODELS["convnet"]
    config = {"model_parallelism": {"pipeline_parallel_size": 3}}
    stages = [["stem"], ["stages.0"], ["stages.1", "pool", "head"]]
    inputs = (torch.zeros(2, 3, 8, 8, dtype=torch.float64),)
    model: Any = penstock.initialize(own.build(), config, own.criterion, stages=stages, example_inputs=inputs)
    return held(model)


def test_the_levels_of_a_convolutional_network_become_its_stages(pool: Pool) -> None:
    first, second, third = pool.run(3, describe_a_sequential)
    assert first == [("stem.0", "stem.1", "stem.2")]
    assert second == [("stages.0.downsample", "stages.0.blocks.0", "stages.0.blocks.1")]
    assert third == [("stages.1.downsample", "stages.1.blocks.0", "stages.1.blocks.1", "head.0", "head.1")]

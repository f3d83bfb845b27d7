"""Pipelines of different depth train as the unsplit model does: loss, gradients, norm and parameters after the step."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import HeterogeneousParallelPlugin, PipelineTemplate
from penstock.data.batch import MicrobatchedBatch
from tests.support.families import FAMILIES
from tests.support.hetero import (
    MICROBATCH_SIZE,
    Seen,
    assert_equal_training,
    balanced,
    batch_size,
    train,
    train_with,
    unsplit,
)
from tests.support.pool import Pool
from tests.support.training import in_turn

pytestmark = pytest.mark.slow

# By number of ranks: a family, pipelines as stages x microbatches, and options. GPT-2 ties its embedding to its head:
# both on one rank in a pipeline of one stage, on two in a deeper one.
CASES: dict[int, list[tuple[str, str, dict[str, Any]]]] = {
    3: [
        ("gpt2", "3x4", {"max_norm": 0.5}),
        *((family, "1x2,2x2", {}) for family in ("bert_classification", "bert_mlm", "llama", "opt", "vit")),
    ],
    4: [
        ("gpt2", "2x1,2x3", {"max_norm": 0.5}),
        ("gpt2", "1x2,1x1,2x3", {"by_hand": True}),
        *(
            ("gpt2", pipelines, {"schedule": schedule, "max_norm": 0.5})
            for schedule, pipelines in (
                ("gpipe", "1x2,3x4"),
                ("zb-h1", "2x3,2x4"),
                ("zb-h2", "1x2,3x4"),
                ("interleaved-1f1b", "1x2,3x4"),
                ("zb-v", "1x2,3x4"),
                ("v-half", "2x3,2x4"),
            )
        ),
    ],
    5: [("gpt2", pipelines, {"max_norm": 0.5}) for pipelines in ("1x1,1x2,3x4", "2x2,3x3")],
}


@pytest.mark.parametrize("ranks", CASES)
def test_any_mix_of_pipelines_family_and_schedule_trains_as_the_unsplit_model(pool: Pool, ranks: int) -> None:
    """Samples of unequal length, padded per microbatch; an incomplete last batch; clipping at every step."""
    numbers = [2 * batch_size(pipelines) - 3 for _, pipelines, _ in CASES[ranks]]
    calls = [
        partial(train, family, pipelines, number, **options)
        for (family, pipelines, options), number in zip(CASES[ranks], numbers, strict=True)
    ]
    for case, number, found in zip(
        CASES[ranks], numbers, zip(*pool.run(ranks, in_turn, calls), strict=True), strict=True
    ):
        print(case)  # for a failure to name
        family, pipelines, options = case
        assert_equal_training(found, unsplit(family, number, batch_size(pipelines), options.get("max_norm", 0.0)))


def test_a_pipeline_without_a_sample_of_the_last_batch_takes_part(pool: Pool) -> None:
    pipelines = "1x2,1x2,2x3"
    number = batch_size(pipelines) + 2
    ranks = pool.run(4, train, "gpt2", pipelines, number, max_norm=0.5)
    assert [steps[1].report["num_microbatches"] for steps in ranks] == [1, 0, 1, 1]
    assert_equal_training(ranks, unsplit("gpt2", number, batch_size(pipelines), max_norm=0.5))


def test_each_template_may_have_its_own_schedule(pool: Pool) -> None:
    """A template of two stages on one rank, one of four on two, and one under a schedule that was written out."""
    pipelines = "1x1,2x3,3x2"
    by_hand = [f"{stage}F0,{stage}F1,{stage}B0,{stage}B1" for stage in range(3)]
    schedules = ["0F0,1F0,1B0,0B0"], "zb-v", by_hand
    number = 2 * batch_size(pipelines)
    ranks = pool.run(6, train, "gpt2", pipelines, number, schedule=schedules)
    assert_equal_training(ranks, unsplit("gpt2", number, batch_size(pipelines)))


def train_with_a_dropout_named() -> list[Seen]:
    model = FAMILIES["gpt2"].build()
    first, second = balanced(model, 2).modules_per_stage
    first = (*first[:2], "transformer.drop", *first[2:])
    templates = [PipelineTemplate("gpt2", stages) for stages in ([[*first, *second]], [first, second])]
    templates[1].validate(model)
    plugin = HeterogeneousParallelPlugin(microbatch_size=MICROBATCH_SIZE)
    plugin.set_pipelines(templates, [1, 2])
    return train_with(plugin, model, "gpt2", 6)


def test_a_template_may_name_modules_without_parameters(pool: Pool) -> None:
    assert_equal_training(pool.run(3, train_with_a_dropout_named), unsplit("gpt2", 6, 6))


def test_dropout_does_not_depend_on_the_layout(pool: Pool) -> None:
    """The same microbatches, also in the incomplete last batch, on one rank and on three."""
    number, schedules = 2 * batch_size("1x5") - 3, ("1f1b", "zb-v")
    alone = [partial(train, "gpt2", "1x5", number, dropout=dropout) for dropout in (0.3, 0.0)]
    ((whole, plain),) = pool.run(1, in_turn, alone)
    assert abs(whole[0].loss - plain[0].loss) > 1e-3
    calls = [partial(train, "gpt2", "1x2,2x3", number, dropout=0.3, schedule=schedule) for schedule in schedules]
    for found in pool.run(3, in_turn, calls):
        for schedule, steps in zip(schedules, found, strict=True):
            for step, expected in zip(steps, whole, strict=True):
                assert step.loss == pytest.approx(expected.loss, abs=1e-10), schedule
                for name, gradient in step.gradients.items():
                    torch.testing.assert_close(gradient, expected.gradients[name], atol=1e-10, rtol=0)


def hold_the_last_block_until(file: Path) -> bool | None:
    """In the second step of two pipelines the last block of the deeper one waits for the file, which the shallow one
    makes at its first output. Gives whether it came; None where that block is not."""
    plugin = HeterogeneousParallelPlugin(microbatch_size=1, schedule="zb-v")
    model = FAMILIES["gpt2"].build()
    plugin.set_pipelines([balanced(model, stages) for stages in (1, 4)], [2, 4])
    model, *_ = plugin.configure(model)
    rows = {name: torch.ones(1, 8).long() for name in ("input_ids", "labels")}
    batch = MicrobatchedBatch([rows] * plugin.num_microbatches[plugin.pipeline_index], 6)
    came: list[bool] = []

    def wait(*_: object) -> None:
        give_up = time.monotonic() + 60
        while not came and not file.exists() and time.monotonic() < give_up:
            time.sleep(0.01)
        came.append(file.exists())

    for number in range(2):  # the first step has more to do
        if plugin.pipeline_index == 1 and number == 1:
            model.transformer.h[-1].register_forward_pre_hook(wait)
        for output in model(**batch):
            if plugin.pipeline_index == 0 and number == 1:
                file.touch()
            output.loss.backward()
    return came[0] if came else None


def test_a_shallow_pipeline_does_not_wait_until_a_deeper_one_is_filled(pool: Pool, tmp_path: Path) -> None:
    """The terms of the loss's mean are counted over all pipelines as the step begins, not at a first last stage."""
    found = pool.run(3, hold_the_last_block_until, tmp_path / "first loss")
    assert [came for came in found if came is not None] == [True]

"""Pipelines of different depth train as the unsplit model does: loss, gradients, norm and parameters after the step."""

import time

import pytest
import torch
import torch.distributed as dist

from families import FAMILIES
from hetero import (
    MICROBATCH_SIZE,
    Seen,
    assert_equal_training,
    balanced,
    batch_size,
    num_ranks,
    train,
    train_with,
    unsplit,
)
from penstock import HeterogeneousParallelPlugin, PipelineTemplate
from penstock.data.batch import MicrobatchedBatch
from pool import Pool

# As stages x microbatches. GPT-2 ties its embedding to its head: both on one rank in a pipeline of one stage, on two in
# a deeper one.
LAYOUTS = {
    "one stage twice beside three": "1x1,1x2,3x4",
    "two stages twice, with unequal microbatches": "2x1,2x3",
    "two beside three": "2x2,3x3",
    "one pipeline alone": "3x4",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_mix_of_pipelines_trains_as_the_unsplit_model(pool: Pool, name: str) -> None:
    """Samples of unequal length, padded per microbatch; an incomplete last batch; clipping at every step."""
    pipelines = LAYOUTS[name]
    size = batch_size(pipelines)
    number = 2 * size - 3
    ranks = pool.run(num_ranks(pipelines), train, "gpt2", pipelines, number, max_norm=0.5)
    assert_equal_training(ranks, unsplit("gpt2", number, size, max_norm=0.5))


def test_a_pipeline_without_a_sample_of_the_last_batch_takes_part(pool: Pool) -> None:
    pipelines = "1x2,1x2,2x3"
    number = batch_size(pipelines) + 2
    ranks = pool.run(4, train, "gpt2", pipelines, number, max_norm=0.5)
    assert [steps[1].report["num_microbatches"] for steps in ranks] == [1, 0, 1, 1]
    assert_equal_training(ranks, unsplit("gpt2", number, batch_size(pipelines), max_norm=0.5))


@pytest.mark.parametrize("family", ["bert_classification", "bert_mlm", "llama", "opt", "vit"])
def test_any_family_trains_as_unsplit(pool: Pool, family: str) -> None:
    pipelines, number = "1x2,2x2", 11
    ranks = pool.run(3, train, family, pipelines, number)
    assert_equal_training(ranks, unsplit(family, number, batch_size(pipelines)))


@pytest.mark.parametrize(
    ("schedule", "pipelines"),
    [
        ("gpipe", "1x2,3x4"),
        ("zb-h1", "2x3,2x4"),
        ("zb-h2", "1x2,3x4"),
        ("interleaved-1f1b", "1x2,3x4"),
        ("zb-v", "1x2,3x4"),
        ("zb-v", "2x3,2x4"),
        ("v-half", "2x3,2x4"),
    ],
)
def test_any_schedule_trains_as_unsplit(pool: Pool, schedule: str, pipelines: str) -> None:
    """Also those that put several stages on a rank; with an incomplete last batch."""
    number = 2 * batch_size(pipelines) - 3
    ranks = pool.run(4, train, "gpt2", pipelines, number, schedule=schedule, max_norm=0.5)
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


def test_a_loop_by_hand_trains_as_unsplit(pool: Pool) -> None:
    pipelines = "1x2,1x1,2x3"
    number = batch_size(pipelines) + 2
    ranks = pool.run(4, train, "gpt2", pipelines, number, by_hand=True)
    assert_equal_training(ranks, unsplit("gpt2", number, batch_size(pipelines)))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_dropout_does_not_depend_on_the_layout(pool: Pool, schedule: str) -> None:
    """The same microbatches, also in the incomplete last batch, on one rank and on three."""
    number = 2 * batch_size("1x5") - 3
    (whole,) = pool.run(1, train, "gpt2", "1x5", number, dropout=0.3)
    (plain,) = pool.run(1, train, "gpt2", "1x5", number)
    assert abs(whole[0].loss - plain[0].loss) > 1e-3
    ranks = pool.run(3, train, "gpt2", "1x2,2x3", number, dropout=0.3, schedule=schedule)
    for steps in ranks:
        for step, expected in zip(steps, whole, strict=True):
            assert step.loss == pytest.approx(expected.loss, abs=1e-10)
            for name, gradient in step.gradients.items():
                torch.testing.assert_close(gradient, expected.gradients[name], atol=1e-10, rtol=0)


def seconds_to_the_first_loss(slow: float) -> float:
    """From a step's begin, if each block of the second pipeline sleeps so long in its first forward."""
    plugin = HeterogeneousParallelPlugin(microbatch_size=1, schedule="zb-v")
    model = FAMILIES["gpt2"].build()
    plugin.set_pipelines([balanced(model, stages) for stages in (1, 4)], [2, 4])
    model, *_ = plugin.configure(model)
    rows = {name: torch.ones(1, 8).long() for name in ("input_ids", "labels")}
    batch = MicrobatchedBatch([rows] * plugin.num_microbatches[plugin.pipeline_index], 6)
    asleep = set()

    def sleep(block: torch.nn.Module, _: object) -> None:
        if block in asleep:
            asleep.remove(block)
            time.sleep(slow)

    for block in model.transformer.h:
        block.register_forward_pre_hook(sleep)
    found = []
    for number in range(2):  # the first step has more to do
        if plugin.pipeline_index == 1 and number == 1:
            asleep.update(model.transformer.h)
        dist.barrier()
        started, seconds = time.perf_counter(), 0.0
        for output in model(**batch):
            seconds = seconds or time.perf_counter() - started
            output.loss.backward()
        found.append(seconds)
    return found[1]


def test_a_shallow_pipeline_does_not_wait_until_a_deeper_one_is_filled(pool: Pool) -> None:
    """The terms of the loss's mean are counted over all pipelines as the step begins, not at a first last stage."""
    shallow, deep, _ = pool.run(3, seconds_to_the_first_loss, 0.4)
    assert shallow < 0.5 * deep, (shallow, deep)

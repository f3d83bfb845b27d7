"""Sequences that are shared out over pipelines of different depth. Oracle: the unsplit model, and the plain Trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock import Booster, HeterogeneousParallelPlugin, PipelineTemplate
from penstock.context_parallel.attention import connect
from penstock.trainer.pipeline_trainer import PipelineTrainer
from tests.support.context_parallel_ranks import DECODERS, SAMPLES, inputs_of
from tests.support.families import FAMILIES
from tests.support.hetero import assert_equal_training, batch_size, make_plugin, pad, samples, train, unsplit
from tests.support.pool import Pool
from tests.support.training import EXACT, in_turn, kept_in_double

# A family, pipelines as stages x microbatches, each of them twice, and options.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "1x1,2x2", {"by_hand": True, "schedule": "zb-h1"}),
    ("gpt2", "1x1,2x1", {"max_norm": 0.5, "loss_chunk_tokens": 5}),
]


@pytest.mark.slow
def test_pipelines_of_different_depth_that_share_sequences_train_as_the_unsplit_model(pool: Pool) -> None:
    """Samples of unequal length; an incomplete last batch, of which one pipeline has nothing."""
    sizes = [batch_size(pipelines) for _, pipelines, _ in CASES]
    calls = [
        partial(train, family, pipelines, size + 2, context_parallel_size=2, **options)
        for (family, pipelines, options), size in zip(CASES, sizes, strict=True)
    ]
    found = zip(*pool.run(6, in_turn, calls, timeout=120), strict=True)
    for (family, _, options), size, ranks in zip(CASES, sizes, found, strict=True):
        print(family, options)  # for a failure to name
        expected = unsplit(family, size + 2, size, options.get("max_norm", 0.0))
        assert_equal_training(ranks, expected)


def evaluate_and_describe() -> tuple[float, torch.Tensor, dict[str, Any], str, list[torch.Tensor]]:
    """On a worker: an evaluation's loss and logits of a batch, the pipelines, and what dropout leaves in training."""
    model: Any = FAMILIES["gpt2"].build(dropout=0.5)
    plugin = make_plugin(model, "1x1,2x1", context_parallel_size=2)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(samples("gpt2", batch_size("1x1,2x1")), collate_fn=pad)
    model, *_ = booster.boost(model, None, None, loader)
    described = plugin.describe()
    with kept_in_double():
        with torch.no_grad():
            model.eval()
            seen = booster.execute_pipeline(iter(loader), model, return_outputs=True)
        kept: list[torch.Tensor] = []

        def note(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            if not output.is_meta:  # as in a trace
                kept.append(output != 0)

        model.train().transformer.drop.register_forward_hook(note)
        booster.execute_pipeline(iter(loader), model)
    return seen["loss"].item(), seen["outputs"].logits, described.data(), str(described), kept[-1:]


@pytest.mark.slow
def test_an_evaluation_gives_each_pipelines_samples_and_parts_draw_their_own_dropout(pool: Pool) -> None:
    every = samples("gpt2", batch_size("1x1,2x1"))
    model = FAMILIES["gpt2"].build().eval()
    with kept_in_double(), torch.no_grad():
        loss = float(model(**pad(every)).loss)
        logits = [model(**pad(every[first : first + 2])).logits for first in (0, 2)]
    ranks = pool.run(6, evaluate_and_describe)
    for rank, (found, outputs, data, text, _) in enumerate(ranks):
        assert abs(found - loss) < EXACT
        expected = logits[rank >= 2]
        assert outputs.shape == expected.shape and float((outputs - expected).abs().max()) < EXACT
        assert [stage["ranks"] for one in data["pipelines"] for stage in one["stages"]] == [[0, 1], [2, 4], [3, 5]]
        assert data["global_batch_size"] == 4 and "2 pipeline(s) on 6 rank(s)" in text
    (first,), (second,) = ranks[0][-1], ranks[1][-1]
    assert first.shape == second.shape and not torch.equal(first, second)


def fit(folder: str, plugin: bool) -> list[float]:
    """The logged losses, in training and in evaluation."""
    rows = [{name: value[row] for name, value in inputs_of("padded").items()} for row in range(SAMPLES)]
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2 if plugin else 4, per_device_eval_batch_size=1, max_steps=3,
        logging_steps=1, eval_strategy="steps", eval_steps=3, learning_rate=1e-2, report_to=[], save_strategy="no",
        use_cpu=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    options: dict[str, Any] = {"args": arguments, "train_dataset": rows, "eval_dataset": rows}
    model: Any = DECODERS["llama"].build(use_cache=False)
    with kept_in_double():
        if plugin:
            pipelines = make_plugin(model, "1x1,2x1", context_parallel_size=2)
            trainer: Any = PipelineTrainer(model, parallelism=pipelines, **options)
        else:
            trainer = Trainer(model, **options)
        trainer.train()
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]


@pytest.mark.slow
def test_a_trainer_over_pipelines_of_different_depth_logs_what_the_plain_one_does(pool: Pool, tmp_path: Path) -> None:
    expected = fit(str(tmp_path / "plain"), plugin=False)
    for found in pool.run(6, fit, str(tmp_path / "parts"), True):
        assert len(expected) == 4 and found == pytest.approx(expected, abs=1e-6)


def go_on(folder: str, pipelines: str, parts: int, goes_on: bool) -> float:
    """On a worker: the loss of a step, from the checkpoint in a folder, which then has that after it."""
    model: Any = DECODERS["llama"].build(use_cache=False)
    plugin = make_plugin(model, pipelines, context_parallel_size=parts)
    booster, loader = Booster(plugin=plugin), plugin.prepare_dataloader(samples("llama", 4), collate_fn=pad)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with kept_in_double():
        model, optimizer, *_ = booster.boost(model, adam, None, loader)
        if goes_on:
            booster.load_model(model, folder)
            booster.load_optimizer(optimizer, folder)
        loss = float(booster.execute_pipeline(iter(loader), model, None, optimizer)["loss"])
        optimizer.step()
        booster.save_model(model, folder)
        booster.save_optimizer(optimizer, folder)
    return loss


@pytest.mark.slow
def test_a_run_goes_on_over_other_pipelines_with_another_number_of_parts(pool: Pool, tmp_path: Path) -> None:
    model, batch, expected = DECODERS["llama"].build(use_cache=False), pad(samples("llama", 4)), []
    with kept_in_double():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            (loss := model(**batch).loss).backward()
            expected.append(float(loss.detach()))
            optimizer.step()
    found = []
    for ranks, pipelines, parts in ((6, "1x1,2x1", 2), (3, "1x1,2x1", 1), (2, "1x2", 2)):
        found += pool.run(ranks, go_on, str(tmp_path), pipelines, parts, bool(found))[:1]
    assert found == pytest.approx(expected, rel=1e-8)


def auto_pipelines_in_parts() -> tuple[list[int], float, float]:
    """On a worker: the depths that the planner chooses, and the loss of a batch beside the unsplit model's."""
    model: Any = DECODERS["llama"].build(use_cache=False)
    rows = samples("llama", 6)
    with kept_in_double():
        expected = float(model(**pad(rows)).loss.detach())
        plugin = HeterogeneousParallelPlugin(microbatch_size=2, context_parallel_size=2)
        plugin.set_pipelines("auto", 3, model)
        booster, loader = Booster(plugin=plugin), plugin.prepare_dataloader(rows, collate_fn=pad)
        model, *_ = booster.boost(model, None, None, loader)
        loss = booster.execute_pipeline(iter(loader), model)["loss"].item()
    return [template.num_stages for template in plugin.pipelines], loss, expected


def test_the_planner_chooses_pipelines_for_half_as_many_ranks(pool: Pool) -> None:
    for stages, loss, expected in pool.run(4, auto_pipelines_in_parts):
        assert sum(stages) == 2 and abs(loss - expected) < EXACT


def refused() -> list[str]:
    """On a worker, of two: what cannot share sequences."""
    found = []
    model: Any = FAMILIES["gpt2"].build()
    for given, counts in ((model, "1x1,1x1"), (model, "1x1"), (nn.Linear(2, 2), "")):
        plugin = HeterogeneousParallelPlugin(context_parallel_size=2)
        try:
            if counts:
                one = PipelineTemplate.balanced(model, 1)
                plugin.set_pipelines([one] * len(counts.split(",")), [1] * len(counts.split(",")))
            else:
                plugin.set_pipelines([PipelineTemplate("Linear", [["weight"]])], [1])
            plugin.configure(given)
            found.append("nothing")
        except (AssertionError, NotImplementedError) as error:
            found.append(str(error))
    return found


def test_what_cannot_share_sequences_is_refused(pool: Pool) -> None:
    for ranks, works, module in pool.run(2, refused):
        assert "(1 + 1) x tp_size 1 x context_parallel_size 2 = 4 ranks, but the world has 2" in ranks
        assert works == "nothing"
        assert "needs a model of transformers, and Linear is none" in module


def attend_with_three_heads() -> str:
    """On a worker: the error of a layer with a mask for whole sequences, which the ranks' trace did not meet."""
    layer, exchange = nn.Linear(1, 1), Mock(index=0, size=2)
    connect(layer, exchange)
    attend, heads = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None), torch.zeros(1, 3, 4, 2)
    try:
        attend(layer, heads, heads, heads, torch.ones(1, 1, 8, 8, dtype=torch.bool))
    except NotImplementedError as error:
        return str(error)
    return "nothing"


def test_heads_that_parts_cannot_share_are_refused_also_where_no_trace_has_shown_them(pool: Pool) -> None:
    (said,) = pool.run(1, attend_with_three_heads)
    assert "Linear has 3 heads of queries and 3 of keys, which 2 ranks cannot share out" in said

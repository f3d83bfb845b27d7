"""`loss_chunk_tokens`: the loss of logits that never exist as a whole is the unsplit model's, or is refused by name."""

from __future__ import annotations

import functools
import re
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig

import penstock
from penstock.config.configuration import Configuration, ConfigurationError
from penstock.modeling.graph.chunked_loss import ChunkedLogits, ChunkedLossError
from penstock.planning.unit_cost import LiveBytes
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import (
    Batch,
    Step,
    assert_steps_equal,
    gradients_of,
    in_turn,
    kept_in_double,
    parallelize,
    run_step,
    train_family,
    unsplit_step,
)

CHUNK = 5  # divides no number of tokens here
# Also tied heads, and one with a bias.
EXACT_FAMILIES = ["llama", "gpt2", "phi", "gpt_neox", "bloom"]


def given(kind: str) -> Batch:
    """A batch with masked labels, of which one row has none at all; or its labels shifted, or its items counted."""
    full = dict(batch("causal", 4))
    labels = full["labels"] = full["labels"].clone()
    labels[0, 3:] = -100
    labels[2] = -100
    if kind == "shifted":
        full["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    if kind == "counted":
        full["num_items_in_batch"] = torch.tensor(7)
    return full


@functools.cache
def oracle(family: str, kind: str) -> Step:
    return unsplit_step(FAMILIES[family].build(), (given(kind), 1.0))


def test_the_loss_over_chunks_is_the_unsplit_model_s(pool: Pool) -> None:
    calls = [partial(train_family, each, 2, [given("plain")], loss_chunk_tokens=CHUNK) for each in EXACT_FAMILIES]
    for family, ranks in zip(EXACT_FAMILIES, zip(*pool.run(2, in_turn, calls), strict=True), strict=True):
        print(family)  # for a failure to name
        assert_steps_equal([steps[0] for steps in ranks], oracle(family, "plain"))


def trained(batches: list[Batch], schedule: str) -> list[Step]:
    with kept_in_double():
        model, steps = parallelize(FAMILIES["llama"].build(), 2, schedule=schedule, loss_chunk_tokens=CHUNK), []
        for each in batches:
            model.zero_grad()
            steps.append(Step(run_step(model, each), gradients_of(model)))
        return steps


def test_it_is_under_every_schedule_and_way_to_count(pool: Pool) -> None:
    kinds, schedules = ["plain", "shifted", "counted"], ["zb-h1", "zb-v", "interleaved-1f1b", "gpipe"]
    calls = [partial(trained, [given(kind) for kind in kinds], schedule) for schedule in schedules]
    for schedule, ranks in zip(schedules, zip(*pool.run(2, in_turn, calls), strict=True), strict=True):
        for steps, kind in zip(zip(*ranks, strict=True), kinds, strict=True):
            print(schedule, kind)
            assert_steps_equal(steps, oracle("llama", kind))


def test_it_is_over_replicas_and_one_stage(pool: Pool) -> None:
    ranks = pool.run(2, train_family, "llama", 1, [given("plain")], loss_chunk_tokens=CHUNK)
    assert_steps_equal([steps[0] for steps in ranks], oracle("llama", "plain"), replicas=2)


def smoothed(reduction: str) -> tuple[torch.Tensor, ...]:
    """Loss and gradients of a cross-entropy with label smoothing: of logits, and over chunks."""
    torch.manual_seed(0)
    head, target = torch.nn.Linear(8, 20).double(), torch.randint(0, 20, (3, 7))
    target[0, :5] = -100
    hidden, found = torch.randn(3, 7, 8, dtype=torch.float64, requires_grad=True), []
    for logits in (head(hidden), ChunkedLogits.of(head, head, hidden, 4)):
        rows, options = logits.view(-1, 20), {"label_smoothing": 0.1, "reduction": reduction}
        loss = torch.nn.functional.cross_entropy(rows, target.view(-1), **options)
        found += [loss, *torch.autograd.grad(loss, [hidden, *head.parameters()])]
    return tuple(found)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_label_smoothing_is_the_same_over_chunks(reduction: str) -> None:
    found = smoothed(reduction)
    for one, other in zip(found[:4], found[4:], strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def peak_of_last_stage(tokens: int | None, schedule: str) -> float:
    """Most bytes that tensors of a step take, once gradients are there."""
    torch.manual_seed(0)
    model: Any = FAMILIES["llama"].build(vocab_size=16384, hidden_size=8, dtype=torch.float32)
    model = parallelize(model, 2, loss_chunk_tokens=tokens, num_microbatches=4, schedule=schedule)
    ids = torch.ones(4, 256, dtype=torch.long)
    run_step(model, {"input_ids": ids, "labels": ids})
    with LiveBytes() as live:
        run_step(model, {"input_ids": ids, "labels": ids})
    return float(live.peak)


def test_the_last_stage_has_the_logits_of_one_chunk(pool: Pool) -> None:
    """Also where weight gradients are put off: the head's is not, as it would keep the gradient of all logits."""
    logits = 256 * 16384 * 4
    calls = [partial(peak_of_last_stage, *case) for case in ((None, "zb-h1"), (16, "zb-h1"), (16, "1f1b"))]
    whole, *chunked = pool.run(2, in_turn, calls)[1]
    assert whole > 2 * logits
    assert max(chunked) < 0.4 * logits


def refusals(family: str, use: str) -> list[str]:
    """What training says to a rank, twice: the refusal must leave the ranks able to go on together."""
    if family == "cohere":
        sizes = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        model: Any = AutoModelForCausalLM.from_config(CohereConfig(**sizes, num_attention_heads=2))
    else:
        model = FAMILIES[family].build()
    model = parallelize(model, 2, loss_chunk_tokens=CHUNK)
    kind = FAMILIES[family].kind if family in FAMILIES else "causal"
    found = []
    for _ in range(2):
        try:
            if use == "criterion":
                model(**batch(kind, 4), criterion=lambda out, inputs: out.logits.mean())
            for out in model(**batch(kind, 4)):
                out.loss.backward()
                if use == "read" and model.pipeline.context.holds_output:
                    assert "not made" in repr(out.logits)
                    out.logits.argmax(-1)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize(
    ("family", "expected"),
    [("gemma2", "used by (div|__truediv__)"), ("cohere", "used by mul"), ("bart", "used by add")],
)
def test_logits_that_are_changed_on_the_way_are_refused_on_every_rank(pool: Pool, family: str, expected: str) -> None:
    for found in pool.run(2, refusals, family, ""):
        assert len(found) == 2
        for text in found:
            assert re.match(rf"ChunkedLossError: loss_chunk_tokens: the logits are {expected}", text)


@pytest.mark.parametrize(("use", "expected"), [("criterion", "the loss is a criterion's"), ("read", "used by argmax")])
def test_logits_that_somebody_reads_are_refused(pool: Pool, use: str, expected: str) -> None:
    *_, last = pool.run(2, refusals, "llama", use)
    assert expected in last[0]


def test_classes_in_another_order_are_refused() -> None:
    head = torch.nn.Linear(8, 8)
    logits = ChunkedLogits.of(head, head, torch.ones(2, 3, 8), 2)
    assert logits[:, :-1].shape == (2, 2, 8)
    with pytest.raises(ChunkedLossError, match="takes apart the logits of a token"):
        logits[..., torch.arange(7, -1, -1)]


def evaluated(tokens: int | None) -> tuple[float, list[float], list[int]]:
    model = parallelize(FAMILIES["llama"].build(), 2, loss_chunk_tokens=tokens)
    inputs = batch("causal", 4)
    run_step(model, inputs)
    with torch.no_grad():
        out = model(**inputs)
    made = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    return out.loss.item(), out.logits.flatten().tolist(), made.flatten().tolist()


def test_evaluation_and_generation_are_unchanged(pool: Pool) -> None:
    assert pool.run(2, evaluated, CHUNK) == pool.run(2, evaluated, None)


def test_it_does_not_go_with_sharded_heads() -> None:
    with pytest.raises(ConfigurationError, match="loss_chunk_tokens is for whole heads"):
        Configuration(pipeline_parallel_size=1, tensor_parallel_size=2, loss_chunk_tokens=8)
    with pytest.raises(ValueError, match="loss_chunk_tokens is for whole heads"):
        penstock.HeterogeneousParallelPlugin(tp_size=2, loss_chunk_tokens=8)

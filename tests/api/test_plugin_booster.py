"""The Booster's calls: criteria, outputs, evaluation, accumulation, clipping by hand, schedulers."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import BertConfig, BertForPreTraining

from penstock import Booster
from tests.support.families import FAMILIES, VOCABULARY
from tests.support.hetero import batch_size, make_plugin, pad, samples, train, unsplit
from tests.support.pool import Pool
from tests.support.training import gradients_of, in_turn, kept_in_double

PIPELINES = "1x2,2x3"
NUMBER = batch_size(PIPELINES) + 3


def smoothed(outputs: Any, inputs: Any) -> torch.Tensor:
    """A criterion of the user's own."""
    logits = outputs.logits[:, :-1].reshape(-1, VOCABULARY)
    return functional.cross_entropy(logits, inputs["labels"][:, 1:].reshape(-1), label_smoothing=0.1)


def boosted(data: list[Any], schedule: str = "1f1b") -> tuple[Booster, Any, Any, Any]:
    model: Any = FAMILIES["gpt2"].build()
    plugin = make_plugin(model, PIPELINES, schedule)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(data, collate_fn=pad)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _, loader, _ = booster.boost(model, sgd, None, loader)
    return booster, model, optimizer, loader


def for_pretraining() -> Any:
    """BERT with a loss of two means: one over masked tokens, one over sentences."""
    torch.manual_seed(0)
    config = BertConfig(**FAMILIES["bert_mlm"].settings, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForPreTraining(config).double().train()


def pad_pairs(chosen: Any) -> dict[str, torch.Tensor]:
    batch = pad(chosen)
    return {**batch, "next_sentence_label": batch["input_ids"][:, 0] % 2}


# The model, its collator, and the criterion.
CRITERIA: dict[str, tuple[Any, Any, Any]] = {
    "the user's": (FAMILIES["gpt2"].build, pad, smoothed),
    "the model's own": (FAMILIES["gpt2"].build, pad, lambda outputs, inputs: outputs.loss),
    "two means": (for_pretraining, pad_pairs, lambda outputs, inputs: outputs.loss),
}


def with_a_criterion(name: str) -> tuple[float, dict[str, Any]]:
    build, collate, criterion = CRITERIA[name]
    model = build()
    plugin = make_plugin(model, PIPELINES)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(samples("gpt2", NUMBER), collate_fn=collate)
    model, _, _, loader, _ = booster.boost(model, None, None, loader)
    with kept_in_double():
        result = booster.execute_pipeline(iter(loader), model, criterion)
    return result["loss"].item(), gradients_of(model)


def test_a_criterion_is_the_mean_over_the_global_batch(pool: Pool) -> None:
    every = pool.run(3, in_turn, [partial(with_a_criterion, name) for name in CRITERIA])
    for (name, (build, collate, criterion)), ranks in zip(CRITERIA.items(), zip(*every, strict=True), strict=True):
        model, batch = build(), collate(samples("gpt2", NUMBER)[: batch_size(PIPELINES)])
        with kept_in_double():
            loss = criterion(model(**batch), batch)
        loss.backward()
        expected = gradients_of(model)
        for found, gradients in ranks:
            assert found == pytest.approx(loss.item(), abs=1e-10), name
            for key, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[key], atol=1e-10, rtol=0)


def with_outputs(schedule: str) -> list[tuple[Any, ...]]:
    """The outputs in training and in evaluation, and the losses of an epoch of evaluation."""
    booster, model, optimizer, loader = boosted(equal_samples(), schedule)
    seen: list[tuple[Any, ...]] = []
    with kept_in_double():
        result = booster.execute_pipeline(iter(loader), model, None, optimizer, return_loss=False, return_outputs=True)
        logits = result["outputs"] and result["outputs"].logits
        assert logits is None or not logits.requires_grad
        seen.append((result["loss"], logits))
        model.eval()
        batches = iter(loader)
        with torch.no_grad():
            for _ in range(len(loader)):
                result = booster.execute_pipeline(batches, model, return_outputs=True)
                seen.append((result["loss"].item(), result["outputs"] and result["outputs"].logits))
            alone = booster.execute_pipeline(iter(loader), model, smoothed)
            assert alone["outputs"] is None
            seen.append((alone["loss"].item(), None))
    return seen


@pytest.mark.parametrize(("schedule", "without_outputs"), [("1f1b", 1), ("zb-v", 2)])
def test_outputs_and_evaluation(pool: Pool, schedule: str, without_outputs: int) -> None:
    """Under zb-v the first rank of a pipeline has its last stage, too."""
    ranks = pool.run(3, with_outputs, schedule)
    model = FAMILIES["gpt2"].build()
    batches = [pad(chosen) for chosen in (equal_samples()[:10], equal_samples()[10:])]
    with kept_in_double(), torch.no_grad():
        expected = [model(**batch) for batch in batches]
        own = smoothed(expected[0], batches[0])
    # Samples of the first batch: 4 for the first pipeline, 6 for the second; of the second batch: 2 and 1.
    parts = [(expected[0].logits[:4], expected[1].logits[:2])] + [(expected[0].logits[4:], expected[1].logits[2:])] * 2
    for rank, ((no_loss, training), first, last, alone) in enumerate(ranks):
        assert no_loss is None
        assert (training is None) == (rank == without_outputs), "in training the last stage has the outputs"
        if training is not None:
            torch.testing.assert_close(training, parts[rank][0], atol=1e-10, rtol=0)
        for index, (loss, logits) in enumerate((first, last)):
            assert loss == pytest.approx(expected[index].loss.item(), abs=1e-10)
            torch.testing.assert_close(logits, parts[rank][index], atol=1e-10, rtol=0)
        assert alone[0] == pytest.approx(own.item(), abs=1e-10)


def equal_samples() -> list[Any]:
    """Of equal length, so that the logits of microbatches can be joined."""
    ids = torch.randint(3, VOCABULARY, (13, 7), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def accumulated() -> tuple[dict[str, Any], float]:
    """Gradients of two batches, half each, and a norm clipped by hand."""
    booster, model, optimizer, loader = boosted(samples("gpt2", 2 * batch_size(PIPELINES)))
    batches = iter(loader)
    with kept_in_double():
        with booster.no_sync(model, optimizer):
            for output in model(**next(batches)):
                booster.backward(output.loss / 2, optimizer)
        for output in model(**next(batches)):
            booster.backward(output.loss / 2, optimizer)
    gradients = gradients_of(model)
    return gradients, float(booster.clip_grad_norm(optimizer, 0.1))


def test_gradients_accumulate_over_batches(pool: Pool) -> None:
    ranks = pool.run(3, accumulated)
    one, two = unsplit_gradients(0), unsplit_gradients(1)
    norm = torch.stack([((one[name] + two[name]) / 2).pow(2).sum() for name in unique_names()]).sum().sqrt().item()
    for gradients, found in ranks:
        assert found == pytest.approx(norm, abs=1e-10)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, (one[name] + two[name]) / 2, atol=1e-10, rtol=0)


def unsplit_gradients(index: int) -> dict[str, Any]:
    model, size = FAMILIES["gpt2"].build(), batch_size(PIPELINES)
    with kept_in_double():
        model(**pad(samples("gpt2", 2 * size)[index * size : (index + 1) * size])).loss.backward()
    return gradients_of(model)


def unique_names() -> list[str]:
    return [name for name, _ in FAMILIES["gpt2"].build().named_parameters()]


def with_a_scheduler(order: str) -> list[float]:
    """Learning rates and the loss of the second batch, with the scheduler made before or after `boost`."""
    model: Any = FAMILIES["gpt2"].build()
    plugin = make_plugin(model, PIPELINES)
    loader = plugin.prepare_dataloader(samples("gpt2", 2 * batch_size(PIPELINES)), collate_fn=pad)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if order == "before":
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, _, loader, scheduler = plugin.configure(model, optimizer, None, loader, scheduler)
    else:
        model, optimizer, _, loader, _ = plugin.configure(model, optimizer, dataloader=loader)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    with kept_in_double():
        for batch in loader:  # an ordinary loop, without a Booster
            for output in model(**batch):
                output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            seen += [optimizer.param_groups[0]["lr"], model.pipeline.last_step.global_loss]
    return seen


@pytest.mark.parametrize("order", ["before", "after"])
def test_schedulers_and_an_ordinary_loop(pool: Pool, order: str) -> None:
    size = batch_size(PIPELINES)
    first, second = unsplit("gpt2", 2 * size, size)
    for seen in pool.run(3, with_a_scheduler, order):
        assert seen == pytest.approx([0.05, first.loss, 0.025, second.loss], abs=1e-10)


def test_gradients_are_summed_in_few_messages_and_the_report_says_how_much_is_hidden(pool: Pool) -> None:
    """GPT-2 over one stage beside three: three segments, and the tied embedding, which has holders of its own."""
    ranks = pool.run(4, train, "gpt2", "1x2,3x4", 2 * batch_size("1x2,3x4"))
    for rank, steps in enumerate(ranks):
        for step in steps:
            num_parameters = len(step.gradients)
            assert step.report["num_buckets"] <= (4 if rank == 0 else 2) < num_parameters
            assert 0.0 <= step.report["hidden"] <= 1.0

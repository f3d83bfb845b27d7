"""A loss of one's own: means, sums, distillation and weights of tokens, against the unsplit model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2Model

import penstock
from tests.support.families import FAMILIES, VOCABULARY, batch
from tests.support.pool import Pool
from tests.support.training import Step, assert_steps_equal, gradients_of, in_turn, kept_in_double, rows, unsplit_step

Inputs = Mapping[str, Any]


def smoothed(outputs: Any, inputs: Inputs) -> torch.Tensor:
    """A mean over tokens."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten(), label_smoothing=0.1)


def summed(outputs: Any, inputs: Inputs) -> torch.Tensor:
    """A sum over tokens."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten(), reduction="sum")


def distilled(outputs: Any, inputs: Inputs) -> torch.Tensor:
    """The labels' loss and the distance to a teacher, each a mean."""
    student = functional.log_softmax(outputs.logits, -1)
    far = functional.kl_div(student, inputs["teacher_logits"].softmax(-1), reduction="batchmean")
    return 0.5 * smoothed(outputs, inputs) + 0.5 * far


class WeightedTokens:
    """A sum over tokens, each with a weight, made by hand."""

    reduction = "sum"

    def __call__(self, outputs: Any, inputs: Inputs) -> torch.Tensor:
        logits, labels = outputs.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:]
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return 0.01 * (losses * inputs["token_weights"][:, 1:]).sum()


CRITERIA: dict[str, Any] = {
    "smoothed": smoothed, "summed": summed, "distilled": distilled, "weighted": WeightedTokens(),
}  # fmt: skip


def inputs_of(criterion: str, size: int = 6) -> dict[str, Any]:
    inputs = batch("causal", size)
    generator = torch.Generator().manual_seed(1)
    shape = tuple(inputs["input_ids"].shape)
    if criterion == "distilled":
        inputs["teacher_logits"] = torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64)
    if criterion == "weighted":
        inputs["token_weights"] = torch.rand(shape, generator=generator, dtype=torch.float64)
    return inputs


class Closed(nn.Module):
    """The unsplit model with a criterion; what its forward does not take is for the criterion."""

    def __init__(self, criterion: str):
        super().__init__()
        self.model, self.criterion = FAMILIES["gpt2"].build(), CRITERIA[criterion]

    def forward(self, **inputs: Any) -> Any:
        own = {name: value for name, value in inputs.items() if name not in ("teacher_logits", "token_weights")}
        outputs = self.model(**own)
        outputs.loss = self.criterion(outputs, inputs)
        return outputs

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)


def train(criterion: str, stages: int, at_each_call: bool) -> tuple[Step, float, float]:
    """A step, the loss of an evaluation, and the model's own loss in one."""
    with kept_in_double():
        section = {"pipeline_parallel_size": stages, "num_microbatches": 2}
        given = None if at_each_call else CRITERIA[criterion]
        model: Any = penstock.initialize(FAMILIES["gpt2"].build(), {"model_parallelism": section}, criterion=given)
        options = {"criterion": CRITERIA[criterion]} if at_each_call else {}
        losses = []
        for out in model(**rows(inputs_of(criterion), model.data_parallel_rank, model.data_parallel_size), **options):
            out.loss.backward()
            losses.append(out.loss.item())
        with torch.no_grad():
            evaluated = model(**inputs_of(criterion), **options).loss.item()
            own = model(**batch("causal", 6), criterion=None).loss.item()
        return Step(losses, gradients_of(model)), evaluated, own


# By number of ranks: criteria, and whether each call is given them.
CASES = {2: [("smoothed", True), ("summed", False), ("distilled", False), ("weighted", True)], 4: [("summed", True)]}


@pytest.mark.parametrize("ranks", CASES)
def test_a_criterion_is_exact(pool: Pool, ranks: int) -> None:
    every = pool.run(ranks, in_turn, [partial(train, name, 2, at_each_call) for name, at_each_call in CASES[ranks]])
    for (criterion, _), found in zip(CASES[ranks], zip(*every, strict=True), strict=True):
        print(criterion)  # for a failure to name
        whole = Closed(criterion)
        expected = unsplit_step(whole, (inputs_of(criterion), 1.0))
        assert_steps_equal([step for step, _, _ in found], expected, replicas=ranks // 2)
        with torch.no_grad(), kept_in_double():
            own = whole.model(**batch("causal", 6)).loss.item()
        for _, evaluated, without in found:
            assert evaluated == pytest.approx(expected.losses[0], rel=1e-10)
            assert without == pytest.approx(own, rel=1e-10)


def shape_of(outputs: Any, inputs: Inputs) -> torch.Tensor:
    logits: torch.Tensor = outputs.logits
    return logits


def call_wrongly() -> list[str]:
    section = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    model: Any = penstock.initialize(FAMILIES["gpt2"].build(), {"model_parallelism": section}, WeightedTokens())
    found = []
    for options in ({}, {"criterion": shape_of}):
        with pytest.raises(ValueError, match="criterion") as caught:
            model(**batch("causal", 4), **options)
        found.append(str(caught.value))
    for out in model(**inputs_of("weighted", 4)):
        out.loss.backward()
    return found


def test_a_criterion_that_fails_is_an_error_on_all_ranks_before_the_step(pool: Pool) -> None:
    for lacking, misshapen in pool.run(2, call_wrongly):
        assert "KeyError: 'token_weights'" in lacking and "the inputs here are input_ids" in lacking
        assert "must return a floating-point tensor of shape (), not one of shape (2, " in misshapen


class Bare(GPT2Model):
    """Takes nothing that is only for the criterion, and its output has no field for a loss."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        return super().forward(input_ids, use_cache=use_cache)


def distance(outputs: Any, inputs: Inputs) -> torch.Tensor:
    return functional.mse_loss(outputs.last_hidden_state, inputs["targets"])


def bare() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=31, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    inputs = {"input_ids": torch.arange(20).view(4, 5), "targets": torch.randn(4, 5, 16, dtype=torch.float64)}
    return Bare(config).double(), inputs


def train_bare() -> tuple[Step, float]:
    whole, inputs = bare()
    model: Any = penstock.initialize(whole, {"model_parallelism": {"pipeline_parallel_size": 2}}, distance)
    losses = []
    for out in model(**inputs):
        out.loss.backward()
        losses.append(out.loss.item())
    with torch.no_grad():
        return Step(losses, gradients_of(model)), model(**inputs).loss.item()


def test_a_criterion_has_inputs_of_its_own_and_a_model_without_a_loss_gets_one(pool: Pool) -> None:
    model, inputs = bare()
    loss = distance(model(inputs["input_ids"]), inputs)
    loss.backward()
    found = pool.run(2, train_bare)
    assert_steps_equal([step for step, _ in found], Step([loss.item()], gradients_of(model)))
    assert [evaluated for _, evaluated in found] == pytest.approx([loss.item()] * 2, rel=1e-10)


def sum_of_tokens(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def train_with_a_loss_function() -> Step:
    with kept_in_double():
        model: Any = FAMILIES["gpt2"].build()
        model.loss_function = sum_of_tokens
        model = penstock.initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 3}})
        losses = []
        for out in model(**batch("causal", 6)):
            out.loss.backward()
            losses.append(out.loss.item())
        return Step(losses, gradients_of(model))


def test_a_loss_function_that_sums_is_exact(pool: Pool) -> None:
    model: Any = FAMILIES["gpt2"].build()
    model.loss_function = sum_of_tokens
    assert_steps_equal(pool.run(2, train_with_a_loss_function), unsplit_step(model, (batch("causal", 6), 1.0)))


def without_labels(pipelines_without: int) -> tuple[float, float, bool]:
    """The global loss of a step, the loss of an evaluation of this pipeline's batch, whether gradients are finite."""
    with kept_in_double():
        model: Any = penstock.initialize(
            FAMILIES["gpt2"].build(), {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}}
        )
        inputs = rows(batch("causal", 4), model.data_parallel_rank, model.data_parallel_size)
        if model.data_parallel_rank < pipelines_without:
            inputs["labels"] = torch.full_like(inputs["labels"], -100)
        for out in model(**inputs):
            out.loss.backward()
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients_of(model).values())
        with torch.no_grad():
            return model.pipeline.last_step.global_loss, float(model(**inputs).loss), finite


@pytest.mark.parametrize(("ranks", "pipelines_without"), [(2, 1), (4, 1), (4, 2)])
def test_a_batch_without_labels_has_no_loss_unless_another_pipeline_has_some(
    pool: Pool, ranks: int, pipelines_without: int
) -> None:
    """The unsplit model gives NaN, and zero gradients, for the whole batch alone."""
    inputs = batch("causal", 4)
    inputs["labels"][: 4 * 2 * pipelines_without // ranks] = -100
    model: Any = FAMILIES["gpt2"].build()
    with kept_in_double():
        expected = model(**inputs).loss.item()
    for rank, (loss, evaluated, finite) in enumerate(pool.run(ranks, without_labels, pipelines_without)):
        assert loss == pytest.approx(expected, rel=1e-10, nan_ok=True)
        assert (evaluated != evaluated) == (rank // 2 < pipelines_without) and finite

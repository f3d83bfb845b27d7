"""Loss rules: the shares of unequal microbatches add up to the whole batch's loss and gradients (the oracle)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from penstock.modeling.graph.loss import CriterionError, LossRule, loss_by, read_counts
from tests.support.families import BERT, FAMILIES, Family, batch
from tests.support.stage_driver import gradients, largest_difference, split, split_gradients, step
from tests.support.training import kept_in_double

TOLERANCE = 1e-10
SMALL_BERT = {**BERT, "num_hidden_layers": 2}
Batch = dict[str, Any]


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """float32 inside a float64 model would hide all but gross errors."""
    with kept_in_double():
        yield


def microbatches(inputs: Batch, sizes: list[int]) -> list[Batch]:
    parts = {
        name: value.split(sizes) if isinstance(value, torch.Tensor) and value.dim() else [value] * len(sizes)
        for name, value in inputs.items()
    }
    return [{name: values[index] for name, values in parts.items()} for index in range(len(sizes))]


def numbers_of(rule: LossRule, inputs: Batch) -> tuple[int, ...]:
    return read_counts([rule.count_later(inputs)])[0]


def rule_of(model: nn.Module, inputs: Batch) -> LossRule:
    rule = split(model, 2)[0].plan(inputs).loss
    assert rule is not None
    return rule


def check_shares(model: nn.Module, inputs: Batch, sizes: list[int], tolerance: float = TOLERANCE) -> LossRule:
    """Shares of microbatches over two stages against the whole batch at once."""
    worker = copy.deepcopy(model)
    expected = worker(**inputs)
    expected.loss.backward()
    splits = split(model, 2)
    parts = microbatches(inputs, sizes)
    rule = splits[0].plan(parts[0]).loss
    assert rule is not None and rule.exact, rule
    totals = [sum(counts) for counts in zip(*(numbers_of(rule, part) for part in parts), strict=True)]
    total = 0.0
    for part in parts:
        output = step(splits, part, shares=rule.shares(numbers_of(rule, part), totals))
        assert torch.isfinite(output.loss)
        total += output.loss.item()
    assert total == pytest.approx(expected.loss.item(), abs=tolerance)
    assert largest_difference(split_gradients(splits), gradients([worker])) < tolerance
    return rule


def bert(model_class: str, **settings: Any) -> nn.Module:
    return Family(model_class, "BertConfig", {**SMALL_BERT, **settings}, "classes").build()


def with_labels(labels: Any) -> Callable[[], Batch]:
    def made() -> Batch:
        inputs = batch("classes", size=5)
        return {**inputs, "labels": labels(inputs)}

    return made


TOKEN_LABELS = with_labels(lambda inputs: (inputs["input_ids"] % 3).masked_fill(inputs["attention_mask"] == 0, -100))
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "causal": (FAMILIES["gpt2"].build, lambda: batch("causal", size=5)),
    "causal, more data": (FAMILIES["qwen3"].build, lambda: batch("causal", size=5, tokens=21, seed=3)),
    "masked": (FAMILIES["bert_mlm"].build, lambda: batch("masked", size=5)),
    "sequence to sequence": (FAMILIES["t5"].build, lambda: batch("sequences", size=5)),
    "speech": (FAMILIES["whisper"].build, lambda: batch("speech", size=5)),
    "images": (FAMILIES["vit"].build, lambda: batch("images", size=5)),
    "classes": (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        with_labels(lambda inputs: torch.tensor([0, 2, -100, 1, 2])),
    ),
    "regression": (
        lambda: bert("BertForSequenceClassification", num_labels=1),
        with_labels(lambda inputs: torch.linspace(0, 1, 5, dtype=torch.float64)),
    ),
    "several regressions": (
        lambda: bert("BertForSequenceClassification", num_labels=3, problem_type="regression"),
        with_labels(lambda inputs: torch.linspace(0, 1, 15, dtype=torch.float64).view(5, 3)),
    ),
    "several labels": (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        with_labels(lambda inputs: (torch.arange(15).view(5, 3) % 2).double()),
    ),
    "token classes": (lambda: bert("BertForTokenClassification", num_labels=3), TOKEN_LABELS),
    "choices": (lambda: bert("BertForNextSentencePrediction"), with_labels(lambda inputs: torch.arange(5) % 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_shares_add_up(case: str) -> None:
    build, inputs = CASES[case]
    check_shares(build(), inputs(), [2, 1, 2])


def test_a_plan_does_not_depend_on_what_the_labels_are() -> None:
    """Constant labels, or none that count, could be shifted or not for all one can see."""
    model = FAMILIES["gpt2"].build()
    expected = rule_of(model, batch("causal"))
    for value in (0, 5, -100):
        inputs = batch("causal")
        inputs["labels"] = torch.full_like(inputs["labels"], value)
        assert rule_of(model, inputs) == expected
    short = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[5, 6]])}
    assert rule_of(model, short).terms == expected.terms


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "t5"])
def test_a_microbatch_in_which_nothing_counts_adds_an_exact_zero(family: str) -> None:
    model = FAMILIES[family].build(**({"output_router_logits": False} if family == "mixtral" else {}))
    inputs = batch(FAMILIES[family].kind, size=4)
    inputs["labels"][:2] = -100
    # A router's softmax is taken in float32.
    check_shares(model, inputs, [2, 2], 1e-7 if family == "mixtral" else TOLERANCE)


def test_a_batch_in_which_nothing_counts_gives_what_the_unsplit_model_gives() -> None:
    model = FAMILIES["gpt2"].build()
    inputs = batch("causal")
    inputs["labels"][:] = -100
    worker = copy.deepcopy(model)
    expected = worker(**inputs).loss
    expected.backward()
    splits = split(model, 2)
    rule = splits[0].plan(inputs).loss
    assert rule is not None and numbers_of(rule, inputs) == (0,)
    output = step(splits, inputs, shares=rule.shares((0,), (0,)))
    assert output.loss.isnan() and expected.isnan()
    assert largest_difference(split_gradients(splits), gradients([worker])) == 0.0


def test_question_answering_means_over_starts_and_ends_separately() -> None:
    inputs = batch("classes", size=5, tokens=9)
    del inputs["labels"]
    inputs["start_positions"] = torch.tensor([0, 3, 12, 9, 1])  # two of them lie outside of the sequence
    inputs["end_positions"] = torch.tensor([2, 4, 5, 8, 30])
    rule = check_shares(bert("BertForQuestionAnswering"), inputs, [2, 3])
    assert numbers_of(rule, inputs) == (3, 4)


def test_two_means_of_one_loss_are_weighted_separately() -> None:
    inputs = batch("masked", size=5)
    inputs["next_sentence_label"] = torch.arange(5) % 2
    rule = check_shares(bert("BertForPreTraining"), inputs, [2, 1, 2])
    assert numbers_of(rule, inputs) == (int((inputs["labels"] != -100).sum()), 5)


def test_a_mean_without_counted_elements_does_not_spoil_the_other() -> None:
    inputs = batch("masked", size=4)
    inputs["labels"][:2] = -100
    inputs["next_sentence_label"] = torch.tensor([0, 1, -100, -100])
    check_shares(bert("BertForPreTraining"), inputs, [2, 2])


def test_a_given_divisor_makes_every_microbatch_its_own_share() -> None:
    model = FAMILIES["llama"].build()
    inputs = batch("causal", size=4)
    counted = torch.tensor(int((inputs["labels"][:, 1:] != -100).sum()))
    rule = check_shares(model, {**inputs, "num_items_in_batch": counted}, [1, 3])
    assert [term.kind for term in rule.terms] == ["sum"]


def test_labels_selected_by_their_values() -> None:
    model = Family(
        "DebertaV2ForSequenceClassification", "DebertaV2Config", {**SMALL_BERT, "num_labels": 3}, "classes"
    ).build()
    inputs = batch("classes", size=5)
    inputs["labels"] = torch.tensor([0, -100, 2, -100, 1])
    rule = check_shares(model, inputs, [2, 3])
    assert numbers_of(rule, inputs) == (3,)


class OneBlock(transformers.GPT2LMHeadModel):
    """A block, and a loss of one's own."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, mask: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
        logits = self.lm_head(self.transformer.h[0](self.transformer.wte(input_ids)))
        loss = None if labels is None else self.take(logits, labels, mask)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    def take(self, logits: torch.Tensor, labels: torch.Tensor, mask: Any) -> torch.Tensor:
        raise NotImplementedError


def with_loss(take: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]) -> nn.Module:
    config = transformers.GPT2Config(**FAMILIES["gpt2"].settings, attn_pdrop=0.0, resid_pdrop=0.0)
    made: nn.Module = type("OneBlock", (OneBlock,), {"take": staticmethod(take)})(config).double()
    return made


def over_the_chosen(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Tokens that a mask leaves, selected before."""
    return nn.functional.cross_entropy(logits[:, :-1][mask[:, 1:] != 0], labels[:, 1:][mask[:, 1:] != 0])


def over_chosen_classes(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Labels are probabilities of all classes, `[batch, tokens, classes]` as the mask that selects."""
    chosen = [each[mask != 0].view(-1, logits.shape[-1]) for each in (logits, labels)]
    return nn.functional.cross_entropy(*chosen)


def over_the_labelled(logits: torch.Tensor, labels: torch.Tensor, mask: Any) -> torch.Tensor:
    """Samples that have a label at all, chosen by the probabilities given."""
    chosen = labels.sum(-1) > 0
    return nn.functional.cross_entropy(logits[chosen], labels[chosen])


def by_hand(logits: torch.Tensor, labels: torch.Tensor, mask: Any) -> torch.Tensor:
    terms = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return terms.sum() / (labels != 3).sum()


def contrastive(logits: torch.Tensor, labels: torch.Tensor, mask: Any) -> torch.Tensor:
    pooled = logits.mean(1)
    return nn.functional.cross_entropy(pooled @ pooled.T, torch.arange(len(logits)))


def test_labels_selected_by_a_mask() -> None:
    inputs = batch("causal", size=4)
    inputs["labels"][0, 2] = -100
    del inputs["attention_mask"]
    inputs["mask"] = torch.ones_like(inputs["input_ids"])
    inputs["mask"][1, 3:] = inputs["mask"][2, 5:] = 0
    rule = check_shares(with_loss(over_the_chosen), inputs, [1, 3])
    counted = (inputs["mask"][:, 1:] == 1) & (inputs["labels"][:, 1:] != -100)
    assert numbers_of(rule, inputs) == (int(counted.sum()),)


def test_probabilities_selected_by_a_mask() -> None:
    classes = FAMILIES["gpt2"].settings["vocab_size"]
    ids = batch("causal", size=4)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 3:] = mask[2, 5:] = 0
    inputs = {
        "input_ids": ids,
        "mask": mask[..., None].repeat(1, 1, classes),
        "labels": torch.rand(*ids.shape, classes, dtype=torch.float64).softmax(-1),
    }
    rule = check_shares(with_loss(over_chosen_classes), inputs, [1, 3])
    assert numbers_of(rule, inputs) == (int(mask.sum()) * classes,)


def test_probabilities_selected_by_their_values_are_inexact_even_if_all_of_the_first_are_chosen() -> None:
    ids = batch("causal", size=2)["input_ids"]
    labels = torch.rand(*ids.shape, FAMILIES["gpt2"].settings["vocab_size"], dtype=torch.float64).softmax(-1)
    rule = rule_of(with_loss(over_the_labelled), {"input_ids": ids, "labels": labels})
    assert not rule.exact and "selected by their values" in rule.reason


def test_router_losses_are_exact_against_accumulating_the_same_microbatches() -> None:
    model = FAMILIES["mixtral"].build()
    inputs = batch("causal", size=5)
    parts = microbatches(inputs, [2, 3])
    splits = split(model, 3)
    rule = splits[0].plan(parts[0]).loss
    assert rule is not None
    counts = [numbers_of(rule, part)[0] for part in parts]
    worker = copy.deepcopy(model)
    for part, count in zip(parts, counts, strict=True):
        (worker(**part).loss * count / sum(counts)).backward()
        step(splits, part, shares=rule.shares([count], [sum(counts)]))
    # The routers' softmax is taken in float32.
    assert largest_difference(split_gradients(splits), gradients([worker])) < 1e-7


def test_router_losses_beside_a_sum_over_items_are_averaged_over_microbatches() -> None:
    """The unsplit model adds the routers' loss once to a batch, whatever the number of items is."""
    model = FAMILIES["mixtral"].build()
    inputs = {**batch("causal", size=5), "num_items_in_batch": torch.tensor(50)}
    sizes = [2, 3]
    parts = microbatches(inputs, sizes)
    splits = split(model, 3)
    rule = splits[0].plan(parts[0]).loss
    assert rule is not None and not rule.exact and "more than the results of torch's loss functions" in rule.reason
    totals = [sum(counts) for counts in zip(*(numbers_of(rule, part) for part in parts), strict=True)]
    worker = copy.deepcopy(model)
    for part, size in zip(parts, sizes, strict=True):
        output = worker(**part)
        routers = worker.router_aux_loss_coef * output.aux_loss
        expected = output.loss - routers + routers * size / 5
        expected.backward()
        found = step(splits, part, shares=rule.shares(numbers_of(rule, part), totals)).loss
        assert found.item() == pytest.approx(expected.item(), abs=1e-7)
    # The routers' softmax is taken in float32.
    assert largest_difference(split_gradients(splits), gradients([worker])) < 1e-7
    plain = rule_of(FAMILIES["gpt2"].build(), inputs)
    assert numbers_of(plain, inputs) == (1,), "a loss that is nothing else is not touched"


@pytest.mark.parametrize(("take", "reason"), [(by_hand, "reduction='none'"), (contrastive, "no input")])
def test_other_losses_are_weighted_by_samples_and_said_to_be_inexact(take: Any, reason: str) -> None:
    inputs = {"input_ids": torch.arange(12).view(4, 3), "labels": torch.arange(12).view(4, 3)}
    rule = rule_of(with_loss(take), inputs)
    assert not rule.exact and reason in rule.reason
    assert numbers_of(rule, inputs) == (4,)


# Of two means, the logits, and a number of the criterion's own.
MADE_OF_MEANS: dict[str, Callable[..., torch.Tensor]] = {
    "scaled": lambda a, b, logits, weight: 3 * a / 7 - b.double() + 1,
    "weighted by a tensor": lambda a, b, logits, weight: torch.exp(-weight) * a + weight.pow(2),
    "stacked": lambda a, b, logits, weight: (torch.stack([a, b]) * torch.tensor([0.3, 2.0])).sum(),
    "added in place": lambda a, b, logits, weight: torch.zeros(()).double().add_(a).add_(b, alpha=0.5),
    "logged": lambda a, b, logits, weight: a + 0 * len(str(b.item())),
}
NO_MEANS: dict[str, Callable[..., torch.Tensor]] = {
    "root": lambda a, b, logits, weight: a.sqrt(),
    "logarithm": lambda a, b, logits, weight: torch.log(a),
    "product": lambda a, b, logits, weight: a * b,
    "ratio": lambda a, b, logits, weight: a / b,
    "flooding": lambda a, b, logits, weight: (a - 0.4).abs() + 0.4,
    "clamped in place": lambda a, b, logits, weight: a.clone().clamp_(max=0.5),
    "with a deviation": lambda a, b, logits, weight: a + logits.std(),
    "with a distance to the centre": lambda a, b, logits, weight: a + (logits - logits.mean(0)).pow(2).mean(),
    "chosen": lambda a, b, logits, weight: max(a, b, key=lambda loss: loss > 1.0) ** 2,
    "the larger": lambda a, b, logits, weight: max(10 * a - 4.9, b),
}


@pytest.mark.parametrize("name", [*MADE_OF_MEANS, *NO_MEANS])
def test_a_loss_counts_as_exact_just_if_its_shares_add_up(name: str) -> None:
    """The oracle is the loss of the whole batch at once."""
    model = Family("BertForSequenceClassification", "BertConfig", {**SMALL_BERT, "num_labels": 3}, "classes").build()
    inputs = batch("classes", size=6)
    del inputs["labels"]
    inputs["wanted"] = torch.linspace(-1, 2, 18, dtype=torch.float64).view(6, 3)
    make = {**MADE_OF_MEANS, **NO_MEANS}[name]

    def criterion(output: Any, inputs: Batch) -> torch.Tensor:
        means = (
            nn.functional.mse_loss(output.logits, inputs["wanted"]),
            nn.functional.l1_loss(output.logits, inputs["wanted"]),
        )
        return make(*means, output.logits, weight)

    weight = torch.tensor(0.3, dtype=torch.float64)  # a trained one is refused
    whole = criterion(model(**{key: value for key, value in inputs.items() if key != "wanted"}), inputs).item()
    splits = split(model, 2)
    parts = microbatches(inputs, [1, 2, 3])
    rule = splits[0].plan(parts[0], criterion=criterion).loss
    assert rule is not None
    shares = (rule.shares(numbers_of(rule, part), [6] * len(rule.counted)) for part in parts)
    losses = [
        step(splits, part, shares=share, criterion=criterion).loss.item()
        for part, share in zip(parts, shares, strict=True)
    ]
    assert rule.exact == (name in MADE_OF_MEANS) == (abs(sum(losses) - whole) < TOLERANCE), (rule, sum(losses) - whole)


def test_a_criterion_that_returns_nothing_is_told_so() -> None:
    with pytest.raises(CriterionError, match=r"tensor of shape \(\), but returned None"):
        loss_by(lambda outputs, inputs: None, {}, {})  # type: ignore[arg-type, return-value]  # a user's mistake


class Noting:
    """A criterion that notes its losses, as many do for a curve of their own."""

    def __init__(self) -> None:
        self.average, self.last = torch.zeros(()), 0.0
        self.history: list[float] = []
        self.curves: dict[str, list[float]] = {"train": []}

    def __call__(self, outputs: Any, inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = outputs.loss
        self.last = loss.item()
        self.history.append(self.last)
        self.curves["train"].append(self.last)
        self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss


def noted_in(history: list[float], outputs: Any, inputs: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs.loss
    history.append(loss.item())
    return loss


class Meter(nn.Module):
    """A criterion with a metric, as of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Module()
        self.inside.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs: Any, inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = outputs.loss
        self.inside.mean.add_(loss.detach())
        return loss


def test_following_a_forward_leaves_nothing_in_what_a_criterion_keeps() -> None:
    """It runs with zeros, and with numbers up to 1,000, as Python reads its loss."""
    model, criterion, calls = split(FAMILIES["gpt2"].build(), 2)[0], Noting(), 0

    def counting(outputs: Any, inputs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return criterion(outputs, inputs)

    meter = Meter()
    for each in (criterion, criterion.__call__, counting, functools.partial(noted_in, criterion.history), meter):
        rule = model.plan(batch("causal", 2), criterion=each).loss
        assert rule is not None and rule.exact
    assert (criterion.last, criterion.history, criterion.curves, calls) == (0.0, [], {"train": []}, 0)
    assert criterion.average == 0 and meter.inside.mean == 0


class Averaging(nn.Module):
    """Keeps a running mean in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.mean, self.kept = torch.ones(()), {"largest": torch.ones(())}

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = torch.tanh(block(x))
        self.mean.mul_(0.9)
        self.kept["largest"].copy_(self.mean + 1)
        return {"loss": x.square().mean(), "x": x}


def test_following_a_forward_leaves_tensors_of_a_model_as_they_were() -> None:
    model = split(Averaging(), 2)[0]
    model.plan({"x": torch.ones(4, 4)})
    assert model.model.mean == 1 and model.model.kept["largest"] == 1

"""Every loss function of torch with every reduction, and what users make of them: the sum over microbatches against the
unsplit model on the whole batch, as a criterion and inside the model's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.modeling.graph.loss import CriterionError, LossRule, read_counts
from penstock.modeling.stage.split import SplitModel
from tests.support.stage_driver import gradients, largest_difference, split, split_gradients, step
from tests.support.training import kept_in_double

Inputs = Mapping[str, Any]
# What was predicted, what it is compared with, the reduction.
Loss = Callable[[torch.Tensor, Inputs, str], torch.Tensor]
SAMPLES, TOKENS, CLASSES = 6, 5, 7
SIZES = [1, 2, 3]
IGNORED = -100


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with kept_in_double():
        yield


class Blocks(nn.Module):
    """Predicts (samples, tokens, classes)."""

    def __init__(self, loss: Callable[[torch.Tensor, Inputs], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(CLASSES, CLASSES) for _ in range(3)])
        self.loss = loss

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,
        positive_labels: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        signs: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        total: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.loss is None or labels is None:
            return {"logits": x}
        given = {"labels": labels, "positive_labels": positive_labels, "values": values, "signs": signs}
        given |= {"lengths": lengths, "mask": mask, "total": total, "num_items_in_batch": num_items_in_batch}
        return {"loss": self.loss(x, given), "logits": x}


def whole_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES, (SAMPLES, TOKENS), generator=generator)
    labels[0, 1:] = labels[3, :2] = labels[4, 4] = IGNORED
    mask = torch.ones(SAMPLES, TOKENS, dtype=torch.int64)
    mask[0, 3:] = mask[2, 1:] = mask[5, 4:] = 0
    return {
        "x": torch.randn(SAMPLES, TOKENS, CLASSES, generator=generator, dtype=torch.float64),
        "labels": labels,
        "positive_labels": labels.clamp(min=0),
        "values": torch.rand(SAMPLES, TOKENS, CLASSES, generator=generator, dtype=torch.float64),
        "signs": torch.randint(0, 2, (SAMPLES, TOKENS), generator=generator) * 2 - 1,
        "lengths": torch.tensor([2, 1, 2, 2, 1, 2]),
        "mask": mask,
    }


def flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.reshape(-1, logits.shape[-1])


WEIGHTS = torch.linspace(0.1, 3.0, CLASSES, dtype=torch.float64)
F: Any = functional
FUNCTIONS: dict[str, Loss] = {
    "cross_entropy": lambda p, i, r: F.cross_entropy(flat(p), i["labels"].flatten(), reduction=r),
    "cross_entropy, classes second": lambda p, i, r: F.cross_entropy(p.transpose(1, 2), i["labels"], reduction=r),
    "cross_entropy, weights": lambda p, i, r: F.cross_entropy(
        flat(p), i["labels"].flatten(), weight=WEIGHTS, reduction=r
    ),
    "cross_entropy, weights made anew": lambda p, i, r: F.cross_entropy(
        flat(p), i["labels"].flatten(), torch.linspace(0.1, 3.0, CLASSES, dtype=torch.float64), reduction=r
    ),
    "cross_entropy, weights and shifted": lambda p, i, r: F.cross_entropy(
        flat(p[:, :-1]), i["labels"][:, 1:].flatten(), weight=WEIGHTS, reduction=r
    ),
    "cross_entropy, weights and smoothing": lambda p, i, r: F.cross_entropy(
        flat(p), i["labels"].flatten(), weight=WEIGHTS, label_smoothing=0.2, reduction=r
    ),
    "cross_entropy, smoothing": lambda p, i, r: F.cross_entropy(
        flat(p), i["labels"].flatten(), label_smoothing=0.2, reduction=r
    ),
    "cross_entropy, another index": lambda p, i, r: F.cross_entropy(
        flat(p), i["positive_labels"].flatten(), ignore_index=3, reduction=r
    ),
    "cross_entropy, probabilities": lambda p, i, r: F.cross_entropy(
        flat(p), flat(i["values"]).softmax(-1), reduction=r
    ),
    "nll_loss": lambda p, i, r: F.nll_loss(flat(p).log_softmax(-1), i["labels"].flatten(), reduction=r),
    "nll_loss, weights": lambda p, i, r: F.nll_loss(
        flat(p).log_softmax(-1), i["labels"].flatten(), weight=WEIGHTS, reduction=r
    ),
    "mse_loss": lambda p, i, r: F.mse_loss(p, i["values"], reduction=r),
    "l1_loss": lambda p, i, r: F.l1_loss(p, i["values"], reduction=r),
    "smooth_l1_loss": lambda p, i, r: F.smooth_l1_loss(p, i["values"], reduction=r),
    "huber_loss": lambda p, i, r: F.huber_loss(p, i["values"], reduction=r, delta=0.3),
    "binary_cross_entropy": lambda p, i, r: F.binary_cross_entropy(p.sigmoid(), i["values"], reduction=r),
    "binary_cross_entropy, weight": lambda p, i, r: F.binary_cross_entropy(
        p.sigmoid(), i["values"], weight=WEIGHTS, reduction=r
    ),
    "binary_cross_entropy_with_logits": lambda p, i, r: F.binary_cross_entropy_with_logits(p, i["values"], reduction=r),
    "binary_cross_entropy_with_logits, pos_weight": lambda p, i, r: F.binary_cross_entropy_with_logits(
        p, i["values"], pos_weight=WEIGHTS, reduction=r
    ),
    "kl_div": lambda p, i, r: F.kl_div(p.log_softmax(-1), i["values"].softmax(-1), reduction=r),
    "kl_div, log_target": lambda p, i, r: F.kl_div(
        p.log_softmax(-1), i["values"].log_softmax(-1), reduction=r, log_target=True
    ),
    "poisson_nll_loss": lambda p, i, r: F.poisson_nll_loss(p, i["values"], reduction=r),
    "poisson_nll_loss, full": lambda p, i, r: F.poisson_nll_loss(p, 3 * i["values"], full=True, reduction=r),
    "gaussian_nll_loss": lambda p, i, r: F.gaussian_nll_loss(p, i["values"], p.exp(), reduction=r),
    "hinge_embedding_loss": lambda p, i, r: F.hinge_embedding_loss(p[..., 0], i["signs"], reduction=r),
    "soft_margin_loss": lambda p, i, r: F.soft_margin_loss(p[..., 0], i["signs"], reduction=r),
    "margin_ranking_loss": lambda p, i, r: F.margin_ranking_loss(
        p[..., 0], p[..., 1], i["signs"], margin=0.1, reduction=r
    ),
    "cosine_embedding_loss": lambda p, i, r: F.cosine_embedding_loss(
        flat(p), flat(i["values"]), i["signs"].flatten(), reduction=r
    ),
    "triplet_margin_loss": lambda p, i, r: F.triplet_margin_loss(p, i["values"], p.flip(-1), reduction=r),
    "triplet_margin_with_distance_loss": lambda p, i, r: F.triplet_margin_with_distance_loss(
        p, i["values"], p.flip(-1), reduction=r
    ),
    "multi_margin_loss": lambda p, i, r: F.multi_margin_loss(flat(p), i["positive_labels"].flatten(), reduction=r),
    "multi_margin_loss, weight": lambda p, i, r: F.multi_margin_loss(
        flat(p), i["positive_labels"].flatten(), weight=WEIGHTS, reduction=r
    ),
    "multilabel_margin_loss": lambda p, i, r: F.multilabel_margin_loss(
        flat(p), i["positive_labels"].flatten()[:, None].expand(-1, CLASSES).contiguous(), reduction=r
    ),
    "multilabel_soft_margin_loss": lambda p, i, r: F.multilabel_soft_margin_loss(
        flat(p), flat(i["values"]).round(), reduction=r
    ),
    "ctc_loss": lambda p, i, r: F.ctc_loss(
        p.transpose(0, 1).log_softmax(-1),
        i["positive_labels"].clamp(min=1),
        torch.full((len(p),), TOKENS),
        i["lengths"],
        reduction=r,
        zero_infinity=True,
    ),
}
# It takes the head's weight itself.
LEFT_OUT = {"linear_cross_entropy"}


def test_no_loss_function_of_torch_is_forgotten() -> None:
    names = {name for name in dir(functional) if name.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits"))}
    assert {*names, "kl_div"} - LEFT_OUT == {name.partition(",")[0] for name in FUNCTIONS}


USES: dict[str, Callable[[Loss, torch.Tensor, Inputs], torch.Tensor]] = {
    "mean": lambda loss, p, i: loss(p, i, "mean"),
    "sum": lambda loss, p, i: loss(p, i, "sum"),
    "mean by hand": lambda loss, p, i: loss(p, i, "none").mean(),
    "sum by hand": lambda loss, p, i: loss(p, i, "none").sum(),
    "sum over samples": lambda loss, p, i: loss(p, i, "sum") / len(p),
    "scaled": lambda loss, p, i: 0.5 * loss(p, i, "mean"),
    "with a penalty": lambda loss, p, i: loss(p, i, "mean") + 0.01 * p.logsumexp(-1).pow(2).mean(),
    "with another": lambda loss, p, i: loss(p, i, "mean") + 3 * F.cross_entropy(flat(p), i["labels"].flatten()),
}


def microbatches(inputs: Inputs) -> list[dict[str, Any]]:
    parts = {name: value.split(SIZES) if value.dim() else [value] * len(SIZES) for name, value in inputs.items()}
    return [{name: values[index] for name, values in parts.items()} for index in range(len(SIZES))]


def blocks(loss: Callable[..., torch.Tensor] | None = None) -> Blocks:
    torch.manual_seed(0)
    return Blocks(loss).double()


@cache
def whole_and_stages() -> tuple[Blocks, list[SplitModel]]:
    return blocks(), split(blocks(), 2)


def compared(
    loss: Callable[..., torch.Tensor], as_criterion: bool = True, **more: torch.Tensor
) -> tuple[LossRule, float]:
    """The rule, and how far the loss and the gradients are from those of the unsplit model on the whole batch."""
    inputs = whole_batch() | more
    whole, splits = whole_and_stages() if as_criterion else (blocks(), split(blocks(loss), 2))
    for model in (whole, *(one.model for one in splits)):
        model.zero_grad()
    expected = loss(whole(inputs["x"])["logits"], inputs)
    expected.backward()

    def criterion(outputs: Any, inputs: Inputs) -> torch.Tensor:
        return loss(outputs["logits"], inputs)

    given, parts = criterion if as_criterion else None, microbatches(inputs)
    rule = splits[0].plan(parts[0], criterion=given).loss
    assert rule is not None
    counts = read_counts([rule.count_later(part, size) for part, size in zip(parts, SIZES, strict=True)])
    totals = [sum(column) for column in zip(*counts, strict=True)]
    found = sum(
        step(splits, part, shares=rule.shares(count, totals), criterion=given).loss.item()
        for part, count in zip(parts, counts, strict=True)
    )
    far = largest_difference(split_gradients(splits), gradients([whole]))
    return rule, max(abs(found - expected.item()), far)


IN_FORWARD = ("mean", "sum by hand", "with a penalty")


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_criterion_is_exact(name: str, use: str) -> None:
    rule, far = compared(partial(USES[use], FUNCTIONS[name]))
    assert rule.exact and far < 1e-10, (rule, far)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_loss_in_the_models_forward_is_exact(name: str) -> None:
    use = IN_FORWARD[list(FUNCTIONS).index(name) % len(IN_FORWARD)]
    rule, far = compared(partial(USES[use], FUNCTIONS[name]), as_criterion=False)
    assert rule.exact and far < 1e-10, (use, rule, far)


def tokens(p: torch.Tensor, i: Inputs, **more: Any) -> torch.Tensor:
    loss: torch.Tensor = F.cross_entropy(flat(p), i["labels"].flatten(), **more)
    return loss


def focal(p: torch.Tensor, i: Inputs) -> torch.Tensor:
    taken = p.log_softmax(-1).gather(-1, i["positive_labels"][..., None])[..., 0]
    return -((1 - taken.exp()) ** 2 * taken * (i["labels"] != IGNORED))


# `n` is the number of labels in the whole batch, as the Trainer counts them.
BY_HAND: dict[str, Callable[[torch.Tensor, Inputs], torch.Tensor]] = {
    "focal, mean": lambda p, i: focal(p, i).mean(),
    "focal, over items": lambda p, i: focal(p, i).sum() / i["n"],
    "focal, over elements": lambda p, i: focal(p, i).sum() / i["labels"].numel(),
    "focal, over samples": lambda p, i: (focal(p, i) / len(p)).sum(),
    "focal, over a constant": lambda p, i: focal(p, i).sum() / 100,
    "focal, chosen and summed": lambda p, i: focal(p, i)[i["labels"] != IGNORED].sum() / i["n"],
    "focal, by an index": lambda p, i: (
        flat(p).log_softmax(-1)[torch.arange(len(flat(p))), i["positive_labels"].flatten()].mean()
    ),
    "masked sum": lambda p, i: (p.pow(2).sum(-1) * i["mask"]).sum(),
    "items and a mean": lambda p, i: tokens(p, i, reduction="sum") / i["n"] + 0.01 * p.logsumexp(-1).pow(2).mean(),
    "a sum and items by hand": lambda p, i: tokens(p, i) + focal(p, i).sum() / i["n"],
    "items and a constant": lambda p, i: tokens(p, i, reduction="sum") / i["n"] + 2.0,
    "a sum over elements": lambda p, i: tokens(p, i, reduction="sum") / i["labels"].numel(),
    "a mean over items": lambda p, i: p.pow(2).mean() / i["n"],
    "a mean times samples": lambda p, i: p.pow(2).mean() * len(p),
    "samples and classes": lambda p, i: p.mean(1).pow(2).mean(0).sum() + p.pow(2).flatten().mean(),
    "weighed by a number": lambda p, i: torch.tensor(0.3).double() * p.pow(2).mean() + tokens(p, i) / 7,
    "in place": lambda p, i: p.pow(2).mul_(0.5).mean().add_(1.0),
    "several": lambda p, i: torch.stack([p.pow(2).mean(), p.abs().mean(), tokens(p, i)]).sum(),
    "classes weighed twice": lambda p, i: tokens(p, i, weight=WEIGHTS) + tokens(p, i, weight=WEIGHTS.flip(0)),
}
# What is neither a mean nor a sum, or whose count cannot be known before.
NEITHER: dict[str, Callable[[torch.Tensor, Inputs], torch.Tensor]] = {
    "a masked mean": lambda p, i: (p.pow(2).sum(-1) * i["mask"]).sum() / i["mask"].sum(),
    "a mean over the chosen": lambda p, i: focal(p, i)[i["labels"] != IGNORED].mean(),
    "similarities": lambda p, i: F.mse_loss(flat(p) @ flat(p).T, flat(i["values"]) @ flat(i["values"]).T),
    "similarities, summed": lambda p, i: (p.mean(1) @ p.mean(1).T).sum(),
    "to the centre": lambda p, i: (p - p.mean(0)).pow(2).mean(),
    "normalised": lambda p, i: F.mse_loss(p / p.std(), i["values"]),
    "over samples": lambda p, i: p.log_softmax(0).mean(),
    "neighbours": lambda p, i: F.mse_loss(p, p.roll(1, 0).detach()),
    "reversed": lambda p, i: (p * p.flip(0)).mean(),
    "halves": lambda p, i: F.logsigmoid(p[: len(p) // 2].mean(1) - p[len(p) // 2 :].mean(1).sum(0)).mean(),
    "the first": lambda p, i: p[:1].pow(2).mean(),
    "the largest": lambda p, i: p.pow(2).amax(),
    "a root": lambda p, i: p.pow(2).mean().sqrt(),
    "a product": lambda p, i: p.pow(2).mean() * tokens(p, i),
    "a square of samples": lambda p, i: p.pow(2).sum() * len(p),
    "what the labels decide": lambda p, i: F.cross_entropy(
        flat(p), i["positive_labels"].masked_fill(i["positive_labels"] == 5, IGNORED).flatten()
    ),
    "what the model decides": lambda p, i: F.cross_entropy(
        flat(p), i["labels"].masked_fill(p.softmax(-1).amax(-1) > 0.3, IGNORED).flatten()
    ),
    "changed labels": lambda p, i: F.cross_entropy(flat(p), i["labels"].clamp(min=0).flatten(), ignore_index=0),
}


def of_numbers(loss: Callable[..., torch.Tensor], p: torch.Tensor, i: Inputs) -> torch.Tensor:
    return loss(p, {**i, "n": i["num_items_in_batch"]})


@pytest.mark.parametrize("name", [*BY_HAND, *NEITHER])
def test_a_loss_by_hand_is_exact_or_said_not_to_be(name: str) -> None:
    number = (whole_batch()["labels"] != IGNORED).sum()
    rule, far = compared(partial(of_numbers, {**BY_HAND, **NEITHER}[name]), num_items_in_batch=number)
    assert rule.exact == (name in BY_HAND) == (far < 1e-10), (rule, far)


class WithPositions(Blocks):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x + position_ids.sum(0)[..., None], labels)


def test_a_loss_by_hand_beside_positions_along_three_axes_is_exact() -> None:
    """Their samples are in the second dimension."""
    torch.manual_seed(0)
    model: Any = WithPositions(lambda p, i: p.pow(2).mean()).double()
    given = {name: whole_batch()[name] for name in ("x", "labels")}
    given["position_ids"] = torch.arange(TOKENS).expand(3, SAMPLES, TOKENS)
    model.dummy_inputs = given
    rules = [split(model, 2)[0].plan(inputs).loss for inputs in (given, dict(reversed(given.items())))]
    assert all(rule is not None and rule.exact for rule in rules), rules


def test_a_loss_that_decides_what_python_does_is_said_to_be_neither() -> None:
    rule, _ = compared(lambda p, i: p.pow(2).mean() * (2 if p.pow(2).mean() > 0.1 else 3))
    assert not rule.exact


def read_in(loss: Callable[[torch.Tensor, Any], torch.Tensor], read: Callable[[torch.Tensor], Any]) -> Any:
    """A loss by what Python reads of the norm of what was predicted."""
    return lambda p, i: loss(p, read(p.norm()))


def squared(p: torch.Tensor, number: Any = 1.0) -> torch.Tensor:
    return p.pow(2).mean() * number


def shrunk(p: torch.Tensor, i: Inputs) -> torch.Tensor:
    while p.norm().item() > 3:
        p = p / 1.1
    return squared(p)


READ: dict[str, Callable[[torch.Tensor, Inputs], torch.Tensor]] = {
    "a number": lambda p, i: squared(p) / (squared(p).item() + 1),
    "a tensor of it": read_in(squared, lambda norm: torch.tensor(norm.item())),
    "a filled tensor": read_in(squared, lambda norm: torch.full((), norm.item())),
    "a large filled tensor": read_in(lambda p, n: (squared(p) * torch.full((300, 300), n)).mean(), torch.Tensor.item),
    "a whole number": read_in(squared, lambda norm: int(100 * norm.item())),
    "by NumPy": read_in(squared, lambda norm: float(norm.detach().numpy())),
    "as a list": lambda p, i: squared(p, p.norm(dim=(1, 2)).tolist()[0]),
    "a place": lambda p, i: squared(p, p.argmax().item() + 1),
    "a deviation": lambda p, i: squared(p, p.std().item()),
    "in a loss function": read_in(lambda p, n: F.mse_loss(p * n, torch.ones_like(p)), torch.Tensor.item),
    "by a threshold": read_in(lambda p, n: squared(p, 2 if n > 3 else 1), torch.Tensor.item),
    "by a far threshold": read_in(lambda p, n: squared(p, 2 if n < 5 else 1), torch.Tensor.item),
    "by a comparison": read_in(squared, lambda norm: 2 if norm > 3 else 1),
    "as long as": shrunk,
    "so often": read_in(lambda p, n: sum((squared(p) for _ in range(int(10 * n))), squared(p)), torch.Tensor.item),
}
# They are the same for every batch, as these go.
UNSEEN = {"by a far threshold"}


@pytest.mark.parametrize("name", READ)
def test_a_loss_by_what_python_reads_of_computed_values_is_said_to_be_neither(name: str) -> None:
    rule, far = compared(READ[name])
    assert not rule.exact and (name in UNSEEN or far > 1e-6)
    assert "a number that Python reads" in rule.reason


def test_a_loss_over_values_too_many_to_be_followed_by_what_python_reads_is_said_to_be_neither() -> None:
    inputs = {"x": torch.ones(2, 40_000, CLASSES, dtype=torch.float64), "labels": torch.zeros(2, 40_000).long()}
    for read in (
        lambda p: p.norm().item(),
        lambda p: 2 if p.norm().item() > 30 else 1,
        lambda p: 2 if (p > 0.5).any() else 1,
    ):
        rule = split(blocks(lambda p, i, read=read: squared(p, read(p))), 2)[0].plan(inputs).loss
        assert rule is not None and "a number that Python reads" in rule.reason


class Between(Blocks):
    """Has a change of what a layer is given."""

    def __init__(self, change: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
        super().__init__()
        self.change = change
        self.dummy_inputs = {"x": whole_batch()["x"]}

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return {"loss": squared(self.layers[-1](self.change(x, x.norm().item())))}


def changed_in_part(x: torch.Tensor, number: float) -> torch.Tensor:
    made = torch.zeros_like(x)
    made[:, 0] = x[:, 0] * number
    return made


def logged_beside_a_part(x: torch.Tensor, number: float) -> torch.Tensor:
    made = torch.zeros_like(x)
    made[:, 0] = x[:, 0]
    Log.last = x.detach().mean() / (number + 1)
    return made


def turned(x: torch.Tensor, number: float) -> torch.Tensor:
    """By a complex constant, as rotary embeddings are."""
    Log.last = number
    angles = torch.arange(x.shape[-1], dtype=x.dtype)
    return torch.real(x * torch.polar(torch.ones_like(angles), angles))


def test_a_loss_is_also_by_what_python_reads_before_a_layer() -> None:
    changes: dict[Callable[[torch.Tensor, float], torch.Tensor], bool] = {
        changed_in_part: False,
        torch.mul: False,
        lambda x, number: x[:, : 1 + int(number)]: False,
        lambda x, number: x * 0.5: True,
        logged_beside_a_part: True,
        turned: True,
    }
    for change, exact in changes.items():
        rule = split(Between(change).double(), 1)[0].plan({"x": whole_batch()["x"]}).loss
        assert rule is not None and rule.exact == exact, change


class Log:
    """What a loss that only logs has noted."""

    last: Any = None


def printed(p: torch.Tensor, i: Inputs) -> torch.Tensor:
    loss = squared(p) / 3.0
    print(loss.item(), f"{float(loss.detach()):.2f}", loss)
    return loss


def noted(p: torch.Tensor, i: Inputs) -> torch.Tensor:
    Log.last = torch.tensor([p.norm().item()]).mean() + p.detach().norm().item() * p.detach().mean()
    return squared(p) / 3.0


def noted_where_it_is_large(p: torch.Tensor, i: Inputs) -> torch.Tensor:
    if p.norm().item() > 0.5:
        Log.last = p.detach().abs().clone().max().item()
    return squared(p) / 3.0


def raising_where_it_is_large(p: torch.Tensor, i: Inputs) -> torch.Tensor:
    if squared(p).item() > 100:
        raise ArithmeticError("it diverges")
    return squared(p) / 3.0


@pytest.mark.parametrize("loss", [printed, noted, noted_where_it_is_large, raising_where_it_is_large])
def test_a_loss_whose_code_only_prints_notes_or_checks_a_number_is_exact(
    loss: Callable[..., torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    rule, far = compared(loss)
    assert rule.exact and far < 1e-10
    assert bool(capsys.readouterr().out) == (loss is printed)


def test_a_sum_and_a_mean_that_microbatches_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(
        CriterionError, match="adds a sum over samples, or one divided by num_items_in_batch, to a mean"
    ):
        compared(lambda p, i: focal(p, i).sum() + p.pow(2).mean())


def test_weights_of_classes_that_change_are_an_error() -> None:
    weights = WEIGHTS.clone()

    def weighted(outputs: Any, inputs: Inputs) -> torch.Tensor:
        return tokens(outputs["logits"], inputs, weight=weights.clone())

    splits, inputs = split(blocks(), 2), microbatches(whole_batch())[1]
    step(splits, inputs, shares=(1.0,), criterion=weighted)
    weights[0] = 5.0
    with pytest.raises(CriterionError, match=r"weights of classes that the loss gives .* have changed"):
        step(splits, inputs, shares=(1.0,), criterion=weighted)

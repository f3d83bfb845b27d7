"""A forward that goes another way than when it was followed: over stages it is followed anew, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import penstock
from penstock.modeling.placeholders.unreceived import Unreceived, has_unreceived
from tests.support import stage_driver
from tests.support.pool import Pool
from tests.support.training import EXACT, gradients_of

WIDTH, ROWS, STEPS = 4, 7, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Four blocks; attributes, and the values of its inputs, may change what it does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.skips, self.depth, self.looks, self.calls = 0.0, 4, False, 0
        self.states: list[Any] = [None] * 4
        self.counts = self.counts_later = self.recurs = self.says_later = False
        self.said = (0.25, torch.Size([WIDTH]))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        skips = self.skips or (self.looks and bool((x.abs() > 9).any())) or (self.counts and self.calls > 3)
        x = start = self.first(x)
        for number, block in enumerate(self.blocks[: self.depth]):
            x = block(x)
            if number == 2 and skips:
                x = x + start
            if self.recurs:
                x = x if self.states[number] is None else x + self.states[number].mean(0)
                self.states[number] = x.detach()
        x = self.last(x)
        self.calls += self.counts_later
        if self.says_later:
            self.depth, self.said = self.depth, (float(str(0.25)), x.shape[1:])
        return functional.mse_loss(x, target)


def batches(large: int | None = None) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    found = [
        {name: torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) for name in ("x", "target")}
        for _ in range(STEPS)
    ]
    if large is not None:
        found[large]["x"][:, 0] = 10.0
    return found


def made(change: Callable[[Any], None]) -> Any:
    torch.manual_seed(3)
    model = Chain().double()
    change(model)
    return model


def split(model: nn.Module, schedule: str = "1f1b") -> Any:
    options = {"pipeline_parallel_size": 2, "num_microbatches": 3, "schedule": schedule}
    return penstock.initialize(model, {"model_parallelism": options}, example_inputs=batches()[0])


def steps_of(model: Any, change: Callable[[Any, int], None], losses: Callable[[Any, Any], Any]) -> list[Any]:
    found = []
    for step, batch in enumerate(batches()):
        change(model, step)
        model.zero_grad()
        total = 0.0
        for loss in losses(model, batch):
            loss.backward()
            total += loss.item()
        found.append((total, gradients_of(model)))
    return found


def skip_later(model: Any, step: int) -> None:
    model.skips = 0.5 * step


def grow(model: Any, step: int) -> None:
    model.depth = 2 + step


def freeze_mode(model: Any, step: int) -> None:
    model.blocks[0].train(step != 1)


CHANGES = (skip_later, grow, freeze_mode)


def compared_with_unsplit() -> None:
    for change in CHANGES:
        expected = steps_of(made(lambda _: None), change, lambda model, batch: [model(**batch)])
        model = split(made(partial(change, step=0)))
        found = steps_of(model, change, lambda model, batch: (out.loss for out in model(**batch)))
        for (loss, gradients), (wanted, of_unsplit) in zip(found, expected, strict=True):
            assert abs(loss - wanted) < EXACT, change
            for name, gradient in gradients.items():
                other = of_unsplit[name]
                assert (gradient is None) == (other is None), (change, name)
                assert gradient is None or other is None or torch.allclose(gradient, other, atol=EXACT), (change, name)


def test_attributes_that_change_between_steps_are_followed_exactly(pool: Pool) -> None:
    pool.run(2, compared_with_unsplit)


def says_tuple(model: Any) -> None:
    model.blocks[1].register_forward_hook(lambda module, args, output: (output, output))
    model.blocks[2].register_forward_pre_hook(lambda module, args: args[0])


def look(model: Any) -> None:
    model.looks = True


def count(model: Any) -> None:
    model.counts = True


def train(change: Callable[[Any], None], large: int | None = None, schedule: str = "1f1b") -> None:
    model = split(made(change), schedule)
    for batch in batches(large):
        for out in model(**batch):
            out.loss.backward()


ERRORS = {
    "values of inputs": (look, 1, "depends on a value of another stage, which did not matter"),
    "a count of forwards": (count, None, "depends on a value of another stage, which did not matter"),
    "a hook's output": (says_tuple, None, "returned a tuple of 2, but a tensor was found"),
}


@pytest.mark.parametrize("of", ERRORS)
def test_a_way_that_was_not_followed_is_an_error_that_names_it_on_all_ranks(pool: Pool, of: str) -> None:
    change, large, words = ERRORS[of]
    for outcome in pool.run(2, train, change, large, outcomes=True):
        assert isinstance(outcome, RuntimeError)
        assert words in str(outcome)


def count_later(model: Any) -> None:
    model.counts_later = True


def say_later(model: Any) -> None:
    model.says_later = True


def recur(model: Any) -> None:
    model.recurs = True


def pruned(model: Any) -> None:
    for block in model.blocks:
        prune.l1_unstructured(block.linear, "weight", 0.5)  # type: ignore[no-untyped-call]


def warned_of(changes: Sequence[Callable[[Any], None]], schedule: str = "1f1b") -> list[list[str]]:
    found = []
    for change in changes:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(change, schedule=schedule)
        found.append([str(each.message) for each in caught])
    return found


def test_what_is_changed_after_a_stages_units_is_warned_of_and_what_each_forward_makes_anew_is_not(pool: Pool) -> None:
    changes = (count_later, recur, pruned, say_later)
    later, states, weights, equal = zip(*pool.run(2, warned_of, changes), strict=True)
    for said, name in ((later, "calls"), (states, "states")):
        [text] = [text for texts in said for text in texts]
        assert f"changes attributes ({name}) after the units of earlier stages" in text
    assert [*weights] == [*equal] == [[], []]


def test_what_is_changed_by_each_of_a_ranks_stages_is_warned_of(pool: Pool) -> None:
    [first], [second] = pool.run(2, warned_of, (count_later,), "zb-v")
    [text] = first + second
    assert "changes attributes (calls), and a rank that holds several stages runs it for each of them" in text


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.blocks(x)
        return hidden.mean()


def test_a_lazy_module_without_a_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"blocks\.0\.weight of this Lazy has no shape yet"):
        penstock.initialize(Lazy(), {"model_parallelism": {"pipeline_parallel_size": 1}})


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_is_computed_from_a_value_that_was_not_received_is_told_from_what_only_has_its_shape(mode: Any) -> None:
    with mode():
        value = Unreceived.of(torch.zeros(2, 3))
        plain = torch.ones(2, 3)
        computed = (value + 1, value.T, torch.zeros_like(value), torch.cat([plain, value]), value[0], value.chunk(2))
        assert all(map(has_unreceived, computed))
        only_shaped = (
            plain.to(value), plain.expand_as(value), plain.view_as(value), plain.type_as(value),
            torch.zeros(value.shape), plain[:, 0], plain,
        )  # fmt: skip
        assert not any(map(has_unreceived, only_shaped))
        pieces = torch.broadcast_tensors(plain, value)
        assert [*map(has_unreceived, pieces)] == [False, True]
        buffer, result = torch.zeros(4, 3), torch.zeros(2, 3)
        buffer[:2] = value
        torch.add(plain, value, out=result)
        assert has_unreceived(buffer) and has_unreceived(result) and not has_unreceived(plain)
        assert has_unreceived({"a": [plain, Pack(buffer * 2)]})


def test_one_that_is_made_later_is_one_at_once_and_made_once() -> None:
    made = []

    def make() -> torch.Tensor:
        made.append(torch.zeros(2, 3))
        return made[-1]

    value = Unreceived.later(make)
    assert has_unreceived(value) and not made
    assert value.shape == (2, 3) and has_unreceived(torch.cat([value, value])) and len(made) == 1


@dataclass
class Pack:
    """Hands a unit a tensor inside of itself."""

    extra: torch.Tensor


class Pair(Block):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = super().forward(x)
        return hidden, hidden[:, :2]


class Takes(Block):
    def __init__(self, root: Any) -> None:
        super().__init__()
        self.__dict__["root"] = root

    def forward(self, x: torch.Tensor, pack: Any) -> torch.Tensor:
        extra = pack.extra if isinstance(pack, Pack) else pack
        hidden: torch.Tensor = super().forward(x) + extra.sum() + self.root.start
        return hidden


class Ways(nn.Module):
    """Uses, as `way` says, a value of its first unit later on; but only if there is a 7 in its input."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last, self.way = Pair(), nn.Linear(WIDTH, WIDTH), way
        self.blocks = nn.ModuleList(Takes(self) for _ in range(3))
        self.start: Any = 0.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        way = self.way if bool((x == 7).any()) else ""
        start, extra = self.first(x)
        hidden = start
        self.start = start if way == "an object" else 0.0
        if way in ("a number", "a list", "a mask"):
            number = {"a number": float, "a list": lambda x: x.tolist()[0], "a mask": lambda x: len(x[x > 0])}[way]
            hidden = hidden * number(start[0, :1])
        for place, block in enumerate(self.blocks):
            given = extra if place == 2 and way in ("an argument", "a data class") else torch.ones(1).to(hidden)
            hidden = block(hidden, Pack(given) if self.way == "a data class" else given)
        logits = self.last(hidden)
        return {"logits": logits + start if way == "the output" else logits}


WAYS = {
    "an argument": "blocks.2 depends on",
    "a data class": "blocks.2 depends on",
    "an object": "what is sent to the next stage depends on",
    "a number": "what its code does next depends on",
    "a list": "what its code does next depends on",
    "a mask": "what its code does next depends on",
    "the output": "the model's output depends on",
}


@pytest.mark.parametrize("way", WAYS)
def test_in_generation_no_way_to_use_a_value_that_was_not_received_is_silent(way: str) -> None:
    torch.manual_seed(3)
    model = Ways(way).double().eval()
    x = batches()[0]["x"]
    parts = stage_driver.split(model, 5)
    with torch.no_grad():
        assert torch.equal(stage_driver.walk(parts, [{"x": x}] * 5)["logits"], model(x)["logits"])
        x[0, 0] = 7
        with pytest.raises(RuntimeError, match=f"took another path than it was planned for: {WAYS[way]}"):
            stage_driver.walk(parts, [{"x": x}] * 5)


class Masks(nn.Module):
    """Gives its mask the type or the shape of a value that only the first stage has."""

    def __init__(self, shaped: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.shaped = nn.Linear(WIDTH, WIDTH), shaped
        self.blocks = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x)
        mask = self.shaped(mask, hidden)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return {"logits": hidden}


SHAPED: list[tuple[Callable[..., torch.Tensor], torch.dtype]] = [
    (torch.Tensor.type_as, torch.int64),
    (torch.Tensor.type_as, torch.float64),
    (lambda mask, hidden: mask[:, :1].expand_as(hidden), torch.float64),
]


@pytest.mark.parametrize(("shaped", "dtype"), SHAPED)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_like_a_value_that_was_not_received_is_exact_in_every_mode(shaped: Any, dtype: Any, mode: Any) -> None:
    torch.manual_seed(3)
    model = Masks(shaped).double().eval()
    inputs = {"x": batches()[0]["x"], "mask": (torch.arange(ROWS * WIDTH) % 3).view(ROWS, WIDTH).to(dtype)}
    with mode():
        output = stage_driver.step(stage_driver.split(model, 2), inputs, backward=False)
        assert torch.equal(output["logits"], model(**inputs)["logits"])
    assert type(inputs["mask"]) is torch.Tensor

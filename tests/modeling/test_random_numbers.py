"""What a forward draws does not depend on the layout, whatever draws it. Oracle: one stage with the same seed, or a
model whose loss is zero only if the same numbers are used everywhere."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.stage_driver import largest_difference, split, split_gradients
from tests.support.stage_driver import step as step_on_stages
from tests.support.training import in_turn, parallelize, run_step

WIDTH, EXACT = 6, 1e-12

Draw = Callable[["Noisy", torch.Size], torch.Tensor]

DRAWS: dict[str, Draw] = {
    "torch.rand": lambda model, shape: torch.rand(shape),
    "torch.randperm": lambda model, shape: torch.randperm(shape.numel()).view(shape) / shape.numel(),
    "torch.bernoulli": lambda model, shape: torch.bernoulli(torch.full(shape, 0.5)),
    "random": lambda model, shape: torch.full(shape, random.random()),
    "numpy.random": lambda model, shape: torch.from_numpy(np.random.rand(*shape)).float(),
    "a generator of torch": lambda model, shape: torch.rand(shape, generator=model.torchs),
    "a generator of Python": lambda model, shape: torch.full(shape, model.pythons.random()),
    "a generator of NumPy": lambda model, shape: torch.from_numpy(model.numpys.random(shape)).float(),
    "a random state of NumPy": lambda model, shape: torch.from_numpy(model.olds.rand(*shape)).float(),
}


class Noisy(nn.Module):
    """Draws before and between its blocks, which are the identity, and compares what comes out with what it drew."""

    def __init__(self, how: str, rank: int = 0) -> None:
        super().__init__()
        self.how = how
        self.torchs, self.pythons = torch.Generator().manual_seed(rank), random.Random(rank)
        self.numpys, self.olds = np.random.default_rng(rank), np.random.RandomState(rank)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for block in self.blocks:
            nn.init.eye_(block.weight)
            nn.init.zeros_(block.bias)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        draw = DRAWS[self.how]
        first = draw(self, x.shape)
        hidden = self.blocks[1](self.blocks[0](x + first))
        second = draw(self, x.shape)
        hidden = self.blocks[3](self.blocks[2](hidden + second))
        return {"loss": functional.mse_loss(hidden - x, first + second), "first": first}


class Inside(nn.Module):
    """Draws in its units, in no attribute's name. `again`: whether these are checkpointed, and whether reentrantly."""

    def __init__(self, how: str, again: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Drawing(how, again) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


class Drawing(nn.Module):
    def __init__(self, how: str, again: bool | None) -> None:
        super().__init__()
        self.how, self.again, self.layer = how, again, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self._compute(x) if self.again is None else checkpoint(self._compute, x, use_reentrant=self.again)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.how == "literal dropout":
            return functional.dropout(x, 0.4, self.training)
        if self.how == "path":  # which cannot be followed without values, so what it draws is in doubt
            return x if self.training and torch.rand(()) < 0.5 else x * 2
        if self.how == "random":
            return x * random.random()
        return x * float(np.random.rand())


step = partial(step_on_stages, loss_of=lambda output: output["loss"])


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))}


def made(kind: Callable[[str], nn.Module], how: str) -> nn.Module:
    torch.manual_seed(0)
    return kind(how)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", DRAWS)
def test_all_stages_draw_the_same_numbers(how: str, training: bool) -> None:
    splits = split(made(Noisy, how).train(training), 3)
    first, second = (step(splits, inputs(), backward=training, seed=seed) for seed in (1, 2))
    assert first["loss"] < EXACT and second["loss"] < EXACT
    assert not torch.equal(first["first"], second["first"]), "nothing was drawn"


@pytest.mark.parametrize("how", ["literal dropout", "path", "random", "numpy.random"])
def test_units_draw_the_same_numbers_on_every_layout(how: str) -> None:
    found = []
    for num_stages, ranks, seed in ((1, None, 3), (3, None, 3), (4, [[0, 2], [1, 3]], 3), (2, None, 4)):
        splits = split(made(Inside, how), num_stages, ranks)
        loss = step(splits, inputs(), seed=seed)["loss"].item()
        found.append((loss, split_gradients(splits)))
    (loss, expected), *others, (another, _) = found
    for other, gradients in others:
        assert other == pytest.approx(loss, abs=EXACT)
        assert largest_difference(gradients, expected) < EXACT
    assert another != pytest.approx(loss, rel=1e-3), "nothing was drawn"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_units_draw_the_same_numbers_again(reentrant: bool) -> None:
    found = []
    for again in (None, reentrant):
        model = made(partial(Inside, again=again), "literal dropout")
        splits = split(model, 2)
        given = {"x": inputs()["x"].requires_grad_()}  # without which a reentrant one has no gradients
        loss = step(splits, given, seed=3)["loss"].item()
        found.append((loss, split_gradients(splits)))
    (loss, expected), (other, gradients) = found
    assert other == pytest.approx(loss, abs=EXACT)
    assert largest_difference(gradients, expected) < EXACT


@pytest.mark.parametrize("how", DRAWS)
def test_what_is_drawn_from_is_left_as_found(how: str) -> None:
    (model,) = split(made(Noisy, how), 1)
    noisy: Any = model.model
    one: Any = DRAWS[how]

    def following() -> torch.Tensor:
        return one(noisy, torch.Size([4]))

    def set_out() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        noisy.torchs.manual_seed(5)
        noisy.pythons.seed(5)
        noisy.numpys.bit_generator.state = np.random.default_rng(5).bit_generator.state
        noisy.olds.seed(5)

    set_out()
    expected = following()
    set_out()
    model.forward(model.plan(inputs()), 0, inputs(), (), seed=1)
    assert torch.equal(following(), expected)


class Hidden(nn.Module):
    """Draws on real tensors only, as code does whose path depends on values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            return self.layer(x)
        if self.how == "torch":
            return self.layer(x) * torch.rand(())
        return self.layer(x) * (random.gauss(0, 1) if self.how.startswith("Python") else float(np.random.randn()))


@pytest.mark.parametrize(
    "how", ["torch", "Python", "Python, which keeps a number", "NumPy", "NumPy, which keeps a number"]
)
def test_a_draw_that_was_not_followed_is_warned_of_once_and_seeded_from_then_on(how: str) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Hidden(how), nn.Linear(WIDTH, WIDTH)])

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for block in self.blocks:
                x = block(x)
            return {"loss": x.square().mean()}

    splits = split(Plain(), 3)
    how, _, keeps = how.partition(",")
    np.random.seed(0)
    random.seed(0)
    if (
        keeps
    ):  # of the two normal numbers that either draws at once: the forward's own draw leaves its words as they are
        np.random.randn()
        random.gauss(0, 1)
    with pytest.warns(UserWarning, match=rf"a forward of blocks.1 .*drew from .*{how}'s random numbers"):
        step(splits, inputs(), seed=1, watch=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [step(splits, inputs(), seed=1, watch=True)["loss"].item() for _ in range(2)]
    assert found[0] == found[1]


def test_models_without_random_numbers_are_not_seeded() -> None:
    """Not in evaluation mode either: attention's operators may drop out, and do not."""
    for model, expected in (
        (FAMILIES["gpt2"].build(), ()),
        (FAMILIES["gpt2"].build(dropout=0.1), ("torch's random numbers",)),
        (FAMILIES["gpt2"].build(dropout=0.1).eval(), ()),
        (FAMILIES["mixtral"].build().eval(), ()),
    ):
        (whole,) = split(model, 1)
        assert whole.plan(batch("causal")).draws == expected


def draw_on_ranks(how: str, evaluating: bool) -> list[float]:
    """Losses over two stages, of ranks whose generators stand unlike."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    model = made(lambda how: Noisy(how, rank), how)
    random.seed(rank)
    np.random.seed(rank)
    model = parallelize(model, 2, num_microbatches=2, schedule="1f1b")
    torch.manual_seed(rank)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    if evaluating:
        model.eval()
        with torch.no_grad():
            outputs = [model(**inputs(1)) for _ in range(2)]
        assert not torch.equal(outputs[0]["first"], outputs[1]["first"]), "each evaluation draws its own"
        losses = [output["loss"].item() for output in outputs]
    else:
        losses = run_step(model, inputs(1))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]
    return losses


def test_ranks_draw_the_same_numbers_in_training_and_evaluation(pool: Pool) -> None:
    kinds = ("torch.rand", "random", "numpy.random", "a generator of NumPy")
    calls = [(draw_on_ranks, how, evaluating) for how in kinds for evaluating in (False, True)]
    for found in pool.run(2, run_all, calls):
        assert max(loss for losses in found for loss in losses) < EXACT


def run_all(calls: list[tuple[Any, ...]]) -> list[Any]:
    return in_turn([lambda call=call: call[0](*call[1:]) for call in calls])

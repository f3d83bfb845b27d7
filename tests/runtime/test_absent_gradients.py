"""A parameter that has no gradient in the unsplit model has none over stages either: None, and not zeros."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from tests.support.pool import Pool
from tests.support.training import assert_same_gradients, gradients_of, kept_in_double

WIDTH, SAMPLES = 4, 4


class Doubled(torch.autograd.Function):
    """What torch gives zeros where it has no gradient, as all that is written so without `set_materialize_grads`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).flatten(0, -2).sum(0)


class Layer(nn.Module):
    """Adds its two arguments up, without a graph to those that `cut` says for the samples of a microbatch: a letter for
    each sample, for none, the first, the second or both."""

    def __init__(self, cuts: str = "-" * SAMPLES) -> None:
        super().__init__()
        self.linear, self.scale, self.cuts = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), 2.0)), cuts

    def forward(self, x: torch.Tensor, skip: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        cut = "-" if number.is_meta else self.cuts[int(number[0])]
        x = x.detach() if cut in "xb" else x
        skip = skip.detach() if cut in "sb" else skip
        return Doubled.apply(torch.tanh(self.linear(x)), self.scale) + skip  # type: ignore[no-untyped-call]


class Model(nn.Module):
    """Four layers; what the first gives goes to the last one, too, past those between. With `glue`, the model's own
    code detaches what the second layer returns; `tied` ties the first layer's weight with the last one's."""

    def __init__(self, cuts: Mapping[str, str], glue: bool = False, tied: bool = False) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, Layer(cuts.get(name, "-" * SAMPLES)))
        self.glue = glue
        if tied:
            self.d.linear.weight = self.a.linear.weight

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        first = self.a(x, x, number)
        hidden = self.b(first, first, number)
        hidden = self.c(hidden.detach() if self.glue else hidden, hidden if not self.glue else hidden.detach(), number)
        return self.d(hidden, first, number)


# Which samples' gradients end where, by layers.
CASES: dict[str, dict[str, Any]] = {
    "in the model's code": {"cuts": {"d": "ssss"}, "glue": True},
    "in a layer": {"cuts": {"c": "bbbb", "d": "ssss"}},
    "at the end": {"cuts": {"d": "bbbb"}},
    "relayed": {"cuts": {"d": "xxxx"}},
    "in the first microbatch": {"cuts": {"c": "b---", "d": "s---"}},
    "in the last microbatches": {"cuts": {"c": "--bb", "d": "-sss"}},
    "in one pipeline": {"cuts": {"c": "bb--", "d": "ss--"}},
    "of tied weights": {"cuts": {"c": "bbbb", "d": "ssss"}, "tied": True},
}
# The gradients of the second layer end in one place in the first microbatch, in another one in those that follow.
HERE_AND_THERE = "here and there"


def build(case: str) -> nn.Module:
    torch.manual_seed(3)
    return Model(**(CASES | {HERE_AND_THERE: {"cuts": {"c": "b---", "d": "-bbb"}}})[case]).double()


def batches() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)

    def values() -> torch.Tensor:
        return torch.randn(SAMPLES, WIDTH, generator=draw, dtype=torch.float64)

    return [{"x": values(), "number": torch.arange(SAMPLES), "target": values()} for _ in range(2)]


def criterion(output: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output, inputs["target"])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


@cache
def unsplit(case: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Gradients of two steps, one sample after the other, and the weights afterwards."""
    model, found = build(case), []
    optimizer = optimizer_of(model)
    for batch in batches():
        optimizer.zero_grad()
        for row in range(SAMPLES):
            one = {name: value[row : row + 1] for name, value in batch.items()}
            (criterion(model(one["x"], one["number"]), one) / SAMPLES).backward()
        found.append(gradients_of(model))
        optimizer.step()
    return found, {name: value.detach() for name, value in model.state_dict().items()}


def trained(case: str, stages: int, options: Mapping[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """On a worker, what `unsplit` gives."""
    with kept_in_double():
        size = SAMPLES * stages // torch.distributed.get_world_size()
        section = {"pipeline_parallel_size": stages, "num_microbatches": size, **options}
        example = {name: value[:1] for name, value in batches()[0].items() if name != "target"}
        model: Any = penstock.initialize(build(case), {"model_parallelism": section}, criterion, example_inputs=example)
        found, optimizer = [], optimizer_of(model)
        rows = slice(model.data_parallel_rank * size, (model.data_parallel_rank + 1) * size)
        for batch in batches():
            optimizer.zero_grad()
            for out in model(**{name: value[rows] for name, value in batch.items()}):
                out.loss.backward()
            found.append(gradients_of(model))
            optimizer.step()
        return found, {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_exact(case: str, ranks: Any, of_owners: bool = False) -> None:
    expected, weights = unsplit(case)
    for gradients, after in ranks:
        for step, wanted in zip(gradients, expected, strict=True):
            assert_same_gradients({n: one for n, one in step.items() if one is not None or not of_owners}, wanted)
        assert all(torch.allclose(value, weights[name], atol=1e-12, rtol=0) for name, value in after.items())
    assert set(chain(*(after for _, after in ranks))) == weights.keys()


def test_the_cases_lack_gradients_and_have_some() -> None:
    lacking = {case: {name[0] for name, one in unsplit(case)[0][0].items() if one is None} for case in CASES}
    assert lacking["in the model's code"] == lacking["in a layer"] == {"a", "b"}
    assert (lacking["at the end"], lacking["relayed"], lacking["of tied weights"]) == ({*"abc"}, {*"bc"}, {*"ab"})


@pytest.mark.parametrize("case", CASES)
def test_what_has_no_gradient_in_the_unsplit_model_has_none_over_stages(pool: Pool, case: str) -> None:
    assert_exact(case, pool.run(4, trained, case, 4, {}))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_nor_has_it_on_any_schedule(pool: Pool, schedule: str) -> None:
    for case in ("in a layer", "relayed"):
        assert_exact(case, pool.run(2, trained, case, 2, {"schedule": schedule}))


@pytest.mark.parametrize("sharded", [False, True])
def test_nor_over_pipelines_of_which_one_may_have_a_gradient(pool: Pool, sharded: bool) -> None:
    for case in ("in one pipeline", "in a layer", "of tied weights"):
        assert_exact(case, pool.run(4, trained, case, 2, {"sharded_optimizer": sharded}), sharded)


def warnings_of_zeros(case: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(case, 4, {})
    return [str(each.message) for each in caught if "has none in a later one" in str(each.message)]


def test_zeros_where_the_unsplit_model_may_have_none_are_warned_of(pool: Pool) -> None:
    assert all(unsplit(HERE_AND_THERE)[0][0][f"b.{name}"] is None for name in ("scale", "linear.weight"))
    *others, last = pool.run(4, warnings_of_zeros, HERE_AND_THERE)
    assert others == [[], [], []] and "between stages 2 and 3" in last[0]
    assert pool.run(4, warnings_of_zeros, "in a layer") == [[], [], [], []]

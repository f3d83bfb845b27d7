"""A layer or a criterion that calls torch.distributed is an error that names it, on every rank, and never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.nn.functional import all_gather
from torch.nn import functional

import penstock
from tests.support.pool import Pool
from tests.support.training import in_turn

WIDTH = 6
SOON = 20.0


def summed(x: torch.Tensor) -> torch.Tensor:
    total = x.detach().clone()
    dist.all_reduce(total)
    return x + 0 * total


def counted(x: torch.Tensor) -> torch.Tensor:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, x.numel())
    return x


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": summed,
    "all_gather_object": counted,
    "with gradients": lambda x: all_gather(x)[0],
    "functional": lambda x: functional_collectives.all_reduce(x, "sum", dist.group.WORLD),
}


class Layer(nn.Module):
    """Communicates where it is traced, or on real tensors only."""

    def __init__(self, call: str | None = None, traced: bool = True) -> None:
        super().__init__()
        self.layer, self.call, self.traced = nn.Linear(WIDTH, WIDTH), call, traced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.call is None:
            return x * (dist.get_world_size() if dist.get_rank() >= 0 else 0)  # may be asked
        return CALLS[self.call](x) if self.traced or not x.is_meta else x


class Chain(nn.Module):
    def __init__(self, *layers: nn.Module, between: bool = False) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList(layers), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = summed(x) if self.between else x
        return x


def squares(outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    return functional.mse_loss(outputs, inputs["target"])


def global_loss(outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    return summed(squares(outputs, inputs))


def global_in_training(outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Which no trace sees, as it follows a forward without gradients."""
    loss = squares(outputs, inputs)
    return summed(loss) if loss.requires_grad else loss


def error_of(model: nn.Module, criterion: Any, evaluating: bool) -> str:
    """What a rank is told, within seconds."""
    batch = {"x": torch.randn(4, WIDTH), "target": torch.randn(4, WIDTH)}
    start = time.monotonic()
    try:
        made = penstock.initialize(
            model, pipeline_parallel_size=2, num_microbatches=2, criterion=criterion, example_inputs={"x": batch["x"]}
        )
        if evaluating:
            made.eval()
            with torch.no_grad():
                made(**batch)
        else:
            for output in made(**batch):
                output.loss.backward()
    except Exception as error:
        assert time.monotonic() - start < SOON
        return f"{type(error).__name__}: {error}"
    dist.all_reduce(torch.zeros(1))  # which is nobody's business between steps
    return "none"


def errors(calls: list[tuple[Callable[[], nn.Module], Any, bool]]) -> list[str]:
    return in_turn([lambda call=call: error_of(call[0](), *call[1:]) for call in calls])


def chain(at: int, *arguments: Any) -> nn.Module:
    return Chain(*(Layer(*arguments) if place == at else Layer() for place in range(4)))


def test_a_layer_that_communicates_is_refused_by_name_before_the_step(pool: Pool) -> None:
    calls = [(partial(chain, 2, call), squares, False) for call in CALLS]
    for told in pool.run(2, errors, calls):
        for error in told:
            assert "NotImplementedError" in error
            assert "the unit blocks.2 calls torch.distributed (all" in error, error


def between() -> nn.Module:
    return Chain(*(Layer() for _ in range(4)), between=True)


def test_code_between_layers_and_a_criterion_that_communicate_are_refused_before_the_step(pool: Pool) -> None:
    calls = [(between, squares, False), *((partial(chain, 9), global_loss, flag) for flag in (False, True))]
    for told in pool.run(2, errors, calls):
        assert "the model's code between its units calls torch.distributed (allreduce_)" in told[0]
        for error in told[1:]:
            assert error.startswith("LoopError: the criterion calls torch.distributed (allreduce_)"), error


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("at", [0, 3])
def test_a_layer_that_communicates_on_real_tensors_only_is_an_error_on_every_rank(
    pool: Pool, at: int, evaluating: bool
) -> None:
    for (error,) in pool.run(2, errors, [(partial(chain, at, "all_reduce", False), squares, evaluating)]):
        assert f"OwnCollective: the unit blocks.{at} calls torch.distributed (all_reduce)" in error


def test_a_criterion_that_communicates_in_training_only_is_an_error_on_every_rank(pool: Pool) -> None:
    for (error,) in pool.run(2, errors, [(partial(chain, 9), global_in_training, False)]):
        assert "CriterionCollective: the criterion calls torch.distributed (all_reduce)" in error


def test_ranks_and_sizes_may_be_asked_for(pool: Pool) -> None:
    assert pool.run(2, errors, [(partial(chain, 9), squares, flag) for flag in (False, True)]) == [["none"] * 2] * 2

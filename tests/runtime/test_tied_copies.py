"""A tied weight is one weight: copies that are updated unlike are an error, or one rank updates the weight for all."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import kept_in_double, parallelize, run_step

STEPS = 3


def by_name(model: nn.Module) -> list[torch.optim.Optimizer]:
    """No weight decay for the embedding, but for the head: the unsplit model knows their weight by its first name."""
    named = dict(model.named_parameters())
    free = [one for name, one in named.items() if "wte" in name or name.endswith("bias")]
    rest = [one for name, one in named.items() if not ("wte" in name or name.endswith("bias"))]
    groups = [{"params": free, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.5}]
    return [torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)]


def alike(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)]


def add_noise(model: nn.Module) -> None:
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.add_(torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype) * 0.01)


def nudge(model: nn.Module) -> None:
    """As another kind of processor may round."""
    if torch.distributed.get_rank():
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + 2**-52)


CHANGES = {"noise": (alike, add_noise), "names": (by_name, None), "rounding": (alike, nudge), "nothing": (alike, None)}


@cache
def unsplit(how: str) -> dict[str, torch.Tensor]:
    optimizers, _ = CHANGES[how]
    with kept_in_double():
        model = FAMILIES["gpt2"].build()
        (optimizer,) = optimizers(model)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(**batch("causal", 4)).loss.backward()
            optimizer.step()
        return {name: one.detach() for name, one in model.state_dict().items()}


def trained(how: str, steps: int, sharded: bool = False, folder: str = "") -> Any:
    """On a worker: the weights after steps, and warnings of a save."""
    optimizers, change = CHANGES[how]
    with kept_in_double():
        model = parallelize(FAMILIES["gpt2"].build(), 2, num_microbatches=2, sharded_optimizer=sharded)
        (optimizer,) = optimizers(model)
        for _ in range(steps):
            optimizer.zero_grad()
            run_step(model, batch("causal", 4))
            if change is not None:
                change(model)
            optimizer.step()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if folder:
                model.save_parallelized(folder)
        return {n: one.detach().clone() for n, one in model.state_dict().items()}, [str(one.message) for one in seen]


@pytest.mark.parametrize("how", ["noise", "names"])
def test_copies_that_are_updated_unlike_are_an_error_at_the_next_step(pool: Pool, how: str) -> None:
    for error in pool.run(2, trained, how, STEPS, outcomes=True):
        words = str(error)
        assert (
            "tied weight transformer.wte.weight (transformer.wte.weight on rank 0, lm_head.weight on rank 1)" in words
        )
        assert "sharded_optimizer" in words


def test_a_save_warns_of_copies_that_the_last_update_left_unlike(pool: Pool, tmp_path: Any) -> None:
    for _, said in pool.run(2, trained, "names", 1, folder=str(tmp_path)):
        assert any("tied weight transformer.wte.weight" in words for words in said)


@pytest.mark.parametrize(("how", "sharded"), [("nothing", False), ("rounding", False), ("names", True)])
def test_a_tied_weight_is_trained_as_the_unsplit_models(pool: Pool, tmp_path: Any, how: str, sharded: bool) -> None:
    """With a sharded optimizer its owner updates it as its first name says. Roundings go unnoticed."""
    expected = unsplit("nothing" if how == "rounding" else how)
    for weights, said in pool.run(2, trained, how, STEPS, sharded, str(tmp_path)):
        assert not said
        assert all(torch.allclose(one, expected[name], atol=1e-9, rtol=0) for name, one in weights.items())


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[3].weight = nn.Parameter(self.layers[0].weight.detach().T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Enclosed(Transposed):
    """`layers.0.weight` encloses the memory of its bias, and behind that the memory of another layer's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = nn.Linear(4, 4)
        memory = torch.randn(16)
        self.layers[0].weight = nn.Parameter(memory.view(4, 4))
        self.layers[0].bias = nn.Parameter(memory[4:8])
        self.layers[3].bias = nn.Parameter(memory[12:])


def refused(kind: type[nn.Module]) -> str:
    with pytest.raises(NotImplementedError) as error:
        penstock.initialize(
            kind(),
            {"model_parallelism": {"pipeline_parallel_size": 2}},
            lambda output, _: output.sum(),
            example_inputs={"x": torch.zeros(1, 4)},
        )
    return str(error.value)


@pytest.mark.parametrize(("kind", "other"), [(Transposed, "layers.3.weight"), (Enclosed, "layers.3.bias")])
def test_two_parameters_with_one_memory_are_refused_by_name(pool: Pool, kind: type[nn.Module], other: str) -> None:
    assert all(f"layers.0.weight and {other}" in words for words in pool.run(2, refused, kind))

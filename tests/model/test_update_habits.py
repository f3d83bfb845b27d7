"""What scripts do with optimizers, gradients and parameters beside a step: taken as meant, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.modeling.graph.loss import LoopError
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import parallelize, run_step

SGD = torch.optim.SGD


def gpt2(stages: int = 2) -> Any:
    return parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=3)


def halves(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """A generator's and a discriminator's optimizer, say."""
    for part in ("attn", "mlp"):
        yield SGD([one for name, one in model.named_parameters() if part in name], lr=0.1)


def said_by_save(model: Any, folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.save_parallelized(folder)
    return [str(one.message) for one in seen]


def in_turn(folder: str) -> list[str]:
    """Two optimizers take turns; then one stage's blocks are frozen, and the other's; a rank may have no optimizer."""
    model = gpt2()
    said = []
    optimizers = list(halves(model))
    for step in range(4):
        run_step(model, batch("causal", 6))
        optimizers[step % 2].step()
        model.zero_grad()
        said += said_by_save(model, folder)
    own = list(model.parameters())
    for frozen in (0, 1, 0):
        for parameter in own:
            parameter.requires_grad_(torch.distributed.get_rank() != frozen)
        model.lm_head.weight.requires_grad_(False)
        model.transformer.wte.weight.requires_grad_(False)
        trained = [one for one in own if one.requires_grad]
        run_step(model, batch("causal", 6))
        if trained:
            SGD(trained, lr=0.1).step()
        model.zero_grad()
        said += said_by_save(model, folder)
    return said


def test_updates_in_turn_are_no_interrupted_ones(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, in_turn, str(tmp_path)) == [[], []]


def interrupted(folder: str) -> list[str]:
    """An optimizer's step that fails on one rank after it has begun."""
    model = gpt2()
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(2):
        run_step(model, batch("causal", 6))
        if step and torch.distributed.get_rank():
            optimizer.param_groups[0]["lr"] = "fast"
            with pytest.raises(TypeError):
                optimizer.step()
        else:
            optimizer.step()
    return said_by_save(model, folder)


def test_an_interrupted_update_is_still_one(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(2, interrupted, str(tmp_path)):
        assert "rank 0 took it" in said[0] and "rank 1 took a part of it" in said[0]


# -- inside the loop over microbatches ---------------------------------------------------------------------------------


def steps_inside(model: Any, optimizer: Any, out: Any) -> None:
    out.loss.backward()
    optimizer.step()


def clears_before(model: Any, optimizer: Any, out: Any) -> None:
    optimizer.zero_grad()
    out.loss.backward()


def clears_after(model: Any, optimizer: Any, out: Any) -> None:
    out.loss.backward()
    model.zero_grad()


def clears_in_place(model: Any, optimizer: Any, out: Any) -> None:
    out.loss.backward()
    optimizer.zero_grad(set_to_none=False)


def clears_one(model: Any, optimizer: Any, out: Any) -> None:
    """The gradient of the last parameter that has one."""
    for parameter in [one for one in model.parameters() if one.grad is not None][-1:]:
        parameter.grad = None
    out.loss.backward()


def loop_with(body: Callable[..., None], stages: int) -> None:
    model = gpt2(stages)
    optimizer = SGD(model.parameters(), lr=0.1)
    for out in model(**batch("causal", 6)):
        body(model, optimizer, out)


@pytest.mark.parametrize("body", [steps_inside, clears_before, clears_after, clears_in_place, clears_one])
def test_updates_and_zero_grad_inside_the_loop_are_an_error(pool: Pool, body: Any) -> None:
    for stages in (1, 2):
        for error in pool.run(stages, loop_with, body, stages, outcomes=True):
            assert type(error) is LoopError
            assert "inside the loop over microbatches" in str(error)


def gives_up(stages: int) -> list[float]:
    model = gpt2(stages)
    for number, out in enumerate(model(**batch("causal", 6))):
        if number == 1:
            model.zero_grad()
            break
        out.loss.backward()
    model.zero_grad()
    return run_step(model, batch("causal", 6))


def test_a_step_that_is_given_up_may_clear_its_gradients_before_it_breaks(pool: Pool) -> None:
    (expected,) = pool.run(1, gives_up, 1)
    for losses in pool.run(2, gives_up, 2):
        assert losses == pytest.approx(expected, rel=1e-6)


# -- parameters that come later ----------------------------------------------------------------------------------------


def replaced() -> str:
    model = gpt2()
    for name, module in model.named_modules():
        if name.endswith("ln_1") and "weight" in module._parameters:
            module.weight = nn.Parameter(torch.full_like(module.weight, 0.5))
    with pytest.raises(RuntimeError) as error:
        run_step(model, batch("causal", 6))
    return str(error.value)


def test_parameters_replaced_after_initialize_are_refused_by_name(pool: Pool) -> None:
    for words in pool.run(2, replaced):
        assert "transformer.h.0.ln_1.weight" in words and "in place" in words


def added_on_one_rank() -> str:
    model = gpt2()
    if torch.distributed.get_rank():
        model.lm_head.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError) as error:
        run_step(model, batch("causal", 6))
    return str(error.value)


def test_a_parameter_that_one_rank_adds_is_an_error_on_all(pool: Pool) -> None:
    assert all("lm_head.scale" in words for words in pool.run(2, added_on_one_rank))


# -- a criterion with numbers of its own -------------------------------------------------------------------------------


class Weighted(nn.Module):
    """Learns how far off its targets are, as losses with uncertainty do."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, output: Any, inputs: Any) -> torch.Tensor:
        loss = functional.mse_loss(output, inputs["target"])
        return loss * torch.exp(-self.log_scale) + self.log_scale


def own_number(frozen: bool) -> str:
    criterion = Weighted().requires_grad_(not frozen)
    model: Any = penstock.initialize(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))),
        {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}},
        criterion,
        example_inputs={"input": torch.zeros(1, 4)},
    )
    try:
        run_step(model, {"input": torch.ones(4, 4), "target": torch.zeros(4, 4)})
    except ValueError as error:
        return str(error)
    return ""


def test_a_trained_number_of_the_criterions_own_is_refused(pool: Pool) -> None:
    assert all("trained number of its own" in words for words in pool.run(2, own_number, False))
    assert pool.run(2, own_number, True) == ["", ""]

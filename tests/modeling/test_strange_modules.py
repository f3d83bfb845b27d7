"""What strangers write as modules: each example of a generator is exact over stages, or refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.modeling.graph.meta_operations import Untraceable
from penstock.modeling.graph.units import list_units
from tests.support.pool import Pool
from tests.support.strange_models import Strange, batch, build, criterion, drawn, inputs_of
from tests.support.training import EXACT, gradients_of

pytestmark = pytest.mark.slow

EXAMPLES = 300
STEPS = 2


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def loss_of(model: nn.Module, strange: Strange, whole: dict[str, Any]) -> torch.Tensor:
    output = model(**inputs_of(strange, whole))
    return output["loss"] if strange.forward == "own loss" else criterion(output, whole)


def train_unsplit(strange: Strange) -> tuple[nn.Module, list[float], dict[str, Any]]:
    """The oracle: the plain model after its steps, their losses, and the last one's gradients."""
    model, losses = build(strange), []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, strange, batch(strange, step))
        loss.backward()
        gradients = gradients_of(model)
        optimizer.step()
        losses.append(loss.item())
    return model, losses, gradients


def differences(strange: Strange, folder: str) -> list[str]:
    """On a worker: what differs from the unsplit model; raises what refuses it."""
    expected, losses, gradients = train_unsplit(strange)
    start = {name: value.clone() for name, value in build(strange).named_parameters(remove_duplicate=False)}
    tolerance = 1e-4 if "single" in (strange.dtype,) else 1e-5 if strange.dtype == "mixed" else EXACT
    first, wrong = batch(strange, 0), []

    def compare(what: str, found: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
        if (found is None) != (wanted is None):
            wrong.append(f"{what} is {'None' if found is None else 'given'}")
        elif (
            found is not None
            and wanted is not None
            and not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)
        ):
            wrong.append(f"{what} is off by {(found - wanted).abs().max():.1e}")

    model: Any = penstock.initialize(
        build(strange),
        {
            "model_parallelism": {
                "pipeline_parallel_size": strange.stages,
                "num_microbatches": 3,
                "schedule": strange.schedule,
            }
        },
        None if strange.forward == "own loss" else criterion,
        example_inputs=inputs_of(strange, first) if strange.forward != "own loss" else {"x": first["x"]},
    )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        compare(f"after initialize, {name}", parameter.detach(), start[name].detach())
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        found = 0.0
        for out in model(**batch(strange, step)):
            out.loss.backward()
            found += out.loss.item()
        compare(f"the loss of step {step}", torch.tensor(found), torch.tensor(losses[step]))
        last = gradients_of(model)
        optimizer.step()
    for name, gradient in last.items():
        compare(f"the gradient of {name}", gradient, gradients[name])
    weights = dict(expected.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        compare(name, parameter.detach(), weights[name].detach())
    wanted = expected.state_dict()
    held = model.state_dict()
    if stray := [name for name in held if name not in wanted]:
        wrong.append(f"the state has {stray}")
    for name, value in held.items():
        if isinstance(value, torch.Tensor) and name in wanted:
            compare(f"{name} of the state", value, wanted[name])
    if strange.state != "none" or strange.alias != "none" or strange.tie != "none":
        model.save_parallelized(folder, merge_checkpoints=True)
        saved = torch.load(f"{folder}/pytorch_model.bin", weights_only=True)
        if saved.keys() != wanted.keys():
            wrong.append(f"of the merged file {sorted(saved.keys() ^ wanted.keys())} are not in both")
        fresh = build(strange)
        fresh.load_state_dict(saved)
        for name, parameter in fresh.named_parameters(remove_duplicate=False):
            compare(f"{name} of the merged file", parameter.detach(), weights[name].detach())
    return wrong


def tried(stranger: Strange, folder: str) -> str:
    """On a worker: "exact", or by what it was refused; anything else is an error that names the example."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = differences(stranger, folder)
    except NotImplementedError as error:
        return f"refused: {error}"
    except Exception as error:
        error.add_note(f"(of {stranger})")
        raise
    finally:
        torch.set_default_dtype(before)
    return "exact" if not wrong else f"wrong: {'; '.join(wrong)}"


def tried_all(strangers: list[Strange], folder: str) -> list[str]:
    """On a worker: what became of each of them."""
    return [tried(stranger, f"{folder}/{number}") for number, stranger in enumerate(strangers)]


@pytest.mark.parametrize("part", range(6))
def test_strange_modules_are_exact_over_stages_or_refused_by_name(pool: Pool, tmp_path: Path, part: int) -> None:
    strangers = [drawn(seed) for seed in range(part * EXAMPLES // 6, (part + 1) * EXAMPLES // 6)]
    for stages in (2, 3):
        chosen = [stranger for stranger in strangers if stranger.stages == stages]
        by_rank = pool.run(stages, tried_all, chosen, str(tmp_path), timeout=240)
        for stranger, *outcomes in zip(chosen, *by_rank, strict=True):
            for outcome in outcomes:
                assert outcome == "exact", f"{stranger}: {outcome}"


class Changes(nn.Module):
    """Puts what it computes into what it is given."""

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key
        self.linear = nn.Linear(4, 4)

    def forward(self, given: Any) -> None:
        given[self.key] = self.linear(given[self.key])


class OfChanges(nn.Module):
    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key
        self.blocks = nn.ModuleList(Changes(key) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: Any = {"a": x} if self.key == "a" else [x]
        for block in self.blocks:
            block(given)
        return given[self.key]


@pytest.mark.parametrize("key", ["a", 0])
def test_a_block_that_changes_what_it_is_given_is_refused_by_name(key: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"the unit blocks\.0 puts other values into a container"):
        list_units(OfChanges(key), {"x": torch.zeros(1, 4)})


class Refused(nn.Module):
    """Keeps its input's shape, as is assumed of units that cannot run on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            raise Untraceable("nobody follows this")
        return self.linear(x)


def test_a_refusal_inside_a_block_is_not_taken_for_a_block_without_shapes() -> None:
    blocks = nn.Sequential(*(nn.Sequential(Refused(), nn.Linear(4, 4)) for _ in range(3)))
    with pytest.raises(NotImplementedError, match="nobody follows this"):
        list_units(blocks, {"input": torch.zeros(1, 4)})

"""Re-forming: a model takes up other stages, as the same object with the same parameters."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from penstock.modeling.graph.units import list_units
from penstock.modeling.placeholders.ghosts import is_ghost
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.weights.whole import alias_groups
from penstock.tensor_parallel.apply import TensorParallel
from tests.support.families import FAMILIES, batch
from tests.support.stage_driver import cut, gradients, largest_difference, split_gradients, step, tied

Ranks = Sequence[Sequence[int]]


def sharded(model, stages, local):
    """Shard 1 of 2 of some stages."""
    aliases = alias_groups(model)
    return SplitModel(model, stages, local, TensorParallel(model, 1, 2, aliases), aliases)


def fill(part: SplitModel, whole: nn.Module) -> None:
    """Give everything that `part` took the values of the unsplit model."""
    values = {**dict(whole.named_parameters(remove_duplicate=False)), **dict(whole.named_buffers())}
    with torch.no_grad():
        for name, tensor in part.taken.items():
            tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-1)
            tensor.copy_(values[name])


def place(parts: Sequence[SplitModel], stages: Sequence[Sequence[str]], ranks: Ranks, whole: nn.Module) -> None:
    for part, local in zip(parts, ranks, strict=True):
        part.change_stages(stages, local)
        fill(part, whole)


def assert_equals_unsplit(parts: Sequence[SplitModel], whole: nn.Module, inputs: dict[str, Any]) -> None:
    whole.zero_grad()
    expected = whole(**inputs)
    expected.loss.backward()
    for part in parts:
        part.model.zero_grad()
    output = step([part for part in parts if part.local_stages], inputs)
    assert output.loss.item() == pytest.approx(expected.loss.item(), abs=1e-10)
    assert largest_difference(split_gradients([p for p in parts if p.local_stages]), gradients([whole])) < 1e-10


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_other_stages_give_the_unsplit_models_loss_and_gradients(family: str) -> None:
    whole = FAMILIES[family].build()
    inputs = batch(FAMILIES[family].kind)
    units = list_units(whole)
    parts = [SplitModel(copy.deepcopy(whole), cut(units, 2), [rank]) for rank in range(2)]
    assert_equals_unsplit(parts, whole, inputs)
    uneven = [units[:1], units[1:-1], units[-1:]]
    for stages, ranks in (
        (cut(units, 2), [[1], [0]]),  # exchanged
        (cut(units, 1), [[0], []]),  # alone, beside one that holds nothing
        (cut(units, 4), [[0, 2], [1, 3]]),  # interleaved
        (uneven, [[1], [0, 2]]),
        (cut(units, 2), [[0], [1]]),  # as at first
    ):
        place(parts, stages, ranks, whole)
        assert_equals_unsplit(parts, whole, inputs)
        for part in parts:
            own = {unit for stage in part.local_stages for unit in part.stages[stage]}
            assert {unit for unit in units if not is_ghost(part.model.get_submodule(unit))} == own
            expected = {n for n in whole.state_dict() if n.startswith(tuple(f"{unit}." for unit in own))}
            assert set(part.model.state_dict()) == expected


def test_parameters_and_their_ties_keep_identity_and_an_optimizer_made_before_goes_on() -> None:
    whole = FAMILIES["gpt2"].build()
    units = list_units(whole)
    models = [copy.deepcopy(whole) for _ in range(2)]
    for model in (whole, *models):
        model.transformer.h[1].mlp.c_fc.weight.requires_grad_(False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, *models)]
    known = [dict(model.named_parameters(remove_duplicate=False)) for model in models]
    parts = [SplitModel(model, cut(units, 2), [rank]) for rank, model in enumerate(models)]
    for stages, ranks in ((cut(units, 2), [[1], [0]]), (cut(units, 3), [[1], [0, 2]]), (cut(units, 2), [[0], [1]])):
        place(parts, stages, ranks, whole)
        for part, parameters in zip(parts, known, strict=True):
            here = dict(part.model.named_parameters(remove_duplicate=False))
            for name, parameter in here.items():
                assert parameter is parameters[name]
                assert parameter.requires_grad == (name != "transformer.h.1.mlp.c_fc.weight")
            elsewhere = {id(p) for p in parameters.values()} - {id(p) for p in here.values()}
            for parameter in parameters.values():
                if id(parameter) in elsewhere:
                    assert parameter.untyped_storage().nbytes() == 0 and parameter.grad is None
            assert {id(p) for p in part.released.values()} <= elsewhere
        assert_equals_unsplit(parts, whole, batch("causal"))
        (tie,) = tied(parts[0]).values()
        holders = [parts[i].model.get_parameter(n) for s, n in tie.items() for i, r in enumerate(ranks) if s in r]
        total = sum({id(holder): holder.grad for holder in holders}.values())
        for holder in holders:
            holder.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
        for part in parts:
            for name, parameter in part.model.named_parameters(remove_duplicate=False):
                torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=0, atol=1e-10)


def test_a_tied_weight_that_moves_within_a_rank_is_not_lost() -> None:
    """Its only local holder is released while another one is taken: the values are still there."""
    whole = FAMILIES["gpt2"].build()
    units = list_units(whole)
    part = SplitModel(copy.deepcopy(whole), cut(units, 2), [0])
    weight = part.model.transformer.wte.weight
    part.change_stages(cut(units, 2), [1])
    assert part.model.lm_head.weight is weight
    assert "transformer.wte.weight" not in {**part.taken, **part.released}
    assert torch.equal(weight, whole.transformer.wte.weight)


class Buffered(nn.Module):
    """A chain with statistics, with a table that no checkpoint holds, and with a bias that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False)
        self.norm.register_buffer("table", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.last(self.norm(self.first(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_buffers_come_back_and_those_of_no_checkpoint_with_their_values() -> None:
    whole = Buffered()
    table = whole.norm.table.clone()
    model = copy.deepcopy(whole)
    stages = [["first"], ["norm", "last"]]
    part = SplitModel(model, stages, [0])
    assert not list(model.norm.buffers())
    part.change_stages(stages, [1])
    assert set(part.taken) == {
        *("norm.weight", "norm.bias", "last.weight"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    }
    assert set(part.released) == {"first.weight", "first.bias"}
    assert torch.equal(model.norm.table, table)
    assert list(model.norm.state_dict()) == list(whole.norm.state_dict())
    assert model.last.bias is None and "bias" in model.last._parameters
    fill(part, whole)
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_unit_comes_back_in_the_models_present_type() -> None:
    whole = FAMILIES["llama"].build()
    stages = cut(list_units(whole), 2)
    part = SplitModel(copy.deepcopy(whole), stages, [0])
    part.model.to(torch.bfloat16)
    assert part.model.lm_head.weight.dtype == torch.bfloat16
    part.change_stages(stages, [1])
    assert {parameter.dtype for parameter in part.model.parameters()} == {torch.bfloat16}


def test_a_model_made_for_one_stage_takes_up_others() -> None:
    """Of a stage that was initialised or loaded by itself, ghosts never had parameters with values."""
    from penstock.modeling.weights.initialise import init_stage

    row = FAMILIES["gpt2"]
    whole = row.build()
    units = list_units(whole)
    stages = cut(units, 2)
    models = [init_stage(type(whole), whole.config, stages, [rank], dtype=torch.float64) for rank in range(2)]
    parts = [SplitModel(model.train(), stages, [rank]) for rank, model in enumerate(models)]
    place(parts, cut(units, 3), [[1], [0, 2]], whole)
    place(parts, stages, [[1], [0]], whole)
    assert not any(parameter.is_meta for part in parts for parameter in part.model.parameters())
    assert parts[0].model.lm_head.weight.shape == whole.lm_head.weight.shape
    for part in parts:
        for name, parameter in part.model.named_parameters(remove_duplicate=False):
            assert name.startswith(tuple(f"{unit}." for unit in part.stages[part.local_stages[0]]))
            with torch.no_grad():
                parameter.copy_(whole.get_parameter(name))
    assert_equals_unsplit(parts, whole, batch("causal"))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_under_tensor_parallelism_a_unit_comes_back_as_it_would_have_been_split(family: str) -> None:
    whole = FAMILIES[family].build(vocab_size=100)
    units = list_units(whole)
    part = sharded(copy.deepcopy(whole), cut(units, 2), [0])
    for stages, local in ((cut(units, 3), [1]), (cut(units, 2), [1]), (cut(units, 2), [0])):
        part.change_stages(stages, local)
        fresh = sharded(copy.deepcopy(whole), stages, local)
        found = dict(part.model.named_parameters(remove_duplicate=False))
        expected = dict(fresh.model.named_parameters(remove_duplicate=False))
        assert {n: tuple(p.shape) for n, p in found.items()} == {n: tuple(p.shape) for n, p in expected.items()}
        with torch.no_grad():
            for name, parameter in found.items():
                if any(parameter is taken for taken in part.taken.values()):  # there under the first of its names
                    parameter.copy_(expected[name])
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        for mine, theirs in zip(part.model.modules(), fresh.model.modules(), strict=True):
            assert type(mine).__mro__[1:] == type(theirs).__mro__[1:]
            numbers = {name: value for name, value in vars(theirs).items() if isinstance(value, int)}
            assert {name: vars(mine).get(name) for name in numbers} == numbers


@pytest.mark.slow
def test_many_placements_leave_nothing_behind() -> None:
    whole = FAMILIES["gpt2"].build()
    units = list_units(whole)
    part = SplitModel(copy.deepcopy(whole), cut(units, 2), [0])

    def turn() -> tuple[int, int, int]:
        for stages, local in ((cut(units, 2), [1]), (cut(units, 3), [1]), (cut(units, 2), [0])):
            part.change_stages(stages, local)
            fill(part, whole)
            part.plan(batch("causal"))
        gc.collect()
        modules = list(part.model.modules())
        hooks = sum(len(value) for m in modules for name, value in vars(m).items() if name.endswith("_hooks"))
        return len(gc.get_objects()), hooks, sum(len(vars(module)) for module in modules)

    turn()
    turn()
    before = turn()
    for _ in range(3):
        after = turn()
    assert after[1:] == before[1:]
    assert abs(after[0] - before[0]) < 20
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in part.model.parameters()}
    own = sum(whole.get_parameter(name).numel() for name, _ in part.model.named_parameters())
    assert sum(storages.values()) == 8 * own

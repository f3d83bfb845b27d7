"""SplitModel: what leaves the model, what stays, and what remains of the rest of the world."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
import transformers
from torch import nn

from penstock.modeling.graph.units import list_units
from penstock.modeling.placeholders.ghosts import is_ghost, strip, stripped_tensors
from penstock.modeling.stage.split import SplitModel
from tests.support.families import FAMILIES, batch
from tests.support.stage_driver import cut, gradients, largest_difference, split, split_gradients, step, tied


def test_shrinking_releases_storage_that_an_optimizer_holds() -> None:
    model = FAMILIES["llama"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    storages = {name: weakref.ref(parameter.untyped_storage()) for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters())
    units = cut(list_units(model), 3)
    SplitModel(model, units, [1])
    gc.collect()
    own = tuple(f"{unit}." for unit in units[1])
    for name, parameter in parameters.items():
        if name.startswith(own):
            assert model.get_parameter(name) is parameter
        else:
            assert parameter.numel() == 0 and parameter.untyped_storage().nbytes() == 0
            assert storages[name]() is None
    assert [name for name, _ in model.named_parameters()] == [name for name in parameters if name.startswith(own)]
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == sum(
        p.numel() for p in model.parameters()
    )


def test_the_model_stays_the_same_object_of_the_same_class() -> None:
    model = FAMILIES["gpt2"].build()
    SplitModel(model, cut(list_units(model), 2), [0])
    assert type(model) is transformers.GPT2LMHeadModel
    assert isinstance(model.transformer.h[3], transformers.models.gpt2.modeling_gpt2.GPT2Block)
    assert str(type(model.transformer.h[0])) == str(transformers.models.gpt2.modeling_gpt2.GPT2Block)
    assert model.device == torch.device("cpu")
    assert model.lm_head.weight.dtype == torch.float64 and model.lm_head.weight.is_meta
    assert set(model.state_dict()) < set(FAMILIES["gpt2"].build().state_dict())


def test_a_local_holder_keeps_a_tied_parameter_of_a_foreign_unit() -> None:
    model = FAMILIES["gpt2"].build()
    weight = model.transformer.wte.weight
    value = weight.detach().clone()
    last = SplitModel(model, cut(list_units(model), 3), [2])
    assert model.lm_head.weight is weight
    assert torch.equal(weight, value)
    assert "transformer.wte.weight" not in dict(model.named_parameters(remove_duplicate=False))
    assert tied(last) == {"transformer.wte.weight": {0: "transformer.wte.weight", 2: "lm_head.weight"}}


def test_tied_groups_of_a_pruned_model_are_those_of_the_whole_one() -> None:
    for family in ("gpt2", "t5", "llama", "bart"):
        model = FAMILIES[family].build()
        units = cut(list_units(model), 3)
        expected = tied(SplitModel(copy.deepcopy(model), units, [0]))
        for unit in units[0] + units[2]:
            strip(model.get_submodule(unit))
        assert tied(SplitModel(model, units, [1])) == expected


class WithGlue(transformers.GPT2LMHeadModel):
    """A parameter outside of every unit, used on two stages."""

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
        hidden = self.transformer.wte(input_ids) * self.scale
        for block in self.transformer.h:
            hidden = block(hidden)
        logits = self.lm_head(self.transformer.ln_f(hidden) * self.scale)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_a_parameter_outside_of_units_is_on_every_stage_and_its_gradients_add_up() -> None:
    torch.manual_seed(0)
    model = WithGlue(transformers.GPT2Config(**FAMILIES["gpt2"].settings, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    model = model.double().train()
    inputs = {"input_ids": torch.arange(10).view(2, 5), "labels": torch.arange(10).view(2, 5)}
    worker = copy.deepcopy(model)
    worker(**inputs).loss.backward()
    splits = split(model, 3)
    assert list(tied(splits[0])["scale"]) == [0, 1, 2]
    step(splits, inputs)
    assert largest_difference(split_gradients(splits), gradients([worker])) < 1e-10


@pytest.mark.parametrize(
    ("family", "ranks"), [("gpt2", [[0, 2], [1, 3]]), ("t5", [[0, 3], [1, 2]]), ("mixtral", [[0, 1, 2, 3]])]
)
def test_a_rank_may_hold_several_stages(family: str, ranks: list[list[int]]) -> None:
    model = FAMILIES[family].build()
    inputs = batch(FAMILIES[family].kind)
    worker = copy.deepcopy(model)
    expected = worker(**inputs)
    expected.loss.backward()
    splits = split(model, 4, ranks)
    output = step(splits, inputs)
    assert output.loss.item() == pytest.approx(expected.loss.item(), abs=1e-10)
    found = gradients([part.model for part in splits])
    for first, holders in tied(splits[0]).items():
        parts = [found.pop(name) for name in set(holders.values()) if name in found]
        found[first] = torch.stack(parts).sum(0)
    assert largest_difference(found, gradients([worker])) < 1e-10


def test_one_stage_is_the_model_itself() -> None:
    model = FAMILIES["bert_mlm"].build()
    expected = copy.deepcopy(model)(**batch("masked"))
    (only,) = split(model, 1)
    assert tied(only) == {}
    output = step([only], batch("masked"))
    assert output.loss.item() == expected.loss.item()
    assert set(gradients([only.model])) == {name for name, _ in model.named_parameters()}


def test_planning_leaves_everything_as_it_was() -> None:
    model = FAMILIES["gpt2"].build(dropout=0.2)
    (part, _) = split(model, 2)
    inputs = batch("causal")
    kept = {name: value.clone() for name, value in inputs.items()}
    state, python_state = torch.get_rng_state(), random.getstate()
    tensors = copy.deepcopy(part.model.state_dict())
    plan = part.plan(inputs)
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state
    assert all(torch.equal(inputs[name], kept[name]) for name in kept)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in part.model.state_dict().items())
    assert all(parameter.grad is None for parameter in part.model.parameters())
    assert part.model.training and torch.is_grad_enabled()
    assert part.plan(inputs) is plan


def test_batch_statistics_are_counted_once_by_their_owner() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.last(self.norm(self.first(x)))
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    model = Normed().train()
    inputs = {"x": torch.randn(6, 3), "labels": torch.arange(6) % 2}
    expected = copy.deepcopy(model)
    expected(**inputs)
    splits = [SplitModel(copy.deepcopy(model), [["first"], ["norm", "last"]], [stage]) for stage in range(2)]
    step(splits, inputs, loss_of=lambda output: output["loss"])
    assert set(splits[0].model.state_dict()) == {"first.weight", "first.bias"}
    assert torch.equal(splits[1].model.norm.running_mean, expected.norm.running_mean)
    assert splits[1].model.norm.num_batches_tracked == 1


def test_users_hooks_fire_where_the_unit_is_and_nowhere_else() -> None:
    model = FAMILIES["gpt2"].build()
    seen: list[tuple[str, bool]] = []
    for index, block in enumerate(model.transformer.h):
        block.register_forward_hook(lambda module, _, output, index=index: seen.append((index, output.is_meta)))
    step(split(model, 2), batch("causal"))
    assert seen == [(0, False), (1, False), (2, False), (3, False)]


def test_a_copy_of_a_stage_is_an_ordinary_model() -> None:
    (first, _) = split(FAMILIES["gpt2"].build(), 2)
    for twin in (copy.deepcopy(first.model), pickle.loads(pickle.dumps(first.model))):
        assert type(twin.transformer.h[0]) is transformers.models.gpt2.modeling_gpt2.GPT2Block
        assert set(twin.state_dict()) == set(first.model.state_dict())
        assert is_ghost(twin.lm_head)


def test_ghosts_tell_what_they_lack() -> None:
    model = FAMILIES["gpt2"].build()
    SplitModel(model, cut(list_units(model), 2), [0])
    names = {name for name, _ in stripped_tensors(model)} | {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in FAMILIES["gpt2"].build().named_parameters(remove_duplicate=False)}

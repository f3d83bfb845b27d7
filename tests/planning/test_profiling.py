"""Costs of units, against what the whole model keeps and how its units compare."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from penstock.modeling.graph.units import list_units
from penstock.modeling.instrumentation import record_of
from penstock.planning.profiling import profile_model
from tests.support.families import FAMILIES
from tests.support.pool import Pool

BATCH, LENGTH = 2, 24


def bytes_kept(model: torch.nn.Module, ids: torch.Tensor) -> int:
    """What autograd keeps of a whole forward with its loss, without the parameters."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=ids, use_cache=False).logits
        functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
    return sum(kept.values())


@pytest.mark.parametrize(("family", "device"), [("gpt2", None), ("llama", "cpu"), ("opt", None)])
def test_units_keep_together_what_the_model_keeps(family: str, device: str | None) -> None:
    model = FAMILIES[family].build(dtype=torch.float32)
    profile = profile_model(model, BATCH, LENGTH, device=device)
    assert [unit.name for unit in profile.units] == list_units(model)
    for unit in profile.units:
        own = model.get_submodule(unit.name).parameters()
        assert unit.weights == sum(parameter.nbytes for parameter in own) == unit.optimizer / 2
    kept = bytes_kept(model.train(), torch.ones(BATCH, LENGTH, dtype=torch.long))
    assert sum(unit.kept for unit in profile.units) == pytest.approx(kept, rel=0.15)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_equal_units_cost_the_same_and_are_measured_once(device: str | None) -> None:
    model = FAMILIES["gpt2"].build(dtype=torch.float32)
    profile = profile_model(model, BATCH, LENGTH, device=device)
    blocks = [unit for unit in profile.units if ".h." in unit.name]
    assert len({(unit.forward, unit.backward, unit.weight, unit.kept) for unit in blocks}) == 1
    assert profile.measured == (device is not None)
    embedding, head = profile.units[0], profile.units[-1]
    assert embedding.seconds < blocks[0].seconds and head.crossing == 0
    hidden = BATCH * LENGTH * model.config.n_embd * 4
    assert {unit.crossing for unit in blocks} == {hidden}
    assert all(unit.kept_checkpointed == hidden < unit.kept for unit in blocks)


def test_estimated_products_are_those_of_the_formula() -> None:
    """A wide block: 24 B s h^2 + 4 B s^2 h operations forward; reading and writing is the smaller part."""
    model = FAMILIES["gpt2"].build(dtype=torch.bfloat16, n_embd=1024, n_head=2, n_layer=1, n_positions=1024)
    (block,) = [u for u in profile_model(model, 4, 1024, operations_per_second=1e12).units if ".h." in u.name]
    operations = 24 * 4 * 1024 * 1024**2 + 4 * 4 * 1024**2 * 1024
    assert 1.0 < block.forward * 0.4e12 / operations < 2.0
    assert 1.5 < (block.backward + block.weight) / block.forward < 3.0


def test_weight_gradients_are_those_that_a_run_puts_off() -> None:
    """Not those of embeddings, nor of a head with far more outputs than inputs."""
    model = FAMILIES["gpt2"].build(dtype=torch.float32, vocab_size=1024)
    units = profile_model(model, BATCH, LENGTH).units
    assert all((unit.weight > 0) == (".h." in unit.name) for unit in units)
    assert units[0].backward > 0 and units[-1].backward > units[-1].forward


def test_the_model_is_left_as_it_was() -> None:
    model = FAMILIES["gpt2"].build(dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert profile_model(model, BATCH, LENGTH).about["dtype"] == "float64"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model(input_ids=torch.ones(1, 4, dtype=torch.long))


def links() -> tuple:
    from penstock.planning.profiling import measure_links

    return measure_links()


def test_links_are_measured_alike_on_all_ranks(pool: Pool) -> None:
    (inside, between), *others = pool.run(3, links)
    assert between is None and all(other == (inside, between) for other in others)
    assert inside is not None and 0 <= inside.latency < 0.1 and 1e6 < inside.bandwidth < 1e12


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))

    def forward(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * t


def test_an_example_input_without_dimensions_is_followed() -> None:
    model = Scaled()
    record_of(model).example_inputs = {"t": torch.tensor(0.5), "x": torch.randn(4, 8)}
    assert len(profile_model(model, 4).units) == 3

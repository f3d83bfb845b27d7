"""Costs of units, against formulas of the models' operations."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.distributions import Distribution

from penstock.modeling.graph.costs import unit_costs
from penstock.modeling.graph.shapes import ShapeFunctions
from penstock.modeling.graph.units import list_units
from tests.support.families import FAMILIES


def test_costs_follow_the_multiplications() -> None:
    """GPT-2's blocks do 24 h^2 + 4 s h multiply-adds' flops per token, its head 2 h V; embeddings do next to none."""
    config = transformers.GPT2Config()
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    units = list_units(model)
    costs = dict(zip(units, unit_costs(model, units, tokens=128), strict=True))
    hidden, tokens = config.n_embd, 128
    expected = 2 * hidden * config.vocab_size / (24 * hidden**2 + 4 * tokens * hidden)
    assert costs["lm_head"] / costs["transformer.h.0"] == pytest.approx(expected, rel=0.1)
    assert costs["transformer.h.0"] == pytest.approx(costs["transformer.h.11"])
    assert costs["transformer.wte"] < costs["transformer.h.0"] / 20
    assert sum(costs.values()) == pytest.approx(len(units))


def test_experts_count_although_they_cannot_run_on_meta_tensors() -> None:
    cheap = FAMILIES["mixtral"].build(dtype=torch.float32, intermediate_size=8)
    dear = FAMILIES["mixtral"].build(dtype=torch.float32, intermediate_size=512)
    units = list_units(cheap)
    ratios = [unit_costs(model, units)[1] / unit_costs(model, units)[-1] for model in (cheap, dear)]
    assert ratios[1] > 5 * ratios[0]


def test_costs_do_not_depend_on_what_the_process_did_before() -> None:
    """torch.compile turns the argument checks of torch.distributions off for good, which sparse layers here use."""
    config = transformers.Gemma3nTextConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=48, vocab_size=64, vocab_size_per_layer_input=64,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, layer_types=["full_attention"] * 3,
        num_kv_shared_layers=0, activation_sparsity_pattern=[0.95, 0.95, 0.0],
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Gemma3nForCausalLM(config)
    units = list_units(model)
    before = Distribution._validate_args
    try:
        Distribution.set_default_validate_args(True)
        checked = unit_costs(model, units)
        assert Distribution._validate_args is True
        Distribution.set_default_validate_args(False)
        assert unit_costs(model, units) == checked
    finally:
        Distribution.set_default_validate_args(before)


def test_costs_stand_in_the_order_of_the_units_whatever_that_of_their_shape_functions() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=500))
    units = list_units(model)
    functions = ShapeFunctions({name: model.get_submodule(name) for name in reversed(units)})
    assert unit_costs(model, units, functions=functions) == unit_costs(model, units)
    assert unit_costs(model, units, functions=functions) == unit_costs(model, units)  # they are as they were

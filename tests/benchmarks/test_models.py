"""The benchmark's models: their sizes, and that all their forms are one model."""

import pytest
import torch
from kinds.configs import GPT_CONFIGS, MODEL_NAMES, GPTConfig, ResNetSize, canonical_name
from kinds.device_pipeline import DevicePipeline
from kinds.measure import model_flops
from kinds.models import (
    GPT,
    POLICIES,
    DeviceLayers,
    apply_policy,
    fill,
    layer_costs,
    next_token_loss,
    sequential_gpt,
)
from kinds.modes import blocks_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import ResNetForImageClassification

from penstock.modeling.graph.units import list_units
from penstock.modeling.stage.split import SplitModel

# Millions of parameters, as the field names these sizes (GPT-3's table 2.1; Megatron's table 1 for the largest).
NAMED = {
    "GPTSmall": 125,
    "GPTMedium": 355,
    "GPTLarge": 760,
    "GPTXL": 1_315,
    "GPTXXL": 2_650,
    "GPTXXXL": 6_658,
    "GPT13B": 12_853,
    "GPT175B": 174_600,
    "GPT1T": 1_008_000,
}


def tiny(**sizes: object) -> GPTConfig:
    return GPTConfig(vocab_size=61, block_size=16, **{"n_layer": 3, "n_head": 2, "n_embd": 32, **sizes})


def tokens(batch: int = 8) -> torch.Tensor:
    return torch.randint(61, (batch, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMED)
def test_presets_have_the_fields_sizes(name: str) -> None:
    config = GPT_CONFIGS[name]()
    counted = sum(parameter.numel() for parameter in GPT(config, device="meta").parameters())
    assert counted == config.num_parameters
    assert counted / 1e6 == pytest.approx(NAMED[name], rel=0.005)


@pytest.mark.parametrize(("depth", "millions"), [(18, 11.69), (34, 21.80), (50, 25.56), (101, 44.55), (152, 60.19)])
def test_resnets_have_the_papers_sizes(depth: int, millions: float) -> None:
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetSize(depth).to_transformers())
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3)


def test_a_size_may_be_a_subclass_as_in_the_documents_example() -> None:
    class GPTNarrowConfig(GPTConfig):
        n_layer = 3
        n_head = 2
        n_embd = 32

    model = GPT(GPTNarrowConfig(vocab_size=61, block_size=16), "cpu")
    assert len(model.transformer.h) == 3 and model.transformer.wte.weight.shape == (61, 32)
    assert sum(parameter.numel() for parameter in model.parameters()) == tiny().num_parameters


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"n_head \(24\) must divide n_embd \(2048\): 16 or 32 heads would do"):
        GPTConfig(n_head=24, n_embd=2048)
    with pytest.raises(ValueError, match="n_layer must be a positive integer, but is 0"):
        GPTConfig(n_layer=0)
    with pytest.raises(TypeError, match="has no size 'n_layers'"):
        GPTConfig(n_layers=2)


@pytest.mark.parametrize(
    ("text", "name"),
    [("GPTSmall", "GPTSmall"), ("gpt-small", "GPTSmall"), ("xl", "GPTXL"), ("GPTXXLConfig", "GPTXXL"),
     ("gpt_175b", "GPT175B"), ("resnet50", "ResNet50"), *((name, name) for name in MODEL_NAMES)],
)  # fmt: skip
def test_models_are_found_in_any_spelling(text: str, name: str) -> None:
    assert canonical_name(text) == name


def test_an_unknown_model_names_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt-smal': known are GPTTiny, .*did you mean GPTSmall\?"):
        canonical_name("gpt-smal")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_the_sequence_is_the_whole_model(tied: bool, num_devices: int) -> None:
    config, ids = tiny(tie_embeddings=tied), tokens()
    whole, parts = GPT(config, "cpu"), sequential_gpt(config, ["cpu"] * num_devices)
    assert len(parts) == num_devices and all(isinstance(part, DeviceLayers) for part in parts)
    assert torch.equal(parts(ids), whole(ids).logits)
    assert sum(parameter.numel() for parameter in parts.parameters()) == config.num_parameters


def test_the_sequence_is_balanced_by_cost() -> None:
    config = GPTConfig(vocab_size=3072, block_size=16, n_layer=10, n_head=2, n_embd=64)
    costs = layer_costs(config)
    sizes = [len(part) for part in sequential_gpt(config, ["cpu"] * 2)]
    cuts = [max(sum(costs[:cut]), sum(costs[cut:])) for cut in range(1, len(costs))]
    assert max(sum(costs[: sizes[0]]), sum(costs[sizes[0] :])) == min(cuts)
    assert sizes[0] > len(costs) / 2  # the head weighs as much as four blocks


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_made_alone_has_the_whole_models_weights(tied: bool) -> None:
    config = tiny(tie_embeddings=tied)
    whole = dict(GPT(config, "cpu", seed=3).named_parameters(remove_duplicate=False))
    units = list_units(GPT(config, device="meta"))
    for stage in (0, 1):
        model = GPT(config, device="meta")
        SplitModel(model, [units[:4], units[4:]], [stage])
        model.materialize("cpu", seed=3)
        held = dict(model.named_parameters())
        assert 0 < len(held) < len(whole)
        assert all(torch.equal(parameter, whole[name]) for name, parameter in held.items())


def test_weights_depend_on_name_and_seed_and_have_gpt2s_spread() -> None:
    weights = {name: torch.empty(64, 500) for name in ("transformer.h.0.attn.c_attn.weight", "h.1.mlp.c_proj.weight")}
    fill(weights.items(), num_layers=8, seed=0)
    first, projection = weights.values()
    assert first.std() == pytest.approx(0.02, rel=0.02) and projection.std() == pytest.approx(0.005, rel=0.02)
    again = {name: torch.empty(64, 500) for name in weights}
    fill(again.items(), num_layers=8, seed=0)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    fill(again.items(), num_layers=8, seed=1)
    assert not any(torch.equal(again[name], weights[name]) for name in weights)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_devices", "num_microbatches", "tied"), [(1, 4, True), (2, 4, False), (3, 2, True)])
def test_the_pipeline_of_devices_gives_the_whole_models_gradients(
    policy: str, num_devices: int, num_microbatches: int, tied: bool
) -> None:
    config, ids = tiny(tie_embeddings=tied), tokens()
    whole = GPT(config, "cpu", torch.float64)
    expected = next_token_loss(whole(ids).logits, ids)
    expected.backward()
    parts = sequential_gpt(config, ["cpu"] * num_devices, torch.float64)
    apply_policy(blocks_of(parts), policy)
    pipeline = DevicePipeline(parts, num_microbatches, next_token_loss)
    for _ in range(2):  # the second time every gradient doubles
        loss = pipeline(ids, ids)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
        loss.backward()
    # The parts' parameters stand in the whole model's order, but for the head's, whose own weight precedes its norm's.
    in_order = list(whole.parameters())
    if not tied:
        in_order[-3:] = [in_order[-1], *in_order[-3:-1]]
    for mine, theirs in zip(in_order, parts.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(theirs.grad, 2 * mine.grad, rtol=1e-10, atol=1e-12)
    busy = pipeline.take_busy_seconds()
    assert len(busy) == num_devices and min(busy) > 0 and pipeline.take_busy_seconds() == [0.0] * num_devices


def test_an_error_in_a_devices_thread_reaches_the_caller() -> None:
    parts = sequential_gpt(tiny(), ["cpu", "cpu"])
    pipeline = DevicePipeline(parts, 2, next_token_loss)
    with pytest.raises(IndexError, match="out of range"):
        pipeline(tokens() + 1000, tokens())
    with pytest.raises(ValueError, match="a batch of 8 cannot be split into 3 equal microbatches"):
        DevicePipeline(parts, 3, next_token_loss)(tokens(), tokens())
    pipeline(tokens(), tokens()).backward()


@pytest.mark.parametrize("sizes", [{}, {"n_layer": 5, "n_embd": 64}, {"tie_embeddings": False}])
def test_model_flops_are_three_forwards(sizes: dict[str, object]) -> None:
    config = tiny(**sizes)
    model = sequential_gpt(config, ["cpu"])
    # The counter knows matrix products, but not the CPU's fused attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens(4))
    assert model_flops(config, 4) == pytest.approx(3 * counter.get_total_flops(), rel=1e-9)


def test_a_resnets_flops_are_the_papers() -> None:
    assert model_flops(ResNetSize(50), 2) == pytest.approx(2 * 3 * 2 * 4.1e9, rel=0.02)  # 4.1 G multiply-adds

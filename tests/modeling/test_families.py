"""Every family, split into stages, gives the loss and gradients of the unsplit model, which is the oracle."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LEDConfig, LEDForConditionalGeneration

from tests.support.families import FAMILIES, batch
from tests.support.stage_driver import gradients, largest_difference, split, split_gradients, step
from tests.support.training import kept_in_double

TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """float32 inside a float64 model would hide all but gross errors."""
    with kept_in_double():
        yield


@cache
def reference(family: str) -> tuple[nn.Module, Any, dict[str, torch.Tensor]]:
    """The unsplit model, its output for the family's batch, and its gradients."""
    model = FAMILIES[family].build()
    worker = copy.deepcopy(model)
    output = worker(**batch(FAMILIES[family].kind))
    output.loss.backward()
    return model, output, gradients([worker])


@pytest.mark.parametrize(("family", "num_stages"), [("gpt2", 2), ("t5", 2), *((family, 3) for family in FAMILIES)])
def test_stages_give_the_unsplit_loss_and_gradients(family: str, num_stages: int) -> None:
    model, expected, expected_gradients = reference(family)
    splits = split(model, num_stages)
    output = step(splits, batch(FAMILIES[family].kind))
    assert type(output) is type(expected)
    assert output.loss.item() == pytest.approx(expected.loss.item(), abs=TOLERANCE)
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=TOLERANCE)
    assert largest_difference(split_gradients(splits), expected_gradients) < TOLERANCE


def test_one_plan_serves_batches_of_every_size_and_length() -> None:
    model = FAMILIES["gpt2"].build()
    splits = split(model, 3)
    for size, tokens, seed in ((2, 9, 0), (1, 5, 1), (5, 17, 2)):
        inputs = batch("causal", size, tokens, seed)
        for part in splits:
            part.model.zero_grad()
        worker = copy.deepcopy(model)
        expected = worker(**inputs)
        expected.loss.backward()
        output = step(splits, inputs)
        assert output.loss.item() == pytest.approx(expected.loss.item(), abs=TOLERANCE)
        assert largest_difference(split_gradients(splits), gradients([worker])) < TOLERANCE
    assert len(splits[0]._plans) == 1


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "mixtral", "t5", "vit"])
def test_hidden_states_and_attentions_of_every_stage_reach_the_output(family: str) -> None:
    model = FAMILIES[family].build()
    model.set_attn_implementation("eager")
    inputs = {**batch(FAMILIES[family].kind), "output_hidden_states": True, "output_attentions": True}
    worker = copy.deepcopy(model)
    expected = worker(**inputs)
    names = [name for name in expected if name.endswith(("hidden_states", "attentions"))]
    assert len(names) >= 2

    def loss_of_all(output: Any) -> torch.Tensor:
        """Also the side outputs must carry gradients back to their stages."""
        total = output.loss
        for name in names:
            for tensor in output[name]:
                total = total + tensor.sin().sum()
        return total

    output = step(splits := split(model, 3), inputs, loss_of=loss_of_all)
    loss_of_all(expected).backward()
    for name in names:
        assert len(output[name]) == len(expected[name])
        for found, wanted in zip(output[name], expected[name], strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    # Attention scores of sharply different sizes are summed in another order.
    assert largest_difference(split_gradients(splits), gradients([worker])) < 10 * TOLERANCE


@pytest.mark.parametrize("return_dict", [True, False])
def test_output_form_is_the_callers_choice(return_dict: bool) -> None:
    model = FAMILIES["gpt2"].build().eval()
    inputs = {**batch("causal"), "return_dict": return_dict}
    with torch.no_grad():
        expected = model(**inputs)
        output = step(split(model, 2), inputs, backward=False)
    assert type(output) is type(expected)
    torch.testing.assert_close(output[0], expected[0])
    torch.testing.assert_close(output[1], expected[1])


def test_a_kernel_without_meta_version_is_handled() -> None:
    """In float32 mixtral's experts run a grouped matrix product, which meta tensors do not have."""
    model = FAMILIES["mixtral"].build(dtype=torch.float32)
    inputs = batch("causal", dtype=torch.float32)
    worker = copy.deepcopy(model)
    expected = worker(**inputs)
    expected.loss.backward()
    splits = split(model, 3)
    output = step(splits, inputs)
    assert output.loss.item() == pytest.approx(expected.loss.item(), abs=1e-6)
    assert largest_difference(split_gradients(splits), gradients([worker])) < 1e-6


def test_a_length_that_takes_another_path_through_the_model_has_a_plan_of_its_own() -> None:
    """LED embeds what it adds up to the next multiple of its attention's window, and nothing if that is none."""
    sizes = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    sizes |= {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 97, "attention_window": 4}
    torch.manual_seed(0)
    model = LEDForConditionalGeneration(LEDConfig(**sizes, dropout=0, attention_dropout=0)).double().train()
    splits = split(model, 3)
    for tokens in (8, 7, 8):
        inputs = batch("sequences", 2, tokens)
        for part in (model, *(one.model for one in splits)):
            part.zero_grad()
        expected = model(**inputs)
        expected.loss.backward()
        assert step(splits, inputs).loss.item() == pytest.approx(expected.loss.item(), abs=TOLERANCE)
        assert largest_difference(split_gradients(splits), gradients([model])) < TOLERANCE

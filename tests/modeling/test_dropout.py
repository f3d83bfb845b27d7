"""Dropout draws the same masks in every layout. Oracle: one stage with the same seed; statistics for independence."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from tests.support.families import FAMILIES, batch
from tests.support.stage_driver import largest_difference, split, split_gradients, step

TOLERANCE = 1e-10


def run(
    model: nn.Module, kind: str, num_stages: int, seed: int | None, ranks: list[list[int]] | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    splits = split(model, num_stages, ranks)
    output = step(splits, batch(kind), seed=seed)
    return output.loss.item(), split_gradients(splits)


@pytest.mark.parametrize("family", ["gpt2", "t5", "mixtral"])
def test_layouts_draw_the_same_masks(family: str) -> None:
    model = FAMILIES[family].build(dropout=0.3)
    if family == "mixtral":
        model.config.router_jitter_noise = 0.1
    kind = FAMILIES[family].kind
    loss, expected = run(model, kind, 1, seed=11)
    for num_stages, ranks in ((3, None), (4, [[0, 2], [1, 3]])):
        found_loss, found = run(model, kind, num_stages, 11, ranks)
        assert found_loss == pytest.approx(loss, abs=TOLERANCE)
        assert largest_difference(found, expected) < TOLERANCE
    assert run(model, kind, 2, seed=12)[0] != pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_draws_the_same_masks_again(reentrant: bool) -> None:
    model = FAMILIES["gpt2"].build(dropout=0.3)
    loss, expected = run(model, "causal", 1, seed=5)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    for num_stages in (1, 3):
        found_loss, found = run(model, "causal", num_stages, seed=5)
        assert found_loss == pytest.approx(loss, abs=TOLERANCE)
        assert largest_difference(found, expected) < TOLERANCE


def test_the_callers_random_stream_is_left_as_found() -> None:
    (first, _) = split(FAMILIES["gpt2"].build(dropout=0.3), 2)
    inputs = batch("causal")
    plan = first.plan(inputs)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first.forward(plan, 0, inputs, (), seed=1)
    assert torch.equal(torch.rand(4), expected)


def test_masks_of_different_units_calls_and_seeds_differ() -> None:
    masks: list[torch.Tensor] = []
    model = FAMILIES["gpt2"].build(dropout=0.5)
    for block in model.transformer.h:
        block.mlp.dropout.register_forward_hook(lambda *args: masks.append(args[2] == 0))
    (only,) = split(model, 1)
    inputs = batch("causal", size=4, tokens=16)
    plan = only.plan(inputs)
    for seed in (0, 1, 2):
        only.forward(plan, 0, inputs, (), seed=seed)
    assert len(masks) == 12
    for index, mask in enumerate(masks):
        assert mask.double().mean() == pytest.approx(0.5, abs=0.06)
        for other in masks[:index]:
            # Independent masks agree in half of the 2048 places: five standard deviations are 0.055.
            assert (mask == other).double().mean() == pytest.approx(0.5, abs=0.06)


class Functional(transformers.GPT2LMHeadModel):
    """Drops elements in its own code, between two units and before the first."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
        hidden = self.transformer.wte(input_ids)
        keep = torch.rand(hidden.shape[:2])
        for block in self.transformer.h:
            hidden = nn.functional.dropout(block(hidden), 0.3, self.training) * (keep > 0.1).unsqueeze(-1)
        logits = self.lm_head(self.transformer.ln_f(hidden))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_dropout_in_the_models_own_code_does_not_depend_on_the_layout() -> None:
    torch.manual_seed(0)
    model = Functional(transformers.GPT2Config(**FAMILIES["gpt2"].settings)).double().train()
    inputs = {"input_ids": torch.arange(18).view(2, 9), "labels": torch.arange(18).view(2, 9)}
    losses = [step(split(model, num_stages), inputs, seed=4).loss.item() for num_stages in (1, 3)]
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE)


def test_evaluation_ignores_the_seed() -> None:
    model = FAMILIES["gpt2"].build(dropout=0.3).eval()
    with torch.no_grad():
        expected = model(**batch("causal")).loss.item()
        assert step(split(model, 2), batch("causal"), backward=False, seed=1).loss.item() == pytest.approx(expected)


def test_layers_dropped_at_random_are_refused_in_training_only() -> None:
    model = FAMILIES["bart"].build()
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.2
    (first, _) = split(model, 2)
    with pytest.raises(NotImplementedError, match=r"Auto policy for BartForConditionalGeneration .*random path"):
        first.plan(batch("sequences"))
    first.model.eval()
    first.plan(batch("sequences"))

"""The report of `check`. Oracle: the model's own parameters, and the plan of an actual split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from penstock.checking.check import check
from tests.support.families import FAMILIES


def test_a_report_names_units_cuts_and_ties() -> None:
    model = FAMILIES["gpt2"].build()
    report = check(model)
    assert report.splittable and report.model == "GPT2LMHeadModel"
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())
    sizes = {unit.name: unit.parameters for unit in report.units}
    assert sizes["transformer.h.0"] == sum(parameter.numel() for parameter in model.transformer.h[0].parameters())
    assert sum(sizes.values()) == report.parameters + model.lm_head.weight.numel()
    assert len(report.boundaries) == len(report.units) - 1
    assert [str(value) for value in report.boundaries[2].crossing] == ["transformer.h.0 float64[2, 8, 32]"]
    assert report.ties == (("transformer.wte.weight", "lm_head.weight"),)
    assert report.everywhere == ()


def test_encoder_states_and_position_biases_are_seen_to_cross() -> None:
    report = check(FAMILIES["t5"].build())
    crossing = {place.before: {value.origin for value in place.crossing} for place in report.boundaries}
    assert crossing["decoder.block.0"] == {
        "encoder.final_layer_norm",
        "decoder.block.0",
        "decoder.block.0 output 1",
        "decoder.block.0 output 2",
    }
    assert len(report.ties) == 1 and len(report.ties[0]) == 4


@pytest.mark.parametrize(
    "subject",
    ["GPT2LMHeadModel", transformers.GPT2LMHeadModel, transformers.GPT2Config(architectures=["GPT2LMHeadModel"])],
)
def test_classes_names_and_configurations_are_built_without_memory(subject: object) -> None:
    report = check(subject)  # type: ignore[arg-type]
    assert report.parameters == 124_439_808
    assert len(report.units) == 16


def test_a_refusal_gives_the_reason() -> None:
    class Broken(transformers.GPT2LMHeadModel):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise ValueError("no cheese")

    report = check(Broken(transformers.GPT2Config(**FAMILIES["gpt2"].settings)))
    assert not report.splittable and "no cheese" in report.reason
    assert "cannot be split: ValueError: no cheese" in report.render()


def test_a_check_leaves_the_model_as_it_was() -> None:
    model = FAMILIES["t5"].build().train()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    check(model)
    assert model.training and all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == keys


OWN_MODEL = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

class OwnConfig(PretrainedConfig):
    model_type = "own_of_a_test"
    width = 8

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(16, config.width)
        self.blocks = nn.ModuleList([nn.Linear(config.width, config.width) for _ in range(3)])
        self.head = nn.Linear(config.width, 2)
        self.post_init()

    def forward(self, input_ids, labels=None):
        hidden = self.embed(input_ids).mean(1)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
"""


def test_a_folder_with_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text(OWN_MODEL)
    (tmp_path / "config.json").write_text(
        '{"model_type": "own_of_a_test", "architectures": ["OwnModel"], "auto_map": {"AutoConfig": '
        '"modeling_own.OwnConfig", "AutoModelForSequenceClassification": "modeling_own.OwnModel"}}'
    )
    report = check(str(tmp_path), trust_remote_code=True)
    assert [unit.name for unit in report.units] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    with pytest.raises(ValueError, match="trust_remote_code"):
        check(str(tmp_path))


class Unbuildable(transformers.GPT2LMHeadModel):
    def __init__(self, config: Any) -> None:
        raise KeyError("no cheese")


def test_a_model_that_cannot_be_built_is_reported() -> None:
    report = check(Unbuildable)
    assert report.reason == "it cannot be built: KeyError: 'no cheese'"


class ByHand(nn.Module):
    """A vision transformer as people write it: the root has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.zeros(1, 16, 8))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in self.rates)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.patches(image).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Two(nn.Module):
    """Takes two arguments that no name explains."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            left = block(left) * right
        return left


class WithDummies(Two):
    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        sizes = torch.zeros(2, 4, device=self.blocks[0].weight.device)  # type: ignore[union-attr]  # a layer
        return {"left": sizes, "right": sizes}


def test_the_shape_of_an_image_is_guessed_past_the_roots_own_parameter() -> None:
    report = check(ByHand())
    assert report.splittable and dict(report.inputs) == {"image": (2, 3, 32, 32)}
    assert "tokens" not in report.render()  # costs are of images


def test_dummy_inputs_of_a_model_without_memory_are_used() -> None:
    with torch.device("meta"):
        report = check(WithDummies())
    assert report.splittable and dict(report.inputs) == {"left": (2, 4), "right": (2, 4)}


def test_a_model_that_needs_inputs_is_not_called_one_that_cannot_be_split() -> None:
    report = check(Two())
    assert not report.splittable and not report.reason and "'left' and 'right'" in report.inputs_needed
    assert "cannot be split" not in report.render() and "needs inputs to be followed" in report.render()
    example = torch.zeros(2, 4)
    assert check(Two(), {"left": example, "right": example}).splittable
    with pytest.raises(
        ValueError, match=r"Two\.forward\(\) missing a required argument: 'right'; the inputs given are left"
    ):
        check(Two(), {"left": example})


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no model"):
        check(int)

"""The report of `check`. Oracle: the model's own parameters, and the plan of an actual split."""

from __future__ import annotations

import pytest
import torch
import transformers

from families import FAMILIES
from penstock.modeling.check import check


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
        "encoder.dropout (call 2)",
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


def test_a_saved_model_is_checked_by_its_folder(tmp_path: object) -> None:
    FAMILIES["bert_mlm"].build(dtype=torch.float32).save_pretrained(tmp_path)
    report = check(str(tmp_path))
    assert report.model == "BertForMaskedLM" and report.splittable


def test_a_refusal_gives_the_reason() -> None:
    class Broken(transformers.GPT2LMHeadModel):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise ValueError("no cheese")

    report = check(Broken(transformers.GPT2Config(**FAMILIES["gpt2"].settings)))
    assert not report.splittable and "no cheese" in report.reason
    assert "cannot be split: ValueError: no cheese" in report.render()


def test_the_text_holds_what_was_found() -> None:
    text = check(FAMILIES["bart"].build()).render()
    for part in ("BartForConditionalGeneration", "model.encoder.layers.0", "tied: ", "cost", "model.decoder.layers.0-"):
        assert part in text


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no model"):
        check(int)

"""The report of `check`. Oracle: the model's own parameters, and the plan of an actual split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from families import FAMILIES
from penstock.checking.check import check
from penstock.checking.verdicts import ACCUMULATED, EXACT, NOT_TRIED, REFUSED


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


def test_a_refusal_gives_the_reason() -> None:
    class Broken(transformers.GPT2LMHeadModel):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise ValueError("no cheese")

    report = check(Broken(transformers.GPT2Config(**FAMILIES["gpt2"].settings)))
    assert not report.splittable and "no cheese" in report.reason
    assert "cannot be split: ValueError: no cheese" in report.render()


def verdicts_of(model: nn.Module) -> dict[str, tuple[str, str]]:
    return {verdict.what: (verdict.answer, verdict.reason) for verdict in check(model).verdicts}


def small_gpt2(kind: type = transformers.GPT2LMHeadModel) -> Any:
    return kind(transformers.GPT2Config(**FAMILIES["gpt2"].settings))


@pytest.mark.parametrize(
    ("family", "generates"),
    [("gpt2", True), ("bert_mlm", False), ("t5", True), ("vit", False)],
)
def test_what_is_exact_is_said_to_be(family: str, generates: bool) -> None:
    what = ["training", "evaluation", *(["generate"] if generates else [])]
    assert verdicts_of(FAMILIES[family].build()) == dict.fromkeys(what, (EXACT, ""))


def test_a_routers_loss_is_no_mean_over_samples() -> None:
    found = verdicts_of(FAMILIES["mixtral"].build())  # its balance over the experts is that of a microbatch
    assert found["training"][0] == ACCUMULATED and "more than the results of torch's loss" in found["training"][1]
    assert found["evaluation"] == found["generate"] == (EXACT, "")


def test_a_check_leaves_the_model_as_it_was() -> None:
    model = FAMILIES["t5"].build().train()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    check(model)
    assert model.training and all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == keys


class Peeks(transformers.GPT2LMHeadModel):
    """Its generate() asks a block past the model's forward."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):  # type: ignore[no-untyped-def]
        self.transformer.h[3].ln_1(self.transformer.wte(input_ids))
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


class Wanders(transformers.GPT2LMHeadModel):
    """Its forward looks for a weight that only the rank of a block has."""

    def forward(self, input_ids, labels=None, **kwargs):  # type: ignore[no-untyped-def]
        if not any("h.0.attn.c_attn.weight" in name for name, _ in self.named_parameters()):
            raise LookupError("no cheese")
        return super().forward(input_ids, labels=labels, **kwargs)


def test_a_generate_past_the_forward_is_refused() -> None:
    found = verdicts_of(small_gpt2(Peeks))
    assert found["training"] == found["evaluation"] == (EXACT, "")
    answer, reason = found["generate"]
    assert answer == REFUSED and "runs a part of the model by itself" in reason and "transformer." in reason


def test_what_only_shows_once_the_model_is_split_is_refused() -> None:
    for answer, reason in verdicts_of(small_gpt2(Wanders)).values():
        assert answer == REFUSED and "LookupError: no cheese" in reason


class SumOverTokens(transformers.GPT2LMHeadModel):
    """Takes its mean itself, and fails if it is evaluated with labels."""

    def forward(self, input_ids, labels=None, **kwargs):  # type: ignore[no-untyped-def]
        hidden = self.transformer(input_ids).last_hidden_state
        if not self.training and labels is None:
            raise ZeroDivisionError("no cheese")
        logits = self.lm_head(hidden)
        if labels is None:
            return transformers.modeling_outputs.CausalLMOutput(logits=logits)
        terms = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return transformers.modeling_outputs.CausalLMOutput(loss=terms.sum() / (labels != 3).sum(), logits=logits)


def test_training_may_be_exact_against_accumulation_and_evaluation_refused() -> None:
    found = verdicts_of(small_gpt2(SumOverTokens))
    assert found["training"] == (ACCUMULATED, "the model's code reduces the result of cross_entropy (reduction='none')")
    assert found["evaluation"] == (REFUSED, "ZeroDivisionError: no cheese (after the call of transformer.ln_f)")
    text = check(small_gpt2(SumOverTokens)).render()
    assert "on 2 stages, training: exact against accumulation over the same microbatches" in text
    assert "on 2 stages, evaluation: refused, because ZeroDivisionError: no cheese" in text


def test_batch_statistics_are_told() -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=(8, 16), depths=(1, 1), num_labels=3)
    found = verdicts_of(transformers.ResNetForImageClassification(config))
    assert found["training"][0] == ACCUMULATED and "batch normalisation (resnet.embedder" in found["training"][1]
    assert found["evaluation"] == (EXACT, "")


class Decides(transformers.GPT2LMHeadModel):
    """What it does next depends on what its first block computed."""

    def forward(self, input_ids, labels=None):  # type: ignore[no-untyped-def]
        hidden = self.transformer.h[0](self.transformer.wte(input_ids))
        if hidden.sum() > 0:
            hidden = hidden + 1
        logits = self.lm_head(self.transformer.h[3](hidden))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_what_no_stage_can_know_is_refused_with_the_value() -> None:
    answer, reason = verdicts_of(small_gpt2(Decides))["training"]
    assert answer == REFUSED and "depends on values computed by transformer.h.0" in reason


def test_a_model_without_labels_is_not_tried() -> None:
    model = transformers.GPT2Model(transformers.GPT2Config(**FAMILIES["gpt2"].settings))
    assert verdicts_of(model)["training"][0] == NOT_TRIED
    assert verdicts_of(model)["evaluation"] == (EXACT, "")


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
    assert [(verdict.what, verdict.answer) for verdict in report.verdicts] == [
        ("training", EXACT),
        ("evaluation", EXACT),
    ]
    with pytest.raises(ValueError, match="trust_remote_code"):
        check(str(tmp_path))


class Unbuildable(transformers.GPT2LMHeadModel):
    def __init__(self, config: Any) -> None:
        raise KeyError("no cheese")


def test_a_model_that_cannot_be_built_is_reported() -> None:
    report = check(Unbuildable)
    assert report.reason == "it cannot be built: KeyError: 'no cheese'" and not report.verdicts


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no model"):
        check(int)

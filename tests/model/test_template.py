"""Pipeline templates: identity, and the documented errors, on the unit names of GPT-2."""

import pickle

import pytest
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from penstock.layout.template import end_modules
from penstock.modeling.pipeline_template import PipelineTemplate

NAME = "GPT2LMHeadModel"
FIRST = ["transformer.wte", "transformer.wpe", "transformer.drop"]
BLOCKS = [f"transformer.h.{index}" for index in range(6)]
LAST = ["transformer.ln_f", "lm_head"]
MODULES = FIRST + BLOCKS + LAST


def tiny_gpt2(cls=GPT2LMHeadModel):
    return cls(GPT2Config(n_layer=6, n_embd=8, n_head=2, vocab_size=32, n_positions=16, pad_token_id=0))


def refusal(modules_per_stage, modules=MODULES):
    with pytest.raises(ValueError) as caught:
        PipelineTemplate(NAME, modules_per_stage).validate(NAME, modules)
    return str(caught.value)


@pytest.mark.parametrize(
    "stages",
    [[MODULES], [MODULES[:4], MODULES[4:]], [FIRST, BLOCKS, LAST], [FIRST, *[[block] for block in BLOCKS], LAST]],
)
def test_every_contiguous_partition_with_whole_ends_is_valid(stages):
    template = PipelineTemplate(NAME, stages)
    template.validate(NAME, MODULES)
    assert template.num_stages == len(stages)
    assert list(template.modules) == MODULES


def test_templates_are_equal_by_model_and_modules_and_serve_as_keys():
    one = PipelineTemplate(NAME, [MODULES[:4], MODULES[4:]])
    same = PipelineTemplate(NAME, (tuple(MODULES[:4]), tuple(MODULES[4:])))
    assert one == same and hash(one) == hash(same) and {one: 3}[same] == 3
    assert one != PipelineTemplate(NAME, [MODULES[:5], MODULES[5:]])
    assert one != PipelineTemplate("another", [MODULES[:4], MODULES[4:]])
    assert pickle.loads(pickle.dumps(one)) == one
    assert "2 stages of 4 + 7 modules" in repr(one)


def test_a_template_cannot_change_with_the_lists_it_was_made_of():
    stages = [list(MODULES[:4]), list(MODULES[4:])]
    template = PipelineTemplate(NAME, stages)
    stages[0].clear()
    assert list(template.modules) == MODULES
    with pytest.raises(AttributeError):
        template.model_name = "another"


def test_missing_unknown_and_duplicated_modules_are_each_named():
    assert refusal([MODULES[:5], MODULES[6:]]) == (
        "Modules in the pipeline template do not match the modules in the model GPT2LMHeadModel: "
        "missing from the template: transformer.h.2."
    )
    assert "unknown to the model: transformer.h.99." in refusal([MODULES[:4], ["transformer.h.99"], MODULES[4:]])
    duplicated = refusal([MODULES[:5], MODULES[4:]])
    assert "duplicated: transformer.h.1 (in stages 0, 1)." in duplicated
    everything = refusal([[*MODULES[:5], "x"], [*MODULES[6:], "x"]])
    assert "missing from the template: transformer.h.2; unknown to the model: x; duplicated: x" in everything


def test_long_lists_of_modules_are_cut_short_in_errors():
    assert "and 3 more" in refusal([["x"]])


def test_reordered_modules_are_named():
    swapped = [*FIRST, BLOCKS[1], BLOCKS[0], *BLOCKS[2:], *LAST]
    assert refusal([swapped]) == (
        "Modules in the pipeline template do not match the modules in the model GPT2LMHeadModel: "
        "reordered: transformer.h.0 (stage 0) must come before transformer.h.1."
    )
    assert "reordered: transformer.h.0 (stage 1)" in refusal([[*FIRST, *BLOCKS[3:]], [*BLOCKS[:3], *LAST]])


@pytest.mark.parametrize(
    ("stages", "module"),
    [
        ([FIRST[:1], FIRST[1:] + BLOCKS + LAST], "transformer.wpe"),
        ([FIRST[1:] + BLOCKS[:2], FIRST[:1] + BLOCKS[2:] + LAST], "transformer.wte"),
        ([FIRST + BLOCKS + LAST[:1], LAST[1:]], "transformer.ln_f"),
        ([FIRST + LAST[1:] + BLOCKS[:2], BLOCKS[2:] + LAST[:1]], "lm_head"),
    ],
)
def test_embeddings_belong_in_the_first_stage_and_the_head_in_the_last(stages, module):
    assert refusal(stages).startswith(f"The first (or last) stage must contain {module} module")


def test_end_modules_are_those_around_the_repeated_blocks():
    assert end_modules(MODULES) == (FIRST, LAST)
    two_stacks = ["shared", "encoder.block.0", "encoder.norm", "decoder.block.0", "decoder.norm", "lm_head"]
    assert end_modules(two_stacks) == (["shared"], ["decoder.norm", "lm_head"])
    assert end_modules(["conv1", "pool", "fc"]) == ([], [])


def test_modules_of_a_real_model_make_valid_templates():
    model = tiny_gpt2()
    modules = PipelineTemplate.get_modules(model)
    assert set(BLOCKS) <= set(modules)
    for name in (NAME, "gpt2", "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel", "my own label"):
        PipelineTemplate(name, [modules]).validate(model)
        PipelineTemplate(name, [modules[:5], modules[5:]]).validate(model)


def test_modules_of_a_classifier_without_a_token_for_padding_are_found():
    model = GPT2ForSequenceClassification(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=32, n_positions=16))
    assert model.config.pad_token_id is None
    assert PipelineTemplate.get_modules(model)[-2:] == ["transformer.ln_f", "score"]


def test_a_template_of_another_model_is_refused():
    model = tiny_gpt2(GPT2ForSequenceClassification)
    for name in ("bert", "GPT2LMHeadModel", "transformers.LlamaForCausalLM"):
        with pytest.raises(ValueError, match=rf"for the model '{name}', but the model is GPT2ForSequence"):
            PipelineTemplate(name, [MODULES]).validate(model, MODULES)
    with pytest.raises(ValueError, match="score"):
        PipelineTemplate("gpt2", [MODULES]).validate(model)


def test_a_subclass_of_the_users_goes_by_both_names():
    class MyGPT2(GPT2LMHeadModel):
        pass

    model = tiny_gpt2(MyGPT2)
    for name in ("MyGPT2", "GPT2LMHeadModel", "gpt2"):
        PipelineTemplate(name, [MODULES]).validate(model, MODULES)


def test_a_module_of_ones_own_goes_by_its_own_names():
    class BlocksModel(nn.Sequential):
        pass

    model = BlocksModel(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"Name it one of BlocksModel, Sequential, [^,]*BlocksModel, [^,]*Sequential\."
    ):
        PipelineTemplate("GPT2Model", [["0"], ["1"]]).validate(model, ["0", "1"])


def test_a_name_given_as_text_contradicts_only_a_name_of_its_kind():
    PipelineTemplate("gpt2", [MODULES]).validate(NAME, MODULES)
    PipelineTemplate("gpt2", [MODULES]).validate("openai-community/gpt2", MODULES)
    with pytest.raises(ValueError, match="is for the model 'opt', but the model is gpt2"):
        PipelineTemplate("opt", [MODULES]).validate("gpt2", MODULES)
    with pytest.raises(TypeError, match="needs the model's modules"):
        PipelineTemplate("gpt2", [MODULES]).validate("gpt2")


@pytest.mark.parametrize(
    ("stages", "error", "text"),
    [
        (MODULES, TypeError, r"item 0 is the string 'transformer.wte'. For a one-stage template write \[modules\]"),
        ("transformer.wte", TypeError, "must be a list of lists"),
        (None, TypeError, "must be a list of lists"),
        ([3], TypeError, "Stage 0 must be a list of module names, but is a int"),
        ([[3]], TypeError, "Stage 0 must hold module names, but holds a int"),
        ([], ValueError, "at least one stage"),
        ([MODULES, []], ValueError, "Stage 1 of 2 in the pipeline template holds no modules"),
    ],
)
def test_malformed_stages_are_refused_when_the_template_is_made(stages, error, text):
    with pytest.raises(error, match=text):
        PipelineTemplate(NAME, stages)


def test_a_model_instead_of_its_name_is_refused():
    with pytest.raises(TypeError, match="model_name must be a string, but is a GPT2LMHeadModel"):
        PipelineTemplate(tiny_gpt2(), [MODULES])

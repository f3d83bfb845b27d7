"""A sample of the sweep over transformers' classes (`benchmarks/coverage.py`): what once was refused or crashed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pool import Pool

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import coverage
from coverage import cause_of, changes, sample, worst
from examine_model import examine

SAMPLE = [
    ("multiple-choice", "BertForMultipleChoice"),  # inputs of shape (batch, choices, tokens)
    ("causal-lm", "MptForCausalLM"),  # no more positions than `max_seq_len`
    ("causal-lm", "MambaForCausalLM"),  # a cache without lengths
    ("causal-lm", "ZayaForCausalLM"),  # layers with keys and values and a convolution's state
    ("ctc", "Wav2Vec2ForCTC"),  # the loss is a sum
    ("ctc", "SEWDForCTC"),  # a value is changed in place after a dropout of another stage
    ("masked-lm", "LukeForMaskedLM"),  # a second loss in the output
    ("sequence-classification", "XLNetForSequenceClassification"),  # the second dimension of a memory is the batch
    ("image-text with images", "Qwen3VLForConditionalGeneration"),  # flattened patches, images of several sizes
    ("image-text with images", "Ovis2ForConditionalGeneration"),  # parts for images are defined after the text's
    ("image-text with images", "Mistral3ForConditionalGeneration"),  # shapes depend on the images' sizes
    ("image-text with images", "Lfm2VlForConditionalGeneration"),  # a unit is called once for each image
    ("image-text with images", "Ernie4_5_VLMoeForConditionalGeneration"),  # offsets are made from the images' sizes
    ("causal-lm", "GlmMoeDsaForCausalLM"),  # a cache with an indexer's keys
    ("causal-lm", "DeepseekV4ForCausalLM"),  # layers of the cache are of the model's own class
    ("seq2seq-lm", "Qwen2AudioForConditionalGeneration"),  # the loss is over the tokens that the mask leaves
    ("causal-lm", "JetMoeForCausalLM"),  # an attention that cannot run on meta tensors lengthens its cache
    ("masked-lm", "PerceiverForMaskedLM"),  # a unit is given the embedding
    ("question-answering", "ReformerForQuestionAnswering"),  # its blocks run inside an autograd function
    ("image-text with images", "LlavaForConditionalGeneration"),  # generate() encodes images before the first forward
]


@pytest.mark.parametrize(("task", "name"), SAMPLE)
def test_two_stages_are_exact(pool: Pool, task: str, name: str) -> None:
    found = worst(pool.run(2, examine, name, task, 2, timeout=120))
    assert "train" in found, found
    assert set(found.values()) == {"exact"}, found


def test_keys_and_values_that_later_layers_share_cross_boundaries(pool: Pool) -> None:
    """Of a model where samples are the second dimension of hidden states."""
    found = worst(pool.run(4, examine, "Gemma3nForCausalLM", "causal-lm", 4, timeout=120))
    assert found == dict.fromkeys(("train", "evaluate", "generate"), "exact"), found


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("seq2seq-lm", "T5ForConditionalGeneration"),  # a bias for each head, handed on from block to block
        ("causal-lm", "BloomForCausalLM"),  # a bias that is made for all heads
        ("causal-lm", "Phi3ForCausalLM"),  # outputs gathered, and taken in part again
        ("masked-lm", "RobertaForMaskedLM"),
    ],
)
def test_tensor_parallelism_is_exact(pool: Pool, task: str, name: str) -> None:
    found = worst(pool.run(2, examine, name, task, 1, 2, timeout=120))
    assert "train" in found, found
    assert set(found.values()) == {"exact"}, found


def test_batch_normalisation_is_exact_against_accumulation_and_named(pool: Pool) -> None:
    found = worst(pool.run(2, examine, "ResNetForImageClassification", "image-classification", 2, timeout=120))
    assert found["train"].startswith("warned: in training, batch normalisation (resnet.embedder"), found


def test_sizes_are_found_in_parts_of_a_configuration(pool: Pool) -> None:
    found = worst(pool.run(2, examine, "CanaryForConditionalGeneration", "speech-seq2seq", 2, timeout=120))
    assert found["train"].startswith("warned: in training, batch normalisation (model.encoder"), found
    assert found["evaluate"] == found["generate"] == "exact", found


def test_a_mean_by_hand_is_exact_against_accumulation_and_named(pool: Pool) -> None:
    found = worst(pool.run(2, examine, "ViTForMaskedImageModeling", "masked-image", 2, timeout=120))
    assert found["train"].endswith("(the model's code reduces the result of l1_loss (reduction='none'))"), found


def test_a_generate_that_runs_parts_of_the_model_by_themselves_is_refused(pool: Pool) -> None:
    found = worst(pool.run(2, examine, "BlipForConditionalGeneration", "image-text", 2, timeout=120))
    assert found["train"] == found["evaluate"] == "exact"
    assert found["generate"].startswith("refused: generate() of BlipForConditionalGeneration runs a part"), found


def test_an_output_inside_another_leaves_its_cache_behind(pool: Pool) -> None:
    found = worst(pool.run(2, examine, "InstructBlipForConditionalGeneration", "image-text", 2, timeout=120))
    assert found["train"] == found["evaluate"] == "exact", found


def test_a_cache_that_grows_by_less_than_the_hidden_states_have_entries(pool: Pool) -> None:
    found = worst(pool.run(2, examine, "ProphetNetForCausalLM", "causal-lm", 2, timeout=120))
    assert found["generate"] == "exact", found


def record(name: str, **outcomes: str) -> dict[str, Any]:
    return {"task": "causal-lm", "class": name, "stages": 2, "tensor_parallel": 1, "seconds": 1.0, **outcomes}


def test_a_newer_version_is_compared_class_by_class() -> None:
    good = {"train": "exact", "evaluate": "exact", "generate": "exact"}
    before = [record("A", **good), record("B", **good), record("C", unsplit="ImportError: timm")]
    after = [
        record("A", **good),
        record("B", **{**good, "generate": "crash: KeyError: 'x'"}),
        record("C", **good),
        record("New", unsplit="ValueError: its smallest configuration found has 30,000,000 parameters"),
    ]
    found = changes(before, after)
    assert found[0] == "causal-lm B: generate was exact, is crash: KeyError: 'x'"
    assert "causal-lm C: train was not tried, is exact" in found
    assert found[-1].startswith("causal-lm New: new, ValueError: its smallest")
    assert not any(line.startswith("causal-lm A") for line in found)
    assert changes(after, after) == []


def test_why_a_class_was_not_tried_is_told_by_its_error() -> None:
    assert cause_of(record("A", unsplit="ImportError: A requires the timm library")).startswith("it needs a package")
    assert cause_of(record("A", unsplit="RuntimeError: shape '[2]' is invalid")) == "no batch was found that it runs on"


def test_a_sample_is_of_good_records_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    bad = {"train": "crash: KeyError"}
    lines = [record(f"Class{number}", **({"train": "exact"} if number % 2 else bad)) for number in range(40)]
    results, found = tmp_path / "results.jsonl", tmp_path / "found.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked: list[str] = []
    with mock.patch.object(coverage, "examine_all", lambda keys, *rest: asked.extend(key[1] for key in keys)):
        sample(8, 1, results, found)
        assert len(set(asked)) == 8 and all(int(name.removeprefix("Class")) % 2 for name in asked)
        first, rest = asked[:3], asked[3:]
        found.write_text("".join(json.dumps(record(name, train="exact")) + "\n" for name in first))
        asked.clear()
        sample(8, 1, results, found)
    assert asked == rest

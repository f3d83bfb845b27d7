"""A sample of the sweep over transformers' classes (studies/coverage.py): what once was refused or crashed."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import coverage
import pytest
from coverage import cause_of, changes, sample, worst
from examine_model import examine

from tests.support.pool import Pool
from tests.support.training import in_turn

pytestmark = pytest.mark.slow

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


WHOLE = {"train": "exact", "evaluate": "exact"}
# What is not exact, or not looked at in all.
OTHERS = {
    ("image-classification", "ResNetForImageClassification"): {
        "train": "warned: in training, batch normalisation (resnet.embedder"
    },
    # Sizes are found in parts of a configuration.
    ("speech-seq2seq", "CanaryForConditionalGeneration"): {
        "train": "warned: in training, batch normalisation (model.encoder", "evaluate": "exact", "generate": "exact"
    },
    ("masked-image", "ViTForMaskedImageModeling"): {
        "train": "warned: the loss of ViTForMaskedImageModeling is no mean over tokens or samples (it is more than"
    },
    ("image-text", "BlipForConditionalGeneration"): {
        **WHOLE, "generate": "refused: generate() of BlipForConditionalGeneration runs a part"
    },
    ("image-text", "InstructBlipForConditionalGeneration"): WHOLE,  # an output inside another leaves its cache behind
    # A cache that grows by less than the hidden states have entries.
    ("causal-lm", "ProphetNetForCausalLM"): {"generate": "exact"},
}  # fmt: skip


def examine_all(names: Collection[tuple[str, str]], *sizes: int) -> list[dict[str, str]]:
    """On a worker."""
    return in_turn([partial(examine, name, task, *sizes) for task, name in names])


def examined(pool: Pool, ranks: int, names: Collection[tuple[str, str]], *sizes: int) -> dict[str, dict[str, str]]:
    found = zip(*pool.run(ranks, examine_all, [*names], *sizes, timeout=400), strict=True)
    return {name: worst(list(each)) for (_, name), each in zip(names, found, strict=True)}


def assert_all_exact(found: dict[str, dict[str, str]]) -> None:
    assert not {name: each for name, each in found.items() if "train" not in each or set(each.values()) != {"exact"}}


@pytest.mark.timeout(400)
def test_two_stages_are_exact(pool: Pool) -> None:
    assert_all_exact(examined(pool, 2, SAMPLE, 2))


def test_what_is_not_exact_over_two_stages_is_named(pool: Pool) -> None:
    found = examined(pool, 2, OTHERS, 2)
    for (_, name), expected in OTHERS.items():
        assert all(text in found[name][what] for what, text in expected.items()), (name, found[name])


def test_keys_and_values_that_later_layers_share_cross_boundaries(pool: Pool) -> None:
    """Of a model where samples are the second dimension of hidden states."""
    (found,) = examined(pool, 3, [("causal-lm", "Gemma3nForCausalLM")], 3).values()
    assert found == dict.fromkeys(("train", "evaluate", "generate"), "exact"), found


def test_tensor_parallelism_is_exact(pool: Pool) -> None:
    cases = [
        ("seq2seq-lm", "T5ForConditionalGeneration"),  # a bias for each head, handed on from block to block
        ("causal-lm", "BloomForCausalLM"),  # a bias that is made for all heads
        ("causal-lm", "Phi3ForCausalLM"),  # outputs gathered, and taken in part again
        ("masked-lm", "RobertaForMaskedLM"),
    ]
    assert_all_exact(examined(pool, 2, cases, 1, 2))


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

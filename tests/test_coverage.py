"""A sample of the sweep over transformers' classes (`benchmarks/coverage.py`): what once was refused or crashed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pool import Pool

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from coverage import worst
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
    ("causal-lm", "Gemma3nForCausalLM"),  # samples are the second dimension of hidden states
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


def test_a_mean_by_hand_is_exact_against_accumulation_and_named(pool: Pool) -> None:
    found = worst(pool.run(2, examine, "ViTForMaskedImageModeling", "masked-image", 2, timeout=120))
    assert found["train"].endswith("(the model's code reduces the result of l1_loss (reduction='none'))"), found


def test_a_generate_that_runs_parts_of_the_model_by_themselves_is_refused(pool: Pool) -> None:
    found = worst(pool.run(2, examine, "BlipForConditionalGeneration", "image-text", 2, timeout=120))
    assert found["train"] == found["evaluate"] == "exact"
    assert found["generate"].startswith("refused: generate() of BlipForConditionalGeneration runs a part"), found


def test_a_cache_that_grows_by_less_than_the_hidden_states_have_entries(pool: Pool) -> None:
    found = worst(pool.run(2, examine, "ProphetNetForCausalLM", "causal-lm", 2, timeout=120))
    assert found["generate"] == "exact", found

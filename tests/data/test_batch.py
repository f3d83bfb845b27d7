"""Batches that come as microbatches, and finding the microbatches of a model call."""

import pickle

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from penstock.data.batch import MicrobatchedBatch, PerMicrobatch, microbatches_of, to_device


def ragged():
    """Two microbatches: two samples of length 3, one of length 5."""
    return [
        {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)},
        {"input_ids": torch.zeros(1, 5), "attention_mask": torch.zeros(1, 5)},
    ]


def called_with(**inputs):
    microbatches, sizes = microbatches_of(inputs, "input_ids", num_microbatches=7)
    assert sizes == [len(microbatch["input_ids"]) for microbatch in microbatches]
    return microbatches


def same(left, right):
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(left, right, strict=True)
    )


def test_every_way_to_hand_over_a_batch_gives_its_own_microbatches():
    batch = MicrobatchedBatch(ragged(), num_samples=9)
    assert same(microbatches_of(batch)[0], ragged()) and microbatches_of(batch)[1] == [2, 1]
    assert same(called_with(**batch), ragged())
    assert same(called_with(**{name: value.to("cpu") for name, value in batch.items()}), ragged())
    assert same(called_with(**batch.to("cpu")), ragged())
    assert same(called_with(**pickle.loads(pickle.dumps(batch))), ragged())


def test_inputs_beside_a_batch_are_cut_to_fit_or_repeated():
    batch = MicrobatchedBatch(ragged(), num_samples=9)
    first, second = called_with(**batch, labels=batch["input_ids"], weight=torch.arange(3), use_cache=False)
    assert first["labels"] is first["input_ids"] and second["labels"] is second["input_ids"]
    assert first["weight"].tolist() == [0, 1] and second["weight"].tolist() == [2]
    assert first["use_cache"] is False is second["use_cache"]


def test_an_empty_share_keeps_its_names_and_has_no_microbatches():
    batch = MicrobatchedBatch([], num_samples=1, names=["input_ids", "labels"])
    assert dict(batch) == {"input_ids": (), "labels": ()} and batch.num_microbatches == 0
    assert microbatches_of(batch) == ([], [])
    assert called_with(**batch) == called_with(**batch.to("cpu"), use_cache=False) == []


def test_an_ordinary_batch_is_cut_as_asked():
    batch = {"input_ids": torch.arange(10).view(5, 2)}
    for options, expected in (
        ({"num_microbatches": 2}, [3, 2]),
        ({"microbatch_size": 2}, [2, 2, 1]),
        ({"default": 8}, [1, 1, 1, 1, 1]),
    ):
        microbatches, sizes = microbatches_of(batch, **options)
        assert sizes == [len(part["input_ids"]) for part in microbatches] == expected
        assert torch.equal(torch.cat([part["input_ids"] for part in microbatches]), batch["input_ids"])


def test_a_batch_is_a_mapping_of_every_input():
    batch = MicrobatchedBatch(ragged(), num_samples=9)
    assert list(batch) == ["input_ids", "attention_mask"] and len(batch) == 2 and "labels" not in batch
    assert isinstance(batch["input_ids"], PerMicrobatch)
    assert [tuple(value.shape) for value in batch["input_ids"]] == [(2, 3), (1, 5)]
    assert "2 microbatches, global batch of 9 samples" in repr(batch)
    with pytest.raises(KeyError, match="labels"):
        batch["labels"]


def test_batches_that_do_not_fit_together_are_refused():
    one, two = MicrobatchedBatch(ragged()[:1], 2), MicrobatchedBatch(ragged(), 3)
    with pytest.raises(ValueError, match=r"different numbers of microbatches: \{'input_ids': 2, 'labels': 1\}"):
        called_with(input_ids=two["input_ids"], labels=one["input_ids"])
    with pytest.raises(ValueError, match=r"the first has \['a'\] and number 1 has \['b'\]"):
        MicrobatchedBatch([{"a": 1}, {"b": 1}], 2)


def test_moving_to_a_device_reaches_nested_tensors_and_keeps_classes():
    value = {"a": [torch.ones(2), (torch.ones(1), "text")], "b": BaseModelOutput(last_hidden_state=torch.ones(1))}
    moved = to_device(value, "meta")
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["a"][1][1] == "text"
    assert isinstance(moved["b"], BaseModelOutput) and moved["b"].last_hidden_state.is_meta

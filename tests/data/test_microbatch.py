"""Cutting a batch into microbatches."""

import collections

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from penstock.data.microbatch import batch_size_of, microbatch_sizes, split_batch

Pair = collections.namedtuple("Pair", "left right")


@given(st.integers(1, 200), st.integers(1, 50))
def test_sizes_are_even_and_make_up_the_batch(batch_size, num_microbatches):
    if num_microbatches > batch_size:
        with pytest.raises(ValueError, match=f"{batch_size} samples cannot be split into {num_microbatches}"):
            microbatch_sizes(batch_size, num_microbatches)
        num_microbatches = len(microbatch_sizes(batch_size, default=num_microbatches))
        assert num_microbatches == batch_size
    sizes = microbatch_sizes(batch_size, num_microbatches)
    assert sum(sizes) == batch_size and len(sizes) == num_microbatches
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 200), st.integers(1, 50))
def test_a_given_size_leaves_a_smaller_last_microbatch(batch_size, size):
    expected = [len(range(begin, min(begin + size, batch_size))) for begin in range(0, batch_size, size)]
    assert microbatch_sizes(batch_size, microbatch_size=size) == expected


def test_documented_sizes():
    assert microbatch_sizes(10, 4) == [3, 3, 2, 2]
    assert microbatch_sizes(10, microbatch_size=3) == [3, 3, 3, 1]
    assert microbatch_sizes(3, default=8) == [1, 1, 1]
    assert microbatch_sizes(5) == [5]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, "has 0 samples"),
        ({"batch_size": 4, "num_microbatches": 0}, "num_microbatches must be at least 1, but is 0"),
        ({"batch_size": 4, "microbatch_size": -1}, "microbatch_size must be at least 1, but is -1"),
        ({"batch_size": 4, "microbatch_size": 2, "num_microbatches": 2}, "give one"),
    ],
)
def test_impossible_sizes_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        microbatch_sizes(**arguments)


@given(st.integers(1, 12), st.data())
def test_microbatches_joined_again_are_the_batch(batch_size, data):
    num_microbatches = data.draw(st.integers(1, batch_size))
    ids = torch.arange(batch_size * 3).view(batch_size, 3)
    batch = {
        "input_ids": ids,
        "labels": ids[:, 0],
        "past": ((ids, ids[:, :1]), [ids]),
        "pair": Pair(ids, "text"),
        "nested": {"mask": ids > 2},
    }
    sizes = microbatch_sizes(batch_size, num_microbatches)
    parts = split_batch(batch, batch_size, sizes)
    assert [part["input_ids"].shape[0] for part in parts] == sizes
    for read in (
        lambda part: part["input_ids"],
        lambda part: part["labels"],
        lambda part: part["past"][0][0],
        lambda part: part["past"][0][1],
        lambda part: part["past"][1][0],
        lambda part: part["pair"].left,
        lambda part: part["nested"]["mask"],
    ):
        assert torch.equal(torch.cat([read(part) for part in parts]), read(batch))
    assert all(type(part["pair"]) is Pair and part["pair"].right == "text" for part in parts)


def test_other_lists_and_tuples_become_plain_ones():
    class Several(list):
        def __init__(self, *items):
            super().__init__(items)

    class Between(tuple):
        def __new__(cls, first, last):
            return super().__new__(cls, (first, last))

    ids = torch.arange(4)
    parts = split_batch({"input_ids": ids, "list": Several(ids, ids), "tuple": Between(ids, ids)}, 4, [1, 3])
    for part, expected in zip(parts, ids.split([1, 3]), strict=True):
        for name, kind in (("list", list), ("tuple", tuple)):
            assert type(part[name]) is kind and len(part[name]) == 2
            assert all(torch.equal(item, expected) for item in part[name])


def test_microbatches_are_views():
    ids = torch.zeros(4, 3)
    split_batch({"input_ids": ids}, 4, [2, 2])[1]["input_ids"].fill_(7)
    assert ids[2:].eq(7).all() and ids[:2].eq(0).all()


def test_what_has_no_row_per_sample_goes_whole_to_every_microbatch():
    shared = {
        "position_ids": torch.arange(5)[None],
        "cache_position": torch.arange(4),  # as long as the batch, by chance
        "head_mask": torch.ones(4, 2),
        "num_items_in_batch": torch.tensor(11),
        "mask_4d": torch.ones(1, 1, 5, 5),
        "use_cache": False,
        "extra": None,
    }
    for part in split_batch({"input_ids": torch.zeros(4, 5), **shared}, 4, [1, 3]):
        assert all(part[name] is value for name, value in shared.items())


def test_multi_axis_position_ids_are_cut_along_their_second_dimension():
    positions = torch.arange(3 * 3 * 5).view(3, 3, 5)  # 3 axes and, by chance, 3 samples
    batch = {"input_ids": torch.zeros(3, 5), "position_ids": positions}
    assert batch_size_of(batch) == 3
    parts = split_batch(batch, 3, [2, 1])
    assert torch.equal(torch.cat([part["position_ids"] for part in parts], dim=1), positions)


def test_annotations_per_sample_are_cut_as_a_list():
    labels = [{"boxes": torch.full((index + 1, 4), float(index))} for index in range(2)]
    parts = split_batch({"pixel_values": torch.zeros(2, 3, 8, 8), "labels": labels}, 2, [1, 1])
    assert [part["labels"] for part in parts] == [labels[:1], labels[1:]]


def test_model_outputs_and_batch_encodings_are_understood():
    batch = BatchEncoding({"decoder_input_ids": torch.zeros(4, 2, dtype=torch.long)})
    batch["encoder_outputs"] = BaseModelOutput(last_hidden_state=torch.arange(4.0).view(4, 1, 1))
    assert batch_size_of(batch, "input_ids") == 4
    first, second = split_batch(batch, 4, [3, 1])
    assert isinstance(first["encoder_outputs"], BaseModelOutput)
    assert second["encoder_outputs"].last_hidden_state.item() == 3


def test_where_one_input_is_not_by_rows_an_ambiguous_one_must_be_named():
    batch = {"src": torch.zeros(3, 3, 2), "target": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=r"target has shape \(3, 3\).*3 samples: write batch_dim=.*'target': 0"):
        batch_size_of(batch, dims={"src": 1})
    assert batch_size_of(batch, dims={"src": 1, "target": 0}) == 3
    with pytest.raises(ValueError, match=r"batch_dim of src is 3, but src has shape \(3, 3, 2\)"):
        batch_size_of(batch, dims={"src": 3})


def test_gradients_of_an_input_add_up_over_microbatches():
    source = torch.ones(4, 2, requires_grad=True)
    for weight, part in enumerate(split_batch({"inputs_embeds": source}, 4, [3, 1]), start=1):
        (part["inputs_embeds"] * weight).sum().backward()
    assert source.grad[:, 0].tolist() == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({}, "holds no tensors to split into microbatches .its inputs: none at all.. Give at least input_ids"),
        ({"input_ids": [[1, 2]], "use_cache": False}, "its inputs: input_ids, use_cache"),
        ({"temperature": torch.tensor(1.0)}, "holds no tensors"),
        ({"input_ids": torch.zeros(0, 5)}, r"empty: input_ids has shape \(0, 5\)"),
        ({"input_ids": torch.zeros(8, 5), "labels": torch.zeros(6, 5)}, "labels has 6 samples .* input_ids has 8"),
        ({"input_ids": torch.zeros(8, 5), "labels": torch.zeros(1)}, "labels has 1 samples"),
        ({"input_ids": torch.zeros(8, 5), "attention_mask": torch.ones(7, 5)}, "attention_mask has 7"),
        ({"pixel_values": torch.zeros(5, 3, 2, 2), "input_ids": torch.zeros(4, 2)}, "pixel_values has 5 .* has 4"),
    ],
)
def test_batches_without_one_size_are_refused(batch, text):
    with pytest.raises(ValueError, match=text):
        batch_size_of(batch)


def test_a_batch_must_be_a_mapping():
    with pytest.raises(TypeError, match=r"must be a mapping .* but is a Tensor"):
        batch_size_of(torch.zeros(3, 3))


def test_the_models_main_input_tells_the_size():
    batch = {"pixel_values": torch.zeros(3, 1), "values": torch.zeros(5, 2)}
    assert batch_size_of(batch) == 3
    assert batch_size_of({"values": torch.zeros(5, 2), "pixels": torch.zeros(3, 1)}, "pixels") == 3
    assert batch_size_of({"scale": torch.tensor(2.0), "anything": torch.zeros(5, 2)}) == 5

"""The data loaders: what each pipeline receives, in which order, and again after a restart."""

import random
import traceback

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from penstock.data.batch import MicrobatchedBatch, microbatches_of
from penstock.data.loader import HeterogeneousDataLoader, ReplicaDataLoader

SAMPLES = [{"input_ids": [index] * (index % 5 + 1)} for index in range(23)]
NUMBERS_AND_ONE = [{"input_ids": torch.tensor([index, index])} for index in range(24)]
NUMBERS = NUMBERS_AND_ONE[:23]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(NUMBERS)

    def __len__(self):
        return len(NUMBERS)


def pad(samples):
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)}


def noisy(samples):
    """A collate function that draws from every random generator, as token masking and augmentation do."""
    noise = [[random.random(), np.random.rand(), torch.rand(()).item()] for _ in samples]
    return {"input_ids": torch.tensor([sample["input_ids"][0] for sample in samples]), "noise": torch.tensor(noise)}


def tuple_of(samples):
    return (samples,)


def heterogeneous(pipeline, dataset=NUMBERS, num_microbatches=(1, 3), size=2, **arguments):
    return HeterogeneousDataLoader(dataset, num_microbatches, size, pipeline, **arguments)


def content(batch):
    """A batch as plain lists, for comparison."""
    return [{name: value.tolist() for name, value in part.items()} for part in microbatches_of(batch)[0]]


def samples_in(batches):
    return [row[0] for batch in batches for part in content(batch) for row in part["input_ids"]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_comes_once_and_as_the_stated_microbatches(num_workers):
    loaders = [heterogeneous(index, shuffle=True, num_workers=num_workers) for index in range(2)]
    epochs = []
    for _ in range(2):
        shares = [list(loader) for loader in loaders]
        assert sorted(samples_in(shares[0] + shares[1])) == list(range(23))
        assert [[len(part["input_ids"]) for part in content(batch)] for batch in shares[0]] == [[2], [2], [2]]
        assert [[len(part["input_ids"]) for part in content(batch)] for batch in shares[1]] == [
            [2] * 3,
            [2] * 3,
            [2, 2, 1],
        ]
        assert [batch.num_samples for batch in shares[0]] == [8, 8, 7]
        epochs.append(samples_in(shares[1]))
    assert epochs[0] != epochs[1]  # though nobody called set_epoch
    assert len(loaders[0]) == 3 and loaders[0].global_batch_size == 8 and loaders[0].epoch == 2


def test_microbatches_are_padded_to_their_own_longest_sample():
    for pipeline in range(2):
        for batch in heterogeneous(pipeline, SAMPLES, collate_fn=pad):
            for part in batch.microbatches:
                lengths = [(row != -1).sum().item() for row in part["input_ids"]]
                assert part["input_ids"].shape[1] == max(lengths)
                assert lengths == [row[0].item() % 5 + 1 for row in part["input_ids"]]


def test_a_datasets_dataset_gives_the_same_batches_as_a_list():
    columns = datasets.Dataset.from_list(SAMPLES)
    for pipeline in range(2):
        batches = [content(batch) for batch in heterogeneous(pipeline, columns, collate_fn=pad, shuffle=True)]
        assert batches == [content(batch) for batch in heterogeneous(pipeline, SAMPLES, collate_fn=pad, shuffle=True)]


def test_lists_numbers_and_labels_are_stacked_by_default():
    dataset = [{"input_ids": [index, index], "label": index, "score": 0.5} for index in range(8)]
    (batch,) = heterogeneous(1, dataset)
    first = batch.microbatches[0]
    assert first["input_ids"].tolist() == [[2, 2], [3, 3]] and first["labels"].tolist() == [2, 3]
    assert first["score"].dtype == torch.float32


def test_set_epoch_chooses_the_order_and_equal_seeds_agree():
    def read(epoch, seed):
        loader = heterogeneous(1, shuffle=True, seed=seed)
        loader.set_epoch(epoch)
        return samples_in(loader)

    assert read(3, 1) == read(3, 1)
    assert len({tuple(read(epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9


@pytest.mark.parametrize(("stop", "num_workers"), [(0, 0), (1, 2), (3, 0)])
def test_a_resumed_run_sees_the_batches_of_an_uninterrupted_one(num_workers, stop):
    def make():
        return heterogeneous(1, collate_fn=noisy, shuffle=True, seed=4, num_workers=num_workers)

    uninterrupted = make()
    expected = [content(batch) for _ in range(2) for batch in uninterrupted]

    first = make()
    seen, batches = [], iter(first)
    for _ in range(stop):
        seen.append(content(next(batches)))
    state = first.state_dict()  # workers have prepared batches beyond this one
    del batches
    second = make()
    second.load_state_dict(state)
    assert len(second) == 3
    for _ in range(2 - second.epoch):
        seen += [content(batch) for batch in second]
    assert seen == expected


def test_set_epoch_keeps_the_position_of_a_loaded_state_in_that_epoch_only():
    state = heterogeneous(0).state_dict() | {"position": 8, "epoch": 1}
    loader = heterogeneous(0)
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert len(list(loader)) == 2 and loader.epoch == 2
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert len(list(loader)) == 3


def test_an_iteration_that_was_broken_off_begins_anew():
    loader = heterogeneous(1, shuffle=True)
    for _ in loader:
        break
    assert loader.state_dict()["position"] == 8
    assert samples_in(loader) == samples_in(heterogeneous(1, shuffle=True))


def test_a_run_continues_with_other_pipelines():
    before = [heterogeneous(index, shuffle=True) for index in range(2)]
    seen, state = [], {}
    for loader in before:
        seen.append(next(iter(loader)))
        state = loader.state_dict()
    for index in range(3):
        loader = heterogeneous(index, num_microbatches=(2, 1, 2), shuffle=True)
        loader.load_state_dict(state)
        seen += list(loader)
    assert sorted(samples_in(seen)) == list(range(23))


def test_a_state_of_another_data_set_or_order_is_refused():
    state = heterogeneous(0).state_dict()
    for other, text in (
        (heterogeneous(0, NUMBERS[:22]), "num_samples=23, but this loader has num_samples=22"),
        (heterogeneous(0, seed=1), "seed=0, but this loader has seed=1"),
        (heterogeneous(0, shuffle=True), "shuffle=False"),
    ):
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_collation_agrees_between_the_ranks_of_a_pipeline(num_workers):
    expected = [content(batch) for batch in heterogeneous(1, collate_fn=noisy)]
    torch.manual_seed(num_workers)  # ranks' own random streams differ
    random.seed(num_workers)
    loader = heterogeneous(1, collate_fn=noisy, num_workers=num_workers)
    assert [content(batch) for batch in loader] == expected
    noise = [tuple(row) for batch in expected for part in batch for row in part["noise"]]
    assert len(set(noise)) == len(noise)
    assert [content(batch) for batch in loader] != expected  # the next epoch masks other tokens


def test_loading_leaves_the_users_random_streams_alone():
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    def seed():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)

    seed()
    expected = draw()
    for num_workers in (0, 1):
        seed()
        list(heterogeneous(1, collate_fn=noisy, num_workers=num_workers))
        assert draw() == expected


def test_pipelines_without_a_sample_still_take_the_step():
    shares = [list(heterogeneous(index, NUMBERS[:9])) for index in range(2)]
    assert [share[-1].num_microbatches for share in shares] == [0, 1]
    empty = shares[0][-1]
    assert list(empty) == ["input_ids"] and empty.num_samples == 1


def test_torch_options_are_passed_on():
    loader = heterogeneous(1, num_workers=1, persistent_workers=True, prefetch_factor=3)
    assert loader.prefetch_factor == 3
    first, second = [samples_in(loader) for _ in range(2)]
    assert first == second == samples_in(heterogeneous(1))
    assert len(loader.dataset) == 23


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"size": 0}, ValueError, "microbatch size must be at least 1"),
        ({"dataset": Stream()}, TypeError, "Stream can only be read in order .* no length"),
        ({"dataset": iter(NUMBERS)}, TypeError, "can only be read in order"),
        ({"dataset": {"train": NUMBERS}}, TypeError, r"mapping with the keys \['train'\]"),
        ({"batch_size": 4}, TypeError, "batch_size is not an argument here: use microbatch_size"),
        ({"sampler": [1]}, TypeError, "sampler is not an argument here: use shuffle and seed"),
    ],
)
def test_impossible_arguments_are_refused_at_once(arguments, error, text):
    with pytest.raises(error, match=text):
        heterogeneous(0, **arguments)


def test_streamed_datasets_and_splits_are_refused():
    columns = datasets.Dataset.from_list(SAMPLES)
    with pytest.raises(TypeError, match="every sample exactly once"):
        heterogeneous(0, columns.to_iterable_dataset())
    with pytest.raises(TypeError, match="give one of its values"):
        heterogeneous(0, datasets.DatasetDict(train=columns))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"collate_fn": tuple_of}, TypeError, r"collate_fn must return a mapping .* but returned a tuple"),
        ({"collate_fn": tuple_of, "num_workers": 1}, TypeError, r"collate_fn must return a mapping"),
        ({"dataset": SAMPLES}, ValueError, r"cannot be stacked .* collate_fn that pads"),
        ({"dataset": TensorDataset(torch.zeros(9, 2))}, TypeError, r"Samples must be mappings .* but are tuple"),
    ],
)
def test_samples_that_make_no_batch_are_refused(arguments, error, text):
    with pytest.raises(error, match=text) as caught:
        list(heterogeneous(1, **arguments))
    traceback.clear_frames(caught.tb)  # garbage with a loader's iterator in it waits for its worker for seconds


@pytest.mark.parametrize(
    ("num_samples", "replicas", "size", "shuffle"),
    [(23, 1, 4, True), (23, 3, 2, False), (24, 3, 2, True), (20, 3, 2, False), (2, 3, 4, True)],
)
def test_replicas_see_every_sample_once_without_repeats(num_samples, replicas, size, shuffle):
    loaders = [
        ReplicaDataLoader(NUMBERS_AND_ONE[:num_samples], size, replicas, rank, shuffle=shuffle)
        for rank in range(replicas)
    ]
    batches = [list(loader) for loader in loaders]
    assert sorted(samples_in(batch for rank in batches for batch in rank)) == list(range(num_samples))
    assert {len(rank) for rank in batches} == {-(-num_samples // (size * replicas))}
    for rank in batches:
        assert all(len(batch["input_ids"]) == size and type(batch) is dict for batch in rank[:-1])


def test_a_replica_without_a_sample_gets_a_batch_without_microbatches():
    last = [list(ReplicaDataLoader(NUMBERS[:7], 2, 3, rank))[-1] for rank in range(3)]
    assert last[0]["input_ids"].tolist() == [[6, 6]]
    assert all(isinstance(batch, MicrobatchedBatch) and microbatches_of(batch)[0] == [] for batch in last[1:])


def test_replicas_drop_the_last_batch_when_asked_and_resume():
    loader = ReplicaDataLoader(NUMBERS, 2, 3, 1, shuffle=True, drop_last=True)
    expected = [batch["input_ids"].tolist() for batch in loader]
    assert len(expected) == len(loader) == 3
    first = ReplicaDataLoader(NUMBERS, 2, 3, 1, shuffle=True, drop_last=True)
    next(iter(first))
    second = ReplicaDataLoader(NUMBERS, 2, 3, 1, shuffle=True, drop_last=True)
    second.load_state_dict(first.state_dict())
    assert [batch["input_ids"].tolist() for batch in second] == expected[1:]


@pytest.mark.parametrize(("size", "replicas", "rank"), [(0, 1, 0), (1, 0, 0), (1, 2, 2)])
def test_impossible_replicas_are_refused(size, replicas, rank):
    with pytest.raises(ValueError, match=r"must be at least 1|is not one of"):
        ReplicaDataLoader(NUMBERS, size, replicas, rank)


def test_a_loop_that_counts_its_batches_comes_to_the_next_epoch_too():
    """Nobody asks such a loader whether there is another batch, neither at an epoch's end nor before it is saved."""
    counted, exhausted = (heterogeneous(1, shuffle=True) for _ in range(2))
    for _ in range(2):
        batches = iter(counted)
        taken = [next(batches) for _ in range(len(counted))]
        assert samples_in(taken) == samples_in(list(exhausted))
    resumed = heterogeneous(1, shuffle=True)
    resumed.load_state_dict(counted.state_dict())
    assert samples_in(list(resumed)) == samples_in(list(exhausted))


def test_a_counted_epoch_ends_where_drop_last_ends_it():
    loader = heterogeneous(0, drop_last=True)
    for _ in range(2):
        batches = iter(loader)
        assert samples_in([next(batches) for _ in range(len(loader))]) == [0, 1, 8, 9]
    iter(loader)
    assert loader.epoch == 2

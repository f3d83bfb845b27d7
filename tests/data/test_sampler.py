"""Which samples go where: exact cover, fair shares, order and position, for any sizes."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.sampler import HeterogeneousSampler, epoch_order, share_sizes

pipelines = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def shares_of(num_samples, num_microbatches, size, epoch=0, start=0, **options):
    """For each pipeline the list of its shares in an epoch."""
    found = []
    for index in range(len(num_microbatches)):
        sampler = HeterogeneousSampler(num_samples, num_microbatches, size, index, **options)
        sampler.epoch, sampler.start = epoch, start
        found.append(list(sampler))
    return found


@given(st.integers(1, 120), pipelines, st.integers(1, 4), st.booleans(), st.integers(0, 3))
@settings(deadline=None)
def test_every_sample_comes_exactly_once_over_all_pipelines(num_samples, num_microbatches, size, shuffle, epoch):
    shares = shares_of(num_samples, num_microbatches, size, epoch, shuffle=shuffle)
    seen = [index for pipeline in shares for share in pipeline for part in share.microbatches for index in part]
    assert sorted(seen) == list(range(num_samples))
    # All pipelines take the same number of steps, and agree on each global batch.
    steps = HeterogeneousSampler(num_samples, num_microbatches, size, 0).__len__()
    assert {len(pipeline) for pipeline in shares} == {steps}
    for step in zip(*shares, strict=True):
        trained = sum(len(part) for share in step for part in share.microbatches)
        assert {share.num_samples for share in step} == {trained}
        assert len({(share.start, share.first_sample, share.epoch) for share in step}) == 1


@given(st.integers(1, 120), pipelines, st.integers(1, 4))
@settings(deadline=None)
def test_full_batches_have_the_asked_shares_and_drop_last_leaves_only_them(num_samples, num_microbatches, size):
    full = num_samples // (sum(num_microbatches) * size)
    if full == 0:
        with pytest.raises(ValueError, match=f"The dataset has {num_samples} samples, fewer than one global batch"):
            shares_of(num_samples, num_microbatches, size, drop_last=True)
        return
    dropped = shares_of(num_samples, num_microbatches, size, shuffle=True, drop_last=True)
    kept = shares_of(num_samples, num_microbatches, size, shuffle=True)
    for pipeline, count in enumerate(num_microbatches):
        assert [[len(part) for part in share.microbatches] for share in dropped[pipeline]] == [[size] * count] * full
        assert dropped[pipeline] == kept[pipeline][:full]


@given(st.data(), pipelines, st.integers(1, 4))
@settings(deadline=None)
def test_shares_of_an_incomplete_batch_are_exact_even_and_never_empty_needlessly(data, num_microbatches, size):
    num_samples = data.draw(st.integers(1, sum(num_microbatches) * size))
    shares = share_sizes(num_samples, num_microbatches, size)
    sizes = [part for share in shares for part in share]
    assert sum(sizes) == num_samples and max(sizes) <= size and min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert all(len(share) <= count for share, count in zip(shares, num_microbatches, strict=True))
    assert sum(not share for share in shares) == max(len(num_microbatches) - num_samples, 0)


@given(st.data(), st.lists(st.integers(1, 4), min_size=2, max_size=3), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_no_other_distribution_has_a_less_busy_busiest_pipeline(data, num_microbatches, size):
    num_samples = data.draw(st.integers(len(num_microbatches), sum(num_microbatches) * size))
    counts = [len(share) for share in share_sizes(num_samples, num_microbatches, size)]

    def busiest(candidate):
        return max(count / full for count, full in zip(candidate, num_microbatches, strict=True))

    ranges = [range(1, full + 1) for full in num_microbatches]
    candidates = [option for option in itertools.product(*ranges) if sum(option) == sum(counts)]
    assert busiest(counts) == min(map(busiest, candidates))


def test_documented_shares_of_small_batches():
    assert share_sizes(24, [2, 4], 4) == [[4, 4], [4, 4, 4, 4]]
    assert share_sizes(10, [2, 4], 4) == [[4], [3, 3]]
    assert share_sizes(2, [2, 4], 4) == [[1], [1]]
    assert share_sizes(1, [2, 4], 4) == [[], [1]]
    assert share_sizes(2, [1, 1, 1], 8) == [[1], [1], []]


@given(st.integers(1, 60), pipelines, st.integers(1, 3), st.data())
@settings(deadline=None)
def test_the_rest_of_an_epoch_is_the_same_when_it_is_begun_again(num_samples, num_microbatches, size, data):
    whole = shares_of(num_samples, num_microbatches, size, epoch=2, shuffle=True, seed=5)
    step = data.draw(st.integers(0, len(whole[0])))
    start = sum(share.num_samples for share in whole[0][:step])
    rest = shares_of(num_samples, num_microbatches, size, epoch=2, start=start, shuffle=True, seed=5)
    assert rest == [pipeline[step:] for pipeline in whole]


@given(st.integers(1, 60), pipelines, pipelines, st.integers(1, 3), st.data())
@settings(deadline=None)
def test_an_epoch_can_be_finished_by_other_pipelines(num_samples, before, after, size, data):
    first = shares_of(num_samples, before, size, shuffle=True)
    step = data.draw(st.integers(0, len(first[0])))
    start = sum(share.num_samples for share in first[0][:step])
    shares = [pipeline[:step] for pipeline in first]
    shares += shares_of(num_samples, after, size, start=start, shuffle=True)
    seen = [index for pipeline in shares for share in pipeline for part in share.microbatches for index in part]
    assert sorted(seen) == list(range(num_samples))


def test_the_order_is_a_function_of_seed_and_epoch_only():
    orders = {(seed, epoch): tuple(epoch_order(50, True, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(set(orders.values())) == 16  # seed 0 in epoch 1 is not seed 1 in epoch 0
    assert all(tuple(epoch_order(50, True, *key)) == order for key, order in orders.items())
    assert list(epoch_order(5, False, 3, 1)) == [0, 1, 2, 3, 4]


def test_global_batches_do_not_depend_on_the_pipelines_that_share_them():
    def global_batches(num_microbatches):
        steps = zip(*shares_of(50, num_microbatches, 2, shuffle=True), strict=True)
        return [[index for share in step for part in share.microbatches for index in part] for step in steps]

    assert global_batches([6]) == global_batches([1, 5]) == global_batches([2, 2, 2])


def test_single_samples_are_shuffled_not_blocks_of_them():
    order = epoch_order(1000, True, 0, 0)
    neighbours = sum(abs(int(a) - int(b)) == 1 for a, b in itertools.pairwise(order))
    assert neighbours < 12  # 2 expected; blocks of even two samples would give 500


def test_an_iteration_keeps_the_epoch_it_began_with():
    sampler = HeterogeneousSampler(20, [2], 2, 0, shuffle=True)
    expected = list(sampler)
    shares = iter(sampler)
    sampler.epoch = 1
    assert list(shares) == expected != list(sampler)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((10, [1, 0], 2, 0), r"at least one microbatch, but num_microbatches is \[1, 0\]"),
        ((10, [], 2, 0), "at least one microbatch"),
        ((10, [1], 0, 0), "microbatch size must be at least 1, but is 0"),
        ((10, [1, 1], 2, 2), "Pipeline index 2 is not one of the 2 pipelines"),
        ((10, [1], 2, -1), "Pipeline index -1"),
        ((0, [1], 2, 0), "dataset is empty"),
        ((10, [1], 2, 0, True, -3), "seed must not be negative, but is -3"),
        ((10, [3, 3], 2, 0, True, 0, True), r"10 samples, fewer than one global batch of 12 \(6 microbatches of 2"),
    ],
)
def test_impossible_arguments_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        HeterogeneousSampler(*arguments)

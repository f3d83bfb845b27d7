"""Which samples of an epoch go to which pipeline, as which microbatches. Pure: imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BatchShare:
    """One pipeline's part of one global batch of `num_samples`: the indices of its samples, of which there may be none
    if the batch has fewer than there are pipelines. `start`: samples of `epoch` before the batch. `first_sample`: the
    index of the batch's first one. `first_microbatch`: how many microbatches other pipelines have before this one."""

    microbatches: tuple[tuple[int, ...], ...]
    num_samples: int
    epoch: int
    start: int
    first_sample: int
    first_microbatch: int


def share_sizes(num_samples: int, num_microbatches: Sequence[int], microbatch_size: int) -> list[list[int]]:
    """Return for each pipeline the sizes of its microbatches in a global batch of `num_samples`.

    A smaller batch than a full one is split into as few microbatches as hold it, but one per pipeline if there are
    samples enough, of sizes that differ by at most one. They are given out one at a time, first one each, then to the
    pipeline that will be the least busy relative to its full share, which minimises the longest pipeline. With fewer
    samples than pipelines, those with the largest shares get one sample each and the others an empty list.
    """
    num_pipelines = len(num_microbatches)
    if num_samples == sum(num_microbatches) * microbatch_size:
        return [[microbatch_size] * count for count in num_microbatches]
    total = max(-(-num_samples // microbatch_size), min(num_pipelines, num_samples))
    largest_first = sorted(range(num_pipelines), key=lambda index: (-num_microbatches[index], index))
    counts = [0] * num_pipelines
    for index in largest_first[:total]:
        counts[index] = 1
    for _ in range(total - sum(counts)):
        open_pipelines = [index for index in range(num_pipelines) if counts[index] < num_microbatches[index]]
        least_busy = min(open_pipelines, key=lambda index: ((counts[index] + 1) / num_microbatches[index], index))
        counts[least_busy] += 1
    size, larger = divmod(num_samples, total)
    sizes = iter([size + 1] * larger + [size] * (total - larger))
    return [[next(sizes) for _ in range(count)] for count in counts]


def epoch_order(num_samples: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """The order of all samples in an epoch: shape (num_samples,), a function of the arguments only."""
    if not shuffle:
        return np.arange(num_samples)
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


class HeterogeneousSampler:
    """One pipeline's shares of the global batches of an epoch. Over all pipelines every sample comes exactly once.

    The order is a permutation of all samples by `seed` and `epoch`, split into global batches and these into the shares
    of `share_sizes`. So the global batches do not depend on how they are shared out, and all ranks of a pipeline agree.
    `drop_last` leaves out an incomplete last global batch. Iterating begins after the first `start` samples of the
    epoch, so that a run can be continued, also with other pipelines than before.

    Raises ValueError if a size, count or index is out of range, or if there is not a single global batch.
    """

    def __init__(
        self,
        num_samples: int,
        num_microbatches: Sequence[int],
        microbatch_size: int,
        pipeline_index: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not num_microbatches or any(count < 1 for count in num_microbatches):
            raise ValueError(
                f"Every pipeline needs at least one microbatch, but num_microbatches is {list(num_microbatches)}."
            )
        if microbatch_size < 1:
            raise ValueError(f"The microbatch size must be at least 1, but is {microbatch_size}.")
        if not 0 <= pipeline_index < len(num_microbatches):
            raise ValueError(f"Pipeline index {pipeline_index} is not one of the {len(num_microbatches)} pipelines.")
        if seed < 0:
            raise ValueError(f"The seed must not be negative, but is {seed}.")
        self.num_samples = num_samples
        self.num_microbatches = tuple(num_microbatches)
        self.microbatch_size = microbatch_size
        self.pipeline_index = pipeline_index
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0
        if num_samples < 1:
            raise ValueError("The dataset is empty.")
        if len(self) == 0:
            raise ValueError(
                f"The dataset has {num_samples} samples, fewer than one global batch of {self.global_batch_size} "
                f"({sum(num_microbatches)} microbatches of {microbatch_size} over all pipelines), and drop_last drops "
                "it: set drop_last=False, or use fewer or smaller microbatches."
            )

    @property
    def global_batch_size(self) -> int:
        """Samples in a full global batch, over all pipelines."""
        return sum(self.num_microbatches) * self.microbatch_size

    @property
    def samples_per_epoch(self) -> int:
        """Samples in a whole epoch, over all pipelines, without those that `drop_last` drops."""
        return min(self.num_samples, len(self) * self.global_batch_size)

    def __len__(self) -> int:
        """Global batches in a whole epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[BatchShare]:
        # Read now, not at the first item: the epoch may be set for the next iteration while this one runs.
        return self._shares(self.epoch, self.start)

    def _shares(self, epoch: int, start: int) -> Iterator[BatchShare]:
        order = epoch_order(self.num_samples, self.shuffle, self.seed, epoch)
        while start < self.num_samples:
            batch = order[start : start + self.global_batch_size]
            if len(batch) < self.global_batch_size and self.drop_last:
                return
            sizes = share_sizes(len(batch), self.num_microbatches, self.microbatch_size)
            before = [size for share in sizes[: self.pipeline_index] for size in share]
            begin = sum(before)
            microbatches = []
            for size in sizes[self.pipeline_index]:
                microbatches.append(tuple(batch[begin : begin + size].tolist()))
                begin += size
            yield BatchShare(tuple(microbatches), len(batch), epoch, start, int(batch[0]), len(before))
            start += len(batch)

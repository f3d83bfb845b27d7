"""Turning a share of sample indices into collated microbatches: what a data loader's worker does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.data.sampler import Share
from penstock.random_state import seeded

CollateFunction = Callable[[list[Any]], Any]
# The inputs' names, the microbatches, the samples of the whole global batch and of the epoch before it, and the
# microbatches of other pipelines before these. Plain containers, because torch's pinning of memory rebuilds mappings of
# other classes as dictionaries.
Fetched = tuple[list[str], list[Any], int, int, int]


class MicrobatchFetcher(torch.utils.data.Dataset[Any]):
    """A data set whose "index" is a `Share`: loads its samples and collates each microbatch by itself.

    Random numbers drawn by the data set and by `collate_fn` (augmentation, token masking) from the generators of
    `random`, `numpy.random` and torch's CPU are seeded by (seed, epoch, place in the epoch, microbatch of the global
    batch). So all ranks of a pipeline see one batch, with any number of workers, and a continued run sees the batches
    of an uninterrupted one, also on other pipelines.
    """

    def __init__(self, dataset: Any, collate_fn: CollateFunction | None, seed: int) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn or collate_samples
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, share: Share) -> Fetched:
        if not share.microbatches:
            # The names of the inputs are needed even so; a sample that another pipeline trains on tells them.
            with seeded(self.seed, share.epoch, share.start, share.first_microbatch):
                names = list(self._collate(self._samples([share.first_sample])))
            return names, [], share.num_samples, share.start, share.first_microbatch
        microbatches = []
        for number, indices in enumerate(share.microbatches, start=share.first_microbatch):
            with seeded(self.seed, share.epoch, share.start, number):
                microbatches.append(self._collate(self._samples(list(indices))))
        return list(microbatches[0]), microbatches, share.num_samples, share.start, share.first_microbatch

    def _samples(self, indices: list[int]) -> list[Any]:
        # Data sets of columns read many rows at once much faster.
        if callable(fetch_many := getattr(self.dataset, "__getitems__", None)):
            return list(fetch_many(indices))
        return [self.dataset[index] for index in indices]

    def _collate(self, samples: list[Any]) -> Mapping[str, Any]:
        microbatch = self.collate_fn(samples)
        if not isinstance(microbatch, Mapping):
            raise TypeError(
                "collate_fn must return a mapping from the model's input names to tensors, "
                f"but returned a {type(microbatch).__name__}."
            )
        return microbatch


def collate_samples(samples: Sequence[Any]) -> Mapping[str, Any]:
    """The default `collate_fn`: stack samples (mappings of tensors, arrays, lists or numbers) of equal shapes.

    Raises TypeError if the samples are no mappings, ValueError if they differ in length.
    """
    from transformers import default_data_collator

    if not all(isinstance(sample, Mapping) for sample in samples):
        raise TypeError(
            f"Samples must be mappings from the model's input names to values, but are {type(samples[0]).__name__}: "
            "give a collate_fn that makes a mapping of a list of them."
        )
    try:
        return default_data_collator(list(samples))
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"Samples of one microbatch cannot be stacked ({error}). If their lengths differ, give a collate_fn that "
            "pads them, such as transformers.DataCollatorWithPadding(tokenizer)."
        ) from error

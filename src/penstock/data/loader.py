"""Data loaders that give each pipeline its own share of every global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import default_data_collator

from penstock.data.batch import MicrobatchedBatch
from penstock.data.sampler import BatchShare, HeterogeneousSampler
from penstock.random_state import seeded

CollateFunction = Callable[[list[Any]], Any]
# The inputs' names, the microbatches, and the numbers of samples of the whole global batch and of the epoch before it,
# and of other pipelines' microbatches before these. Plain containers, because torch's pinning of memory rebuilds
# mappings of other classes as dictionaries.
Fetched = tuple[list[str], list[Any], int, int, int]

# What this loader decides itself, and the argument to use instead.
DECIDED_HERE = {
    "batch_size": "microbatch_size and num_microbatches",
    "sampler": "shuffle and seed",
    "batch_sampler": "shuffle and seed",
    "generator": "seed",
}

# What must be equal for a saved position to mean the same samples.
POSITION_MEANING = ("num_samples", "shuffle", "seed")


class HeterogeneousDataLoader(DataLoader[Any]):
    """Loads one pipeline's share of each global batch, as a `MicrobatchedBatch`.

    Every sample comes exactly once per epoch over all pipelines; `shuffle` shuffles samples (not whole batches) anew
    each epoch, by `seed` and the epoch's number. Epochs advance by themselves when one has been read to its end;
    `set_epoch` chooses one. All ranks of one pipeline load the same batches.

    An incomplete last global batch (`drop_last=False`) is shared out so that every pipeline gets a microbatch if there
    are samples enough; a pipeline may get fewer or smaller microbatches, or none (see `sampler.share_sizes`).

    Args:
        dataset: a map-style data set (`__len__` and `__getitem__`), or a `datasets.Dataset`.
        num_microbatches: of a full global batch, for each pipeline.
        microbatch_size: samples in a microbatch.
        pipeline_index: the pipeline to load for, counted from 0.
        shuffle, seed: whether and how to shuffle.
        drop_last: leave out an incomplete last global batch.
        collate_fn: makes the model's keyword arguments of a list of samples. It is called for each microbatch, so
            padding reaches only as far as the microbatch's longest sample. By default samples are stacked.
        arguments: anything else of torch's DataLoader, such as `num_workers`, `pin_memory`, `persistent_workers`.

    Raises:
        TypeError: the data set has no length or no random access, or is a collection of splits; an argument is
            decided here; `collate_fn` returns no mapping (when iterating).
        ValueError: a size, count or index is out of range, or there is not a single global batch.
    """

    def __init__(
        self,
        dataset: Any,
        num_microbatches: Sequence[int],
        microbatch_size: int,
        pipeline_index: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: CollateFunction | None = None,
        **arguments: Any,
    ) -> None:
        _check_dataset(dataset)
        for name, instead in DECIDED_HERE.items():
            if arguments.pop(name, None) is not None:
                raise TypeError(f"{name} is not an argument here: use {instead}.")
        self._shares = HeterogeneousSampler(
            len(dataset), num_microbatches, microbatch_size, pipeline_index, shuffle, seed, drop_last
        )
        self._position = 0  # samples of this epoch, over all pipelines, that have been given out
        self._resume_at = 0
        self._num_reshared = 0
        self._num_rewound = 0
        super().__init__(
            MicrobatchFetcher(dataset, collate_fn, seed),
            batch_sampler=self._shares,  # type: ignore[arg-type]  # its shares go to the fetcher untouched
            collate_fn=_identity,
            generator=torch.Generator(),  # torch draws a number for its workers; not from the user's random stream
            **arguments,
        )

    @property
    def epoch(self) -> int:
        return self._shares.epoch

    @property
    def global_batch_size(self) -> int:
        """Samples in a full global batch, over all pipelines."""
        return self._shares.global_batch_size

    @property
    def share(self) -> tuple[tuple[int, ...], int, int]:
        """What this loader was made for: `num_microbatches`, `microbatch_size` and `pipeline_index`."""
        return self._shares.num_microbatches, self._shares.microbatch_size, self._shares.pipeline_index

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch for the next iteration. Naming the epoch that a loaded state is in keeps its position."""
        if epoch < 0:
            raise ValueError(f"The epoch must not be negative, but is {epoch}.")
        if epoch != self._shares.epoch:
            self._shares.epoch = epoch
            self._position = self._resume_at = 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch given out (not those that workers have prepared). Equal on all ranks."""
        meaning = {name: getattr(self._shares, name) for name in POSITION_MEANING}
        epoch, position = (self.epoch + 1, 0) if self._at_the_end() else (self.epoch, self._position)
        return {"epoch": epoch, "position": position, **meaning}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position: the next iteration gives the rest of its epoch.

        Positions count samples over all pipelines, so the pipelines may be others than in the run that saved it.

        Raises ValueError if the data set's length, the seed or `shuffle` differ, as the samples would be others.
        """
        for name in POSITION_MEANING:
            if state[name] != getattr(self._shares, name):
                raise ValueError(
                    f"The data loader's state was saved with {name}={state[name]!r}, but this loader has "
                    f"{name}={getattr(self._shares, name)!r}: it would continue with other samples."
                    " Make it with the saved value, or load no state."
                )
        self._shares.epoch = state["epoch"]
        self._position = self._resume_at = state["position"]

    def reshare(self, num_microbatches: Sequence[int], pipeline_index: int) -> None:
        """Share the same global batches out to other pipelines. Iterations under way go on with their next batch.

        Raises ValueError if a global batch would have another size.
        """
        before, after = sum(self._shares.num_microbatches), sum(num_microbatches)
        if before != after:
            raise ValueError(
                f"A global batch of this loader has {before} microbatches, but the pipelines take {after}: make the "
                "loader with the plugin that trains with it."
            )
        self._shares.num_microbatches = tuple(num_microbatches)
        self._shares.pipeline_index = pipeline_index
        self._num_reshared += 1

    def rewind(self) -> None:
        """Iterations under way go on from the state that was loaded last."""
        self._resume_at = 0
        self._num_rewound += 1

    def __iter__(self) -> Batches:  # type: ignore[override]  # torch promises its own iterator class
        if self._at_the_end():
            self.set_epoch(self.epoch + 1)
        self._position = self._resume_at
        self._resume_at = 0
        return Batches(self, self.epoch, self._position)

    def _fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        """What workers yield from `start` on."""
        with mock.patch.multiple(self._shares, epoch=epoch, start=start):
            return super().__iter__()  # it asks for the shares now

    def _at_the_end(self) -> bool:
        """Whether the epoch's last batch was taken, while nobody asked yet whether there is another one."""
        return self._position >= self._shares.samples_per_epoch

    def _present(self, batch: MicrobatchedBatch) -> Any:
        return batch


class Batches(Iterator[Any]):
    """The batches of an epoch that a loader gives."""

    def __init__(self, loader: HeterogeneousDataLoader, epoch: int, position: int) -> None:
        self._position = position
        self._loader = loader
        self._epoch = epoch
        self._fetched: Iterator[Fetched] | None = loader._fetch(epoch, position)
        self._shared, self._rewound = loader._num_reshared, loader._num_rewound

    @property
    def position(self) -> int:
        """Samples of the epoch before the next batch, over all pipelines."""
        if self._rewound != self._loader._num_rewound:
            self.follow()
        return self._position

    def seek(self, position: int) -> None:
        """Go on from a position that this iterator had."""
        if position != self.position:
            self._position, self._fetched = position, None

    def follow(self) -> None:
        """Go on from the loader's state, which may be in another epoch."""
        loader = self._loader
        self._rewound, self._fetched = loader._num_rewound, None
        self._epoch, self._position = loader.epoch, loader._position

    def __next__(self) -> Any:
        loader = self._loader
        position = self.position
        if self._fetched is None or self._shared != loader._num_reshared:
            self._fetched = None  # its workers end before new ones begin
            self._fetched, self._shared = loader._fetch(self._epoch, position), loader._num_reshared
        try:
            names, microbatches, num_samples, start, first_microbatch = next(self._fetched)
        except StopIteration:
            if loader.epoch == self._epoch:
                loader.set_epoch(self._epoch + 1)
            raise
        self._position = start + num_samples
        if loader.epoch == self._epoch:
            loader._position = self._position
        return loader._present(MicrobatchedBatch(microbatches, num_samples, names, first_microbatch))


class ReplicaDataLoader(HeterogeneousDataLoader):
    """Loads one replica's batches in plain data parallelism, as what `collate_fn` returns.

    Unlike `DistributedSampler` it repeats no sample to fill up: an incomplete last global batch is spread evenly, so
    replicas may get batches smaller than `batch_size`. If it has fewer samples than there are replicas, some get a
    `MicrobatchedBatch` without microbatches, which `model(**batch)` takes as "nothing, but take part".
    """

    def __init__(self, dataset: Any, batch_size: int, num_replicas: int, rank: int, **arguments: Any) -> None:
        if num_replicas < 1 or batch_size < 1:
            raise ValueError(f"batch_size ({batch_size}) and num_replicas ({num_replicas}) must be at least 1.")
        super().__init__(dataset, [1] * num_replicas, batch_size, rank, **arguments)

    def _present(self, batch: MicrobatchedBatch) -> Any:
        return batch.microbatches[0] if batch.microbatches else batch


def _identity(fetched: Any) -> Any:
    return fetched


def _check_dataset(dataset: Any) -> None:
    advice = "use a map-style data set (one with __len__ and __getitem__), or make one of it"
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"A {type(dataset).__name__} can only be read in order and has no length, so it cannot be shared out among "
            f"pipelines with every sample exactly once: {advice}."
        )
    if isinstance(dataset, Mapping):
        raise TypeError(f"The data set is a mapping with the keys {list(dataset)}: give one of its values.")


class MicrobatchFetcher(torch.utils.data.Dataset[Any]):
    """A data set whose "index" is a `BatchShare`: loads its samples and collates each microbatch by itself.

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

    def __getitems__(self, share: BatchShare) -> Fetched:
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
    if not all(isinstance(sample, Mapping) for sample in samples):
        raise TypeError(
            f"Samples must be mappings from the model's input names to values, but are {type(samples[0]).__name__}: "
            "give a collate_fn that makes a mapping of a list of them."
        )
    try:
        collated: Mapping[str, Any] = default_data_collator(list(samples))
        return collated
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"Samples of one microbatch cannot be stacked ({error}). If their lengths differ, give a collate_fn that "
            "pads them, such as transformers.DataCollatorWithPadding(tokenizer)."
        ) from error

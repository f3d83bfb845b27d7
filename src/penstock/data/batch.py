"""A batch that comes as microbatches from the data loader, and how a model call finds its microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.data.media import MediaTokens, rows_of_media
from penstock.data.microbatch import (
    IN_A_LIST,
    NO_DIMS,
    BatchDims,
    batch_dim,
    batch_size_of,
    microbatch_sizes,
    rows_of,
    split_batch,
)
from penstock.nested import map_tensors, named_tensors, walkable

# Tensors on the device up to this many bytes are copied to the host, as somebody may ask for their values.
SMALL_BYTES = 1 << 20


class PerMicrobatch(tuple[Any, ...]):
    """One input of a model, for each microbatch, which may be padded to different lengths: `batch["input_ids"]` of a
    `MicrobatchedBatch`, whose `first_microbatch` it has."""

    first_microbatch: int

    def __new__(cls, values: Iterable[Any] = (), first_microbatch: int = 0) -> PerMicrobatch:
        self = super().__new__(cls, values)
        self.first_microbatch = first_microbatch
        return self

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PerMicrobatch:
        return PerMicrobatch((to_device(value, device, non_blocking) for value in self), self.first_microbatch)


class MicrobatchedBatch(Mapping[str, PerMicrobatch]):
    """One pipeline's share of a global batch, already split into microbatches.

    As a mapping it holds every input of every microbatch, so `model(**batch)`, also with `labels=batch["input_ids"]`,
    and `{name: value.to(device) for name, value in batch.items()}` work as with an ordinary batch, and nothing is
    padded or copied to join what the model would split again.

    Args:
        microbatches: each one the model's keyword arguments. None at all if the global batch had fewer samples than
            there are pipelines; such a pipeline trains on nothing but takes part in the gradient reduction.
        num_samples: samples of the whole global batch, over all pipelines.
        names: the inputs' names, when there is no microbatch to tell them.
        first_microbatch: how many microbatches of the global batch the pipelines before this one have.

    Raises ValueError if two microbatches have different inputs.
    """

    def __init__(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        num_samples: int,
        names: Sequence[str] | None = None,
        first_microbatch: int = 0,
    ) -> None:
        self.microbatches = [{name: walkable(name, each[name]) for name in each} for each in microbatches]
        self.num_samples = num_samples
        self.first_microbatch = first_microbatch
        self._names = list(self.microbatches[0]) if self.microbatches else list(names or ())
        for index, microbatch in enumerate(self.microbatches):
            if microbatch.keys() != self.microbatches[0].keys():
                raise ValueError(
                    f"The microbatches of a batch must have the same inputs, but the first has {self._names} "
                    f"and number {index} has {list(microbatch)}. Let collate_fn return the same names each time."
                )

    @property
    def num_microbatches(self) -> int:
        return len(self.microbatches)

    def __getitem__(self, name: str) -> PerMicrobatch:
        if name not in self._names:
            raise KeyError(name)
        return PerMicrobatch((microbatch[name] for microbatch in self.microbatches), self.first_microbatch)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return (
            f"MicrobatchedBatch({', '.join(self._names)}: {self.num_microbatches} microbatches, "
            f"global batch of {self.num_samples} samples)"
        )

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> MicrobatchedBatch:
        """The same batch with all tensors on a device."""
        moved = [to_device(microbatch, device, non_blocking) for microbatch in self.microbatches]
        return MicrobatchedBatch(moved, self.num_samples, self._names, self.first_microbatch)


def microbatches_of(
    inputs: Mapping[str, Any],
    main_input_name: str | None = None,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    default: int | None = None,
    media: MediaTokens | None = None,
    dims: BatchDims = NO_DIMS,
) -> tuple[list[dict[str, Any]], list[int]]:
    """The microbatches of a model call's keyword arguments, and the number of samples in each. Inputs from a
    `MicrobatchedBatch` keep its microbatches (perhaps none), and others are split to fit. An ordinary batch is split by
    `microbatch_sizes`; images and other media go with the sample in whose text their tokens stand, if `media` tells
    these. Raises ValueError for inputs with different numbers of microbatches, and what its callees raise."""
    given = {name: value for name, value in inputs.items() if isinstance(value, PerMicrobatch)}
    inputs = {name: value if name in given else walkable(name, value) for name, value in inputs.items()}
    if not given:
        rows = _rows_of_media(inputs, media)
        batch_size = batch_size_of(inputs, main_input_name, rows, dims)
        sizes = microbatch_sizes(batch_size, num_microbatches, microbatch_size, default)
        return split_batch(inputs, batch_size, sizes, rows, dims), sizes
    counts = {name: len(value) for name, value in given.items()}
    count = next(iter(counts.values()))
    if any(other != count for other in counts.values()):
        raise ValueError(
            f"The inputs come from batches with different numbers of microbatches: {counts}. Give those of one batch."
        )
    microbatches = [{name: value[index] for name, value in given.items()} for index in range(count)]
    sizes = [batch_size_of(part, main_input_name, _rows_of_media(part, media), dims) for part in microbatches]
    whole = {name: value for name, value in inputs.items() if name not in given}
    if whole and count:
        parts = split_batch(whole, sum(sizes), sizes, dims=dims)
        microbatches = [microbatch | part for microbatch, part in zip(microbatches, parts, strict=True)]
    return microbatches, sizes


def with_one_sample_more(
    inputs: Mapping[str, Any], size: int, media: MediaTokens | None = None, dims: BatchDims = NO_DIMS
) -> dict[str, Any]:
    """A microbatch of `size` samples with its first sample a second time, at the end."""
    rows = _rows_of_media(inputs, media)
    first = named_tensors(split_batch(inputs, size, [1, size - 1], rows, dims)[0] if size > 1 else inputs)

    def grown(name: str, tensor: torch.Tensor) -> torch.Tensor:
        rows_of_first, dim = first.get(name), batch_dim(name, tensor, dims)
        has_rows = rows_of(name, tensor, dims) == size and not IN_A_LIST.search(name)
        if rows_of_first is None or dim is None or not (name in rows or has_rows):
            return tensor
        return torch.cat([tensor, rows_of_first if name in rows else rows_of_first.narrow(dim, 0, 1)], dim)

    return {name: map_tensors(grown, name, value) for name, value in inputs.items()}


def _rows_of_media(inputs: Mapping[str, Any], media: MediaTokens | None) -> dict[str, list[int]]:
    return {} if media is None else rows_of_media(inputs, media)


def to_device(value: Any, device: torch.device | str | int, non_blocking: bool = False) -> Any:
    """Move every tensor in what is walked (see `nested`) to a device; leave everything else as it is."""
    if isinstance(value, PerMicrobatch):
        return value.to(device, non_blocking=non_blocking)
    return map_tensors(lambda _, tensor: tensor.to(device, non_blocking=non_blocking), "", value)


def place(
    microbatches: Sequence[Mapping[str, Any]], device: torch.device
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """The microbatches with all tensors on `device`, an accelerator, and the same ones with tensors that the host can
    read, where there are such. Tensors from the CPU, but those inside other inputs, are copied through pinned memory,
    and the host does not wait. Those on the device are copied to the host if they are small and hold integers or
    booleans (ids, labels, masks): it waits once for all of them."""
    copies: dict[Any, torch.Tensor] = {}

    def to_the_device(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in copies:  # labels are often the ids
            copies[key] = tensor.pin_memory().to(device, non_blocking=True)
        return copies[key]

    placed: list[dict[str, Any]] = []
    hosts: list[dict[str, Any]] = []
    waits = False
    for microbatch in microbatches:
        here, host = {}, {}
        for name, value in microbatch.items():
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                here[name] = host[name] = to_device(value, device)
            elif value.is_cpu:
                here[name], host[name] = to_the_device(value), value
            else:
                here[name] = host[name] = value
                if value.nbytes <= SMALL_BYTES and not (value.is_floating_point() or value.is_complex()):
                    host[name] = torch.empty_like(value, device="cpu", pin_memory=True)
                    host[name].copy_(value, non_blocking=True)
                    waits = True
        placed.append(here)
        hosts.append(host)
    if waits:
        torch.accelerator.current_stream(device).synchronize()
    return placed, hosts

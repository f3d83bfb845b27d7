"""A batch, as a model's keyword arguments, and the microbatches it is split into."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

# Where to read the batch size when the model's own main input is absent (an encoder-decoder model continued from
# `encoder_outputs` has only decoder inputs), most telling first.
MAIN_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_features",
    "input_values",
    "decoder_input_ids",
    "decoder_inputs_embeds",
)

# Inputs of transformers models whose dim 0 is a length, a layer or a count: never split, even where it happens to equal
# the batch size.
WITHOUT_BATCH = frozenset(
    {
        "cache_position",
        "cross_attn_head_mask",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "decoder_head_mask",
        "head_mask",
        "num_items_in_batch",
    }
)

# Inputs named like this hold one row per sample. A wrong size is an error, because handing the whole tensor to every
# microbatch would train on the wrong rows. The second group may also hold one row for all samples.
ROWS_PER_SAMPLE = ("label", "labels")
ROWS_PER_SAMPLE_OR_ONE = ("_embeds", "_features", "_ids", "_mask", "_positions", "_values")


def microbatch_sizes(
    batch_size: int,
    num_microbatches: int | None = None,
    micro_batch_size: int | None = None,
    default: int | None = None,
) -> list[int]:
    """Split a batch of `batch_size` samples into microbatches; return their sizes, which sum to `batch_size`.

    `num_microbatches` spreads the remainder over the first ones (10 samples in 4 -> 3, 3, 2, 2).
    `micro_batch_size` gives full ones and a smaller last (10 samples by 3 -> 3, 3, 3, 1). With neither, as many
    microbatches as `default` (one if None), but never more than samples.

    Raises ValueError if the batch is empty, a number is below 1, both are given, or `num_microbatches` exceeds the
    batch.
    """
    if batch_size < 1:
        raise ValueError(f"The batch has {batch_size} samples, so there is nothing to split into microbatches.")
    for name, value in (("num_microbatches", num_microbatches), ("micro_batch_size", micro_batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}.")
    if micro_batch_size is not None:
        if num_microbatches is not None:
            raise ValueError(
                f"Both num_microbatches ({num_microbatches}) and micro_batch_size ({micro_batch_size}) are given: "
                "each determines the other, so give one."
            )
        full, rest = divmod(batch_size, micro_batch_size)
        return [micro_batch_size] * full + [rest] * (rest > 0)
    if num_microbatches is None:
        num_microbatches = min(max(default or 1, 1), batch_size)
    elif num_microbatches > batch_size:
        raise ValueError(
            f"A batch of {batch_size} samples cannot be split into {num_microbatches} microbatches: "
            f"give batches of at least {num_microbatches} samples, or set num_microbatches to at most {batch_size}, "
            "or set micro_batch_size instead."
        )
    size, larger = divmod(batch_size, num_microbatches)
    return [size + 1] * larger + [size] * (num_microbatches - larger)


def batch_size_of(inputs: Mapping[str, Any], main_input_name: str | None = None, media: Collection[str] = ()) -> int:
    """Return the number of samples in a batch of model inputs, read from dim 0 of the main input.

    The main input is `main_input_name` (a model's attribute of this name), else the first of `MAIN_INPUTS`, else the
    first tensor. Every other input that by its name has a row per sample (labels, masks, ids) must agree, except for
    `media`, which have as many rows as the samples have images, say.

    Raises TypeError if `inputs` is no mapping, ValueError if it holds no tensor, no sample, or two batch sizes.
    """
    if not isinstance(inputs, Mapping):
        raise TypeError(f"A batch must be a mapping from input names to tensors, but is a {type(inputs).__name__}.")
    main = _main_input({name: value for name, value in inputs.items() if name not in media}, main_input_name)
    if main is None:
        names = ", ".join(map(str, inputs)) or "none at all"
        raise ValueError(
            f"The batch holds no tensors to split into microbatches (its inputs: {names}). "
            f"Give at least {main_input_name or MAIN_INPUTS[0]} as a tensor of shape (batch, ...)."
        )
    batch_size = inputs[main].shape[0]
    if batch_size == 0:
        raise ValueError(f"The batch is empty: {main} has shape {tuple(inputs[main].shape)}, without a single sample.")
    for name, value in inputs.items():
        rows = rows_of(name, value)
        if rows is None or rows == batch_size or name in media:
            continue
        strict = name in MAIN_INPUTS or name.endswith(ROWS_PER_SAMPLE)
        if strict or (rows != 1 and name.endswith(ROWS_PER_SAMPLE_OR_ONE)):
            raise ValueError(
                f"The batch disagrees about its size: {name} has {rows} samples (shape {tuple(value.shape)}), "
                f"but {main} has {batch_size} (shape {tuple(inputs[main].shape)})."
            )
    return batch_size


def split_batch(
    inputs: Mapping[str, Any],
    batch_size: int,
    sizes: Sequence[int],
    media: Mapping[str, Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Split a batch of model inputs into microbatches of the given sizes, in order.

    Tensors with `batch_size` rows are split along dim 0 (views, no copies), also inside tuples, lists and mappings, and
    so are lists of `batch_size` mappings (one annotation per sample). `position_ids` of shape (axes, batch, length) are
    split along dim 1. Everything else is handed to every microbatch as it is.

    `media` says, for some inputs, how many of their rows belong to each sample; a microbatch without any gets None.

    Raises ValueError if the sizes are not positive or do not sum to `batch_size`.
    """
    if sum(sizes) != batch_size or any(size < 1 for size in sizes):
        raise ValueError(f"Microbatches of sizes {list(sizes)} do not make up a batch of {batch_size} samples.")
    if len(sizes) == 1:
        return [dict(inputs)]
    microbatches: list[dict[str, Any]] = [{} for _ in sizes]
    for name, value in inputs.items():
        rows = (media or {}).get(name)
        parts = _split_input(name, value, batch_size, sizes) if rows is None else _split_media(value, rows, sizes)
        for index, microbatch in enumerate(microbatches):
            microbatch[name] = value if parts is None else parts[index]
    return microbatches


def _main_input(inputs: Mapping[str, Any], main_input_name: str | None) -> str | None:
    for name in (main_input_name, *MAIN_INPUTS):
        if name is not None and name in inputs and _has_rows(inputs[name]):
            return name
    for name, value in inputs.items():
        if name not in WITHOUT_BATCH and _has_rows(value):
            return name
    return None


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def rows_of(name: str, value: Any) -> int | None:
    """The number of samples a top-level input seems to hold, None if it is no tensor of samples."""
    if name in WITHOUT_BATCH or not _has_rows(value):
        return None
    return value.shape[batch_dim(name, value)]


def batch_dim(name: str, value: torch.Tensor) -> int:
    """The dimension of a top-level input that has a row for each sample."""
    # Multi-axis rotary embeddings (time, height, width) put the axes first.
    return 1 if name == "position_ids" and value.dim() == 3 else 0


def _split_input(name: str, value: Any, batch_size: int, sizes: Sequence[int]) -> Sequence[Any] | None:
    """The parts of one input, None if it goes whole to every microbatch."""
    if name in WITHOUT_BATCH:
        return None
    return _split_nested(value, batch_size, sizes, batch_dim(name, value) if _has_rows(value) else 0)


def _split_media(value: torch.Tensor, rows: Sequence[int], sizes: Sequence[int]) -> Sequence[Any]:
    """The parts of an input of which each sample has `rows`."""
    ends = [0, *accumulate(sizes)]
    lengths = [sum(rows[start:end]) for start, end in pairwise(ends)]
    return [part if len(part) else None for part in value.split_with_sizes(lengths)]


def _split_nested(value: Any, batch_size: int, sizes: Sequence[int], dim: int = 0) -> Sequence[Any] | None:
    """The parts of a tensor along `dim`, or of a container with its tensors split along dim 0; None if nothing has
    `batch_size` rows."""
    if isinstance(value, torch.Tensor):
        has_rows = value.dim() > dim and value.shape[dim] == batch_size
        return value.split_with_sizes(list(sizes), dim) if has_rows else None
    if not isinstance(value, (Mapping, tuple, list)):
        return None
    if not isinstance(value, Mapping) and len(value) == batch_size and all(isinstance(one, Mapping) for one in value):
        return [value[start:end] for start, end in pairwise([0, *accumulate(sizes)])]
    items = list(value.values() if isinstance(value, Mapping) else value)
    split = [_split_nested(item, batch_size, sizes) for item in items]
    if all(parts is None for parts in split):
        return None
    return [
        with_items(value, [item if parts is None else parts[index] for item, parts in zip(items, split, strict=True)])
        for index in range(len(sizes))
    ]


def with_items(value: Any, items: Sequence[Any]) -> Any:
    """A mapping, a tuple or a list like `value`, with other values in it; of subclasses, only data classes and named
    tuples keep their class."""
    if isinstance(value, Mapping):
        content = dict(zip(value, items, strict=True))
        # A ModelOutput (encoder_outputs) must keep its class: models ask for its fields.
        return type(value)(**content) if dataclasses.is_dataclass(value) else content
    if hasattr(value, "_fields"):  # a named tuple takes its fields one by one
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else list(items)

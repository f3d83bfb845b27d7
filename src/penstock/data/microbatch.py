"""A batch, as a model's keyword arguments, and the microbatches it is split into."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import torch

from penstock.nested import items_of, named_tensors, with_items

# For an input, or all tensors inside it, the dimension that has the samples, if not the usual one; None: none has.
BatchDims = Mapping[str, int | None]
NO_DIMS: BatchDims = MappingProxyType({})
# Names of tensors inside an entry of a list: of one sample, or one layer.
IN_A_LIST = re.compile(r"\.\d+\.")

# Where to read the batch size when the model's own main input is absent (an encoder-decoder model continued from
# `encoder_outputs` has only decoder inputs), most telling first.
MAIN_INPUTS = (
    "input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values", "decoder_input_ids",
    "decoder_inputs_embeds",
)  # fmt: skip

# Inputs of transformers models whose dim 0 is a length, a layer or a count: never split, even where it happens to equal
# the batch size.
WITHOUT_BATCH = frozenset((
    "cache_position", "cross_attn_head_mask", "cu_seq_lens_k", "cu_seq_lens_q", "decoder_head_mask", "head_mask",
    "num_items_in_batch",
))  # fmt: skip

# Inputs named like this hold one row per sample. A wrong size is an error, because handing the whole tensor to every
# microbatch would train on the wrong rows. The second group may also hold one row for all samples.
ROWS_PER_SAMPLE = ("label", "labels")
ROWS_PER_SAMPLE_OR_ONE = ("_embeds", "_features", "_ids", "_mask", "_positions", "_values")


def microbatch_sizes(
    batch_size: int,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    default: int | None = None,
) -> list[int]:
    """The sizes of the microbatches of a batch of `batch_size` samples.

    `num_microbatches` spreads the remainder over the first ones (10 samples in 4 -> 3, 3, 2, 2). `microbatch_size`
    gives full ones and a smaller last (10 samples by 3 -> 3, 3, 3, 1). With neither, as many microbatches as `default`
    (one if None), but never more than samples. Raises ValueError for numbers that cannot be.
    """
    if batch_size < 1:
        raise ValueError(f"The batch has {batch_size} samples, so there is nothing to split into microbatches.")
    for name, value in (("num_microbatches", num_microbatches), ("microbatch_size", microbatch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}.")
    if microbatch_size is not None:
        if num_microbatches is not None:
            raise ValueError(
                f"Both num_microbatches ({num_microbatches}) and microbatch_size ({microbatch_size}) are given: "
                "each determines the other, so give one."
            )
        full, rest = divmod(batch_size, microbatch_size)
        return [microbatch_size] * full + [rest] * (rest > 0)
    if num_microbatches is None:
        num_microbatches = min(max(default or 1, 1), batch_size)
    elif num_microbatches > batch_size:
        raise ValueError(
            f"A batch of {batch_size} samples cannot be split into {num_microbatches} microbatches: "
            f"give batches of at least {num_microbatches} samples, or set num_microbatches to at most {batch_size}, "
            "or set microbatch_size instead."
        )
    size, larger = divmod(batch_size, num_microbatches)
    return [size + 1] * larger + [size] * (num_microbatches - larger)


def batch_size_of(
    inputs: Mapping[str, Any],
    main_input_name: str | None = None,
    media: Collection[str] = (),
    dims: BatchDims = NO_DIMS,
) -> int:
    """The number of samples in a batch of model inputs, read from the main input: `main_input_name` (a model's
    attribute of this name), else the first of `MAIN_INPUTS`, else the first tensor, if need be one inside another
    input. Every other input that by its name has a row per sample (labels, masks, ids), or by `dims`, must have as
    many, except for `media`. Raises TypeError if `inputs` is no mapping, ValueError if it holds no tensor, no sample,
    or two batch sizes."""
    if not isinstance(inputs, Mapping):
        raise TypeError(f"A batch must be a mapping from input names to tensors, but is a {type(inputs).__name__}.")
    given = {name: value for name, value in inputs.items() if name not in media}
    main = _main_input(given, main_input_name, dims)
    if main is None:
        inputs = {name: value for name, value in named_tensors(given).items() if not IN_A_LIST.search(name)}
        main = _main_input(inputs, main_input_name, dims)
    if main is None:
        names = ", ".join(map(str, given)) or "none at all"
        raise ValueError(
            f"The batch holds no tensors to split into microbatches (its inputs: {names}). "
            f"Give at least {main_input_name or MAIN_INPUTS[0]} as a tensor of shape (batch, ...)."
        )
    batch_size = rows_of(main, inputs[main], dims)
    assert batch_size is not None  # as of any main input
    if batch_size == 0:
        raise ValueError(
            f"The batch is empty: {main} has shape {tuple(inputs[main].shape)}, without a single sample."
            " Leave such batches out."
        )
    for name, value in inputs.items():
        rows = rows_of(name, value, dims)
        if any(dims.values()) and rows == batch_size and batch_size in value.shape[1:] and _said(name, dims) is None:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, and a batch has {batch_size} samples: write batch_dim="
                f"{ {**dims, name: 0} }, with the dimension that has them in place of 0, or None if none has."
            )
        if rows is None or rows == batch_size or name in media:
            continue
        strict = _last(name) in MAIN_INPUTS or name.endswith(ROWS_PER_SAMPLE) or _said(name, dims) is not None
        if strict or (rows != 1 and name.endswith(ROWS_PER_SAMPLE_OR_ONE)):
            raise ValueError(
                f"The batch disagrees about its size: {name} has {rows} samples (shape {tuple(value.shape)}), "
                f"but {main} has {batch_size} (shape {tuple(inputs[main].shape)}). If one of them has samples along "
                f"another dimension than the first, write batch_dim={ {**dims, name: 1} }, say; None if it has none."
            )
    return batch_size


def split_batch(
    inputs: Mapping[str, Any],
    batch_size: int,
    sizes: Sequence[int],
    media: Mapping[str, Sequence[int]] | None = None,
    dims: BatchDims = NO_DIMS,
) -> list[dict[str, Any]]:
    """Split a batch of model inputs into microbatches of the given sizes, in order.

    Tensors with `batch_size` rows are split (views, no copies), also inside tuples, lists, mappings and data classes,
    and so are lists of `batch_size` mappings (one annotation per sample). Everything else is handed to every microbatch
    as it is. `media` says, for some inputs, how many of their rows belong to each sample; a microbatch without any gets
    None.
    """
    if len(sizes) == 1:
        return [dict(inputs)]
    microbatches: list[dict[str, Any]] = [{} for _ in sizes]
    for name, value in inputs.items():
        rows = (media or {}).get(name)
        parts = _split_input(name, value, batch_size, sizes, dims) if rows is None else _split_media(value, rows, sizes)
        for index, microbatch in enumerate(microbatches):
            microbatch[name] = value if parts is None else parts[index]
    return microbatches


def refuse_unknown_names(dims: BatchDims, inputs: Sequence[str]) -> None:
    """Raise ValueError if `dims` name something that is none of the possible `inputs`."""
    for name in dims:
        if name.partition(".")[0] not in inputs:
            close = difflib.get_close_matches(name, inputs, n=1)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            known = ", ".join(dict.fromkeys(inputs))
            raise ValueError(f"batch_dim names {name!r}, which is no input of the model: known are {known}{hint}")


def _main_input(inputs: Mapping[str, Any], main_input_name: str | None, dims: BatchDims) -> str | None:
    having = [name for name, value in inputs.items() if rows_of(name, value, dims) is not None]
    for wanted in (main_input_name, *MAIN_INPUTS):
        if candidates := [name for name in having if _last(name) == wanted]:
            return candidates[0]
    return having[0] if having else None


def _last(name: str) -> str:
    """The last part of a name such as "batch.labels"."""
    return name.rpartition(".")[2]


def _said(name: str, dims: BatchDims) -> str | None:
    """The key of `dims` that a tensor goes by: its own name, or that of the input that it is inside; None without."""
    return next((key for key in (name, name.partition(".")[0]) if key in dims), None)


def rows_of(name: str, value: Any, dims: BatchDims = NO_DIMS) -> int | None:
    """The number of samples a tensor among the inputs seems to hold, None if it is no tensor of samples.

    Raises ValueError if it lacks the dimension that `dims` say.
    """
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    dim = batch_dim(name, value, dims)
    if dim is None:
        return None
    if dim >= value.dim():
        raise ValueError(f"batch_dim of {_said(name, dims)} is {dim}, but {name} has shape {tuple(value.shape)}.")
    return value.shape[dim]


def batch_dim(name: str, value: torch.Tensor, dims: BatchDims = NO_DIMS) -> int | None:
    """The dimension of a tensor among the inputs that has a row for each sample; None if it has none."""
    key, last = _said(name, dims), _last(name)
    if key is not None:
        return dims[key]
    if last in WITHOUT_BATCH:
        return None
    # Multi-axis rotary embeddings (time, height, width) put the axes first.
    return 1 if last == "position_ids" and value.dim() == 3 else 0


def _split_media(value: torch.Tensor, rows: Sequence[int], sizes: Sequence[int]) -> Sequence[Any]:
    """The parts of an input of which each sample has `rows`."""
    ends = [0, *accumulate(sizes)]
    lengths = [sum(rows[start:end]) for start, end in pairwise(ends)]
    return [part if len(part) else None for part in value.split_with_sizes(lengths)]


def _split_input(name: str, value: Any, batch_size: int, sizes: Sequence[int], dims: BatchDims) -> Sequence[Any] | None:
    """The parts of one input, or of what is inside it; None if it goes whole to every microbatch."""
    if isinstance(value, torch.Tensor):
        if rows_of(name, value, dims) != batch_size:
            return None
        return value.split_with_sizes(list(sizes), batch_dim(name, value, dims) or 0)
    items = items_of(value)
    if not items or _last(name) in WITHOUT_BATCH:
        return None
    per_sample = isinstance(value, (tuple, list)) and len(value) == batch_size
    if per_sample and all(isinstance(sample, Mapping) for sample in value):
        return [value[start:end] for start, end in pairwise([0, *accumulate(sizes)])]
    split = [_split_input(f"{name}.{key}", item, batch_size, sizes, dims) for key, item in items]
    if all(parts is None for parts in split):
        return None
    pairs = [(old, parts) for (_, old), parts in zip(items, split, strict=True)]
    return [
        with_items(value, [old if parts is None else parts[index] for old, parts in pairs])
        for index in range(len(sizes))
    ]

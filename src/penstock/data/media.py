"""Which images, videos and sounds of a batch belong to which sample.

A text says where each of its images stands by placeholder tokens, one for each vector that the vision tower makes of
the image. The images themselves come in one tensor, in the order of the texts, with a row for each image or, flattened,
for each patch of it. So a sample's share of that tensor follows from how many placeholders its text has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import torch

# Kinds of media, by the number that `mm_token_type_ids` gives their tokens.
KINDS = {1: "image", 2: "video", 3: "audio"}
# The inputs of a kind begin with its name, or are among these; the main one, with the pixels or sounds, comes first.
INPUTS = {
    "image": ("pixel_values", "pixel_values_images", "pixel_attention_mask", "spatial_shapes"),
    "video": ("pixel_values_videos", "second_per_grid_ts", "image_sizes_videos", "target_sizes_videos"),
    "audio": ("input_features", "feature_attention_mask", "input_features_mask"),
}
# Endings of inputs that have a row for each image: its patches along each axis, or its size in pixels.
GRIDS = ("_grid_thw", "_grid_hw", "spatial_shapes")
SIZES = ("_sizes", "_sizes_videos")
# From so many dimensions on, the rows of pixels are samples, each padded to as many images as any has.
DIMENSIONS_OF_PADDED_IMAGES = 5


@dataclass(frozen=True)
class MediaTokens:
    """The tokens that stand for media in a text, `{kind: token}`."""

    tokens: Mapping[str, int]

    @classmethod
    def of(cls, config: Any) -> MediaTokens:
        """The tokens that a model's configuration names."""
        tokens = {}
        for kind in KINDS.values():
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                token = getattr(config, name, None)
                if isinstance(token, int):
                    tokens[kind] = token
                    break
        return cls(tokens)

    def counts(self, kind: str, inputs: Mapping[str, Any]) -> list[int] | None:
        """How many tokens of each sample stand for media of a kind; None if the batch does not tell."""
        types, ids = inputs.get("mm_token_type_ids"), inputs.get("input_ids")
        if _is_text(types):
            marks = torch.eq(types, next(number for number, name in KINDS.items() if name == kind))
        elif _is_text(ids) and kind in self.tokens:
            marks = torch.eq(ids, self.tokens[kind])
        else:
            return None
        return [int(count) for count in marks.sum(1).tolist()]

    def runs(self, kind: str, inputs: Mapping[str, Any]) -> list[int]:
        """How many runs of tokens of a kind each sample's text has."""
        ids = inputs.get("input_ids")
        if not _is_text(ids) or kind not in self.tokens:
            return []
        marks = torch.eq(ids, self.tokens[kind])
        begins = marks.clone()
        begins[:, 1:] &= ~marks[:, :-1]
        return [int(count) for count in begins.sum(1).tolist()]


def rows_of_media(inputs: Mapping[str, Any], media: MediaTokens) -> dict[str, list[int]]:
    """For each input that holds media, how many of its rows belong to each sample, in order.

    Inputs whose rows are samples, and those of a batch whose text does not tell, are left out.

    Args:
        inputs: a batch of a model's arguments, with `input_ids` or `mm_token_type_ids` of shape (batch, tokens).
    """
    rows_by_name: dict[str, list[int]] = {}
    for kind in KINDS.values():
        names = [name for name in inputs if name in INPUTS[kind] or name.startswith(f"{kind}_")]
        names = [name for name in names if isinstance(inputs[name], torch.Tensor) and inputs[name].dim()]
        main = next((name for name in (*INPUTS[kind], *names) if name in names), None)
        counts = None if main is None else media.counts(kind, inputs)
        if main is None or counts is None or not any(counts):
            continue
        grid = next((inputs[name] for name in names if name.endswith(GRIDS) and inputs[name].dim() == 2), None)
        sized = grid is not None or any(name.endswith(SIZES) for name in names)
        rows = inputs[main].shape[0]
        if rows == len(counts) and inputs[main].dim() >= DIMENSIONS_OF_PADDED_IMAGES and not sized:
            continue
        patches = None if grid is None else [math.prod(row) for row in grid.tolist()]
        number = rows if patches is None else len(patches)
        merged = _merged(patches, kind, inputs)
        shares = next(_shares_that_fit(counts, merged, number, media.runs(kind, inputs)), None)
        if shares is None:
            if rows == len(counts) and patches is None:
                continue
            raise ValueError(
                f"The batch does not tell which of its samples {main} belongs to: {number} {kind}s "
                f"({main} has shape {tuple(inputs[main].shape)}), and their placeholder tokens number {counts} in the "
                "samples' texts. Split the batch into microbatches yourself: prepare_dataloader's collate_fn is given "
                "one microbatch at a time."
            )
        for name in names:
            length = inputs[name].shape[0]
            if length == number:
                rows_by_name[name] = shares
            elif patches is not None and length == sum(patches):
                ends = [0, *accumulate(patches)]
                stops = [0, *accumulate(shares)]
                rows_by_name[name] = [ends[stop] - ends[start] for start, stop in pairwise(stops)]
    return rows_by_name


def _shares_that_fit(
    counts: Sequence[int], weights: Sequence[float] | None, number: int, runs: Sequence[int]
) -> Iterator[list[int]]:
    """Possible numbers of images for each sample, the most certain first: by `weights`, in proportion to which images
    may have placeholders, if known; equal ones; by the `runs` of placeholders that each sample has."""
    for guess in (weights, [1.0] * number):
        if guess is not None and (shares := _in_proportion(counts, guess)) is not None:
            yield shares
    if sum(runs) == number:
        yield list(runs)


def _in_proportion(counts: Sequence[int], weights: Sequence[float]) -> list[int] | None:
    """How many items of these weights each sample has, if items have placeholders in proportion to their weights."""
    each = sum(counts) / sum(weights) if sum(weights) else 0.0
    shares, position = [], 0
    for count in counts:
        start, reached = position, 0.0
        while position < len(weights) and reached + weights[position] * each <= count + 1e-6:
            reached += weights[position] * each
            position += 1
        if abs(reached - count) > 1e-6:
            return None
        shares.append(position - start)
    return shares if position == len(weights) else None


def _merged(patches: Sequence[int] | None, kind: str, inputs: Mapping[str, Any]) -> list[float] | None:
    """The weight of each image: its patches, in groups for one placeholder where the batch has their sizes."""
    if patches is None:
        return None
    sizes = inputs.get(f"{kind}_merge_sizes")
    if isinstance(sizes, torch.Tensor) and sizes.shape == (len(patches),):
        return [count / size**2 for count, size in zip(patches, sizes.tolist(), strict=True)]
    return [float(count) for count in patches]


def _is_text(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() == 2

"""Images go with the samples in whose texts their placeholder tokens stand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.batch import MicrobatchedBatch, microbatches_of, with_one_sample_more
from penstock.data.media import MediaTokens

IMAGE, VIDEO, TEXT = 90, 91, 5
MEDIA = MediaTokens.of(SimpleNamespace(image_token_id=IMAGE, video_token_id=VIDEO))


def texts(runs: Sequence[Sequence[int]], token: int = IMAGE) -> torch.Tensor:
    """A row for each sample: a run of placeholders of each length, each after a token of text, and padding."""
    rows = [[entry for length in own for entry in (TEXT, *[token] * length)] + [TEXT] for own in runs]
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def pixels(rows: int, *shape: int) -> torch.Tensor:
    """Rows that can be told apart."""
    return torch.arange(rows, dtype=torch.float32).reshape(-1, *[1] * len(shape)).expand(rows, *shape).contiguous()


# Of each image of a sample: how many groups of patches along time, height and width.
GRIDS = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4)), max_size=3)


@given(st.lists(GRIDS, min_size=2, max_size=8), st.data())
def test_flattened_patches_follow_their_texts(samples: list[list[tuple[int, int, int]]], data: Any) -> None:
    samples[0] = samples[0] or [(1, 1, 1)]
    merge = 2
    grids = [(t, merge * h, merge * w) for own in samples for t, h, w in own]
    owner = [index for index, own in enumerate(samples) for _ in own]
    patches = [t * h * w for t, h, w in grids]
    owner_of_patch = torch.tensor([o for o, count in zip(owner, patches, strict=True) for _ in range(count)])
    batch = {
        "input_ids": texts([[t * h * w for t, h, w in own] for own in samples]),
        "pixel_values": owner_of_patch[:, None].float().expand(-1, 6).contiguous(),
        "image_grid_thw": torch.tensor(grids),
        "labels": torch.arange(len(samples)),
    }
    number = data.draw(st.integers(1, len(samples)))
    parts, _ = microbatches_of(batch, "input_ids", number, media=MEDIA)
    for part in parts:
        own = set(part["labels"].tolist())
        wanted = [grid for grid, of in zip(grids, owner, strict=True) if of in own]
        if not wanted:
            assert part["pixel_values"] is None and part["image_grid_thw"] is None
            continue
        assert part["image_grid_thw"].tolist() == [list(grid) for grid in wanted]
        assert len(part["pixel_values"]) == sum(t * h * w for t, h, w in wanted)
        assert set(part["pixel_values"][:, 0].int().tolist()) <= own


def test_images_of_one_size_are_shared_out_by_their_tokens() -> None:
    batch = {"input_ids": texts([[4], [4, 4], [], [4]]), "pixel_values": pixels(4, 3, 8, 8)}
    parts, sizes = microbatches_of(batch, "input_ids", 2, media=MEDIA)
    assert sizes == [2, 2]
    assert [part["pixel_values"][:, 0, 0, 0].tolist() for part in parts] == [[0, 1, 2], [3]]


def test_images_of_unknown_numbers_of_tokens_are_told_by_runs() -> None:
    batch = {
        "input_ids": texts([[3], [5, 2], [7]]),
        "pixel_values": pixels(4, 2, 3, 8, 8),
        "image_sizes": torch.arange(8).reshape(4, 2),
    }
    parts, _ = microbatches_of(batch, "input_ids", 3, media=MEDIA)
    assert [len(part["pixel_values"]) for part in parts] == [1, 2, 1]
    assert [part["image_sizes"].tolist() for part in parts] == [[[0, 1]], [[2, 3], [4, 5]], [[6, 7]]]


def test_token_types_tell_videos_from_images_whatever_their_tokens() -> None:
    ids = texts([[2, 4], [4, 2]])
    types = (ids == IMAGE).long()
    types[0, 4:] *= 2  # the second run of the first sample is a video, and the first of the second
    types[1, :5] *= 2
    batch = {
        "input_ids": ids,
        "mm_token_type_ids": types,
        "pixel_values": pixels(16, 6),
        "image_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 2]]),
        "pixel_values_videos": pixels(32, 6),
        "video_grid_thw": torch.tensor([[2, 2, 4], [2, 4, 2]]),
        "second_per_grid_ts": torch.tensor([0.5, 1.0]),
    }
    parts, _ = microbatches_of(batch, "input_ids", 2, media=MEDIA)
    assert [part["pixel_values"][:, 0].tolist() for part in parts] == [list(range(8)), list(range(8, 16))]
    assert [part["pixel_values_videos"][:, 0].tolist() for part in parts] == [list(range(16)), list(range(16, 32))]
    assert [part["second_per_grid_ts"].tolist() for part in parts] == [[0.5], [1.0]]


def test_images_padded_to_as_many_for_each_sample_are_split_by_samples() -> None:
    batch = {"input_ids": texts([[], [4, 4]]), "pixel_values": pixels(2, 2, 3, 8, 8)}
    parts, _ = microbatches_of(batch, "input_ids", 2, media=MEDIA)
    assert [len(part["pixel_values"]) for part in parts] == [1, 1]


def test_what_fits_no_sharing_out_is_refused() -> None:
    batch = {"input_ids": texts([[3], [5]]), "pixel_values": pixels(3, 3, 8, 8)}
    with pytest.raises(ValueError, match=r"which of its samples pixel_values belongs to: 3 images .* number \[3, 5\]"):
        microbatches_of(batch, "input_ids", 2, media=MEDIA)


def test_microbatches_of_a_loader_may_have_any_number_of_images() -> None:
    given = [
        {"input_ids": texts([[4, 4], [4]]), "pixel_values": pixels(3, 3, 8, 8)},
        {"input_ids": texts([[4]]), "pixel_values": pixels(1, 3, 8, 8)},
    ]
    parts, sizes = microbatches_of(MicrobatchedBatch(given, 3), "input_ids", media=MEDIA)
    assert sizes == [2, 1]
    assert [len(part["pixel_values"]) for part in parts] == [3, 1]


def test_one_sample_more_brings_its_images() -> None:
    batch = {"input_ids": texts([[4, 4], [4]]), "pixel_values": pixels(3, 3, 8, 8), "scale": torch.tensor(2.0)}
    grown = with_one_sample_more(batch, 2, MEDIA)
    assert grown["input_ids"].tolist() == [*batch["input_ids"].tolist(), batch["input_ids"][0].tolist()]
    assert grown["pixel_values"][:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1]
    assert grown["scale"] is batch["scale"]

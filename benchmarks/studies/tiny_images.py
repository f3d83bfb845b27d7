"""Images in the forms in which models take them beside a text."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

IMAGE_SIZE = 32


def forms_of_images(
    model: Any, takes: Collection[str], number: int, samples: int, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Forms of `number` images that a model with such arguments may take, the likeliest first."""
    config = model.config
    vision = getattr(config, "vision_config", None) or config
    patch = getattr(vision, "patch_size", None) or 8
    patch = patch if isinstance(patch, int) else patch[-1]
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    size = getattr(vision, "image_size", None) or IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if "image_grid_thw" in takes:
        # Flattened, with the numbers of patches along time, height and width; every third image is wider.
        merge = getattr(vision, "spatial_merge_size", None) or 2
        merge = merge if isinstance(merge, int) else merge[-1]
        grid = torch.tensor([[1, 2 * merge, 2 * merge * (1 + (image % 3 == 2))] for image in range(number)])
        patches = int(grid.prod(1).sum())
        told = {"image_grid_thw": grid}
        if "image_merge_sizes" in takes:
            told["image_merge_sizes"] = torch.full((number,), merge)
        frames = getattr(vision, "temporal_patch_size", None) or 1
        yield {"pixel_values": drawn(patches, channels * frames * patch**2), **told}
        yield {"pixel_values": drawn(patches, channels, patch, patch), **told}
        yield {"pixel_values": drawn(patches, channels * patch**2), **told}
    if "spatial_shapes" in takes:
        # As many patches for each image as the largest has.
        shapes = torch.tensor([[4, 4 if image % 3 else 2] for image in range(number)])
        real = torch.arange(16)[None] < shapes.prod(1)[:, None]
        pixels = drawn(number, 16, channels * patch**2)
        yield {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": real.long()}
    sizes = torch.tensor([[height, width]] * number)
    if "image_sizes" in takes and hasattr(config, "image_grid_pinpoints"):
        # Each image once whole, and in two tiles.
        pixels = drawn(number, 3, channels, height, width)
        yield {"pixel_values": pixels, "image_sizes": torch.tensor([[height, 2 * width]] * number)}
    if "pixel_attention_mask" in takes:
        # As many images for each sample as any has; what is zero is no image.
        pixels = drawn(samples, 2, channels, height, width)
        pixels[[sample for sample in range(samples) if sample != 2], 1] = 0
        yield {"pixel_values": pixels, "pixel_attention_mask": torch.ones(samples, 2, height, width, dtype=torch.long)}
    plain = {"pixel_values": drawn(number, channels, height, width)}
    if "high_res_pixel_values" in takes:
        yield {**plain, "high_res_pixel_values": drawn(number, 3, 64, 64)}
    if "image_sizes" in takes:
        yield {**plain, "image_sizes": sizes}
    yield plain

"""Images for a forward that computes nothing, in the forms in which models take them beside a text."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from penstock.modeling.graph.dummy_inputs import dtype_of
from penstock.modeling.graph.meta_operations import KnownValues
from penstock.modeling.placeholders.ghosts import meta_placeholder

IMAGE_SIZE = 32


def with_dummy_images(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`inputs`, a batch of texts, with an image for each sample; the likeliest form first, none if it takes no images.

    How many tokens stand for an image is found by running the model's `get_image_features` on meta tensors.
    """
    owner: Any = getattr(model, "base_model", model)
    owner = owner if hasattr(owner, "get_image_features") else model
    config = getattr(model, "config", None)
    token = next(
        (t for n in ("image_token_id", "image_token_index") if isinstance(t := getattr(config, n, None), int)), None
    )
    ids = inputs.get("input_ids")
    if not hasattr(owner, "get_image_features") or token is None or ids is None or ids.dim() != 2:
        return
    takes = inspect.signature(owner.get_image_features).parameters
    parameters = inspect.signature(model.forward).parameters
    samples = ids.shape[0]
    shadow: Any = meta_placeholder(owner)
    dtype = dtype_of(model)
    for form in forms_of_images(model, takes, samples, samples, torch.Generator().manual_seed(0)):
        images = {n: value.to(dtype) if value.is_floating_point() else value for n, value in form.items()}
        given = {n: value.to("meta") if value.is_floating_point() else value for n, value in images.items()}
        try:
            with torch.no_grad(), torch.device("meta"), KnownValues():
                features = shadow.get_image_features(**given, return_dict=True).pooler_output
            rows = sum(part[..., 0].numel() for part in features)
        except Exception:
            continue
        ahead = ids.new_full((samples, rows // samples), token)
        found = {**inputs, **images, "input_ids": torch.cat([ahead, ids], 1)}
        if "attention_mask" in inputs:
            found["attention_mask"] = torch.ones_like(found["input_ids"])
        if "mm_token_type_ids" in parameters:
            found["mm_token_type_ids"] = (found["input_ids"] == token).long()
        yield found


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

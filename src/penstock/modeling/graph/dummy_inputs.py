"""Inputs for a forward that computes nothing, made from a model's configuration and signature."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.modeling.instrumentation import known_of
from penstock.modeling.libraries import configuration_of
from penstock.nested import map_tensors

BATCH = 2
TOKENS = 8
CHOICES = 2
# Separators between a question and the text that it is about, and at the text's end.
SEPARATORS = 3
# No longer sequence is tried.
MOST_TOKENS = 4096
# Entries of a configuration that say how long a sequence may be.
POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
# Entries of configurations that say how many features a moment of sound has.
FEATURES_OF_SOUND = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size")
# Layers that say what they take.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
FIRST_LAYERS = (nn.Embedding, nn.Linear, *CONVOLUTIONS)


class InputsNeeded(NotImplementedError):
    """The forward of a model fails on inputs that were guessed: whether the model can be split is not known."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"what {type(model).__name__}.forward() takes was guessed, and it fails so ({reason}): give some as "
            "example_inputs, in a command as --inputs SCRIPT.py:NAME, or as an attribute dummy_inputs of the model"
        )


def dummy_inputs(model: nn.Module, batch: int = BATCH, tokens: int = TOKENS) -> Iterator[dict[str, Any]]:
    """Arguments with which the forward of `model` may be traced, without labels; the likeliest first.

    A model says what it takes by its signature, its configuration, or its first layer, but not everything: whether a
    sample is one sequence or several to choose from, say. So there is more than one guess, and whoever needs inputs
    takes the first that the forward runs on. A model's own `dummy_inputs`, where it has some, come first. Inputs that
    the user has given are the only ones. A sample has fewer `tokens` if the model has fewer positions."""
    given = known_of(model).example_inputs
    if given is not None:
        yield dict(given)
        return
    own = getattr(type(model), "dummy_inputs", vars(model).get("dummy_inputs"))
    if own is not None and own is not PreTrainedModel.dummy_inputs:
        with contextlib.suppress(Exception):  # nothing uses some of them, and a few are broken
            yield {
                name: map_tensors(_with_values, name, value) for name, value in cast(Any, model.dummy_inputs).items()
            }
    plain = _guess(model, batch, tokens)
    if not isinstance(model, PreTrainedModel):
        yield from _for_first_layer(model, plain, batch, tokens)
    yield plain
    config, parameters = configuration_of(model), inspect.signature(model.forward).parameters
    text = {name: value for name, value in plain.items() if value.dim() == 2}
    separator = _number(config, "sep_token_id")
    marked: dict[str, torch.Tensor] = {}
    if "input_ids" in text and separator is not None and plain["input_ids"].shape[1] > SEPARATORS + 1:
        ids = plain["input_ids"][:, :1].expand_as(plain["input_ids"]).clone()
        ids[:, 1 : 1 + SEPARATORS] = separator
        marked = {**text, "input_ids": ids}
        yield {**plain, **marked}
    for boxes in (torch.long, torch.float32):
        if "bbox" in parameters and "bbox" not in plain and "input_ids" in text:
            yield {**plain, "bbox": torch.zeros(*plain["input_ids"].shape, 4, dtype=boxes)}
    for single in filter(None, (text, marked)):
        if "input_ids" in single:  # several sequences for each sample
            several = {name: value[:, None].expand(-1, CHOICES, -1).contiguous() for name, value in single.items()}
            yield {**plain, **several}
    if "input_ids" in parameters and "input_ids" not in plain:
        ids = _ids(config, batch, tokens)
        yield {**plain, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "pixel_values" in parameters and "pixel_values" not in plain:
        yield {**plain, "pixel_values": _made("pixel_values", config, batch, tokens)}
    if "input_features" in plain:  # some take the bins first
        yield {**plain, "input_features": plain["input_features"].transpose(1, 2).contiguous()}
    if "inputs" in parameters and "inputs" not in plain:
        yield {**plain, "inputs": _ids(config, batch, _number(config, "max_position_embeddings") or tokens)}
        yield {**plain, "inputs": _made("pixel_values", config, batch, tokens)}
    limit = _most_positions(config)
    if limit is not None and tokens < limit <= MOST_TOKENS and "input_ids" in text:  # some take full sequences only
        yield _guess(model, batch, limit)
    if batch > 1:  # a classifier of texts without a token for padding takes one at a time
        yield _guess(model, 1, tokens)


def _with_values(_: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a model on the meta device makes as its inputs has no values: ones may be ids, masks and numbers."""
    return torch.ones_like(tensor, device="cpu") if tensor.is_meta else tensor


class InputsError(ValueError):
    """The inputs given are not those of the model's forward."""


def refuse_arguments(model: nn.Module, inputs: Mapping[str, Any], signature: inspect.Signature | None = None) -> None:
    """Raise InputsError if the model's forward, which has this `signature`, does not take these arguments."""
    try:
        (signature or inspect.signature(model.forward)).bind(**inputs)
    except TypeError as error:
        given = ", ".join(inputs) or "none"
        raise InputsError(f"{type(model).__name__}.forward() {error}; the inputs given are {given}") from None


def arguments_by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, those by position under the names that the model's forward has for them."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    forward = f"{type(model).__name__}.forward()"
    if len(args) > len(names):
        raise TypeError(
            f"{forward} names {len(names)} arguments that may be given by position ({', '.join(names) or 'none'}), but "
            f"{len(args)} were given: pass the others by name, those for a criterion as well"
        )
    if twice := [name for name in names[: len(args)] if name in kwargs]:
        raise TypeError(f"{forward} was given {twice[0]!r} by position and by name")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def dtype_of(model: nn.Module) -> torch.dtype:
    """The type of a model's first floating-point parameter; torch.float32 if it has none."""
    return next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)


def _for_first_layer(model: nn.Module, plain: Mapping[str, Any], batch: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Guesses for the one argument whose name says nothing (`x`), by what the first layer that says so takes."""
    needed = _needed(inspect.signature(model.forward).parameters)
    unknown = [name for name in needed if name not in plain] if len(needed) > 1 else [*needed]
    if len(unknown) != 1:
        return
    dtype = dtype_of(model)
    first = next((module for module in model.modules() if isinstance(module, FIRST_LAYERS)), None)
    shapes: list[tuple[int, ...]] = []
    if isinstance(first, nn.Embedding):
        yield {**plain, unknown[0]: torch.zeros(batch, tokens, dtype=torch.long)}
    elif isinstance(first, nn.Linear):
        shapes = [(first.in_features,), (tokens, first.in_features)]
    elif isinstance(first, CONVOLUTIONS):
        shapes = [(first.in_channels, *[size] * len(first.kernel_size)) for size in (32, 28, 224, 64, 96, 128)]
    for shape in shapes:
        yield {**plain, unknown[0]: torch.zeros(batch, *shape, dtype=dtype)}


def _needed(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    """The names of arguments without a default."""
    return {
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }


def _guess(model: nn.Module, batch: int, tokens: int) -> dict[str, Any]:
    config = configuration_of(model)
    main = getattr(model, "main_input_name", "input_ids")
    parameters = inspect.signature(model.forward).parameters
    if main not in parameters and "input_ids" in parameters:
        main = "input_ids"
    tokens = max(1, min(tokens, _most_positions(config) or tokens))
    inputs: dict[str, Any] = {}
    names = [main, *sorted(_needed(parameters) - {main})]
    if main not in parameters and not isinstance(model, PreTrainedModel):
        names = names[1:]
    # A model of two inputs (an image and a text, a document and its boxes) takes both.
    if hasattr(config, "vision_config") and not hasattr(config, "image_token_id"):
        names += [name for name in ("input_ids", "pixel_values") if name in parameters]
    dtype = dtype_of(model)
    for name in dict.fromkeys(names):
        made = _made(name, config, batch, tokens)
        if made is not None:
            inputs[name] = made.to(dtype) if made.is_floating_point() else made
    if "input_ids" in inputs and "attention_mask" in parameters:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = _ids(config, batch, tokens)
    return inputs


def _most_positions(config: Any) -> int | None:
    limits = [_number(config, name) for name in POSITION_LIMITS]
    return min((limit for limit in limits if limit), default=None)


def _made(name: str, config: Any, batch: int, tokens: int) -> Any:
    if name in ("pixel_values", "pixel_values_videos"):
        frames = _number(config, "num_frames")
        height, width = _image_size(config)
        shape = (_number(config, "num_channels") or 3, height, width)
        return torch.zeros((batch, frames, *shape) if frames else (batch, *shape))
    if name == "input_features":
        bins = next((n for n in (_number(config, name) for name in FEATURES_OF_SOUND) if n), 80)
        frames = 2 * (_number(config, "max_source_positions") or 50)
        return torch.zeros(batch, frames, bins)
    if name == "input_values":
        return torch.zeros(batch, 8000)
    if name == "flattened_patches":  # each patch's row and column, and its pixels
        elements = (_number(config, "patch_size") or 16) ** 2 * (_number(config, "num_channels") or 3)
        return torch.ones(batch, tokens, 2 + (_number(config, "patch_embed_hidden_size") or elements))
    if name == "bbox":
        return torch.zeros(batch, tokens, 4, dtype=torch.long)
    if name.endswith("mask"):
        return torch.ones(batch, tokens, dtype=torch.long)
    if name.endswith("ids"):
        return _ids(config, batch, tokens)
    if name.endswith("embeds"):
        return torch.zeros(batch, tokens, _number(config, "hidden_size") or 1)
    return None


def _ids(config: Any, batch: int, tokens: int) -> torch.Tensor:
    """Tokens that are no padding, each sequence ending with the end-of-sequence token if there is one."""
    pad = _number(config, "pad_token_id")
    token = next(i for i in (1, 2, 3) if i not in (pad, _number(config, "eos_token_id")))
    ids = torch.full((batch, tokens), min(token, (_number(config, "vocab_size") or 4) - 1))
    end = _number(config, "eos_token_id")
    if end is not None:
        ids[:, -1] = end
    return ids


def _image_size(config: Any) -> tuple[int, int]:
    size = _found(config, "image_size") or _found(config, "input_size") or 32
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


def _found(config: Any, name: str) -> Any:
    """An entry of the configuration, or of its parts for text, vision and audio."""
    for part in ("", "text_config", "vision_config", "audio_config", "encoder", "encoder_config"):
        value = getattr(getattr(config, part, None) if part else config, name, None)
        if value is not None:
            return value
    return None


def _number(config: Any, name: str) -> int | None:
    value = _found(config, name)
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value if isinstance(value, int) and not isinstance(value, bool) else None

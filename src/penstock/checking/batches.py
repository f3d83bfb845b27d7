"""A model of transformers by its configuration, and a batch that it computes a loss from."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from penstock.checking.check import build_on_meta
from penstock.modeling.graph.dummy_inputs import dummy_inputs
from penstock.modeling.graph.loss import loss_of
from penstock.modeling.libraries import configuration_of
from penstock.modeling.weights.initialise import meta_model
from penstock.tensor_parallel.plans import or_none

TOKENS = 12
# Ids below it are often special ones.
FIRST_TOKEN = 5
# Copies of a whole model that a process of a comparison holds at once, in double precision and with gradients.
COPIES = 6
# As many as make stages, where a whole model is too large.
FEW_LAYERS = 2


def build(subject: type | PretrainedConfig | str, layers: int | None, ranks: int, trust_remote_code: bool) -> nn.Module:
    """The model that `penstock check` would look at, with a checkpoint's weights, if it has any, or random ones; with
    so many `layers` only. Raises ValueError if this machine has not the memory to compare it on `ranks` processes."""
    shape = _shape_of(subject, layers, trust_remote_code)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (needed := _needed(shape, ranks)) > memory:
        fewer = layers is None or layers > FEW_LAYERS
        fewer = fewer and _needed(_shape_of(subject, FEW_LAYERS, trust_remote_code), ranks) <= memory
        advice = (
            f"--layers {FEW_LAYERS} compares a smaller one" if fewer else "write a function that makes a smaller one"
        )
        raise ValueError(
            f"comparing {type(shape).__name__} on {ranks} processes needs about {needed / 1e9:.0f} GB, and this "
            f"machine has {memory / 1e9:.0f}: {advice}"
        )
    config = shape.config
    kind: Any = type(shape)
    if isinstance(subject, str) and any(file.suffix in (".safetensors", ".bin") for file in Path(subject).glob("*")):
        loaded: nn.Module = kind.from_pretrained(subject, config=config, trust_remote_code=trust_remote_code)
        return loaded
    made: nn.Module = kind(config)
    return made


def _shape_of(subject: type | PretrainedConfig | str, layers: int | None, trust_remote_code: bool) -> Any:
    """The model on the meta device, with so many `layers` only."""
    shape: Any = build_on_meta(subject, trust_remote_code)
    if layers is None:
        return shape
    config = copy.deepcopy(shape.config)
    for part in (config, config.get_text_config()):
        for name in ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"):
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, min(layers, getattr(part, name)))
        if isinstance(kinds := getattr(part, "layer_types", None), list):
            part.layer_types = kinds[:layers]
    return meta_model(type(shape), config)


def _needed(shape: nn.Module, ranks: int) -> int:
    return 8 * COPIES * ranks * sum(each.numel() for each in shape.parameters())


def made_batch(model: nn.Module, samples: int) -> dict[str, Any]:
    """A batch of random tokens, or numbers, with uneven padding where there is a mask, and labels. Raises ValueError if
    the model computes no loss from any that was tried."""
    generator = torch.Generator().manual_seed(0)
    for inputs in filter(None, dummy_inputs(model, samples, TOKENS)):
        drawn = _drawn(model, inputs, generator)
        for batch in ({**drawn, **labels} for labels in _labels(model, drawn)):
            try:
                loss = loss_of(model(**batch))
            except Exception:  # whatever a model's own code raises
                continue
            if loss is not None and loss.isfinite() and loss.requires_grad:
                return batch
    raise ValueError(
        f"no batch was found from which {type(model).__name__} computes a loss: give one with --inputs SCRIPT.py:NAME"
    )


def _drawn(model: Any, inputs: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """`inputs` with random values, and in each second sample some padding."""
    config = configuration_of(model)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
    drawn = dict(inputs)
    for name, value in inputs.items():
        if value.is_floating_point():
            drawn[name] = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        elif name.endswith("input_ids") and vocabulary:
            low = min(FIRST_TOKEN, vocabulary - 1)
            drawn[name] = torch.randint(low, vocabulary, value.shape, generator=generator)
        elif name == "attention_mask" and value.dim() == 2:
            drawn[name] = value.clone()
            for sample in range(1, len(value), 2):
                drawn[name][sample, value.shape[1] - 1 - sample % (value.shape[1] // 2) :] = 0
    return drawn


def _labels(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Labels that the forward may take: a class or a position for each sample, a token or a class for each token."""
    parameters = inspect.signature(model.forward).parameters
    classes = torch.arange(max(len(value) for value in inputs.values())) % 2
    if "start_positions" in parameters:
        yield {"start_positions": classes, "end_positions": classes + 1}
    guesses = [classes, torch.ones(len(classes), 4, dtype=torch.long)]
    ids, mask = inputs.get("decoder_input_ids", inputs.get("input_ids")), inputs.get("attention_mask")
    if ids is not None:
        padding = mask == 0 if mask is not None and mask.shape == ids.shape else torch.zeros_like(ids).bool()
        tokens = [ids.masked_fill(padding, -100), torch.zeros_like(ids)]
        # A model with a head for tokens has labels for tokens.
        guesses = tokens if or_none(getattr(model, "get_output_embeddings", None)) is not None else guesses + tokens
    names = [name for name in ("labels", "label", "next_sentence_label") if name in parameters]
    yield from ({name: guess} for name in names for guess in guesses)
    yield {}  # its forward may return a loss by itself

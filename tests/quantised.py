"""Tiny quantised models with adapters, the same from the same seed, for tests of quantised bases."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from optimum.quanto.library.extensions import get_extension
from peft import LoraConfig, get_peft_model
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

from families import FAMILIES

# Quanto compiles C++ when it first unpacks 4 bits on a CPU, which takes a minute. This is the same in Python.
get_extension("quanto_cpp")._lib = SimpleNamespace(
    unpack=lambda packed, bits: torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])
)

BITSANDBYTES = ("nf4", "fp4", "double", "int8")
UNSAVED = ("quanto8", "quanto4")  # by transformers
KINDS = (*BITSANDBYTES, "torchao8", "torchao-float8", *UNSAVED)

# Of a width that the 4-bit libraries pack in whole blocks.
SIZES = {
    "llama": {"hidden_size": 64, "intermediate_size": 128},
    "gpt2": {"n_embd": 64},
    "mixtral": {"hidden_size": 64, "intermediate_size": 128},
}


def quantisation(kind: str) -> Any:
    """A configuration of transformers for one of `KINDS`. `double` is nf4, its statistics quantised again."""
    if kind.startswith("torchao"):
        return transformers.TorchAoConfig((Int8WeightOnlyConfig if kind[-2] == "o" else Float8WeightOnlyConfig)())
    if kind.startswith("quanto"):
        return transformers.QuantoConfig(weights=f"int{kind[-1]}")
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4" if kind == "fp4" else "nf4",
        bnb_4bit_use_double_quant=kind == "double",
        bnb_4bit_compute_dtype=torch.float32,
    )


def write_base(family: str, folder: Path, kind: str | None = None, scale: float = 1.0, **sizes: int) -> Path:
    """A checkpoint of a tiny model; with a `kind`, saved quantised."""
    model: Any = FAMILIES[family].build(dtype=torch.float32, **{**SIZES[family], **sizes})
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    model.save_pretrained(folder)
    if kind is not None:
        quantised = type(model).from_pretrained(folder, quantization_config=quantisation(kind))
        folder = folder / kind
        quantised.save_pretrained(folder)
    return folder


def adapt(model: Any) -> Any:
    torch.manual_seed(1)
    layers = ["c_attn", "c_fc"] if model.config.model_type == "gpt2" else ["q_proj", "o_proj", "down_proj", "gate_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=layers, init_lora_weights=False, task_type="CAUSAL_LM"))


def load(family: str, folder: Path, kind: str | None, adapters: bool = True) -> Any:
    """The unsplit model; `kind` None for a checkpoint that was saved quantised."""
    config = {} if kind is None else {"quantization_config": quantisation(kind)}
    model = getattr(transformers, FAMILIES[family].model_class).from_pretrained(folder, dtype=torch.float32, **config)
    return adapt(model) if adapters else model

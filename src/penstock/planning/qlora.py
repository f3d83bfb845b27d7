"""A model on the meta device as QLoRA trains it, packed base and adapters, for estimates.

It needs neither PEFT nor the libraries that pack.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from transformers.pytorch_utils import Conv1D

from penstock.modeling.packed_layers import Unpacking, UnpackingStack, stacks_of

# Bits of a number, with its share of the scales: bitsandbytes keeps a float32 for 64 numbers; quantised twice, 8 bits,
# and a float32 for 256 of these. In 8 bits there is one for a whole row.
BITS = {"nf4": 4 + 32 / 64, "fp4": 4 + 32 / 64, "nf4-double": 4 + 8 / 64 + 32 / (64 * 256), "int8": 8.0}


def pack(model: nn.Module, kind: str) -> None:
    """Pack the weights of all adapted layers but those that the model keeps in float32, as transformers does, and the
    experts, which bitsandbytes packs in 4 bits only."""
    if kind not in BITS:
        raise ValueError(f"quantization must be one of {', '.join(BITS)}, but is {kind!r}")
    whole = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, module in list(model.named_modules()):
        if set(whole) & set(name.split(".")):
            continue
        if isinstance(module, _Adapted):
            inner, outer = _sizes(module.layer)
            module.layer = Unpacking(inner, outer, _bytes(inner * outer, kind), module.layer.bias)
        elif kind != "int8":
            for stack in stacks_of(module):
                plain = module._parameters[stack]
                assert plain is not None
                setattr(module, stack, nn.Parameter(_bytes(plain.numel(), kind), requires_grad=False))
                unpacking = UnpackingStack(tuple(plain.shape), plain.dtype)
                register_parametrization(module, stack, unpacking, unsafe=True)


def _bytes(num_weights: int, kind: str) -> torch.Tensor:
    return torch.empty(round(num_weights * BITS[kind] / 8), dtype=torch.uint8, device="meta")


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze the model, and adapt every linear layer but the head, as `target_modules="all-linear"` does."""
    model.requires_grad_(False)
    for parent, name, layer in list(_linear_layers(model)):
        setattr(parent, name, _Adapted(layer, rank))


# What PEFT takes for the names of experts in one stack, or of their router, as these were once linear layers. So
# "all-linear" adapts experts, too.
OF_EXPERTS = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})


def names_to_adapt(model: nn.Module) -> list[str]:
    """The `target_modules` with which PEFT adapts linear layers, and no experts."""
    return sorted({name for _, name, _ in _linear_layers(model)} - OF_EXPERTS)


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """All but the head, each with the module that it is in, and its name there."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | Conv1D) and child is not head:
                yield parent, name, child


def _sizes(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.nx, layer.nf)


class _Adapted(nn.Module):
    """A frozen layer with an adapter, as PEFT makes them: in float32, of whatever type the layer is."""

    def __init__(self, layer: nn.Linear | Conv1D, rank: int) -> None:
        super().__init__()
        inner, outer = _sizes(layer)
        self.layer = layer
        self.down = nn.Linear(inner, rank, bias=False, device="meta", dtype=torch.float32)
        self.up = nn.Linear(rank, outer, bias=False, device="meta", dtype=torch.float32)

    @property
    def weight(self) -> torch.Tensor:
        """The layer's, as `bias`: code of T5 and Mamba asks for them."""
        return self.layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.layer.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(input)
        output_with_adapter: torch.Tensor = (output + self.up(self.down(input.float())) * 1.0).to(output.dtype)
        return output_with_adapter

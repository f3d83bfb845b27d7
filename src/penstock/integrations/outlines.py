"""What a model on the meta device would be with a packed base, and with adapters: for estimates, without PEFT or the
libraries that pack."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from penstock.integrations.packed_layers import Unpacking

# Bits of a number, with its share of the scales: bitsandbytes keeps a float32 for 64 numbers; quantised twice, 8 bits,
# and a float32 for 256 of these. In 8 bits there is one for a whole row.
BITS = {"nf4": 4 + 32 / 64, "fp4": 4 + 32 / 64, "nf4-double": 4 + 8 / 64 + 32 / (64 * 256), "int8": 8.0}


def pack(model: nn.Module, kind: str) -> None:
    """Pack the weights of every adapted layer: as transformers does with `quantization_config`, of all but the head
    and of what the model keeps in float32."""
    if kind not in BITS:
        raise ValueError(f"quantization must be one of {', '.join(BITS)}, but is {kind!r}")
    whole = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, adapted in list(model.named_modules()):
        if not isinstance(adapted, _Adapted) or set(whole) & set(name.split(".")):
            continue
        inner, outer = _sizes(adapted.layer)
        weight = torch.empty(round(inner * outer * BITS[kind] / 8), dtype=torch.uint8, device="meta")
        adapted.layer = Unpacking(inner, outer, weight, adapted.layer.bias)


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze the model, and adapt every linear layer but the head, as `target_modules="all-linear"` does."""
    model.requires_grad_(False)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | Conv1D) and child is not head:
                setattr(parent, name, _Adapted(child, rank))


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
        return (output + self.up(self.down(input.float())) * 1.0).to(output.dtype)

"""Modules that belong to no unit and hold nothing: each call runs where its input is."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def floating_modules(model: nn.Module, units: Iterable[str]) -> dict[str, nn.Module]:
    """Dropout modules between units, by name. They hold nothing, so each call runs where its input is."""
    prefixes = tuple(f"{unit}." for unit in units)
    names = set(units)
    return {
        name: module
        for name, module in model.named_modules()
        if name not in names and not name.startswith(prefixes) and _is_dropout(module)
    }


def _is_dropout(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return True
    name = type(module).__name__
    return name.endswith(("Dropout", "DropPath")) and not any(True for _ in (*module.parameters(), *module.buffers()))

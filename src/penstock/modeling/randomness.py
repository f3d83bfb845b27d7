"""Dropout that does not depend on the layout.

Before each unit runs, the random generators are set from (seed, unit, call), and after it from (seed, unit, call,
"after") for the model's code between units. Whichever stage runs a unit, it draws the same mask as in one process.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from torch import nn

_MASK = (1 << 64) - 1

# Attributes and configuration entries that hold a probability or an amplitude of noise.
NOISE = re.compile(r"drop|jitter|noise|mask_(time|feature)_prob|apply_spec_augment")


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether the model may draw random numbers in training: a dropout probability, or the like, above zero, on its
    modules or in its configuration. Ghosts count, so every rank finds the same."""
    config = getattr(model, "config", None)
    if config is not None and _is_noisy(vars(config)):
        return True
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if _is_noisy(vars(module)):
            return True
    return False


def _is_noisy(attributes: dict[str, Any]) -> bool:
    return any(
        isinstance(value, (int, float)) and value > 0 and NOISE.search(name) for name, value in attributes.items()
    )


def key_of(*parts: Any) -> int:
    """A 64-bit number from `parts`, the same on every machine; computed once per unit call."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def mixed(seed: int, key: int) -> int:
    """A 64-bit seed from a forward's seed and a unit's key (the finaliser of splitmix64, Steele et al. 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + key) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)

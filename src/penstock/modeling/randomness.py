"""Random numbers that do not depend on the layout.

Before each unit runs, the random generators are set from (seed, unit, call), and after it from (seed, unit, call,
"after") for the model's code between units. Whichever stage runs a unit, it draws the same numbers as in one process.
"""

from __future__ import annotations

import hashlib
from typing import Any

_MASK = (1 << 64) - 1


def key_of(*parts: Any) -> int:
    """A 64-bit number from `parts`, the same on every machine; computed once per unit call."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def mixed(seed: int, key: int) -> int:
    """A 64-bit seed from a forward's seed and a unit's key (the finaliser of splitmix64, Steele et al. 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + key) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)

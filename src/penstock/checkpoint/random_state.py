"""The state of the random generators of a process, as data that can be saved and loaded without running code."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture_random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators (of the CPU, and of the current GPU once it is in use)."""
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Continue the generators where `capture_random_state` saw them."""
    random.setstate(state["python"])
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

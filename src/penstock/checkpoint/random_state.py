"""The state of the random generators of a process, as data that can be saved and loaded without running code."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from .fields import Field


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


def check_random_state(state: Field) -> None:
    """Raise CheckpointError for what `capture_random_state` cannot have returned."""
    trial = random.Random()
    try:
        trial.setstate(state["python"].value)
    except (TypeError, ValueError, OverflowError):
        state["python"].refuse("the state of Python's random generator")
    try:
        np.random.RandomState().set_state(_numpy_state(state["numpy"].value))
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError):
        state["numpy"].refuse("the state of numpy's random generator")
    names = ["torch", "cuda"] if state.get("cuda") else ["torch"]
    for name in names:
        value = state[name].value
        if not (isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1):
            state[name].refuse("the state of torch's random generator")
    try:
        torch.Generator().set_state(state["torch"].value)
    except (TypeError, RuntimeError):
        state["torch"].refuse("the state of torch's random generator")


def _numpy_state(saved: Any) -> tuple[str, np.ndarray, int, int, float]:
    keys, position, has_gauss, cached = saved
    return "MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached


def restore_random_state(state: dict[str, Any]) -> None:
    """Continue the generators where `capture_random_state` saw them."""
    random.setstate(state["python"])
    np.random.set_state(_numpy_state(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

"""The states of a process's random generators as a checkpoint has them: Python's, numpy's, torch's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_BIT_GENERATOR = "MT19937"  # numpy's global one, always


def capture_random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators (of the CPU, and of the current GPU once it is in use).
    Returns plain data and tensors, which can be loaded from a file without running code."""
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
    """Restore what `capture_random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(_numpy_state(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def check_random_state(name: str, state: Any) -> None:
    """Raise ValueError if `state` cannot be the entry `name` of what `capture_random_state` returned."""
    try:
        if name == "python":
            random.Random().setstate(state)
        elif name == "numpy":
            np.random.RandomState().set_state(_numpy_state(state))
        else:
            if not (isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.dim() == 1):
                raise TypeError("no bytes")
            if name == "torch":
                torch.Generator().set_state(state)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise ValueError(f"this is no state of {name}'s random generator") from error


def _numpy_state(saved: Any) -> tuple[str, np.ndarray, int, int, float]:
    keys, position, has_gauss, cached = saved
    return _BIT_GENERATOR, keys.numpy().astype(np.uint32), position, has_gauss, cached

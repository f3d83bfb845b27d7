"""Saving and restoring the state of random generators: Python's, numpy's, torch's. The only place that does it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_BIT_GENERATOR = "MT19937"  # numpy's global one, always


def accelerator_generator(device: torch.device) -> list[torch.Generator]:
    """An accelerator's default generator; none for the CPU."""
    if device.type in ("cpu", "meta"):
        return []
    module = torch.get_device_module(device)
    module.init()
    return [module.default_generators[device.index if device.index is not None else module.current_device()]]


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The default generators of torch that a model on `device` draws from: the CPU's, and the accelerator's."""
    return [torch.default_generator, *accelerator_generator(device)]


def generators_in_use() -> list[torch.Generator]:
    """The default generators of torch's CPU, and of the current GPU once it is in use."""
    gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return generators_of(torch.device("cuda" if gpu else "cpu"))


def seed_all(generators: Sequence[torch.Generator], seed: int) -> None:
    """Seed these alone; `torch.manual_seed` would reseed every accelerator as well."""
    for generator in generators:
        generator.manual_seed(seed)


def states_of(generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Their states, as bytes on the CPU."""
    return torch.cat([generator.get_state() for generator in generators])


def set_states(generators: Sequence[torch.Generator], states: torch.Tensor) -> None:
    """Restore what `states_of` returned for the same kinds of generators."""
    lengths = [generator.get_state().numel() for generator in generators]
    for generator, state in zip(generators, states.split(lengths), strict=True):
        generator.set_state(state.clone())


@contextmanager
def restored(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Restore these generators at the end."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def all_restored(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Restore Python's and numpy's generators, and these of torch, at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    with restored(generators):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def seeded(*entropy: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's CPU generators inside the block; restore them after it."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    with all_restored([torch.default_generator]):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        yield


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

"""Random generators of Python, numpy and torch: found, seeded, and set back to a state of before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


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

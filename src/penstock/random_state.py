"""Random generators of Python, numpy and torch: found, seeded, and set back to a state of before.

What a forward draws does not depend on the layout: before each unit runs, the generators are set from (seed, unit,
call), and after it from (seed, unit, call, "after") for the model's code between units (`key_of`, `mixed`). Whichever
stage runs a unit, it draws the same numbers as in one process.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


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


def seed_as_new(replica: int) -> None:
    """Seed Python's, numpy's and torch's generators for a new replica, by its number and by torch's present numbers."""
    seed = mixed(int(torch.randint(1 << 62, ())), key_of("a new pipeline", replica))
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # which is all that it takes
    torch.manual_seed(seed)


# -- what a model's code draws from --------------------------------------------------------------------------------

TORCH, PYTHON, NUMPY = "torch's random numbers", "Python's random numbers", "NumPy's random numbers"


class RandomSource(NamedTuple):
    """Something that random numbers are drawn from. `fingerprint()` changes when numbers are drawn."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]
    fingerprint: Callable[[], Any]


def _of_torch(generator: torch.Generator) -> RandomSource:
    """Of this generator alone; `torch.manual_seed` would seed every accelerator's as well."""
    state = generator.get_state
    return RandomSource(generator.manual_seed, state, generator.set_state, lambda: state().numpy().tobytes())


# Where in memory a `random.Random` has the words of its state, and the place among them: all that its C class adds.
_PYTHONS_STATE, _PYTHONS_BYTES = object.__basicsize__, random.Random.__mro__[1].__basicsize__ - object.__basicsize__


def _of_python(generator: Any) -> RandomSource:
    """Of a `random.Random`, or of Python's global one, which the module has the methods of. Python makes an int of each
    word of a state, in 20 us, so they are compared in memory; beside them it keeps a normal number."""
    itself = generator.getstate.__self__

    def fingerprint() -> Any:
        return ctypes.string_at(id(itself) + _PYTHONS_STATE, _PYTHONS_BYTES), itself.gauss_next

    return RandomSource(generator.seed, generator.getstate, generator.setstate, fingerprint)


def _of_numpy(generator: Any) -> RandomSource:
    """Of a `RandomState`, or of NumPy's global one, which the module has the methods of."""

    def fingerprint() -> Any:
        _, numbers, *rest = generator.get_state()
        return numbers.tobytes(), *rest

    seed = lambda seed: generator.seed(seed & 0xFFFFFFFF)  # noqa: E731  # which is all that it takes
    return RandomSource(seed, generator.get_state, generator.set_state, fingerprint)


def _of_numpy_generator(generator: np.random.Generator) -> RandomSource:
    bits = generator.bit_generator

    def restore(state: Any) -> None:
        bits.state = state

    seed = lambda seed: restore(type(bits)(seed).state)  # noqa: E731
    return RandomSource(seed, lambda: bits.state, restore, lambda: repr(bits.state))


# The state of NumPy's MT19937: 624 words, and the place among them.
_MT19937_BYTES = 4 * (624 + 1)


def _of_numpys_global() -> RandomSource:
    """NumPy copies the words of a state one by one, in 0.1 ms, so they are compared in memory. Beside them it keeps a
    normal number, as it draws two at once. To keep one, new words are drawn: while none is kept and the words are the
    same, there is nothing more to read (but for a `set_state` that sets this number alone, which draws nothing)."""
    source = _of_numpy(np.random)
    words, kept = b"", (True, 0.0)

    def fingerprint() -> Any:
        nonlocal words, kept
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # the stubs lack it
        if type(bits) is not np.random.MT19937:
            return repr(np.random.get_state(legacy=False))
        before, words = words, ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
        if words != before or kept[0]:
            *_, has_one, number = source.state()
            kept = bool(has_one), number
        return words, kept

    return source._replace(fingerprint=fingerprint)


_GLOBAL = {PYTHON: _of_python(random), NUMPY: _of_numpys_global()}
# The names of the global generators that are not torch's.
OUTSIDE_TORCH = tuple(_GLOBAL)
# By their very classes: `isinstance` asks Python code of torch's.
_KINDS: dict[type, Callable[[Any], RandomSource]] = {
    type(torch.default_generator): _of_torch,
    random.Random: _of_python,
    np.random.RandomState: _of_numpy,
    np.random.Generator: _of_numpy_generator,
}


def sources_of(names: Iterable[str], device: torch.device) -> list[RandomSource]:
    """What stands for these names (`TORCH`, ...), for a model on `device`."""
    sources = [_of_torch(generator) for generator in generators_of(device)] if TORCH in names else []
    return [*sources, *(source for name, source in _GLOBAL.items() if name in names)]


def draws_from_now(names: Iterable[str], device: torch.device) -> Callable[[], set[str]]:
    """Gives what tells, of these names, those that numbers were drawn from since now."""
    sources = {name: sources_of([name], device) for name in names}

    def fingerprints() -> dict[str, list[Any]]:
        return {name: [source.fingerprint() for source in each] for name, each in sources.items()}

    before = fingerprints()
    return lambda: {name for name, now in fingerprints().items() if now != before[name]}


def held_sources(model: nn.Module) -> list[RandomSource]:
    """The generators that a model's modules hold as attributes, each once."""
    held = {id(each): each for module in model.modules() for each in vars(module).values() if type(each) in _KINDS}
    return [_KINDS[type(each)](each) for each in held.values()]


@contextmanager
def seedable(sources: Sequence[RandomSource]) -> Iterator[Callable[[int], None]]:
    """Gives what seeds `sources`, which are as before at the end."""
    states = [source.state() for source in sources]

    def seed(number: int) -> None:
        for source in sources:
            source.seed(number)

    try:
        yield seed
    finally:
        for source, state in zip(sources, states, strict=True):
            source.restore(state)


_MASK = (1 << 64) - 1


def key_of(*parts: Any) -> int:
    """A 64-bit number from `parts`, the same on every machine; a plan computes those of its unit calls once."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def mixed(seed: int, key: int) -> int:
    """A 64-bit seed from a forward's seed and a unit's key (the finaliser of splitmix64, Steele et al. 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + key) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)

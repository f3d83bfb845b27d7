"""Checks of numbers that users give: what cannot be used is refused with its name."""

from __future__ import annotations

from numbers import Real


def check_count(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless an argument is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_number(name: str, value: object) -> None:
    """Raise TypeError unless an argument is a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")

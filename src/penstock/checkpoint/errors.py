"""The error of this package, and what is said of the errors of others."""

from __future__ import annotations

import pickle
import re

_SHOWN = 300


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names the file and the rank."""


def describe(error: BaseException) -> str:
    """The error in one line, with its type unless it is this package's own."""
    text = " ".join(str(error).split())
    if isinstance(error, CheckpointError):
        return text
    return f"{type(error).__name__}: {text[:_SHOWN]}" if text else type(error).__name__


def no_plain_data(error: Exception) -> str:
    """What could only be loaded by running code, in words, from the error of saving or loading it as plain data."""
    found = re.search(r"GLOBAL (\S+) (?:was not|whose module)", str(error))
    return f"something that is no plain data: {f'a {found[1]}' if found else describe(error)}"


def cannot_read(path: str, error: Exception) -> CheckpointError:
    """The error for a file that another library could not read. Chain it with `from None`.

    torch advises to load what its unpickler refuses with `weights_only=False`, which would run the code in it.
    """
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, pickle.UnpicklingError):
        text = str(error)
        found = re.search(r"GLOBAL (\S+) (?:was not|whose module)", text)
        if found:
            return CheckpointError(
                f"{path} asks to run code when it is loaded ({found[1][:80]}), and was refused: files are read as data "
                "only. Save what you need of it as plain tensors and numbers; do not trust it if it is not yours"
            )
        return CheckpointError(f"{path} is damaged, or holds more than tensors and plain data: nothing in it was run")
    return CheckpointError(f"cannot read {path}: {describe(error)}")

"""Tables and sentences as plain text that fits a terminal."""

from __future__ import annotations

import io
import textwrap

from rich.console import Console
from rich.table import Table

WIDTH = 80


def as_text(*parts: Table | str) -> str:
    """Tables, and lines of text wrapped between words, one below the other."""
    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, legacy_windows=False)
    for part in parts:
        if isinstance(part, str):
            console.out("\n".join(textwrap.wrap(part, WIDTH, break_on_hyphens=False)), highlight=False)
        else:
            console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def wrapped(line: str) -> str:
    """A line of text in lines that fit, the later ones indented further. Words stay whole, as they may be paths."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

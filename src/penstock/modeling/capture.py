"""Side outputs: router logits, hidden states and attentions that transformers collects while the model runs.

transformers appends them to lists of an active collector from hooks on modules inside the units. A ghost's hooks do
not run, so its entries are appended for it: the values received from the owner, or placeholders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import output_capturing

# Lists by key ("hidden_states", "router_logits", ...). Names with an underscore hold the collector's own settings.
Collected = dict[str, list[Any]]


def collected() -> Collected:
    """The lists that are being filled now; empty when nothing is collected."""
    active = output_capturing._active_collector.get()
    if not active:
        return {}
    return {key: value for key, value in active.items() if isinstance(value, list) and not key.startswith("_")}


@contextmanager
def collected_aside() -> Iterator[Collected]:
    """Collect into a copy of the active lists, so that what is appended meanwhile does not reach the model's output."""
    active = output_capturing._active_collector.get() or {}
    aside = {key: list(value) if isinstance(value, list) else value for key, value in active.items()}
    token = output_capturing._active_collector.set(aside)
    try:
        yield {key: value for key, value in aside.items() if isinstance(value, list) and not key.startswith("_")}
    finally:
        output_capturing._active_collector.reset(token)


def lengths(lists: Collected) -> dict[str, int]:
    """How much each list holds."""
    return {key: len(values) for key, values in lists.items()}

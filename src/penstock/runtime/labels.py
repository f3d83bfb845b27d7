"""Names in torch's profiler for what a rank does: actions, messages, sums of gradients.

They are made only while a profiler is on, which is asked once a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.profiler import record_function

from penstock.schedule.actions import Action

PREFIX = "penstock: "


def profiling() -> bool:
    """Whether a profiler of torch is on in this process."""
    return bool(torch.autograd._profiler_enabled())


def label(*words: object) -> contextlib.AbstractContextManager[object]:
    """Around what `words` name in the profile, if there is one."""
    return record_function(PREFIX + " ".join(map(str, words))) if profiling() else contextlib.nullcontext()


def numbered(actions: Sequence[Action]) -> Iterator[tuple[int, Action]]:
    """`actions` with their positions, each labelled until the next one is asked for."""
    if not profiling():
        yield from enumerate(actions)
        return
    for position, action in enumerate(actions):
        with record_function(f"{PREFIX}{action.kind.value} stage {action.stage} microbatch {action.microbatch}"):
            yield position, action

"""Whether all ranks' optimizers have taken the last step, which an interrupt may have cut short on some of them.

A signal between two steps is the user's program's to handle, so it may end `optimizer.step()` half-way, or come after
it on one rank and before it on another. Nothing can undo an update; but whoever saves weights of two steps should know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from operator import attrgetter

import torch

from penstock.runtime.failures.board import ranks_in_words

_version = attrgetter("_version")


class Update(IntEnum):
    """What happened to a rank's weights since its last training step."""

    UNKNOWN = 0
    NONE = 1
    PART = 2
    WHOLE = 3


class UpdateWatch:
    """Notes updates between training steps: steps of optimizers, of which torch tells the beginning and the end, and
    weights that are changed by hand: those that changed together once are taken for what an update changes."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._ids = frozenset(map(id, parameters))
        self._versions: list[int] = []
        self._patterns: set[tuple[int, ...]] = set()
        self._begun = self._ended = 0
        # Whether this rank took an update after each step so far that was meant for one.
        self._always = True
        self._due = False

    def begin_step(self) -> None:
        """A training step begins: whatever changed until now was one update, or none."""
        changed = tuple(self.changed())
        if changed:
            self._patterns.add(changed)
        elif not self._ended:
            self._always &= not self._due

    def end_step(self, due: bool = True) -> None:
        """A step has ended. `due`: whether an update is expected of whoever has a gradient."""
        self._versions = list(map(_version, self._parameters))
        self._begun = self._ended = 0
        self._due = due and any(parameter.grad is not None for parameter in self._parameters)

    def has_any_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        return any(id(parameter) in self._ids for parameter in parameters)

    def begin_update(self) -> None:
        """An optimizer begins a step on some of these weights."""
        self._begun += 1

    def end_update(self) -> None:
        self._ended += 1

    @property
    def none(self) -> bool:
        """Whether no weight has changed since the last step's end, so that its gradients were not used yet."""
        return not self.changed()

    def state(self) -> Update:
        if self._begun or self._ended:
            return Update.WHOLE if self._begun <= self._ended else Update.PART
        if not self._patterns:
            return Update.UNKNOWN
        if changed := tuple(self.changed()):
            return Update.WHOLE if changed in self._patterns else Update.PART
        # Where optimizers or parts of the model take turns, some updates pass this rank by: no change says nothing.
        return Update.NONE if self._due and self._always else Update.UNKNOWN

    def changed(self) -> list[int]:
        """The places of the weights that have changed since the last step's end."""
        now = map(_version, self._parameters)
        return [index for index, (then, this) in enumerate(zip(self._versions, now, strict=False)) if then != this]


def mixed_update(states: Mapping[int, int]) -> str | None:
    """What to say of a checkpoint if some ranks took the last step's update and others did not, or not all of it."""
    ranks = {state: [rank for rank, other in states.items() if other == state] for state in Update}
    if not ranks[Update.PART] and not (ranks[Update.NONE] and ranks[Update.WHOLE]):
        return None
    words = {Update.WHOLE: "took it", Update.PART: "took a part of it", Update.NONE: "did not take it"}
    messages = [f"{ranks_in_words(ranks[state])} {what}" for state, what in words.items() if ranks[state]]
    return (
        f"the optimizer's last step was interrupted: {', '.join(messages)}. The checkpoint holds weights of two "
        "neighbouring steps. To go on, load it (or an earlier one) on all ranks rather than train on in this process, "
        "as copies of one weight may differ between pipelines"
    )

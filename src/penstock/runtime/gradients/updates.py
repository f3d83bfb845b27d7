"""Whether all ranks' optimizers have taken the last step, which an interrupt may have cut short on some of them.

A signal between two steps is the user's program's to handle, so it may end `optimizer.step()` half-way, or after it on
one rank and before it on another. Nothing can undo an update; but whoever saves weights of two steps should know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Notes which weights change between training steps: those that did once are what an optimizer updates."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._versions: list[int] = []
        self._usual: list[int] = []

    def begin_step(self) -> None:
        """A training step begins: whatever changed until now was one update, or none."""
        changed = self.changed()
        if changed:
            self._usual = changed

    def end_step(self) -> None:
        self._versions = list(map(_version, self._parameters))

    @property
    def none(self) -> bool:
        """Whether no weight has changed since the last step's end, so that its gradients were not used yet."""
        return not self.changed()

    def state(self) -> Update:
        if not self._usual:
            return Update.UNKNOWN
        changed = self.changed()
        return Update.NONE if not changed else Update.WHOLE if changed == self._usual else Update.PART

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
    said = [f"{ranks_in_words(ranks[state])} {what}" for state, what in words.items() if ranks[state]]
    return (
        f"the optimizer's last step was interrupted: {', '.join(said)}. The checkpoint holds weights of two "
        "neighbouring steps. To go on, load it (or an earlier one) on all ranks rather than train on in this process, "
        "as copies of one weight may differ between pipelines"
    )

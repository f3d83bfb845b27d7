"""What becomes of a call of all ranks when one of them is lost meanwhile.

An engine has a `Recovery`. Mostly it is `NoRecovery`: the call is made once, and an error on every rank that is left.
An elastic run is one that goes on among those ranks, and makes the call again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
# Gives a context.
Pause = Callable[[], AbstractContextManager[object]]


class LastResort(Protocol):
    """Has values that no rank has any more, such as a `CheckpointManager`."""

    def newest(self, objects: Mapping[str, Any]) -> tuple[int, str] | None:
        """Step and path of the newest checkpoint that has the states of `objects`; None if there is none."""

    def go_back(self, step: int) -> None:
        """Load the checkpoint of a step. Raises ValueError if it cannot be loaded."""


class Recovery(Protocol):
    """Makes the calls in which all ranks take part.

    Attributes:
        repeats: whether a call may be made again, with other ranks.
        in_call: whether one is being made, or made again.
        joined: whether this process came to a run under way.
        step: updates made in the run; 0 where nobody counts them.
        accumulating: whether there are gradients that no update has used, which a repetition would need.
        last_resort: where to find values that were lost with every rank that had them.
        save_unfinished: saves the run, on all ranks, when all of them leave it; None if nothing here can.
    """

    repeats: bool
    in_call: bool
    joined: bool
    step: int
    last_resort: LastResort | None
    save_unfinished: Callable[[], None] | None

    @property
    def accumulating(self) -> bool: ...

    def run_call(self, work: Callable[[], T], trains: bool, local: bool = False) -> T:
        """Make a call. `trains`: it makes or changes gradients, so it is made again with the step that they belong to.
        `local`: it needs no other rank."""

    def run_without_gradients(self, work: Callable[[], T], stale: Callable[[], T] | None = None) -> T:
        """Make a call that makes no gradients. `stale`: is made in its place if the values that it is about were lost
        meanwhile; by default that is an error."""

    def run_step(self, batches: Iterator[Any], step: Callable[[Any], T], pause: Pause | None) -> T:
        """Make a step, or an evaluation without gradients, on the next of `batches`. `pause`: gives the context in
        which gradients only accumulate, if they do."""

    def load(self, load: Callable[[], int | None]) -> None:
        """Load all values. `load`: returns the step of what it has loaded; None if nothing has changed."""

    def commit_update(self, prepare: Callable[[], Callable[[], T]]) -> T:
        """Make an update. `prepare`: does what needs other ranks, and returns the update, which needs none but for what
        `complete_update` is given."""

    def complete_update(self, work: Callable[[], object]) -> None:
        """From within an update: do what needs other ranks, once it is made."""

    def note_saved(self, path: str) -> None:
        """A checkpoint of the present step is whole."""

    def drop(self) -> None:
        """Gradients were dropped."""

    def refuse(self, what: str, instead: str) -> None:
        """Raise NotImplementedError for `what`, which could not be made again, if calls may have to be."""

    def close(self) -> None:
        """No call follows."""


class NoRecovery:
    """Every call is made once."""

    repeats = in_call = joined = accumulating = False
    step = 0
    last_resort: LastResort | None = None
    save_unfinished: Callable[[], None] | None = None

    def run_call(self, work: Callable[[], T], trains: bool, local: bool = False) -> T:
        return work()

    def run_without_gradients(self, work: Callable[[], T], stale: Callable[[], T] | None = None) -> T:
        return work()

    def run_step(self, batches: Iterator[Any], step: Callable[[Any], T], pause: Pause | None) -> T:
        return step(next(batches))

    def load(self, load: Callable[[], int | None]) -> None:
        load()

    def commit_update(self, prepare: Callable[[], Callable[[], T]]) -> T:
        return prepare()()

    def complete_update(self, work: Callable[[], object]) -> None:
        work()

    def note_saved(self, path: str) -> None:
        pass

    def drop(self) -> None:
        pass

    def refuse(self, what: str, instead: str) -> None:
        pass

    def close(self) -> None:
        pass

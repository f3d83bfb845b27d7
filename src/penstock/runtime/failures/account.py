"""What is known about a failure: the account of the rank that saw it, how ranks ended, and both in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

KILLED = "its process ended without a word, as one that is killed does (by hand, by the system for want of memory)"
LEFT = "its program had ended"


class Account(NamedTuple):
    """What a rank tells of a failure. It goes to other ranks as JSON.

    Attributes:
        suspects: the ranks to blame: the one that tells it, or those of which one closed a connection; none if no
            single rank is to blame.
        at: seconds since the epoch.
    """

    suspects: list[int]
    cause: str
    seen_by: int
    at: float

    @property
    def is_own(self) -> bool:
        """Whether the rank that tells it has failed itself."""
        return self.suspects == [self.seen_by]


@dataclass
class Endings:
    """How ranks ended, as far as this process knows.

    Attributes:
        lost: the ranks whose processes ended without taking leave.
        words: what ranks said of the exception that ended them.
    """

    lost: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    words: dict[int, str] = field(default_factory=dict)

    def confirm(self, account: Account) -> bool:
        """Whether an account is of an exception of the rank that tells it, or of the end of a process."""
        return not account.suspects or account.is_own or any(rank in self.lost for rank in account.suspects)

    def explain(self, account: Account, rank: int) -> bool:
        """Whether `rank` can learn nothing more about a failure."""
        seen_by = account.seen_by
        if not account.suspects or account.suspects == [rank]:
            return True
        if account.is_own:
            # Its interpreter shows the exception before it says so.
            return seen_by in self.words or seen_by in self.lost or seen_by in self.left
        return bool(self.lost)

    def tell(self, account: Account) -> tuple[str, int | None]:
        """A failure in words, and the rank to blame, as far as known."""
        suspects, cause, seen_by, _ = account
        if not suspects:
            return cause, None
        if account.is_own:
            said = self.words.get(seen_by, "")
            # Its exception may have come up through the loop's body, which this library does not see.
            said = f"{said}; " if said and said not in cause else ""
            return f"rank {seen_by} failed: {said}{cause}", seen_by
        # A connection may also have been closed by one that lost another rank itself.
        certain = [rank for rank in suspects if rank in self.lost] or sorted(self.lost) or suspects
        if len(certain) > 1:
            return f"one of ranks {certain} was lost: rank {seen_by} {cause}", None
        return f"rank {certain[0]} was lost: {self._end_of(certain[0])}rank {seen_by} {cause}", certain[0]

    def _end_of(self, rank: int) -> str:
        if rank in self.words:
            return f"it ended with {self.words[rank]}; "
        if rank in self.lost:
            return f"{KILLED}; "
        return f"{LEFT}; " if rank in self.left else ""


class Watching(Protocol):
    """This process's `watcher.Watch`, as failure boards and their inquiries use it."""

    rank: int
    world_size: int
    endings: Endings
    keys: Any
    ring: Any

    def wait(self, known: Callable[[], bool], seconds: float) -> bool: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...
    def add(self, board: Any) -> None: ...
    def remove(self, board: Any) -> None: ...

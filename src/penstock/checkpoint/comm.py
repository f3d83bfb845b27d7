"""What saving and loading need from the ranks around them, and how ranks fail together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from penstock.runtime.comm.exchange import Guard, OnceLost

from .untrusted import CheckpointError, describe

Result = TypeVar("Result")


class Comm(Protocol):
    """A few ranks that can talk. Every call is collective, except send and receive.

    `doing` says what for, in the error of a rank that has lost another.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather_object(self, obj: Any, doing: str) -> list[Any]:
        """Every rank's object, in order of rank."""

    def send(self, tensor: torch.Tensor, destination: int, doing: str) -> None:
        """Send a contiguous CPU tensor. May block until the other side receives."""

    def receive(self, tensor: torch.Tensor, source: int, doing: str) -> None:
        """Fill a contiguous CPU tensor."""


class SoloComm:
    """One rank on its own."""

    rank = 0
    size = 1

    def all_gather_object(self, obj: Any, doing: str) -> list[Any]:
        return [obj]

    def send(self, tensor: torch.Tensor, destination: int, doing: str) -> None:
        raise ValueError(f"there is no rank {destination} to send to")

    def receive(self, tensor: torch.Tensor, source: int, doing: str) -> None:
        raise ValueError(f"there is no rank {source} to receive from")


class GroupComm:
    """The ranks of a process group whose backend carries CPU tensors (gloo).

    Args:
        guard: how a lost rank is told and named. Without it a CheckpointError says which ranks it can have been.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, guard: Guard | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._guard = OnceLost(guard or _name_the_others)

    def all_gather_object(self, obj: Any, doing: str) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        others = [rank for place, rank in enumerate(self._ranks) if place != self.rank]
        with self._guard(doing, others):
            dist.all_gather_object(gathered, obj, group=self._group)
        return gathered

    def send(self, tensor: torch.Tensor, destination: int, doing: str) -> None:
        if tensor.numel():
            with self._guard(doing, [self._ranks[destination]]):
                dist.send(_bytes(tensor), group=self._group, group_dst=destination)

    def receive(self, tensor: torch.Tensor, source: int, doing: str) -> None:
        if tensor.numel():
            with self._guard(doing, [self._ranks[source]]):
                dist.recv(_bytes(tensor), group=self._group, group_src=source)


@contextlib.contextmanager
def _name_the_others(doing: str, peers: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        lost = f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {list(peers)}"
        cause = describe(error).split(". This is typically")[0]
        raise CheckpointError(f"lost the connection to {lost} while {doing} ({cause})") from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as bytes: gloo does not carry every dtype."""
    return tensor.view(-1).view(torch.uint8)


def together(
    comm: Comm, doing: str, phase: str, work: Callable[[], Result], *, unchanged: str | None = None
) -> list[Result]:
    """Do `work` on every rank and return every rank's result; if it fails anywhere, every rank raises.

    Results are exchanged as pickled objects, so they should be small.

    Args:
        doing: what this is, for the message ("cannot write ...").
        phase: what `work` does, for a rank that loses another ("writing the files").
        unchanged: what is as it was if `work` failed, for the message.

    Raises:
        CheckpointError: `work` failed on some rank. The message names that rank and the cause.
        KeyboardInterrupt, SystemExit: if this ended `work` here; the other ranks raise CheckpointError.
    """
    result: Result | None = None
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    outcomes = comm.all_gather_object((result, None if error is None else describe(error)), f"{phase} to {doing}")
    failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text is not None]
    if error is not None and not isinstance(error, Exception):
        raise error
    if failures:
        ending = "" if unchanged is None else f"; {unchanged}"
        raise CheckpointError(f"cannot {doing}: " + "; ".join(failures) + ending) from error
    return [cast(Result, value) for value, _ in outcomes]

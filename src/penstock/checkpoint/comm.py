"""What saving and loading need from the ranks around them, and how ranks fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from .errors import CheckpointError

Result = TypeVar("Result")


class Comm(Protocol):
    """A few ranks that can talk. Every call is collective, except send and receive."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, in order of rank."""

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Send a contiguous CPU tensor. May block until the other side receives."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a contiguous CPU tensor."""


class SoloComm:
    """One rank on its own."""

    rank = 0
    size = 1

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj]

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        raise ValueError(f"there is no rank {destination} to send to")

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        raise ValueError(f"there is no rank {source} to receive from")


class GroupComm:
    """The ranks of a process group whose backend carries CPU tensors (gloo)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self._group)
        return gathered

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        if tensor.numel():
            dist.send(_bytes(tensor), group=self._group, group_dst=destination)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.numel():
            dist.recv(_bytes(tensor), group=self._group, group_src=source)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as bytes: gloo does not carry every dtype."""
    return tensor.view(-1).view(torch.uint8)


def together(comm: Comm, doing: str, work: Callable[[], Result]) -> list[Result]:
    """Do `work` on every rank and return every rank's result; if it fails anywhere, every rank raises.

    Results are exchanged as pickled objects, so they should be small.

    Args:
        doing: what this is, for the message ("cannot write ...").

    Raises:
        CheckpointError: `work` failed on some rank. The message names that rank and the cause.
    """
    result: Result | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    outcomes = comm.all_gather_object((result, None if error is None else describe(error)))
    failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text is not None]
    if failures:
        raise CheckpointError(f"cannot {doing}: " + "; ".join(failures)) from error
    return [cast(Result, value) for value, _ in outcomes]


def describe(error: Exception) -> str:
    """The error in one line, with its type unless it is this package's own."""
    text = " ".join(str(error).split())
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"

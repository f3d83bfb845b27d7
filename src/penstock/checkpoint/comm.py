"""The ranks that save and load, and how they fail together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import torch.distributed as dist

from penstock.runtime.comm.exchange import Guard, Ranks

from .untrusted import CheckpointError, describe


@contextlib.contextmanager
def _name_the_others(doing: str, peers: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        lost = f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {list(peers)}"
        cause = describe(error).split(". This is typically")[0]
        raise CheckpointError(f"lost the connection to {lost} while {doing} ({cause})") from error


class CheckpointRanks(Ranks):
    """Ranks of which all raise CheckpointError if one fails: it names that rank and the cause.

    Args:
        group: whose backend carries CPU tensors (gloo); None for a rank on its own.
        guard: how a lost rank is told and named. Without it a CheckpointError says which ranks it can have been.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, guard: Guard = _name_the_others) -> None:
        super().__init__(group, guard)

    def _words(self, error: BaseException) -> str:
        return describe(error)

    def _fail(self, doing: str, failed: Mapping[int, str], unchanged: str, own: Exception | None) -> NoReturn:
        said = "; ".join(f"rank {rank}: {words}" for rank, words in failed.items())
        raise CheckpointError(f"{doing} failed: {said}" + (f"; {unchanged}" if unchanged else "")) from own

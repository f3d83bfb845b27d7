"""The ranks that save or load together: where each stands, and what they raise if one fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from penstock.checkpoint.untrusted import CheckpointError, CheckpointMismatch, describe
from penstock.runtime.comm.exchange import Guard, Ranks
from penstock.runtime.failures.board import ranks_in_words


@dataclass(frozen=True)
class SavingRank:
    """Where a rank that saves or loads stands. `number`, in its files' names: its index among the ranks of all
    pipelines that have its tensor-parallel rank. The first pipeline writes the weights; the others hold the same."""

    number: int = 0
    num_pipeline_ranks: int = 1
    pipeline: int = 0
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    @property
    def replica(self) -> int:
        """The replica that it is in; see `Layout.num_replicas`."""
        return self.pipeline // self.context_parallel_size

    @property
    def in_first_pipeline(self) -> bool:
        return self.pipeline == 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.number == 0 and self.tensor_parallel_rank == 0


@contextlib.contextmanager
def _name_the_others(doing: str, peers: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        lost = f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {list(peers)}"
        cause = describe(error).split(". This is typically")[0]
        raise CheckpointError(f"lost the connection to {lost} while {doing} ({cause})") from error


class CheckpointRanks(Ranks):
    """Ranks of which all raise CheckpointError if one fails: it names that rank and the cause. It is a
    CheckpointMismatch if each rank that failed raised one. `group`: whose backend carries CPU tensors (gloo); None for
    a rank on its own. `guard`: how a lost rank is reported and named. Without it a CheckpointError says which ranks it
    can have been. `place`: where this one stands."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        guard: Guard = _name_the_others,
        place: SavingRank | None = None,
    ) -> None:
        super().__init__(group, guard)
        self.place = place or SavingRank()

    def _words(self, error: BaseException) -> tuple[str, bool]:
        return describe(error), isinstance(error, CheckpointMismatch)

    def _fail(
        self, doing: str, failed: Mapping[int, tuple[str, bool]], unchanged: str, own: Exception | None
    ) -> NoReturn:
        alike: dict[str, list[int]] = {}
        for rank, (words, _) in failed.items():
            alike.setdefault(words, []).append(rank)
        failures = "; ".join(f"{ranks_in_words(ranks)}: {words}" for words, ranks in alike.items())
        kind = CheckpointMismatch if all(is_mismatch for _, is_mismatch in failed.values()) else CheckpointError
        raise kind(f"{doing} failed: {failures}" + (f"; {unchanged}" if unchanged else "")) from own

"""Which of the ranks that save writes what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from torch import nn

from .comm import CheckpointRanks
from .merge import Holding
from .optimizer_state import SEPARATOR
from .tensors import first_of_tied, shards_of, tied_groups
from .training_state import TrainingReport
from .untrusted import Field


@dataclass(frozen=True)
class SavingRank:
    """Where a rank that saves stands.

    Attributes:
        pipeline_rank: its index in its pipeline, which has `num_pipeline_ranks`; it may hold several stages.
        is_writer: whether this pipeline is the one that writes; replicas hold the same weights and only wait.
        tensor_parallel_rank: its index among the `tensor_parallel_size` ranks that hold shards of the same stages.
        pipeline: the index of its pipeline.
    """

    pipeline_rank: int
    num_pipeline_ranks: int
    is_writer: bool = True
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline: int = 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.is_writer and self.pipeline_rank == 0 and self.tensor_parallel_rank == 0


@dataclass(frozen=True)
class SavingReport:
    """What a rank tells the others before the writing starts."""

    place: SavingRank
    needed: list[str]
    holdings: dict[str, Holding]
    training: TrainingReport | None
    names: list[str]


def tell_reports(
    ranks: CheckpointRanks, doing: str, describe: Callable[[], SavingReport], unchanged: str = ""
) -> list[SavingReport]:
    """Make a report on every rank; returns every rank's. See `CheckpointRanks.together`."""
    said = ranks.together(doing, lambda: asdict(describe()), unchanged)
    return [Field(one, f"what rank {rank} says").read(SavingReport) for rank, one in enumerate(said)]


def writers_of(reports: Sequence[SavingReport]) -> list[SavingReport]:
    """The reports of the ranks that write, in order of pipeline rank, then of tensor-parallel rank."""
    writers = [report for report in reports if report.place.is_writer]
    return sorted(writers, key=lambda report: (report.place.pipeline_rank, report.place.tensor_parallel_rank))


def names_to_write(model: nn.Module, reports: Sequence[SavingReport], place: SavingRank) -> set[str]:
    """Of the tensors and states that a rank has to write, those that no rank before it writes.

    Of what is sharded, each tensor-parallel rank holds another part.
    """
    first = first_of_tied(tied_groups(model))
    shards = {first.get(name, name) for name in shards_of(model)}

    def key(name: str) -> tuple[str, str]:
        parameter, _, state = name.partition(SEPARATOR)
        return first.get(parameter, parameter), state

    whole, sharded = set[tuple[str, str]](), set[tuple[str, str]]()
    for report in writers_of(reports):
        if report.place == place:
            return {name for name in report.names if key(name) not in (sharded if key(name)[0] in shards else whole)}
        keys = {key(name) for name in report.names}
        whole |= keys
        sharded |= keys if report.place.tensor_parallel_rank == place.tensor_parallel_rank else set()
    return set()

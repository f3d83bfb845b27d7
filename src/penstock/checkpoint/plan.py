"""What a save consists of: files, each of tensors from the ranks that hold them, written by one rank.

A kind of save is a `Folder`: it says what this rank holds, which files there will be, and how one of them is written.
`save.Save` does the rest, alike for all kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from torch import nn

from penstock.modeling.weights.names import of_diffusers
from penstock.modeling.weights.whole import whole_shape
from penstock.tensor_parallel import Sharding

from .comm import CheckpointRanks
from .manifest import MODEL, FileEntry
from .safetensors_file import Behind
from .save_pretrained import SaveOptions
from .staging import Replacement
from .tensors import DTYPES, dtype_name, held_state
from .training_state import TrainingReport
from .untrusted import Count, typed


@dataclass(frozen=True)
class SavingRank:
    """Where a rank that saves stands.

    Attributes:
        pipeline_rank: its index in its pipeline, which has `num_pipeline_ranks`; it may hold several stages.
        is_writer: whether this pipeline is the one that writes; replicas hold the same weights and only wait.
        tensor_parallel_rank: its index among the `tensor_parallel_size` ranks that hold shards of the same stages.
        pipeline: the index of its pipeline.
        before: how many ranks of its tensor-parallel rank the pipelines before its own have.
    """

    pipeline_rank: int
    num_pipeline_ranks: int
    is_writer: bool = True
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline: int = 0
    before: int = 0

    @property
    def number(self) -> int:
        """In its files' names: its index among the ranks of all pipelines that have its tensor-parallel rank."""
        return self.before + self.pipeline_rank

    @property
    def is_leader(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.is_writer and self.pipeline_rank == 0 and self.tensor_parallel_rank == 0


@dataclass(frozen=True)
class Holding:
    """A tensor that a rank holds, by its name in the unsplit model, and its shape there."""

    shape: tuple[Count, ...]
    dtype: Annotated[str, DTYPES]
    is_parameter: bool = False


@dataclass(frozen=True)
class SavingReport:
    """What a rank tells the others before the writing starts.

    Attributes:
        names: what its kind of save wants to know; of a rank of another pipeline what it writes nevertheless.
    """

    place: SavingRank
    names: list[str] = field(default_factory=list)
    holdings: dict[str, Holding] = field(default_factory=dict)
    training: TrainingReport | None = None


def writers_of(reports: Sequence[SavingReport]) -> list[int]:
    """The ranks that write, in order of pipeline rank, then of tensor-parallel rank; so the first is the leader. Last
    come those of other pipelines."""
    places = {rank: report.place for rank, report in enumerate(reports) if report.place.is_writer or report.names}

    def order(rank: int) -> tuple[bool, int, int]:
        return not places[rank].is_writer, places[rank].number, places[rank].tensor_parallel_rank

    return sorted(places, key=order)


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: one rank, or of a tensor that is sharded those that have its shards, in order."""

    holding: Holding
    ranks: Sequence[int]
    sharding: Sharding | None = None


@dataclass(frozen=True)
class FilePlan:
    """One file of a save, or several that another library writes.

    Attributes:
        writer: the rank that writes it.
        inputs: what it is made of that ranks give to the writer, in the order in which they do.
        own: what else it holds, on the writer.
        outputs: its tensors' names, where they are not those of what it is made of.
        part: see `FileEntry`.
        data: gives the content of a file that is no file of tensors.
    """

    name: str
    writer: int
    inputs: Mapping[str, Source] = field(default_factory=dict)
    own: Mapping[str, torch.Tensor] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    part: str = MODEL
    data: Callable[[], bytes] | None = None


Content = dict[str, torch.Tensor] | bytes


@dataclass
class Folder:
    """A kind of save.

    Attributes:
        given: what this rank holds, by name.
        sides: names of the small files beside the weights.
    """

    model: nn.Module
    options: SaveOptions
    given: Mapping[str, torch.Tensor] = field(default_factory=dict, init=False)
    sides: Sequence[str] = field(default=(), init=False)

    @property
    def diffusers(self) -> bool:
        """Whether the files of weights have diffusers' names."""
        return of_diffusers(type(self.model))

    @property
    def call(self) -> list[Any]:
        """What must be the same on all ranks."""
        return [type(self).__name__, self.options.safe_serialization, self.options.variant]

    def report(self, place: SavingRank, folder: str) -> SavingReport:
        """Look at what this rank holds. The rank that leads writes the small files to `folder`."""
        names: list[str] = []
        if place.is_writer:
            self.given = held_state(self.model, self.options.state_dict)
        if place.is_leader:
            self.sides, names = self.lead(folder)
        return SavingReport(place, names, describe_holdings(self.model, self.given))

    def lead(self, folder: str) -> tuple[list[str], list[str]]:
        """On the rank that leads: write the small files; their names, and what it has to tell the others."""
        return [], []

    def plan(self, reports: Sequence[SavingReport], rank: int) -> list[FilePlan]:
        """The files in which this rank has a part, in an order that is the same on all ranks."""
        raise NotImplementedError

    def write(self, file: FilePlan, content: Content, folder: str, behind: Behind) -> Callable[[], FileEntry] | None:
        """Write a file. With `behind`, see `write_tensors`: what tells its entry once it is on disk."""
        raise NotImplementedError

    def replacement(self, directory: str, folder: str, entries: Mapping[str, FileEntry]) -> Replacement:
        """On the rank that leads: how what was written to `folder` becomes the checkpoint in `directory`."""
        raise NotImplementedError


def describe_holdings(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, Holding]:
    """What this rank can contribute, or its tensor-parallel group together."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: Holding(whole_shape(model, name, tensor), dtype_name(tensor.dtype), name in parameters)
        for name, tensor in state.items()
    }


def first_holders(
    reports: Sequence[SavingReport], sharded: Mapping[str, Sharding] | None = None, names: Collection[str] = ()
) -> dict[str, Source]:
    """Each tensor, or those of these names, from the first rank that holds it, or of `sharded` the first group."""
    writers, sharded = writers_of(reports), sharded or {}
    size = reports[writers[0]].place.tensor_parallel_size
    first = {name: place for place in reversed(range(len(writers))) for name in reports[writers[place]].holdings}
    return {
        name: Source(
            reports[writers[first[name]]].holdings[name],
            writers[first[name] : first[name] + (size if name in sharded else 1)],
            sharded.get(name),
        )
        for name in names or first
    }


def tell_reports(
    ranks: CheckpointRanks, what: str, report: Callable[[], SavingReport], unchanged: str = ""
) -> list[SavingReport]:
    """Make a report on every rank; returns every rank's. See `CheckpointRanks.together`."""
    said = ranks.together(f"comparing what ranks hold to {what}", lambda: asdict(report()), unchanged)
    return [typed(SavingReport, one, f"what rank {rank} says") for rank, one in enumerate(said)]


def each_file(
    folder: Folder, reports: Sequence[SavingReport], ranks: CheckpointRanks, do: Callable[[FilePlan, Content], object]
) -> None:
    """Gather the content of each planned file on the rank that writes it, and call `do` with it there.

    Transfers happen in one order on all ranks, so they cannot deadlock. A rank that fails goes on taking part in them,
    so that no other waits for it, and raises at the end. No more than one file is gathered at a time.
    """
    failure: Exception | None = None
    for file in folder.plan(reports, ranks.rank):
        gathered: dict[str, torch.Tensor] = {}
        for name, source in file.inputs.items():
            failure = _transfer(gathered, name, source, file, folder.given, ranks, failure)
        if ranks.rank == file.writer and failure is None:
            try:
                do(file, {**file.own, **gathered} if file.data is None else file.data())
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure


def _transfer(
    gathered: dict[str, torch.Tensor],
    name: str,
    source: Source,
    file: FilePlan,
    given: Mapping[str, torch.Tensor],
    ranks: CheckpointRanks,
    failure: Exception | None,
) -> Exception | None:
    """Do this rank's part in giving a tensor to a file's writer, which finds it in `gathered`; what has failed here."""
    if ranks.rank not in (*source.ranks, file.writer):
        return failure
    holding, sharding = source.holding, source.sharding
    shape = holding.shape if sharding is None else sharding.shape(holding.shape, len(source.ranks))
    parts: list[torch.Tensor] = []
    for rank in source.ranks:
        try:
            tensor = given[name].cpu().contiguous() if ranks.rank == rank else None
        except Exception as error:  # for example out of host memory
            failure, tensor = failure or error, None
        if tensor is None:
            tensor = torch.empty(shape, dtype=DTYPES[holding.dtype])
        if ranks.rank == file.writer:
            if rank != file.writer:
                ranks.receive(tensor, rank, f"gathering {name} for {file.name}")
            parts.append(tensor)
        elif ranks.rank == rank:
            ranks.send(tensor, file.writer, f"giving {name} for {file.name}")
    if failure is None and ranks.rank == file.writer:
        gathered[name] = parts[0] if sharding is None else sharding.join(parts)
    return failure

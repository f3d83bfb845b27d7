"""Which rank holds what: the map rank <-> (pipeline, rank in pipeline, tensor-parallel index).

The groups of ranks follow from it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

Units = tuple[str, ...]


@dataclass(frozen=True)
class PipelineLayout:
    """One pipeline placed on ranks `first_rank` to `first_rank + num_ranks * tensor_parallel_size - 1`.

    `stages[s]` are the units of stage s; `stage_to_rank[s]` is the rank within the pipeline that holds it. With one
    stage per rank that is the identity; interleaved and V-shaped schedules put several stages on a rank.
    """

    stages: tuple[Units, ...]
    stage_to_rank: tuple[int, ...]
    first_rank: int = 0
    tensor_parallel_size: int = 1

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.stage_to_rank) + 1

    @property
    def world_size(self) -> int:
        return self.num_ranks * self.tensor_parallel_size

    def global_rank(self, stage: int, tensor_parallel_rank: int = 0) -> int:
        """The global rank that holds `stage`, or its shard `tensor_parallel_rank`."""
        return self.first_rank + self.stage_to_rank[stage] * self.tensor_parallel_size + tensor_parallel_rank

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages that `pipeline_rank` holds, in ascending order."""
        return tuple(stage for stage, rank in enumerate(self.stage_to_rank) if rank == pipeline_rank)

    def ranks(self, tensor_parallel_rank: int | None = None) -> tuple[int, ...]:
        """Global ranks of the pipeline, in pipeline order; of one `tensor_parallel_rank`, or of all."""
        every = range(self.first_rank, self.first_rank + self.world_size)
        if tensor_parallel_rank is None:
            return tuple(every)
        return tuple(every[tensor_parallel_rank :: self.tensor_parallel_size])


@dataclass(frozen=True)
class Place:
    """Where one rank stands."""

    pipeline: int
    pipeline_rank: int
    tensor_parallel_rank: int


@dataclass(frozen=True)
class Layout:
    """All pipelines of a run, placed one after another on the ranks of the world. `context_parallel_size` neighbouring
    ones, which are alike, are given the same batch, and each computes a part of every sequence."""

    pipelines: tuple[PipelineLayout, ...]
    context_parallel_size: int = 1

    @classmethod
    def place(
        cls,
        stages_per_pipeline: Sequence[Sequence[Sequence[str]]],
        stage_to_rank: Sequence[Sequence[int]] | None = None,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
    ) -> Layout:
        """Place `stages_per_pipeline` (units per stage of each) on consecutive ranks, in the order given.

        `stage_to_rank` is the pipeline rank of each stage of each pipeline, by default one stage a rank;
        `tensor_parallel_size` is how many ranks share a stage, `context_parallel_size` how many pipelines a sequence.
        """
        pipelines, first_rank = [], 0
        for index, stages in enumerate(stages_per_pipeline):
            mapping = tuple(stage_to_rank[index]) if stage_to_rank is not None else tuple(range(len(stages)))
            units = tuple(tuple(stage) for stage in stages)
            pipelines.append(PipelineLayout(units, mapping, first_rank, tensor_parallel_size))
            first_rank += pipelines[-1].world_size
        return cls(tuple(pipelines), context_parallel_size)

    @cached_property
    def tensor_parallel_size(self) -> int:
        """The same in all pipelines."""
        return self.pipelines[0].tensor_parallel_size

    @cached_property
    def world_size(self) -> int:
        return sum(pipeline.world_size for pipeline in self.pipelines)

    @property
    def num_replicas(self) -> int:
        """How many replicas there are. A replica takes a batch of its own: it is one pipeline, or the pipelines that
        share their sequences (`context_parallel_size`)."""
        return len(self.pipelines) // self.context_parallel_size

    def replica_of(self, pipeline: int) -> int:
        """The replica that the pipeline of this index is in."""
        return pipeline // self.context_parallel_size

    def part_of(self, pipeline: int) -> int:
        """Which part of each sequence of its batch the pipeline of this index computes."""
        return pipeline % self.context_parallel_size

    def of_replica(self, replica: int) -> tuple[PipelineLayout, ...]:
        """The pipelines of a replica, in the order of their parts of a sequence."""
        first = replica * self.context_parallel_size
        return self.pipelines[first : first + self.context_parallel_size]

    @property
    def units(self) -> Units:
        """Every unit, in forward order."""
        return tuple(unit for stage in self.pipelines[0].stages for unit in stage)

    def place_of(self, rank: int) -> Place:
        """Where `rank` stands. Raises ValueError if it is in no pipeline."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside this layout of {self.world_size} ranks")
        index = bisect_right(self.pipelines, rank, key=attrgetter("first_rank")) - 1
        offset = rank - self.pipelines[index].first_rank
        return Place(index, *divmod(offset, self.tensor_parallel_size))

    def holders(self, unit: str, tensor_parallel_rank: int = 0) -> tuple[int, ...]:
        """Global ranks that hold `unit`, or its shard `tensor_parallel_rank`, one per pipeline."""
        return self._holders[tensor_parallel_rank][unit]

    @cached_property
    def _holders(self) -> list[dict[str, tuple[int, ...]]]:
        tables: list[dict[str, tuple[int, ...]]] = []
        for tensor_parallel_rank in range(self.tensor_parallel_size):
            table: dict[str, list[int]] = {}
            for pipeline in self.pipelines:
                for stage, units in enumerate(pipeline.stages):
                    for unit in units:
                        table.setdefault(unit, []).append(pipeline.global_rank(stage, tensor_parallel_rank))
            tables.append({unit: tuple(ranks) for unit, ranks in table.items()})
        return tables

    def are_of_several_stages(self, ranks: Iterable[int]) -> bool:
        """Whether two of `ranks` hold different stages of one pipeline."""
        places = [self.place_of(rank) for rank in ranks]
        stages = {(place.pipeline, place.pipeline_rank) for place in places}
        return len(stages) > len({place.pipeline for place in places})

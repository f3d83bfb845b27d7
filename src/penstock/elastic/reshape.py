"""Which pipelines to form of the devices that are there now, and which device takes which place.

Candidates are pipelines of equal depth, or of two neighbouring depths, for every number of pipelines; and the pipelines
that there were, each with what is left of it. The best costs least until the next change: the bytes that have to move,
and what is lost against the fastest candidate over `horizon` seconds of training. So a small loss moves little, and a
layout that is much faster is worth its moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.config.elastic import Elastic
from penstock.layout.partition import partition
from penstock.planning.cluster import Cluster, DeviceClass
from penstock.planning.microbatches import split_microbatches
from penstock.planning.planner import Infeasible
from penstock.planning.profile import Profile, seconds_of, stages_of
from penstock.planning.search import Chain, find_splits

Stages = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Shape:
    """A pipeline on so many devices. `stage_to_rank`: which of the pipeline's devices holds each stage. `slowest`,
    `total`: seconds of a microbatch on the device that has most to do, and on all."""

    stages: Stages
    stage_to_rank: tuple[int, ...]
    slowest: float
    total: float

    @property
    def num_devices(self) -> int:
        return max(self.stage_to_rank) + 1

    def seconds(self, microbatches: int) -> float:
        """The seconds of a step; see `penstock.planning.search`."""
        return self.total + (microbatches - 1) * self.slowest

    def units_of(self, device: int) -> set[str]:
        """The units that a device of the pipeline holds."""
        return {
            unit
            for stage, there in zip(self.stages, self.stage_to_rank, strict=True)
            if there == device
            for unit in stage
        }


def shape_of(stages: Sequence[Sequence[str]], stage_to_rank: Sequence[int], seconds: Mapping[str, float]) -> Shape:
    """The shape of stages that the user chose."""
    busy = [0.0] * (max(stage_to_rank) + 1)
    for stage, device in zip(stages, stage_to_rank, strict=True):
        busy[device] += sum(seconds[unit] for unit in stage)
    return Shape(tuple(map(tuple, stages)), tuple(stage_to_rank), max(busy), sum(busy))


def best_shapes(
    profile: Profile, num_microbatches: int, memory: float, stage_to_rank: Mapping[int, Sequence[int]]
) -> dict[int, Shape]:
    """For each number of devices that can hold the model, the best pipeline on so many equal ones. `memory`: bytes of
    each device. `stage_to_rank`: for each number of devices its stages' devices, under the schedule that the run has.
    """
    parts = profile.parts
    seconds = {unit.name: unit.seconds for unit in profile.units}
    cluster = Cluster((DeviceClass("device", len(stage_to_rank), memory=memory),))
    shapes: dict[int, Shape] = {}
    for template in find_splits(Chain(parts, cluster, num_microbatches)):
        (devices,) = template.counts
        mapping = stage_to_rank[devices]
        if len(mapping) > len(parts):
            continue
        sizes: Sequence[int] = template.split_for(num_microbatches).sizes
        if len(mapping) != devices:  # several stages on a device
            sizes = partition(seconds_of(parts), [1.0] * len(mapping)).sizes
        stages = [[unit.name for unit in stage] for stage in stages_of(parts, sizes)]
        shapes[devices] = shape_of(stages, mapping, seconds)
    return shapes


@dataclass(frozen=True)
class Formation:
    """Pipelines on devices. `devices`: which device is at each rank, as an index into what `choose` was given."""

    shapes: Sequence[Shape]
    microbatches: Sequence[int]
    devices: tuple[int, ...]


def choose(
    shapes: Mapping[int, Shape],
    held: Sequence[Collection[str]],
    size_of: Mapping[str, float],
    num_microbatches: int,
    settings: Elastic,
    before: Sequence[Sequence[int]],
) -> Formation:
    """The formation of all devices that costs least until the next change. `size_of`: bytes of each unit's state.
    `before`: the devices that are left of each former pipeline."""
    if not shapes:
        raise Infeasible("no pipeline of any number of these devices holds the model in their memory")
    formations = []
    most_copies = min(len(held) // min(shapes), num_microbatches)
    for depths in _depths(sorted(shapes), len(held), before):
        if min(settings.copies, most_copies) <= len(depths) <= num_microbatches:
            chosen = [shapes[depth] for depth in depths]
            counts = split_microbatches([shape.seconds for shape in chosen], num_microbatches)
            seconds = max(shape.seconds(count) for shape, count in zip(chosen, counts, strict=True))
            formations.append((seconds, chosen, counts))
    if not formations:
        raise Infeasible(
            f"no pipelines use {len(held)} devices: a pipeline takes {_in_words(sorted(shapes))} devices, and a step "
            f"has {num_microbatches} microbatches, at least 1 for each pipeline"
        )
    fastest = min(seconds for seconds, _, _ in formations)
    # What is too slow to win even if nothing moved need not be placed.
    most = sum(size_of.values()) * len(held) / settings.bandwidth
    best: tuple[float, Formation] | None = None
    for seconds, chosen, counts in sorted(formations, key=lambda formation: formation[0]):
        lost = settings.horizon * (1 - fastest / seconds) if seconds > 0 else 0.0
        if best is not None and lost > min(best[0], most):
            break
        devices, moved = _placed(chosen, held, size_of)
        cost = lost + moved / settings.bandwidth
        if best is None or cost < best[0]:
            best = cost, Formation(chosen, counts, devices)
    assert best is not None
    return best[1]


def _depths(known: Sequence[int], total: int, before: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Numbers of devices of the pipelines of each candidate."""
    seen = set()
    left = tuple(sorted((len(devices) for devices in before if devices), reverse=True))
    if left and sum(left) == total and all(depth in known for depth in left):
        seen.add(left)
        yield left
    for shallow, deep in pairwise([*known, known[-1]]):
        for number in range(total // deep + 1):
            rest, remainder = divmod(total - number * deep, shallow)
            depths = (deep,) * number + (shallow,) * rest
            if not remainder and depths and depths not in seen:
                seen.add(depths)
                yield depths


def _placed(
    chosen: Sequence[Shape], held: Sequence[Collection[str]], size_of: Mapping[str, float]
) -> tuple[tuple[int, ...], float]:
    """A device for each rank, those first that have most of what is needed there; and the bytes that are missing."""
    wanted = [shape.units_of(device) for shape in chosen for device in range(shape.num_devices)]
    pairs = sorted(
        ((-sum(size_of[unit] for unit in units if unit in has), device, rank)
        for rank, units in enumerate(wanted) for device, has in enumerate(held))
    )  # fmt: skip
    at: dict[int, int] = {}
    taken: set[int] = set()
    moved = sum(size_of[unit] for units in wanted for unit in units)
    for overlap, device, rank in pairs:
        if rank not in at and device not in taken:
            at[rank] = device
            taken.add(device)
            moved += overlap
    return tuple(at[rank] for rank in range(len(wanted))), moved


def _in_words(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers)) if len(numbers) < 6 else f"{numbers[0]} to {numbers[-1]}"

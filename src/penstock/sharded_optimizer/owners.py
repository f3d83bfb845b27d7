"""Which holders of a parameter keep its optimizer's state: its owners."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.runtime.comm.devices import device_memory
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.context import RankContext
from penstock.runtime.gradients.holders import HeldParameter

logger = logging.getLogger("penstock")

# What an owner keeps for each byte of a parameter: the summed gradient, and two moments for Adam.
BYTES_KEPT = 3


class OwnershipGroup(NamedTuple):
    """What is given to owners as a whole. `holders`: for each tensor-parallel index the ranks that hold it, ascending.
    Owners stand at the same place in each, so that the copies which the indices have of one weight get the same sums.
    `num_bytes`: what an owner keeps for it. `is_trained`: what is not comes last. `preferred`: the places of holders
    that own it unless there are too few of them, so that a tied weight is updated by the parameter group that lists its
    first name, as in the unsplit model; if it is empty, no holder is preferred."""

    holders: tuple[tuple[int, ...], ...]
    num_bytes: float
    is_trained: bool = True
    preferred: tuple[int, ...] = ()


def choose_owners(groups: Sequence[OwnershipGroup], used: Sequence[float], copies: int = 1) -> list[tuple[int, ...]]:
    """For each group, the places of its owners among its holders, so that the ranks' free memory fills up evenly.

    The largest group comes first, and each goes to those of its holders that have most left (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969, section 3). The same arguments give the same owners.

    Args:
        used: of each rank, the bytes that it uses without these groups, minus the memory that it has.
        copies: how many owners each group has, if it has as many holders.
    """
    load, chosen = list(used), [()] * len(groups)  # type: list[float], list[tuple[int, ...]]
    for index in sorted(range(len(groups)), key=lambda index: (not groups[index].is_trained, -groups[index].num_bytes)):
        columns = list(zip(*groups[index].holders, strict=True))
        fullest = [max(load[rank] for rank in column) for column in columns]
        preferred = groups[index].preferred or range(len(columns))
        ranked = sorted(range(len(columns)), key=lambda place: (place not in preferred, fullest[place]))
        chosen[index] = tuple(sorted(ranked[:copies]))
        for place in chosen[index]:
            for rank in columns[place]:
                load[rank] += groups[index].num_bytes
    return chosen


def with_owners(
    held: Sequence[HeldParameter], before: Sequence[HeldParameter], context: RankContext, copies: int
) -> list[HeldParameter] | None:
    """What this rank holds, with `copies` owners each, on which all ranks agree; None if no weight of any rank has
    more holders. All ranks call this together. The parameters in `before`, what it held in this layout until now, keep
    their owners, who have their state."""
    shared = context.groups.reduction
    if not any(len(ranks) > copies for ranks in shared):
        if context.rank == 0:
            most = f"{copies} rank{'s' * (copies > 1)}"
            logger.warning("sharded_optimizer has no effect: no parameter is held by more than %s", most)
        return None
    owners = {(weight.name, weight.ranks): weight.owners for weight in before if weight.owners}
    first = [weight for weight in held if weight.ranks[0] == context.rank and len(weight.ranks) > 1]
    new = [weight for weight in first if (weight.name, weight.ranks) not in owners]
    kept = [weight for weight in held if context.rank in owners.get((weight.name, weight.ranks), ())]
    used = sum(weight.parameter.nbytes for weight in held) + BYTES_KEPT * sum(
        weight.parameter.nbytes for weight in kept
    )
    mine = [
        used - (device_memory() or 0.0),
        [
            [weight.name, weight.ranks, weight.parameter.nbytes, weight.parameter.requires_grad, _preferred(weight)]
            for weight in new
        ],
    ]
    by_rank = Ranks(context.groups.world_control, context.board.guard).exchange(mine, "choosing owners of parameters")
    holders: dict[str, list[tuple[int, ...]]] = {}
    sizes: dict[str, int] = {}
    trained: set[str] = set()
    preferred: dict[str, tuple[int, ...]] = {}
    for _, theirs in by_rank:
        for name, ranks, num_bytes, is_trained, places in theirs:
            preferred[name] = tuple(places)
            holders.setdefault(name, []).append(tuple(ranks))
            sizes[name] = num_bytes
            trained |= {name} if is_trained else set()
    # What is frozen now takes no memory, but may be trained later.
    groups = [
        OwnershipGroup(tuple(holders[name]), BYTES_KEPT * sizes[name], name in trained, preferred[name])
        for name in holders
    ]
    chosen_places = choose_owners(groups, [float(theirs) for theirs, _ in by_rank], copies)
    for group, name, chosen in zip(groups, holders, chosen_places, strict=True):
        owners |= {(name, ranks): tuple(ranks[place] for place in chosen) for ranks in group.holders}
    return [replace(weight, owners=owners.get((weight.name, weight.ranks), ())) for weight in held]


def _preferred(weight: HeldParameter) -> list[int]:
    """Among its holders, the places of those that have it under its first name."""
    return [weight.ranks.index(rank) for rank in weight.holders_by_first_name]

"""Which holders of a parameter are its owners, where the holders divide the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# What an owner keeps for each byte of a parameter: the summed gradient, and two moments for Adam.
BYTES_KEPT = 3


class Owned(NamedTuple):
    """What is given to owners as a whole.

    Attributes:
        holders: for each tensor-parallel index the ranks that hold it, ascending. Owners stand at the same place in
            each, so that the copies which the indices have of one weight get the same sums.
        num_bytes: what an owner keeps for it.
        is_trained: what is not comes last.
    """

    holders: tuple[tuple[int, ...], ...]
    num_bytes: float
    is_trained: bool = True


def choose_owners(parts: Sequence[Owned], used: Sequence[float], copies: int = 1) -> list[tuple[int, ...]]:
    """For each part, the places of its owners among its holders, so that the ranks' free memory fills up evenly.

    The largest part comes first, and each goes to those of its holders that have most left (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969, section 3). The same arguments give the same owners.

    Args:
        used: of each rank, the bytes that it uses without these parts, less those that it has.
        copies: how many owners each part has, if it has as many holders.
    """
    load, found = list(used), [()] * len(parts)  # type: list[float], list[tuple[int, ...]]
    for index in sorted(range(len(parts)), key=lambda index: (not parts[index].is_trained, -parts[index].num_bytes)):
        columns = list(zip(*parts[index].holders, strict=True))
        fullest = [max(load[rank] for rank in column) for column in columns]
        found[index] = tuple(sorted(sorted(range(len(columns)), key=fullest.__getitem__)[:copies]))
        for place in found[index]:
            for rank in columns[place]:
                load[rank] += parts[index].num_bytes
    return found

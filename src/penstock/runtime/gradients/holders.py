"""Which ranks hold each logical parameter: what is summed over whom, and who answers for it in the gradient norm."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from penstock.layout.layout import Layout
from penstock.modeling.weights.whole import unit_with


@dataclass(frozen=True)
class HeldParameter:
    """A parameter this rank holds.

    Attributes:
        name: its first name in the unsplit model (a tied weight has several).
        ranks: the global ranks that hold a copy, ascending.
        sliced: whether each rank of a tensor-parallel group holds another slice of it, or of its gradient.
        holders_by_first_name: those of `ranks` that hold it under `name`, by which an optimizer of the unsplit model
            knows it.
        owners: those of `ranks` that keep its optimizer's state and update it; empty if all of them do.
    """

    name: str
    parameter: torch.nn.Parameter
    ranks: tuple[int, ...]
    sliced: bool = False
    holders_by_first_name: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()

    @property
    def keepers(self) -> tuple[int, ...]:
        """The ranks that have its gradient after a step, and its optimizer's state: the owners, or all."""
        return self.owners or self.ranks

    def counted_by(self, rank: int, tensor_parallel_rank: int) -> bool:
        """Whether `rank` answers for it in the gradient norm: one rank does for each whole or slice."""
        return self.keepers[0] == rank and (self.sliced or tensor_parallel_rank == 0)

    @property
    def digest(self) -> int:
        return zlib.crc32(self.name.encode()) * 0x9E3779B97F4A7C15

    def equality_term(self, rank: int, among: tuple[int, ...]) -> int:
        """What `rank` adds to a sum over the ranks `among` if it has done something with this parameter, such as an
        update: the sum is zero if all of them have, or none."""
        return self.digest * (len(among) - 1 if among[0] == rank else -1)


def find_holders(
    layout: Layout,
    tensor_parallel_rank: int,
    aliases: Iterable[tuple[str, ...]],
    local: Mapping[str, torch.nn.Parameter],
    sliced: Collection[str] = (),
    partial: Collection[str] = (),
    homes: Mapping[str, str] | None = None,
) -> tuple[list[HeldParameter], set[tuple[int, ...]]]:
    """The local parameters with their holders, in an order all ranks share, and every set of several holders there is.
    A parameter outside every unit is held by all ranks.

    Args:
        aliases: every parameter of the unsplit model as the tuple of its names, in the model's order.
        local: the parameters this rank holds, by each of their names.
        sliced: names of those of which each rank of a tensor-parallel group holds another slice.
        partial: names of those that these ranks hold whole, but of whose gradient each has only a part: all of them are
            holders, so that the parts are summed.
        homes: the names in units of the modules that have several, see `names_in_units`.
    """
    units = set(layout.units)
    held: list[HeldParameter] = []
    shared: set[tuple[int, ...]] = set()
    for names in aliases:
        by_index: list[set[int]] = []
        by_first_name: list[tuple[int, ...]] = []
        for index in range(layout.tensor_parallel_size):
            by_name = []
            for name in names:
                unit = unit_with(name, homes or {}, units)
                every_rank = (rank for pipeline in layout.pipelines for rank in pipeline.ranks(index))
                by_name.append(tuple(every_rank if unit is None else layout.holders(unit, index)))
            by_index.append(set().union(*by_name))
            by_first_name.append(by_name[0])
        if any(name in partial for name in names):
            by_index = [set().union(*by_index)] * len(by_index)
        every = [tuple(sorted(holders)) for holders in by_index]
        shared.update(ranks for ranks in every if len(ranks) > 1)
        parameter = next((local[name] for name in names if name in local), None)
        if parameter is not None:
            # A partial one counts as a slice: its first keeper answers for it, with whatever tensor-parallel rank.
            is_sliced = any(name in sliced or name in partial for name in names)
            ranks, first = every[tensor_parallel_rank], by_first_name[tensor_parallel_rank]
            held.append(HeldParameter(names[0], parameter, ranks, is_sliced, first))
    return held, shared

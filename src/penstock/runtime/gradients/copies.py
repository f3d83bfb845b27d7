"""A tied weight is one weight: whether the copies that several stages have of it are still the same.

Each stage's rank updates its own copy, from the same gradient. Copies stay equal to the last bit, unless something
treats them unlike: parameter groups that go by names, an optimizer that keeps other numbers for an embedding than for
a linear layer, random numbers that a rank adds. So the ranks compare a checksum of each copy, which is part of what
they say at the next step's roll call. On an accelerator the host would wait for a checksum, which no training step may
do, so only evaluations and saves compare there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.comm.gloo import wait_for_all
from penstock.runtime.comm.settings import MODULUS
from penstock.runtime.context import RankContext
from penstock.runtime.gradients.holders import HeldParameter

# By how many roundings of their largest entry copies may differ that processors of unlike kinds have updated.
ROUNDINGS = 8
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class TiedCopies:
    """This rank's copies of weights that several stages of a pipeline hold. `names`: the names that they have here."""

    def __init__(self, held: Sequence[HeldParameter], context: RankContext, names: Mapping[str, str]) -> None:
        several = context.layout.are_of_several_stages
        plain = (
            weight for weight in held if weight.parameter.layout is torch.strided and weight.parameter.dtype in _FLOATS
        )
        self._tied = [weight for weight in plain if several(weight.ranks)]
        pipeline = frozenset(context.pipeline_ranks)
        self._holders = [tuple(rank for rank in weight.ranks if rank in pipeline) for weight in self._tied]
        self._context, self._names = context, names
        self._versions: list[int] = []
        self._equality_term = 0

    def equality_term(self, training: bool = False) -> int:
        """What this rank says of its copies: the sum over a pipeline is zero if all of them are the same. With
        `training` the host does not wait for an accelerator: the copies there count as the same."""
        if training and self._context.device.type != "cpu":
            return 0
        versions, rank = [weight.parameter._version for weight in self._tied], self._context.rank
        if versions != self._versions:
            terms = [weight.equality_term(rank, among) for weight, among in zip(self._tied, self._holders, strict=True)]
            sums = [_checksum(weight.parameter) for weight in self._tied]
            self._equality_term = sum(term * checksum for term, checksum in zip(terms, sums, strict=True)) % MODULUS
            self._versions = versions
        return self._equality_term

    @torch.no_grad()
    def reconcile(self, adopt: bool = False) -> str | None:
        """Where copies differ by roundings, or whatever they differ by with `adopt`, all take that of the first holder.
        Returns what to say if they differ by more. All ranks call this together."""
        rank, groups, apart_by_name = self._context.rank, self._context.groups, {}
        with self._context.board.guard("comparing tied weights", self._context.everyone):
            for weight in self._tied:
                value = weight.parameter.detach()
                first = value.clone() if rank == weight.ranks[0] else torch.zeros_like(value)
                real = torch.view_as_real(first) if first.is_complex() else first
                group = groups.reduction[weight.ranks]
                work = dist.all_reduce(real, group=group, async_op=True)
                wait_for_all(work, group, real.device, self._context.board.check)
                apart = float((first - value).abs().max()) if value.numel() else 0.0
                limit = ROUNDINGS * torch.finfo(value.dtype).eps * float(first.abs().max()) if value.numel() else 0.0
                if apart > limit:
                    apart_by_name[weight.name] = apart
                if apart and (adopt or apart <= limit):
                    weight.parameter.copy_(first)
        self._versions = []
        mine = {weight.name: [apart_by_name.get(weight.name, 0.0), self._names[weight.name]] for weight in self._tied}
        every = Ranks(groups.world_control, self._context.board.guard).exchange(mine, "comparing tied weights")
        for name in dict.fromkeys(name for theirs in every for name in theirs):
            by_rank = {rank: theirs[name] for rank, theirs in enumerate(every) if name in theirs}
            apart = max(difference for difference, _ in by_rank.values())
            if apart:
                here = ", ".join(f"{local} on rank {rank}" for rank, (_, local) in by_rank.items())
                return (
                    f"the copies of the tied weight {name} ({here}) differ by up to {apart:.3g}: each rank updates its "
                    "own, and these were updated unlike, as by parameter groups that go by names, by an optimizer that "
                    "treats an embedding otherwise than a linear layer, by random numbers of each rank's own, or where "
                    "an update was interrupted. Treat the copies alike, or set sharded_optimizer: true: one rank then "
                    "updates the weight under its first name, and sends it to the others"
                )
        return None


def _checksum(tensor: torch.Tensor) -> int:
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    return int(values.reshape(-1).view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))

"""Which parameters are frozen, the same on all ranks that hold them.

The caller of each rank freezes parameters there, at any time. The roll call of a step shows whether all ranks have the
same ones frozen; only if they have not, they tell each other which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import nn

from penstock.runtime.comm.settings import MODULUS, SettingsMismatch, in_words
from penstock.runtime.context import RankContext
from penstock.runtime.gradients.ownership import HeldParameter
from penstock.runtime.loss_proxy import requires_grad

_type = attrgetter("dtype")


class FrozenParameters:
    """Compares which parameters are frozen, over all that hold them: replicas, holders of a tied weight, and the ranks
    of a tensor-parallel group.

    Of a frozen parameter with k holders in its pipeline the first one says (k - 1) times a digest of its name, each
    other one minus it: the sum over the pipeline is zero if they agree. The first one with each tensor-parallel rank
    says the digest itself, too, so that the sum of these is a digest of all that is frozen.
    """

    def __init__(self, held: Sequence[HeldParameter], context: RankContext, model: nn.Module):
        self._parameters = [one.parameter for one in held]
        self._flags: tuple[bool, ...] = ()
        self._types: tuple[torch.dtype, ...] = ()
        self._changed: Sequence[int] = ()
        self._numbers = (0, 0, 0)
        # Of each parameter, what is said of it if it is frozen.
        self._said: list[tuple[int, int]] = []
        pipeline, shard = frozenset(context.pipeline_ranks), context.pipeline.ranks(context.place.tensor_parallel_rank)
        for one in held:
            holders = [rank for rank in one.ranks if rank in pipeline]
            first = next(rank for rank in holders if rank in shard)
            self._said.append((
                one.vote(context.rank, tuple(holders)),
                one.digest * (first == context.rank),
            ))  # fmt: skip
        own: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            own[id(parameter)] = name
        # By its first name in the unsplit model, the name that `named_parameters()` gives here.
        self._names = {one.name: own.get(id(one.parameter), one.name) for one in held}

    def numbers(self, changed: Sequence[int] = ()) -> tuple[int, int, int]:
        """This rank's `Settings.frozen`, `frozen_whole` and `trainable`. What is said of those at the places `changed`,
        which all holders must have changed, is counted in the first two as well, three times."""
        flags, types = tuple(map(requires_grad, self._parameters)), tuple(map(_type, self._parameters))
        if flags != self._flags or types != self._types or changed != self._changed:
            frozen = [said for said, trainable in zip(self._said, flags, strict=True) if not trainable]
            frozen += [self._said[place] for place in changed] * 3
            self._numbers = (
                sum(apart for apart, _ in frozen) % MODULUS,
                sum(whole for _, whole in frozen) % MODULUS,
                hash((flags, tuple(map(str, types)))) % MODULUS,
            )
            self._flags, self._types, self._changed = flags, types, changed
        return self._numbers

    def described(self) -> dict[str, tuple[bool, str]]:
        """Of each parameter here, by its first name in the unsplit model: whether it is frozen, and its name here."""
        return {
            first: (not parameter.requires_grad, own)
            for (first, own), parameter in zip(self._names.items(), self._parameters, strict=True)
        }


def refuse_differing(every: Mapping[int, Mapping[str, tuple[bool, str]]]) -> None:
    """Raise SettingsMismatch, on every rank, if parameters are frozen on some of their holders only."""
    differences = []
    for first in dict.fromkeys(name for described in every.values() for name in described):
        frozen = {rank: int(described[first][0]) for rank, described in every.items() if first in described}
        if len(set(frozen.values())) == 1:
            continue
        words = in_words(frozen, lambda frozen: "frozen it" if frozen else "not")
        names = {rank: every[rank][first][1] for rank in frozen}
        if len(set(names.values())) > 1:  # a tied weight
            where = ", ".join(f"{name} on rank {rank}" for rank, name in names.items())
            words += f" (a tied weight, freeze it under the name that it has on each rank: {where})"
        differences.append(f"{first}: {words}")
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise SettingsMismatch(
            "parameters are frozen (requires_grad=False) on some of the ranks that hold them only: "
            + "; ".join(differences[:5])
            + more
        )

"""Which parameters are frozen, agreed on by all ranks that hold them.

The caller of each rank freezes parameters there, at any time. The roll call of a step shows whether all ranks have the
same ones frozen; only if they have not, they tell each other which.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn

from penstock.runtime.comm.settings import MODULUS, SettingsMismatch, in_words
from penstock.runtime.gradients.ownership import HeldParameter
from penstock.runtime.stages import requires_grad

_type = attrgetter("dtype")


class Wish(NamedTuple):
    """Whether one rank's caller wants a parameter trained.

    Attributes:
        names: those under which the rank holds it.
        trainable: whether it requires a gradient there now.
        wished: what the caller last made of it.
    """

    names: tuple[str, ...]
    trainable: bool
    wished: bool


class FrozenParameters:
    """Compares which parameters are frozen, over all that hold them: replicas, holders of a tied weight, and the ranks
    of a tensor-parallel group.

    Of a frozen parameter with k holders the first one says (k - 1) times a digest of its name, each other one minus it.
    So the sum over all ranks is zero if they agree.

    A tied weight that different ranks have under different names is frozen as long as it is frozen under any of them.
    What a rank was told by others (`settle`) is not taken for the wish of its own caller. A weight that was frozen
    before the model was split was frozen under its first name, the one that `named_parameters()` gives.
    """

    def __init__(self, held: Sequence[HeldParameter], rank: int, model: nn.Module):
        self._held = held
        self._parameters = [one.parameter for one in held]
        self._rank = rank
        self._flags: tuple[bool, ...] = ()
        self._types: tuple[torch.dtype, ...] = ()
        self._numbers = (0, 0, 0)
        names: dict[int, tuple[str, ...]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)] = (*names.get(id(parameter), ()), name)
        self._wishes: list[Wish] = []
        # Whether a rank that has it under another name has frozen it.
        self._told_frozen: list[bool] = []
        for one in held:
            own, trainable = names.get(id(one.parameter), ()), one.parameter.requires_grad
            told_frozen = not trainable and one.name not in own
            self._told_frozen.append(told_frozen)
            self._wishes.append(Wish(own, trainable, trainable or told_frozen))

    def numbers(self) -> tuple[int, int, int]:
        """This rank's `Settings.frozen`, `frozen_here` and `trainable`."""
        flags, types = tuple(map(requires_grad, self._parameters)), tuple(map(_type, self._parameters))
        if flags != self._flags or types != self._types:
            total = here = 0
            for index, (wish, trainable) in enumerate(zip(self._wishes, flags, strict=True)):
                if trainable != wish.trainable:
                    self._wishes[index] = Wish(wish.names, trainable, trainable)
            for held, trainable in zip(self._held, flags, strict=True):
                if not trainable:
                    digest = zlib.crc32(held.name.encode()) * 0x9E3779B97F4A7C15
                    total += digest * (len(held.ranks) - 1 if held.ranks[0] == self._rank else -1)
                    here += digest
            digest = hash((flags, tuple(map(str, types))))
            self._flags, self._types = flags, types
            self._numbers = (total % MODULUS, here % MODULUS, digest % MODULUS)
        return self._numbers

    def described(self) -> dict[str, Wish]:
        """The wish of this rank's caller for each parameter here, by its first name in the unsplit model."""
        self.numbers()
        return {held.name: wish for held, wish in zip(self._held, self._wishes, strict=True)}

    def settle(self, every: Mapping[int, Mapping[str, Wish]]) -> None:
        """Freeze here what is frozen under another name elsewhere, from what all ranks described.

        Raises:
            SettingsMismatch: ranks that hold a parameter under the same names differ; on every rank.
        """
        differences = []
        names: Collection[str] = dict.fromkeys(name for described in every.values() for name in described)
        index_of = {held.name: index for index, held in enumerate(self._held)}
        for name in names:
            wishes = {rank: described[name] for rank, described in every.items() if name in described}
            if len({wish.trainable for wish in wishes.values()}) == 1:
                continue
            of_names = {wish.names: wish.trainable for wish in wishes.values()}
            if any(wish.trainable != of_names[wish.names] for wish in wishes.values()):
                frozen = {rank: int(not wish.trainable) for rank, wish in wishes.items()}
                differences.append(f"{name}: {in_words(frozen, lambda frozen: 'frozen it' if frozen else 'not')}")
                continue
            if (index := index_of.get(name)) is not None:
                self._settle_one(index, [wish for wish in wishes.values() if not wish.wished])
        if differences:
            more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
            raise SettingsMismatch(
                "parameters are frozen (requires_grad=False) on some of the ranks that hold them only: "
                + "; ".join(differences[:5])
                + more
            )

    def _settle_one(self, index: int, freezing: Sequence[Wish]) -> None:
        parameter, wish, trainable = self._parameters[index], self._wishes[index], not freezing
        if freezing and wish.wished and parameter.requires_grad and self._told_frozen[index]:
            warnings.warn(
                f"{wish.names[0]} stays frozen, as it is tied to {freezing[0].names[0]}, which is frozen: set "
                "requires_grad under that name",
                stacklevel=2,
            )
        self._told_frozen[index] = not trainable
        parameter.requires_grad_(trainable)
        self._wishes[index] = wish._replace(trainable=trainable)

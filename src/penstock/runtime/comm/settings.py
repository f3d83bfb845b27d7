"""What the ranks compare at the roll call of a step or an evaluation: their batches, and what decides the computation.

All ranks see the same numbers, so all raise the same error, before anything is under way. The roll call shows whether
all ranks have the same parameters frozen; only if they have not, they tell each other which.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from penstock.layout.layout import Layout, PipelineLayout
from penstock.runtime.boundary.p2p import DTYPES
from penstock.runtime.comm.rollcall import Shared
from penstock.runtime.context import RankContext
from penstock.runtime.failures.board import ranks_in_words
from penstock.runtime.gradients.holders import HeldParameter
from penstock.runtime.loss_proxy import requires_grad

MODULUS = 1 << 62
GIVEN = " was given "
# A batch's samples and microbatches, and of each input its form in words and its fingerprint.
TellsBatch = tuple[int, int, Mapping[str, Sequence[Any]]]
BatchInWords = Callable[[], TellsBatch]


class BatchMismatch(RuntimeError):
    """The ranks of one pipeline, or of those that share their sequences, were given different batches."""


class SettingsMismatch(RuntimeError):
    """A setting that decides what is computed differs between ranks."""


class Settings(NamedTuple):
    """One rank's facts, which go to the others as plain numbers, in this order. The first two are the batch's.

    Attributes:
        fingerprint, num_microbatches: of the batch; the same on all ranks of a pipeline.
        plans: a checksum of the microbatches' plans; the same on all ranks of a pipeline.
        schedule: a checksum of the schedule of so many microbatches; the same on all ranks of a pipeline.
        autocast: 0 if it is off, otherwise 1 + the number of its type.
        modes: whether the model is in train mode (the last bit), and a digest of the units' modes.
        loss_scale: its bits.
        reduces_gradients: whether gradients are summed at the end of the step; not inside `no_sync()`.
        frozen, frozen_whole: see `FrozenParameters`.
        trainable: a digest of which of this rank's parameters are trainable, and of their types.
    """

    fingerprint: int
    num_microbatches: int
    plans: int
    schedule: int
    autocast: int
    modes: int
    loss_scale: int
    reduces_gradients: int
    frozen: int
    frozen_whole: int
    trainable: int

    def shared(self, pipeline: PipelineLayout, gathered: Mapping[int, Sequence[int]]) -> Shared:
        """What the roll call compares beyond this rank's pipeline (a `Summary`), by the pipeline's facts. If all of it
        is alike, and nothing is wrong in any pipeline, `compare` and `batches_differ` find nothing.

        `everywhere`: the type of autocast, the modes, the loss scale, whether gradients are summed, and what is frozen.
        `of_batch`: a digest of the batch. `wrong`: the ranks of this pipeline differ in a batch, a plan or a schedule,
        or in what is frozen."""
        by_rank = {rank: Settings(*facts) for rank, facts in gathered.items()}
        batches = {
            (settings.num_microbatches, settings.fingerprint, settings.plans, settings.schedule)
            for settings in by_rank.values()
        }
        frozen = _frozen_in(pipeline, by_rank)
        (apart, whole), *others = frozen
        wrong = len(batches) > 1 or apart != 0 or bool(others)
        everywhere = self.autocast, self.modes, self.loss_scale, self.reduces_gradients, whole
        return Shared(everywhere, [self.fingerprint ^ self.num_microbatches], wrong)

    @staticmethod
    def batches_differ(gathered: Mapping[int, Sequence[int]], layout: Layout) -> bool:
        """Whether ranks of one pipeline, or of those that share their sequences, were given different batches."""
        given = {rank: Settings(*facts)[:2] for rank, facts in gathered.items()}
        return any(len({given[rank] for rank in ranks}) > 1 for ranks in _with_one_batch(layout, given))

    @staticmethod
    def compare(gathered: Mapping[int, Sequence[int]], layout: Layout) -> bool:
        """Compare all but the batches (see `batches_differ`) of the ranks that are here. Raises SettingsMismatch, on
        every rank, if they differ in anything but what is frozen and the copies of tied weights. Returns whether these
        are alike, too; True if not all ranks are here, as nothing is trained then."""
        by_rank = {rank: Settings(*facts) for rank, facts in gathered.items()}
        pipelines = [pipeline for pipeline in layout.pipelines if pipeline.first_rank in by_rank]
        differences = []
        for field, name, words in _COMPARED:
            values = {rank: getattr(settings, field) for rank, settings in by_rank.items()}
            if len(set(values.values())) > 1:
                differences.append(f"{name}: {in_words(values, words)}")
        if differences:
            raise SettingsMismatch(
                "the ranks compute under different settings, but all must have the same: " + "; ".join(differences)
            )
        for pipeline in pipelines:
            compare_plans({rank: by_rank[rank].plans for rank in pipeline.ranks()})
            _compare_schedules({rank: by_rank[rank].schedule for rank in pipeline.ranks()})
        if len(by_rank) < layout.world_size:
            return True
        frozen_sets = {frozen for pipeline in pipelines for frozen in _frozen_in(pipeline, by_rank)}
        return len(frozen_sets) == 1 and all(apart == 0 for apart, _ in frozen_sets)


def refuse_unlike_batches(described: Mapping[int, TellsBatch], layout: Layout) -> NoReturn:
    """Raise BatchMismatch, on every rank, by what each rank tells of its batch."""
    here = _with_one_batch(layout, described)
    ranks = next(ranks for ranks in here if len({repr(described[rank]) for rank in ranks}) > 1)
    same_size = len({described[rank][0] for rank in ranks}) == 1
    names = dict.fromkeys(name for rank in ranks for name in described[rank][2])
    inputs = {name: {rank: tuple(described[rank][2].get(name, ("none", 0))) for rank in ranks} for name in names}
    differences = [
        f"{name}: {_unlike(by_rank, ' has ', 'other values')}" for name, by_rank in inputs.items() if _differ(by_rank)
    ]
    more = [f"and {len(differences) - 5} inputs more"] if len(differences) > 5 else []
    batches = {}
    for rank in ranks:
        samples, microbatches, _ = described[rank]
        in_parts = f", in {microbatches} microbatches" if same_size and not differences else ""
        batches[rank] = f"a batch of {samples} samples{in_parts}", repr(described[rank])
    words = [_unlike(batches, GIVEN, "another"), *differences[:5], *more]
    raise BatchMismatch(
        f"{'; '.join(words)}: all ranks of one pipeline, those that share a stage's weights included, and of pipelines "
        "that share their sequences must be given the same batch: draw random data from one seed (use "
        "model.data_parallel_rank and _size, or model.prepare_dataloader, to share a data set out between pipelines)"
    )


def _with_one_batch(layout: Layout, among: Container[int]) -> list[list[int]]:
    """For each replica, its ranks that are `among` these: they must be given the same batch."""
    replicas = map(layout.of_replica, range(layout.num_replicas))
    ranks_by_replica = (
        [rank for pipeline in replica for rank in pipeline.ranks() if rank in among] for replica in replicas
    )
    return [ranks for ranks in ranks_by_replica if ranks]


def _differ(by_rank: Mapping[int, tuple[Any, ...]]) -> bool:
    return len(set(by_rank.values())) > 1


def _unlike(by_rank: Mapping[int, tuple[Any, ...]], verb: str, other: str) -> str:
    """What ranks have, each a form in words and a digest: of those of one form, `other` after the first."""
    kinds = list(dict.fromkeys(by_rank.values()))
    forms = [form for form, _ in kinds]
    words = [f"{other} ({form})" if form in forms[:place] else form for place, form in enumerate(forms)]
    return in_words({rank: kinds.index(kind) for rank, kind in by_rank.items()}, words.__getitem__, verb)


def _frozen_in(pipeline: PipelineLayout, by_rank: Mapping[int, Settings]) -> set[tuple[int, int]]:
    """Of a pipeline: 0 if all holders of each parameter have it frozen or none has, and a digest of what is frozen;
    for each tensor-parallel rank."""
    apart = sum(by_rank[rank].frozen for rank in pipeline.ranks()) % MODULUS
    shards = [pipeline.ranks(index) for index in range(pipeline.tensor_parallel_size)]
    return {(apart, sum(by_rank[rank].frozen_whole for rank in ranks) % MODULUS) for ranks in shards}


def compare_plans(checksums: Mapping[int, int]) -> None:
    """Raise SettingsMismatch, on every rank, if ranks of one pipeline planned different forwards, by checksums."""
    if len(set(checksums.values())) > 1:
        raise SettingsMismatch(
            "the ranks of a pipeline followed the model's forward in different ways: "
            f"{in_words(checksums, '{:x}'.format)} (checksums of what each stage computes and sends). Probably the "
            "model's code draws what it does from Python's or NumPy's random numbers, such as which layers it leaves "
            "out (layer drop), and no plan can follow that: set that probability to 0 before initialize(). Otherwise "
            "use the same versions of Penstock, torch and transformers on all ranks, and make no choice by rank in the "
            "model's code"
        )


def _compare_schedules(checksums: Mapping[int, int]) -> None:
    """Raise SettingsMismatch, on every rank, if ranks of one pipeline have different schedules, by checksums."""
    if len(set(checksums.values())) > 1:
        raise SettingsMismatch(
            f"the ranks of a pipeline run different schedules: {in_words(checksums, '{:08x}'.format)} (checksums of "
            "all actions). Give register_schedule() the same maker on all ranks, one that gives the same schedule "
            "whenever it is given the same numbers"
        )


def states_of_stages(gathered: Mapping[int, Sequence[int]], context: RankContext, training: bool) -> list[Hashable]:
    """For each stage of this pipeline, what decides types and gradient flags of the values it sends (see `Boundaries`):
    autocast, which is the same everywhere, and what is trainable, and of which type, in all stages up to this one."""
    states: list[Hashable] = []
    trainable: tuple[int, ...] = ()
    for stage in range(context.pipeline.num_stages):
        theirs = Settings(*gathered[context.rank_of(stage)])
        trainable = (*trainable, theirs.trainable)
        states.append((training, theirs.autocast, trainable))
    return states


def in_words(values: Mapping[int, int], words: Callable[[int], str], verb: str = " has ") -> str:
    """`rank 0 has bfloat16, ranks 1, 2 have none`."""
    parts = []
    for value in dict.fromkeys(values.values()):
        ranks = [rank for rank, other in values.items() if other == value]
        several = verb.replace("has", "have").replace("was", "were")
        parts.append(ranks_in_words(ranks) + (several if len(ranks) > 1 else verb) + words(value))
    return ", ".join(parts)


def bits_of(number: float) -> int:
    """The bits of a float as an integer, for the roll call."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def float_of(bits: int) -> float:
    """The float whose bits these are."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def number_in_words(bits: int) -> str:
    """The float whose bits these are, in words."""
    return f"{float_of(bits):g}"


_COMPARED: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("autocast", "autocast", lambda value: str(DTYPES[value - 1]) if value else "none"),
    ("modes", "train or eval mode", lambda value: ("train" if value & 1 else "eval") + f" mode (units {value >> 1:x})"),
    ("loss_scale", "the loss scale", number_in_words),
    ("reduces_gradients", "no_sync()", lambda value: "left it" if value else "entered it"),
)


def autocast_code(device: torch.device) -> int:
    """The state of autocast as a number; see `Settings`."""
    on = torch.is_autocast_enabled(device.type)
    return 1 + DTYPES.index(torch.get_autocast_dtype(device.type)) if on else 0


_training, _type = attrgetter("training"), attrgetter("dtype")


def modes_digest(modules: Sequence[nn.Module]) -> int:
    """See `Settings.modes`. `modules`: the model, and its units: every rank has all of them, if only as ghosts."""
    modes = bytes(map(_training, modules))
    return zlib.crc32(modes[1:]) * 2 + modes[0]


class FrozenParameters:
    """Compares which parameters are frozen, over all that hold them: replicas, holders of a tied weight, and the ranks
    of a tensor-parallel group.

    Of a frozen parameter with k holders in its pipeline the first one says (k - 1) times a digest of its name, each
    other one minus it: the sum over the pipeline is zero if they agree. The first one with each tensor-parallel rank
    says the digest itself, too, so that the sum of these is a digest of all that is frozen.
    """

    def __init__(self, held: Sequence[HeldParameter], context: RankContext, model: nn.Module):
        self._parameters = [weight.parameter for weight in held]
        self._flags: tuple[bool, ...] = ()
        self._types: tuple[torch.dtype, ...] = ()
        self._changed: Sequence[int] = ()
        self._numbers = (0, 0, 0)
        # Of each parameter, what is said of it if it is frozen.
        self._said: list[tuple[int, int]] = []
        pipeline, shard = frozenset(context.pipeline_ranks), context.pipeline.ranks(context.place.tensor_parallel_rank)
        for weight in held:
            holders = [rank for rank in weight.ranks if rank in pipeline]
            first = next(rank for rank in holders if rank in shard)
            self._said.append((
                weight.equality_term(context.rank, tuple(holders)),
                weight.digest * (first == context.rank),
            ))  # fmt: skip
        own = {id(parameter): name for name, parameter in model.named_parameters()}
        # By its first name in the unsplit model, the name that `named_parameters()` gives here.
        self.names = {weight.name: own.get(id(weight.parameter), weight.name) for weight in held}

    def numbers(self, changed: Sequence[int] = (), faults: int = 0) -> tuple[int, int, int]:
        """This rank's `Settings.frozen`, `frozen_whole` and `trainable`. What is said of those at the places `changed`,
        which all holders must have changed, is counted in the first two as well, three times; and in the first one
        `faults`: what is said of tied weights' copies, and whether the model has trained parameters that it had not
        when it was parallelised."""
        flags, types = tuple(map(requires_grad, self._parameters)), tuple(map(_type, self._parameters))
        if flags != self._flags or types != self._types or changed != self._changed:
            frozen = [words for words, trainable in zip(self._said, flags, strict=True) if not trainable]
            frozen += [self._said[place] for place in changed] * 3
            self._numbers = (
                sum(apart for apart, _ in frozen) % MODULUS,
                sum(whole for _, whole in frozen) % MODULUS,
                hash((flags, tuple(map(str, types)))) % MODULUS,
            )
            self._flags, self._types, self._changed = flags, types, changed
        apart, whole, trainable = self._numbers
        return (apart + faults) % MODULUS, whole, trainable

    def described(self) -> dict[str, tuple[bool, str]]:
        """Of each parameter here, by its first name in the unsplit model: whether it is frozen, and its name here."""
        return {
            first: (not parameter.requires_grad, own)
            for (first, own), parameter in zip(self.names.items(), self._parameters, strict=True)
        }


def refuse_frozen_on_some(by_rank: Mapping[int, Mapping[str, tuple[bool, str]]]) -> None:
    """Raise SettingsMismatch, on every rank, if parameters are frozen on some of their holders only."""
    differences = []
    for first in dict.fromkeys(name for described in by_rank.values() for name in described):
        frozen = {rank: int(described[first][0]) for rank, described in by_rank.items() if first in described}
        if len(set(frozen.values())) == 1:
            continue
        words = in_words(frozen, lambda frozen: "frozen it" if frozen else "not")
        names = {rank: by_rank[rank][first][1] for rank in frozen}
        if len(set(names.values())) > 1:  # a tied weight
            where = ", ".join(f"{name} on rank {rank}" for rank, name in names.items())
            words += f" (a tied weight, freeze it under the name that it has on each rank: {where})"
        differences.append(f"{first}: {words}")
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise SettingsMismatch(
            "parameters are frozen (requires_grad=False) on only some of the ranks that hold them: "
            + "; ".join(differences[:5])
            + more
        )

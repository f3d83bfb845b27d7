"""An engine's parts: what one rank has for as long as the ranks of a layout work together.

What lasts is the engine, the model, and its parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from penstock.data.fingerprint import fingerprint
from penstock.layout.layout import Layout
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.weights.whole import names_in_units
from penstock.runtime.boundary.boundaries import Boundaries
from penstock.runtime.boundary.p2p import P2PChannels
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.comm.rollcall import Answers, RollCall, Summary
from penstock.runtime.comm.settings import (
    BatchInWords,
    FrozenParameters,
    Settings,
    SettingsMismatch,
    autocast_code,
    bits_of,
    modes_digest,
    refuse_frozen_on_some,
    refuse_unlike_batches,
)
from penstock.runtime.comm.totals import Totals
from penstock.runtime.context import RankContext
from penstock.runtime.gradients.copies import TiedCopies
from penstock.runtime.gradients.gradients import Gradients
from penstock.runtime.gradients.holders import HeldParameter, find_holders
from penstock.runtime.gradients.updates import UpdateWatch
from penstock.runtime.gradients.weight_gradients import install, uninstall
from penstock.runtime.inputs import StepInputs
from penstock.runtime.loop import OpenStep
from penstock.runtime.options import OwnerChoice, SharesSequences
from penstock.runtime.program import Program
from penstock.schedule.actions import Schedule
from penstock.schedule.text import checksum

# (number of microbatches) -> the schedule of this rank's pipeline
ScheduleMaker = Callable[[int], Schedule]


def holders_of(split: SplitModel, layout: Layout) -> tuple[list[HeldParameter], set[tuple[int, ...]]]:
    """The parameters that this rank holds, with the other ranks that do; and all sets of ranks that hold something
    together."""
    sharding = split.tensor_parallel
    return find_holders(
        layout,
        layout.place_of(dist.get_rank()).tensor_parallel_rank,
        split.aliases,
        dict(split.model.named_parameters(remove_duplicate=False)),
        sharding.shards if sharding else (),
        sharding.partial if sharding else (),
        names_in_units(split.model, layout.units),
    )


class Parts:
    """One rank's parts. All ranks of the layout make theirs together. `held`: the parameters this rank holds, with the
    other ranks that do, and the owners that `owner_choice` chooses. `sends_updates`: whether it has chosen any, on any
    rank. `updates`: whether the weights have changed since the last step."""

    gradients: Gradients
    updates: UpdateWatch

    def __init__(
        self,
        split: SplitModel,
        context: RankContext,
        make_schedule: ScheduleMaker,
        held: Sequence[HeldParameter],
        owner_choice: OwnerChoice | None = None,
        share_sequences: SharesSequences | None = None,
    ) -> None:
        self.make_schedule, self._split, self._owner_choice = make_schedule, split, owner_choice
        self.context, self.held = context, held
        self._schedules: dict[int, Schedule] = {}
        self._checksums: dict[int, int] = {}
        self._programs: dict[tuple[int, bool], Program] = {}
        self.closed = False
        device, board = context.device, context.board
        self.open_step = OpenStep(context.interrupts)
        self._channels = P2PChannels(context.groups.p2p_group, context.rank_of, device, board)
        self.boundaries = Boundaries(
            self._channels, context.pipeline.stage_to_rank, context.place.pipeline_rank, device
        )
        self.totals = Totals(context)
        self.sequences = None if share_sequences is None else share_sequences(split, context)
        for give_up in (self.open_step.end, self.totals.clear, self._channels.clear):
            board.on_close(give_up)
        self.roll_call = RollCall(context)
        self.build_gradients()
        board.on_close(lambda: self.gradients.clear())  # those of that moment: they may be built anew

    def build_gradients(self, before: Sequence[HeldParameter] = ()) -> None:
        """Make the parts that know the model's parameters and modules; `before` is what was held until now."""
        context, model = self.context, self._split.model
        chosen = None if self._owner_choice is None else self._owner_choice(self.held, before, context)
        self.sends_updates = chosen is not None
        if chosen is not None:
            self.held = chosen
        self.gradients = Gradients(self.held, context)
        self._ids = frozenset(id(weight.parameter) for weight in self.held)
        self._has_owners = any(weight.owners for weight in self.held)
        self._modules = [model, *map(model.get_submodule, context.layout.units)]
        self._frozen = FrozenParameters(self.held, context, model)
        self.copies = TiedCopies(self.held, context, self._frozen.names)
        self.updates = UpdateWatch([held.parameter for held in self.held])
        if self.schedule(1).splits_backward:
            install(model, self.gradients.queues, self._split.head_in_chunks())

    def connect(self) -> None:
        """Exchange a first message with each neighbour, on an accelerator also in each group. All ranks call this
        together."""
        context = self.context
        if context.device.type != "cpu":
            context.groups.warm_up()
        remote = [boundary for boundary, (a, b) in enumerate(pairwise(context.pipeline.stage_to_rank)) if a != b]
        self._channels.warm_up(remote, context.stages)

    def give_up(self) -> None:
        """Give up groups, hooks and threads."""
        if self.closed:
            return
        self.closed = True
        self.context.board.retire()
        self.remove_hooks()
        if self._split.tensor_parallel is not None:
            self._split.tensor_parallel.disconnect()

    def remove_hooks(self) -> None:
        self.gradients.reducer.remove_hooks()
        uninstall(self._split.model)

    # -- the schedule ----------------------------------------------------------------------------------------------

    def schedule(self, num_microbatches: int) -> Schedule:
        """This pipeline's schedule for a number of microbatches; without any there is nothing to do."""
        if num_microbatches not in self._schedules:
            made = self.make_schedule(max(1, num_microbatches))
            if not num_microbatches:
                made = replace(made, num_microbatches=0, actions=((),) * made.num_ranks)
            self._schedules[num_microbatches] = made
        return self._schedules[num_microbatches]

    def _checksum(self, num_microbatches: int) -> int:
        if num_microbatches not in self._checksums:
            self._checksums[num_microbatches] = checksum(self.schedule(num_microbatches))
        return self._checksums[num_microbatches]

    def program(self, num_microbatches: int, forwards: bool = False) -> Program:
        """This rank's part of the schedule for a number of microbatches, or of its forwards alone."""
        key = num_microbatches, forwards
        if key not in self._programs:
            schedule = self.schedule(num_microbatches)
            self._programs[key] = Program.of(
                schedule.forwards() if forwards else schedule,
                self.context.place.pipeline_rank,
                far_ahead=self._channels.receives_ahead > 0,
            )
        return self._programs[key]

    # -- what the ranks compare ------------------------------------------------------------------------------------

    def settings(
        self, digest: int, inputs: StepInputs, loss_scale: float, reduces_gradients: bool, training: bool = False
    ) -> Settings:
        """What this rank tells the others at the start of a step (`training`) or an evaluation; `digest` is that of its
        batch."""
        frozen, frozen_whole, trainable = self._frozen.numbers(
            self.updates.changed() if self._has_owners else (),
            self.copies.equality_term(training) + bool(self._strangers()),
        )
        return Settings(
            fingerprint=digest,
            num_microbatches=len(inputs.microbatches),
            plans=inputs.plans_checksum(),
            schedule=self._checksum(len(inputs.microbatches)),
            autocast=autocast_code(self.context.device),
            modes=modes_digest(self._modules),
            loss_scale=bits_of(loss_scale),
            reduces_gradients=int(reduces_gradients),
            frozen=frozen,
            frozen_whole=frozen_whole,
            trainable=trainable,
        )

    def _strangers(self) -> list[str]:
        """The names of trained parameters that the model has here and this rank does not hold: those that have come
        since it was parallelised, or were put in the place of others."""
        not_held, modules, seen = [], [self._split.model], set[int]()
        for module in modules:  # faster than `parameters()`, in each step
            if id(module) not in seen:
                seen.add(id(module))
                not_held += [p for p in module._parameters.values() if p is not None and id(p) not in self._ids]
                modules += [child for child in module._modules.values() if child is not None]
        unknown = {id(parameter) for parameter in not_held if parameter.requires_grad}
        if not unknown:
            return []
        return [name for name, parameter in self._split.model.named_parameters() if id(parameter) in unknown]

    def _compare_weights(self, ranks: Ranks) -> None:
        """Say what is wrong with the weights, on every rank."""
        changed = list(self.updates.changed()) if self._has_owners else []
        by_rank = ranks.exchange([self._strangers(), int(self.updates.state()), bool(changed)], "comparing weights")
        if strangers := list(dict.fromkeys(name for names, _, _ in by_rank for name in names)):
            more = f", and {len(strangers) - 5} more" if len(strangers) > 5 else ""
            raise SettingsMismatch(
                f"the model has trained parameters that it had not when it was parallelised: {', '.join(strangers[:5])}"
                f"{more}. Their gradients would be neither summed over pipelines nor counted in the norm. Add or "
                "replace parameters before initialize(); give one that is there other values in place "
                "(parameter.data.copy_(...))"
            )
        torn = len({state for _, state, _ in by_rank}) > 1  # an update that a signal kept some ranks from
        if words := self.copies.reconcile(adopt=torn):
            if not torn:
                raise SettingsMismatch(words)
            warnings.warn(f"{words}. From here on all have the copy of the first of these ranks", stacklevel=2)
        elif any(has_changed for _, _, has_changed in by_rank):
            raise SettingsMismatch(
                "weights were changed on only some of the ranks that hold them. With sharded_optimizer only a weight's "
                "owner has its gradient: update it with step() of a torch.optim.Optimizer, which sends it to the others"
            )

    def shared(self, settings: Settings) -> Summary:
        """What the pipelines compare of a step's or an evaluation's settings."""
        return partial(settings.shared, self.context.pipeline)

    def with_equal_batches(self, inputs: Mapping[str, Any]) -> list[int]:
        """The pipelines that were given the same batch, of several such sets the largest. All ranks call this
        together."""
        context = self.context
        on_host = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, dict(inputs))
        ranks = Ranks(context.groups.world_control, context.board.guard)
        fingerprints = ranks.exchange(fingerprint(on_host), "comparing the pipelines' batches")
        by_rank = dict(zip(ranks.ranks, fingerprints, strict=True))
        given: dict[int, list[int]] = {}
        for replica in range(context.layout.num_replicas):
            first, *_ = context.layout.of_replica(replica)
            given.setdefault(by_rank[first.first_rank], []).append(context.layout.pipelines.index(first))
        same = max(given.values(), key=len)
        return same if len(same) > 1 else []

    def compare(self, answers: Answers, batch: BatchInWords) -> Mapping[int, Sequence[int]]:
        """Raise, on every rank, if what the ranks said differs; returns what those of this pipeline said. `batch` tells
        of this rank's, where batches differ."""
        if answers.equal:
            return answers.pipeline
        context, gathered = self.context, answers.everyone()
        everyone = len(gathered) == context.layout.world_size
        if Settings.batches_differ(gathered, context.layout):
            group = context.groups.world_control if everyone else context.groups.batch_control
            ranks = Ranks(group, context.board.guard)
            by_rank = ranks.exchange(batch(), "comparing batches")
            refuse_unlike_batches(dict(zip(ranks.ranks, by_rank, strict=True)), context.layout)
        if not Settings.compare(gathered, context.layout):
            ranks = Ranks(context.groups.world_control, context.board.guard)
            by_rank = ranks.exchange(self._frozen.described(), "comparing frozen parameters")
            refuse_frozen_on_some(dict(zip(sorted(gathered), by_rank, strict=True)))
            self._compare_weights(ranks)
        return answers.pipeline

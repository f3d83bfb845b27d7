"""The roll call: before ranks do something together, each says what it is about to do, and under which settings.

It is one small gather on the CPU over the pipeline, and one small maximum over the world of what must be equal on all,
in both signs: its messages do not grow with the world. Pipelines that share their sequences take one over these first.
Only where that differs, or a call asks for what each rank said, does everyone hear everyone. Ranks that do different
things get an error which says who does what, and nothing is under way then: the pipeline stays usable.

A signal may reach rank A inside a step that rank B has not begun. B's handler runs at once, and B goes on to another
call. A waits here for B: it sees that call, lets its own handler run as well, and follows B.

A training step starts its roll call and computes its first forward before it needs the answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.runtime.context import RankContext
from penstock.runtime.failures.board import PipelineFailure, ranks_in_words
from penstock.runtime.failures.position import Among

# How long ranks that do different things wait for a signal that some of them have had already.
SIGNAL_GRACE = 3.0
# How long a rank with a signal of its own waits for the others to come to the roll call.
INTERRUPTED_GRACE = 10.0
PAUSE = 0.02
# As many as `Settings` has fields, and as `Settings.shared` gives: all roll calls have one length.
MAX_FACTS = 11
MAX_SHARED = 6
CLOSED = (
    "this model's pipeline was closed: it keeps its weights, but runs no more steps, and saves and loads nothing "
    "together. Make a new model for more"
)


class Call(Enum):
    """What ranks do together, by its name in messages. On the way it is its number here."""

    TRAIN = "training step"
    EVALUATE = "evaluation"
    EVALUATE_TOGETHER = "evaluation over all pipelines"
    GENERATE = "generation"
    CLIP = "clip_grad_norm_"
    NORM = "grad_norm"
    UNSCALE = "GradScaler.unscale_"
    SAVE = "save_parallelized"
    SAVE_WHOLE = "save_pretrained"
    SAVE_ADAPTER = "save_adapter"
    SAVE_BY_OWN_METHOD = "a save by the model's own method"
    LOAD = "from_parallelized"
    LOAD_MODEL = "load_model"
    SAVE_OPTIMIZER = "save_optimizer"
    LOAD_OPTIMIZER = "load_optimizer"
    COUNT = "num_parameters"
    SAVE_CHECKPOINT = "save_checkpoint"
    LOAD_CHECKPOINT = "load_checkpoint"
    COMPARE_STEPS = "CheckpointManager.save"
    UPDATE = "the optimizer's step"
    SEND_UPDATES = "the end of an optimizer's step"
    RENEW = "merge_and_unload"
    SUM = "sum over pipelines"
    COUNT_LABELS = "the Trainer's training step"
    BETWEEN_STEPS = "the end of an evaluation or a save of the Trainer"
    CHANGE = "a change of the run's members"
    DECIDE = "what the Trainer's callbacks decide"
    SHARE = "sharing what the last stage has"

    def __str__(self) -> str:
        return self.value


CALLS = tuple(Call)


class CallMismatch(RuntimeError):
    """The ranks did different things: every rank must make the same calls in the same order."""


class RollCall:
    """This rank's voice in the roll calls of its pipeline, of those that take the same batch, and of the world.
    `own_group`, `batch_group`, `world_group`: the numbers of their groups; None where there is nobody else, or nobody
    but this pipeline."""

    def __init__(self, context: RankContext):
        made = context.groups
        pipeline, batch, world = made.model_parallel_control, made.batch_control, made.world_control
        groups = [group for group in dict.fromkeys((pipeline, batch, world)) if dist.get_world_size(group) > 1]
        self._groups: list[dist.ProcessGroup] = groups
        self.ranks = [dist.get_process_group_ranks(group) for group in groups]
        self.own_group = groups.index(pipeline) if pipeline in groups else None
        self.batch_group = groups.index(batch) if batch in groups and batch != pipeline else None
        self.world_group = groups.index(world) if world in groups and world != pipeline else None
        self.rank, self.board, self.interrupts = context.rank, context.board, context.interrupts
        context.board.on_close(self._groups.clear)

    def begin(
        self, call: Call, facts: Sequence[int] = (), among: Among = Among.ALL, shared: Summary | None = None
    ) -> PendingRollCall:
        """Say that this rank is about to make `call`, as others do; `facts` are numbers to hand to them, `shared` what
        must be the same in their pipelines (see `Answers.equal`)."""
        assert len(facts) <= MAX_FACTS, f"{len(facts)} facts: raise MAX_FACTS"
        return PendingRollCall(self, call, [*facts, *[0] * (MAX_FACTS - len(facts))], self._beyond(among), shared)

    def _beyond(self, among: Among) -> list[int]:
        """The groups over which a call is compared once this pipeline agrees, from the smallest on."""
        wanted = {Among.PIPELINE: (), Among.BATCH: (self.batch_group,), Among.ALL: (self.batch_group, self.world_group)}
        return [number for number in dict.fromkeys(wanted[among]) if number is not None]

    def among(self, number: int | None) -> Among:
        """Whose ranks a group has."""
        if number == self.world_group or len(self.ranks) == 1:
            return Among.ALL
        return Among.BATCH if number == self.batch_group else Among.PIPELINE

    def alive(self, number: int) -> dist.ProcessGroup:
        if not self._groups:
            self.board.check()
            raise RuntimeError(CLOSED)
        return self._groups[number]

    def guard(self, number: int, call: Call) -> contextlib.AbstractContextManager[None]:
        return self.board.guard(f"beginning {call}", self.ranks[number])


class Shared(NamedTuple):
    """What must be the same in all pipelines, what besides in those that take the same batch, and whether something is
    wrong in this one."""

    everywhere: Sequence[int] = ()
    of_batch: Sequence[int] = ()
    wrong: bool = False


# What this pipeline's ranks said, summed up.
Summary = Callable[[Mapping[int, Sequence[int]]], Shared]


class RollCallAnswer(NamedTuple):
    """What one rank says: its call (a number), whether it has waited long enough for another answer, and its facts."""

    call: int
    given_up: int
    facts: list[int]


@dataclass
class Answers:
    """What ranks said in a roll call, all of which made the same call. `pipeline`: the facts of this pipeline's ranks,
    by global rank. `equal`: whether it is known that what must be the same in all pipelines is, and that nothing is
    wrong. `everyone`: gives the facts of all ranks that were asked; all of them call it, or none."""

    pipeline: Mapping[int, Sequence[int]]
    equal: bool
    everyone: Callable[[], Mapping[int, Sequence[int]]]


class PendingRollCall:
    """A roll call that has begun."""

    def __init__(
        self, roll_call: RollCall, call: Call, facts: list[int], beyond: Sequence[int], shared: Summary | None
    ):
        self._roll_call = roll_call
        self._call = call
        self._facts = facts
        self._shared = shared
        self._given_up = False
        self._own, self._beyond = roll_call.own_group, beyond
        # What is under way of the first round.
        self._gathering = None if self._own is None else self._gather(self._own)
        self._comparing = self._maximum(beyond[0], self._me()) if self._own is None and beyond else None

    def wait(self) -> Answers:
        """What the ranks say, once all of them make this call. If they do not, raises CallMismatch on every rank, or
        whatever the handler of a signal raises that came meanwhile."""
        deadline: float | None = None
        while True:
            gathered = self._me()
            if self._own is not None:
                gathered, self._gathering = self._gathered(self._own, self._gathering or self._gather(self._own)), None
            same_call, equal, unlike = _same_call(gathered), bool(self._beyond), None
            given_up = any(theirs.given_up for theirs in gathered.values())
            for number in self._beyond if same_call else ():
                under_way, self._comparing = self._comparing or self._maximum(number, gathered, not equal), None
                same_call, given_up, same = self._compared(number, under_way)
                equal = equal and same
                if not same_call:
                    unlike = number
                    break
            if same_call:
                return Answers(_facts(gathered), equal, partial(self._ask_all, gathered))
            # Nothing is under way, so a signal may end this call here.
            self._roll_call.interrupts.deliver()
            if given_up:
                if unlike is not None:
                    gathered = self._gathered(unlike, self._gather(unlike))
                among = self._roll_call.among(self._own if unlike is None else unlike)
                raise CallMismatch(_mismatch({rank: theirs.call for rank, theirs in gathered.items()}, among))
            deadline = deadline or time.monotonic() + SIGNAL_GRACE
            self._given_up = time.monotonic() > deadline
            if self._roll_call.interrupts.wait(PAUSE):
                self._roll_call.interrupts.deliver()

    def _me(self) -> dict[int, RollCallAnswer]:
        return {self._roll_call.rank: RollCallAnswer(CALLS.index(self._call), int(self._given_up), self._facts)}

    def _ask_all(self, gathered: Mapping[int, RollCallAnswer]) -> Mapping[int, Sequence[int]]:
        return _facts(self._gathered(self._beyond[-1], self._gather(self._beyond[-1])) if self._beyond else gathered)

    # Groups go by their number here, and a transfer that failed is let go of: whoever refers to one keeps its
    # connections open, on which neighbours may wait.

    def _gather(self, number: int) -> tuple[dist.Work, list[torch.Tensor]]:
        group = self._roll_call.alive(number)
        mine = torch.tensor([CALLS.index(self._call), self._given_up, *self._facts], dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in range(group.size())]
        with self._roll_call.guard(number, self._call):
            return group.allgather([every], [mine]), every

    def _gathered(self, number: int, under_way: tuple[dist.Work, list[torch.Tensor]]) -> dict[int, RollCallAnswer]:
        work, every = under_way
        self._finish(number, work)
        ranks, numbers = self._roll_call.ranks[number], [theirs.tolist() for theirs in every]
        answers = zip(ranks, numbers, strict=True)
        return {rank: RollCallAnswer(call, gone, facts) for rank, (call, gone, *facts) in answers}

    def _maximum(
        self, number: int, gathered: Mapping[int, RollCallAnswer], wrong: bool = False
    ) -> tuple[dist.Work, torch.Tensor]:
        """Over a group's pipelines, of what the ranks of this one said: the call and what must be equal, in both signs.
        `wrong`: whether pipelines that take the same batch differ."""
        group = self._roll_call.alive(number)
        shared = Shared() if self._shared is None else self._shared(_facts(gathered))
        facts = [*shared.everywhere, *(shared.of_batch if number == self._roll_call.batch_group else ())]
        assert len(facts) <= MAX_SHARED, f"{len(facts)} shared facts: raise MAX_SHARED"
        numbers = [CALLS.index(self._call), *facts, *[0] * (MAX_SHARED - len(facts))]
        flags = self._given_up, wrong or shared.wrong
        most = torch.tensor([*numbers, *(-number for number in numbers), *flags], dtype=torch.int64)
        with self._roll_call.guard(number, self._call):
            return group.allreduce([most], dist.ReduceOp.MAX), most

    def _compared(self, number: int, under_way: tuple[dist.Work, torch.Tensor]) -> tuple[bool, bool, bool]:
        """Whether all make the same call, whether a rank has given up, and whether all that must be equal is."""
        work, most = under_way
        self._finish(number, work)
        *both, given_up, wrong = most.tolist()
        equal = [high == -low for high, low in zip(both[: MAX_SHARED + 1], both[MAX_SHARED + 1 :], strict=True)]
        return equal[0], bool(given_up), all(equal) and not wrong

    def _finish(self, number: int, work: dist.Work) -> None:
        board = self._roll_call.board
        try:
            self._await(work)
        except PipelineFailure:
            raise
        except BaseException as error:
            # The others count on this rank's part in what is under way.
            board.abort(f"{type(error).__name__} while it waited to begin {self._call}")
            raise
        try:
            work.wait()
        except RuntimeError as error:
            del work
            raise board.lost_connection(f"beginning {self._call}", self._roll_call.ranks[number], error) from None

    def _await(self, work: dist.Work) -> None:
        """Wait in Python, where handlers run, and not in the transport."""
        interrupts = self._roll_call.interrupts
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        before, interrupts.busy = interrupts.busy, False
        while not done.wait(0.1):
            self._roll_call.board.check()
            if interrupts.pending and time.monotonic() - min(interrupts.pending.values()) > INTERRUPTED_GRACE:
                interrupts.deliver()
        interrupts.busy = before


def _facts(gathered: Mapping[int, RollCallAnswer]) -> dict[int, list[int]]:
    return {rank: theirs.facts for rank, theirs in gathered.items()}


def _same_call(gathered: Mapping[int, RollCallAnswer]) -> bool:
    return len({theirs.call for theirs in gathered.values()}) == 1


def _mismatch(calls: Mapping[int, int], among: Among) -> str:
    """Which rank makes which call, of `among`, who must make the same."""
    entered = [
        f"{ranks_in_words([rank for rank, other in calls.items() if other == number])} entered {CALLS[number]}"
        for number in sorted(set(calls.values()))
    ]
    return (
        f"{', '.join(entered)}: {among.in_words} must make the same calls in the same order (a call inside "
        "`if rank == 0:` is made by one rank only)"
    )

"""The roll call: before ranks do something together, each says what it is about to do, and under which settings.

It is one small gather on the CPU. What it buys:

- No rank sends or awaits a message of a step, a save or an evaluation that another rank does not take part in. Ranks
  that do different things get an error which says who does what, and nothing is under way then: the pipeline stays
  usable.
- An interrupt that reaches one rank before a step and another inside it would leave the second waiting for the first.
  It waits here instead, where a signal can still end the wait: the one that was interrupted goes on to save, say; the
  other one sees so, is interrupted too, and follows.
- Settings that decide what is computed (autocast, train or eval mode, frozen parameters, ...) are compared on all
  ranks at once, replicas and tensor-parallel ranks included.

A training step starts its roll call and computes its first forward before it needs the answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.runtime.context import RankContext
from penstock.runtime.failures.board import PipelineFailure, ranks_in_words

# How long ranks that do different things wait for a signal that some of them have had already.
PATIENCE = 3.0
# How long a rank with a signal of its own waits for the others to come to the roll call.
INTERRUPTED_PATIENCE = 10.0
PAUSE = 0.02
MAX_FACTS = 10


class Call(Enum):
    """What ranks do together, by its name in messages. On the way it is its number here."""

    TRAIN = "training step"
    EVALUATE = "evaluation"
    EVALUATE_TOGETHER = "evaluation over all pipelines"
    GENERATE = "generation"
    CLIP = "clip_grad_norm_"
    NORM = "grad_norm"
    SAVE = "save_parallelized"
    LOAD = "from_parallelized"
    LOAD_MODEL = "load_model"
    SAVE_OPTIMIZER = "save_optimizer"
    LOAD_OPTIMIZER = "load_optimizer"
    COUNT = "num_parameters"
    SAVE_CHECKPOINT = "save_checkpoint"
    LOAD_CHECKPOINT = "load_checkpoint"
    COMPARE_STEPS = "CheckpointManager.save"
    UPDATE = "the optimizer's step"
    RENEW = "merge_and_unload"
    SUM = "sum over pipelines"
    COUNT_LABELS = "the Trainer's training step"
    BETWEEN_STEPS = "the end of an evaluation or a save of the Trainer"

    def __str__(self) -> str:
        return self.value


CALLS = tuple(Call)


class CallMismatch(RuntimeError):
    """The ranks did different things: every rank must make the same calls in the same order."""


class RollCall:
    """This rank's voice in the roll calls of its pipeline and of the world.

    Attributes:
        number: how many roll calls of the whole world agreed, alike on all ranks.
    """

    def __init__(self, context: RankContext):
        pipeline, world = context.groups.model_parallel_control, context.groups.world_control
        groups = [group for group in dict.fromkeys((pipeline, world)) if dist.get_world_size(group) > 1]
        self._groups: list[dist.ProcessGroup] = groups
        self._ranks = [dist.get_process_group_ranks(group) for group in groups]
        # How many of them a call of this pipeline alone concerns.
        self._num_own = int(pipeline in groups)
        self._rank = context.rank
        self._board = context.board
        self._interrupts = context.interrupts
        self.number = 0
        context.board.on_abort(self._groups.clear)

    def begin(self, call: Call, facts: Sequence[int] = (), everyone: bool = True) -> Pending:
        """Say that this rank is about to make `call`; `facts` are numbers to hand to the others.

        Args:
            everyone: whether all pipelines make this call, or this one alone.
        """
        assert len(facts) <= MAX_FACTS, "all roll calls have one length"
        return Pending(self, call, [*facts, *[0] * (MAX_FACTS - len(facts))], everyone)

    def take(self, call: Call, facts: Sequence[int] = (), everyone: bool = True) -> dict[int, list[int]]:
        """`begin`, and wait for the answer."""
        return self.begin(call, facts, everyone).wait()

    def _alive(self, number: int) -> dist.ProcessGroup:
        if not self._groups:
            self._board.check()
            raise RuntimeError("this model's pipeline was closed")
        return self._groups[number]

    def _guard(self, number: int, call: Call) -> contextlib.AbstractContextManager[None]:
        return self._board.guard(f"beginning {call}", self._ranks[number])


class Said(NamedTuple):
    """What one rank says: its call (a number), whether it has waited long enough for another answer, and its facts."""

    call: int
    given_up: int
    facts: list[int]


class Pending:
    """A roll call that has begun."""

    def __init__(self, roll_call: RollCall, call: Call, facts: list[int], everyone: bool):
        self._roll_call = roll_call
        self._call = call
        self._facts = facts
        self._everyone = everyone
        self._given_up = False
        self._num_groups = len(roll_call._ranks) if everyone else roll_call._num_own
        self._under_way = self._launch(0) if self._num_groups else None

    def wait(self) -> dict[int, list[int]]:
        """Every rank's facts, by global rank, once all of them make this call.

        Raises:
            CallMismatch: they do not, on every rank.
            PipelineFailure: a rank was lost.
            whatever the handler of a signal raises that came meanwhile, if the others do something else.
        """
        deadline: float | None = None
        while True:
            said = self._round()
            if _agreed(said):
                self._roll_call.number += self._everyone
                return {rank: theirs.facts for rank, theirs in said.items()}
            # Nothing is under way, so a signal may end this call here.
            self._roll_call._interrupts.deliver()
            if any(theirs.given_up for theirs in said.values()):
                raise CallMismatch(_mismatch({rank: theirs.call for rank, theirs in said.items()}))
            deadline = deadline or time.monotonic() + PATIENCE
            self._given_up = time.monotonic() > deadline
            if self._roll_call._interrupts.wait(PAUSE):
                self._roll_call._interrupts.deliver()

    def _round(self) -> dict[int, Said]:
        """What every rank says; of the world only once this pipeline's ranks say the same."""
        said = {self._roll_call._rank: Said(CALLS.index(self._call), 0, self._facts)}
        for number in range(self._num_groups):
            said = self._finish(number)
            if not _agreed(said):
                break
        return said

    # Groups go by their number here, and a transfer that failed is let go of: whoever refers to one keeps its
    # connections open, on which neighbours may wait.

    def _launch(self, number: int) -> tuple[dist.Work, list[torch.Tensor]]:
        group = self._roll_call._alive(number)
        mine = torch.tensor([CALLS.index(self._call), self._given_up, *self._facts], dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in range(group.size())]
        with self._roll_call._guard(number, self._call):
            return group.allgather([every], [mine]), every

    def _finish(self, number: int) -> dict[int, Said]:
        work, every = self._under_way or self._launch(number)
        self._under_way = None
        try:
            self._await(work)
        except PipelineFailure:
            raise
        except BaseException as error:
            # The others count on this rank's part in what is under way.
            self._roll_call._board.abort(f"{type(error).__name__} while it waited to begin {self._call}")
            raise
        ranks = self._roll_call._ranks[number]
        try:
            work.wait()
        except RuntimeError as error:
            del work
            raise self._roll_call._board.lost_connection(f"beginning {self._call}", ranks, error) from None
        numbers = [theirs.tolist() for theirs in every]
        return {rank: Said(call, gone, facts) for rank, (call, gone, *facts) in zip(ranks, numbers, strict=True)}

    def _await(self, work: dist.Work) -> None:
        """Wait in Python, where handlers run, and not in the transport."""
        interrupts = self._roll_call._interrupts
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        before, interrupts.busy = interrupts.busy, False
        while not done.wait(0.1):
            self._roll_call._board.check()
            if interrupts.pending and time.monotonic() - min(interrupts.pending.values()) > INTERRUPTED_PATIENCE:
                interrupts.deliver()
        interrupts.busy = before


def _agreed(said: Mapping[int, Said]) -> bool:
    return len({theirs.call for theirs in said.values()}) == 1


def _mismatch(calls: Mapping[int, int]) -> str:
    """Which rank makes which call."""
    said = [
        f"{ranks_in_words([rank for rank, other in calls.items() if other == number])} entered {CALLS[number]}"
        for number in sorted(set(calls.values()))
    ]
    return (
        f"{', '.join(said)}: every rank of a pipeline must make the same calls in the same order (a call inside "
        "`if rank == 0:` is made by one rank only)"
    )

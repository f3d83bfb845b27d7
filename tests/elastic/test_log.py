"""After a loss every rank repeats what makes it as if nothing had happened: in random programs, at any moments."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from penstock.elastic.protocol import Log, LoggedCall

# What a program is made of: a training step, clipping on each rank, a save, and dropped gradients.
TRAIN, CLIP, SAVE, DROP = "train", "clip", "save", "drop"


@dataclass
class Rank:
    """One that goes through a program, and what it has."""

    program: list[str]
    position: int = 0
    begun: int = 0  # of the calls in which all take part
    next_step: int = 7
    gradients: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)  # of the calls in which all take part
    log: Log = field(default_factory=Log)

    def __post_init__(self) -> None:
        self.log.begin(self.next_step)

    def call(self, position: int) -> LoggedCall:
        kind = self.program[position]

        def run() -> None:
            if kind == TRAIN:
                self.gradients.append(f"step {self.next_step} of {position}")
                self.next_step += 1
            elif kind == CLIP:
                self.gradients.append("clipped")
            if kind != CLIP:
                self.made.append(f"{kind} {position}")

        return LoggedCall(run, trains=kind != SAVE, local=kind == CLIP)

    def step(self, others: list[Rank]) -> None:
        """As far as the next moment at which it might wait."""
        if self.position == len(self.program):
            return
        kind = self.program[self.position]
        if kind == DROP:
            self.gradients.clear()
            self.log.drop(self.next_step)
        else:
            if kind != CLIP and self.begun <= self.position:
                self.begun = self.position + 1
                return
            if kind != CLIP and any(other.begun <= self.position for other in others):
                return
            call = self.call(self.position)
            call.run()
            self.log.add(call)
        self.position += 1

    def repeat(self, calls: int, dropped: int) -> None:
        """After a loss."""
        self.gradients.clear()
        self.made.clear()
        todo, self.next_step = self.log.to_repeat(calls, dropped, self.gradients.clear)
        for call in todo:
            call.run()

    def finish(self) -> None:
        for kind_at in range(self.position, len(self.program)):
            if self.program[kind_at] == DROP:
                self.gradients.clear()
            else:
                self.call(kind_at).run()


def undisturbed(program: list[str]) -> Rank:
    rank = Rank(program)
    rank.finish()
    return rank


@pytest.mark.parametrize("seed", range(20))
def test_ranks_repeat_what_brings_them_to_the_same_place(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        program = draw.choices([TRAIN, CLIP, SAVE, DROP], [4, 1, 2, 2], k=draw.randint(1, 9))
        ranks = [Rank(program) for _ in range(draw.randint(2, 3))]
        for _ in range(draw.randint(0, 40)):
            rank = draw.choice(ranks)
            rank.step([other for other in ranks if other is not rank])
        calls = min(rank.log.num_calls for rank in ranks)
        dropped = min(rank.log.dropped for rank in ranks)
        for rank in ranks:
            rank.repeat(calls, dropped)
            rank.finish()
        assert all(rank.made == ranks[0].made for rank in ranks), program
        assert all(rank.gradients == undisturbed(program).gradients for rank in ranks), program


def test_a_rank_that_went_on_to_the_next_step_saves_again_with_one_that_did_not_see_the_save_end() -> None:
    done: list[str] = []
    ahead, behind = Log(), Log()
    ahead.add(LoggedCall(lambda: done.append("save"), trains=False))
    ahead.drop(3)
    calls, dropped = min(ahead.num_calls, behind.num_calls), min(ahead.dropped, behind.dropped)
    for call in ahead.to_repeat(calls, dropped, lambda: done.append("drop"))[0]:
        call.run()
    assert done == ["save", "drop"]
    assert behind.to_repeat(calls, dropped, done.clear) == ([], 0)


def test_only_calls_that_may_be_repeated_are_kept() -> None:
    log = Log()
    for _ in range(50):
        log.add(LoggedCall(lambda: None, trains=False))
    assert log.num_calls == 50 and list(log.calls) == [49]
    for _ in range(3):
        log.add(LoggedCall(lambda: None, trains=True))
    log.drop(3)
    assert list(log.calls) == [50, 51, 52]
    log.add(LoggedCall(lambda: None, trains=False))
    assert list(log.calls) == [53]

"""The members of a run agree, whatever is lost, late or mistaken: every interleaving of a few members is gone through.

The model: members compute gradients, vote, update, and report when they notice that somebody is gone. Each sees the
crash of another when it likes. A live member may be taken for lost, by some and not by others, so that two members may
take themselves for the one that decides. Between what a decider sees and what it writes anything may happen. What a
member does is asked of `penstock.elastic.protocol`, which the runs use too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import pytest

from penstock.elastic.protocol import Generation, MemberReport, Move, View, next_move, successor

GOAL = 2
# One object for each: worlds are looked for among many, and what is the same object need not be compared.
generation_of, report_of = cache(Generation), cache(MemberReport)


class Member(NamedTuple):
    """What a member knows and does.

    Attributes:
        phase: "gradients", "voting" (its gradients are complete), "changing", "writing" a decision, "ended" or
            "crashed".
        prepared: whether its gradients are complete, so that it can update without anybody.
    """

    generation: int = 0
    committed: int = 0
    phase: str = "gradients"
    prepared: bool = False
    proposal: Generation | None = None


CRASHED = Member(phase="crashed")  # wherever it was, nobody sees it any more


class World(NamedTuple):
    members: tuple[Member, ...]
    generations: tuple[Generation, ...]
    reports: frozenset[tuple[int, MemberReport]] = frozenset()
    # (generation, update, member) of all whose gradients were complete then.
    votes: frozenset[tuple[int, int, int]] = frozenset()
    crashes: int = 0
    mistakes: int = 0

    def with_member(self, number: int, member: Member, **changes: Any) -> World:
        members = (*self.members[:number], member, *self.members[number + 1 :])
        return self._replace(members=members, **changes)


def successors(world: World) -> Iterator[World]:
    """Every world that may come next."""
    for number, member in enumerate(world.members):
        if member.phase in ("crashed", "ended"):
            continue
        if world.crashes:
            yield world.with_member(number, CRASHED, crashes=world.crashes - 1)
        now = world.generations[member.generation]
        if member.phase == "gradients" and member.committed < GOAL:
            vote = (member.generation, member.committed, number)
            yield world.with_member(
                number, member._replace(phase="voting", prepared=True), votes=world.votes | {vote}
            )  # fmt: skip
        if member.phase == "voting" and all(
            (member.generation, member.committed, other) in world.votes for other in now.members
        ):
            yield world.with_member(number, updated(member))  # nobody sees whether it has done so yet
        if member.phase in ("gradients", "voting"):
            disturbed = is_disturbed(world, number)
            if disturbed or world.mistakes:
                left = world.mistakes - (not disturbed)
                yield world.with_member(number, member._replace(phase="changing"), mistakes=left)
        if member.phase == "changing":
            yield from changes(world, number)
        if member.phase == "writing":
            assert member.proposal is not None
            generations = world.generations
            if len(generations) == member.generation + 1:  # created once and for all
                generations = (*generations, member.proposal)
            yield world.with_member(number, member._replace(phase="changing", proposal=None), generations=generations)


def updated(member: Member) -> Member:
    return member._replace(committed=member.committed + 1, phase="gradients", prepared=False)


def is_disturbed(world: World, number: int) -> bool:
    """Whether a member may find that its generation is over. It may also think so by mistake."""
    generation = world.members[number].generation
    others = [other for other in world.generations[generation].members if other != number]
    gone = any(world.members[other].phase in ("crashed", "ended") for other in others)
    reported = any(
        (generation, report.member) != (generation, number) for g, report in world.reports if g == generation
    )
    return gone or reported or len(world.generations) > generation + 1


def changes(world: World, number: int) -> Iterator[World]:
    """What a member may do to get to the next generation, whomever it takes for lost."""
    member = world.members[number]
    now = world.generations[member.generation]
    others = [other for other in now.members if other != number]
    crashed = [other for other in others if world.members[other].phase in ("crashed", "ended")]
    alive = [other for other in others if other not in crashed]
    decided = world.generations[member.generation + 1] if len(world.generations) > member.generation + 1 else None
    reports = {report.member: report for generation, report in world.reports if generation == member.generation}
    for mistaken in ((), *((other,) for other in alive if world.mistakes)):
        for size in range(len(crashed) + 1):
            for seen in combinations(crashed, size):
                view = View(number, now.members, reports, {*seen, *mistaken}, decided)
                move = next_move(view)
                left = world.mistakes - len(mistaken)
                if move is Move.REPORT:
                    report = report_of(number, member.committed)
                    yield world._replace(reports=world.reports | {(member.generation, report)})
                    return
                if move is Move.ENTER:
                    yield world.with_member(number, entered(member, view))
                    return
                if move is Move.LEFT_OUT:
                    yield world.with_member(number, member._replace(phase="ended"))
                    return
                if move is Move.DECIDE:
                    going_on, step, calls, _ = successor(view)
                    proposal = generation_of(
                        member.generation + 1, tuple(report.member for report in going_on), step=step, calls=calls
                    )
                    yield world.with_member(
                        number, member._replace(phase="writing", proposal=proposal), mistakes=left
                    )  # fmt: skip


def entered(member: Member, view: View) -> Member:
    """A member takes up the next generation. Here no step may be made twice or left out."""
    decided = view.decided
    assert decided is not None and decided.number == member.generation + 1
    if decided.step == member.committed + 1:
        assert member.prepared, "it is to make an update of which it has no gradients"
        member = updated(member)
    assert decided.step == member.committed, "an update that it has made would be made again, or one left out"
    return member._replace(generation=decided.number, phase="gradients", prepared=False)


def check(world: World) -> None:
    """What holds in every world."""
    for index, generation in enumerate(world.generations):
        assert generation.number == index
    for number, member in enumerate(world.members):
        assert number in world.generations[member.generation].members
    # Of one generation nobody is more than the vote under way ahead of another.
    for first, second in combinations(world.members, 2):
        if first.generation == second.generation and "crashed" not in (first.phase, second.phase):
            assert abs(first.committed - second.committed) <= 1


@pytest.fixture
def hashes_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen is hashed once: half of the time goes into looking for worlds among those seen."""

    def kept(compute: Callable[[Any], int]) -> Callable[[Any], int]:
        def found(self: Any) -> int:
            if "hash" not in self.__dict__:
                self.__dict__["hash"] = compute(self)
            return int(self.__dict__["hash"])

        return found

    for kind in (Generation, MemberReport):
        monkeypatch.setattr(kind, "__hash__", kept(kind.__hash__))


@pytest.mark.usefixtures("hashes_kept")
@pytest.mark.parametrize(
    ("num_members", "crashes", "mistakes", "least"),
    [(2, 2, 1, 3_500), (3, 2, 0, 12_000), (3, 0, 2, 50_000), (3, 1, 1, 60_000)],
)
def test_every_interleaving_ends_with_one_layout_and_each_update_once(
    num_members: int, crashes: int, mistakes: int, least: int
) -> None:
    everyone = tuple(range(num_members))
    start = World((Member(),) * num_members, (Generation(0, everyone),), crashes=crashes, mistakes=mistakes)
    seen, todo, ends = {start}, [start], 0
    while todo:
        world = todo.pop()
        check(world)
        following = [one for one in successors(world) if one != world]
        ends += not following
        if not following:  # nobody waits for ever: all that live have made all updates, or know that they are out
            for member in world.members:
                assert member.phase in ("crashed", "ended") or member.committed == GOAL, world
        for one in following:
            known = len(seen)
            seen.add(one)  # and hashed once
            todo += [one] * (len(seen) - known)
    assert len(seen) > least and ends

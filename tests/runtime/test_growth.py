"""What one rank does, holds and is told does not grow with the number of ranks."""

from __future__ import annotations

import logging
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from penstock.layout.layout import Layout
from penstock.runtime.comm.bootstrap import allow_descriptors, default_store
from penstock.runtime.failures import inquiry
from penstock.runtime.failures.ring import Ring
from tests.support.ended import LIMIT, End
from tests.support.growth_ranks import form_and_step, groups_of_one, lines_of_a_wait, lose_one, run_counted
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

# benchmarks/studies/growth.py counts up to 64.
WORLDS = tuple(map(int, os.environ.get("PENSTOCK_WORLDS", "4,8,16").split(",")))
# What a rank may have more when the world doubles: connections of the groups that broadcast, and questions for them.
MORE_DESCRIPTORS, MORE_QUESTIONS = 3, 18


def wait_and_lose_one(victim: int, **told: Any) -> dict[str, Any]:
    """The lines that each rank sent to others while one was slow, and what it said; then that one stands still."""
    store, said = default_store(), list[str]()
    assert store is not None

    def note(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        store.set("said", "")
        return True

    def stay() -> None:
        give_up = time.monotonic() + 30
        while not store.check(["said"]) and time.monotonic() < give_up:
            time.sleep(0.05)
        time.sleep(3.0)  # so that another one could say it, too

    logging.getLogger("penstock").addFilter(note)
    waits: list[Any] = [None] * dist.get_world_size()
    with mock.patch.multiple(inquiry, TURN_SECONDS=2.0, ANSWER_SECONDS=2.0):
        dist.all_gather_object(waits, (lines_of_a_wait(victim, 1.0, stay), said))
    return lose_one(victim, "stop", **told, waits=waits)


# What the ranks of a world do once they have been counted, for other tests.
VICTIM = 5  # none of those that are counted
THEN: dict[int, Callable[..., dict[str, Any]]] = {
    8: partial(wait_and_lose_one, VICTIM),
    16: partial(lose_one, VICTIM, "kill"),
}


def count_and_then(world: int) -> dict[str, Any]:
    """The watchers look often, so that what they say and when does not depend on when each looked last."""
    serve = Ring.serve
    with mock.patch.object(Ring, "serve", lambda ring, on_tick, every: serve(ring, on_tick, 0.1)):
        return THEN.get(world, dict)(counts=form_and_step())


@cache
def run_world(world: int) -> tuple[list[End], Counter[str]]:
    return run_counted(world, count_and_then, world)


def test_what_a_rank_asks_for_does_not_grow_with_the_world() -> None:
    found, questions = {}, {}
    for world in WORLDS:
        ends, asked = run_world(world)
        assert {end.kind for rank, end in enumerate(ends) if rank != VICTIM} == {"nothing"}, ends
        assert asked["held"] <= world + 4, f"connections of the store's host with {world} ranks"
        questions[world] = asked["asked"] / world
        # Ranks with the first and with the second stage, of the first and of the last pipelines.
        found[world] = {rank: ends[rank].value["counts"] for rank in (0, 1, world - 2, world - 1)}
    few = found[WORLDS[0]]
    open_files = max(mine["held"]["descriptors"] for mine in few.values())
    assert few[0]["forming"]["allreduce"] and few[0]["step"]["allgather"] and few[0]["step"]["python calls"], "counted"
    for world in WORLDS:
        doublings = (world // WORLDS[0]).bit_length() - 1
        for rank, mine in found[world].items():
            first = few[rank % 2]
            assert mine["step"] == first["step"], f"a step of rank {rank} of {world}"
            for name in ("groups", "threads"):
                assert mine["held"][name] == first["held"][name], f"{name} of rank {rank} of {world}"
            for name in ("new_group", "allreduce", "allgather", "broadcast"):
                assert mine["forming"][name] == first["forming"][name], f"{name} while rank {rank} of {world} formed"
            most = open_files + MORE_DESCRIPTORS * doublings
            assert mine["held"]["descriptors"] <= most, f"open files of rank {rank} of {world}"
        assert questions[world] <= questions[WORLDS[0]] + MORE_QUESTIONS * doublings, f"asked the store: {questions}"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_rank_makes_its_own_groups_only(pool: Pool, device: str) -> None:
    """The last of a pipeline of eight stages, and one in the middle: the groups of an accelerator are counted alone."""
    found = {
        (world, rank): pool.run(1, groups_of_one, world, 8, rank, device, init=False)[0]
        for world in (16, 128, 1024)
        for rank in (7, 3)
    }
    for (world, rank), counts in found.items():
        assert counts["new_group"] == found[16, rank]["new_group"] <= 10, f"rank {rank} of {world}"
        assert counts["threads"] <= 16 and counts["connections"] <= 16 + 2 * world.bit_length(), (
            f"rank {rank} of {world}"
        )


def test_one_rank_asks_for_all_that_wait_and_is_answered_alone_and_says_once_for_whom() -> None:
    ends, _ = run_world(8)
    lines, ((line,), *others) = zip(*ends[0].value["waits"], strict=True)
    assert others == [[]] * 7
    assert 8 < sum(lines) <= 2 * 8
    assert line.startswith("rank 0 has waited ") and f"; rank {VICTIM} is in its own program " in line
    assert re.findall(r"rank \d+", line) == ["rank 0", f"rank {VICTIM}"]
    assert "test_growth.py, line" in line and line.endswith(": still waiting")


@pytest.mark.parametrize(
    ("world", "kind", "words"), [(16, "killed", "was lost"), (8, "stands still", "does not answer")]
)
def test_a_rank_of_many_that_is_lost_is_named_by_all(world: int, kind: str, words: str) -> None:
    ends, _ = run_world(world)
    assert ends[VICTIM].kind == kind
    for end in (*ends[:VICTIM], *ends[VICTIM + 1 :]):
        assert end.kind == "nothing" and f"rank {VICTIM} {words}" in end.value["text"], end
        assert end.value["learned"] < 5.0 and end.value["seconds"] < LIMIT


def test_the_place_of_a_rank_is_found_among_unlike_pipelines() -> None:
    sizes = [1 + index * 7 % 5 for index in range(200)]
    layout = Layout.place([[[f"unit {stage}"] for stage in range(size)] for size in sizes], None, 2)
    places = [(index, rank, shard) for index, size in enumerate(sizes) for rank in range(size) for shard in range(2)]
    found = [layout.place_of(rank) for rank in range(layout.world_size)]
    assert [(one.pipeline, one.pipeline_rank, one.tensor_parallel_rank) for one in found] == places
    for outside in (-1, layout.world_size):
        with pytest.raises(ValueError, match=f"rank {outside} is outside"):
            layout.place_of(outside)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_descriptors")
def test_open_files_are_allowed_for_all_ranks_or_their_number_is_said() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_descriptors(8)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512, "enough already"
    allow_descriptors(200)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2 * 200
    if hard != resource.RLIM_INFINITY:
        with pytest.raises(RuntimeError, match=rf"{hard} ranks need .* the hard limit here is {hard}: raise"):
            allow_descriptors(hard)

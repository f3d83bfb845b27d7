"""A rank that is killed while the ranks form their pipelines: the others end with an error that names it."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from ended import LIMIT, kill_self, run_ranks
from families import FAMILIES, batch
from training import parallelize, run_step


def die_in(where: str, name: str, count: int) -> None:
    """Kill this process when it calls `name` of the module or class `where` for the `count`-th time."""
    module, _, owner_name = where.partition(":")
    owner: Any = importlib.import_module(module)
    if owner_name:
        owner = getattr(owner, owner_name)
    original, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            kill_self()
        return original(*args, **kwargs)

    setattr(owner, name, call)


def initialize(victim: int, where: str, name: str, count: int) -> None:
    model = FAMILIES["gpt2"].build()
    if int(os.environ["RANK"]) == victim:
        die_in(where, name, count)
    # One that is not needed for the rest of it is missed in the first step.
    run_step(parallelize(model, 3, num_microbatches=2), batch("causal", 4))


@pytest.mark.parametrize(("victim", "by_hand"), [(0, True), (1, True), (1, False)])
@pytest.mark.parametrize(
    ("where", "name", "count"),
    [
        ("torch.distributed", "init_process_group", 1),
        ("torch.distributed", "all_gather_object", 1),
        ("penstock.runtime.engine", "SplitModel", 1),
        ("torch.distributed", "new_group", 1),
        ("torch.distributed", "new_group", 2),
        ("penstock.runtime.boundary.p2p:P2PChannels", "warm_up", 1),
        ("penstock.runtime.engine", "copy_from_first_holders", 1),
    ],
)
def test_a_rank_killed_in_initialize_is_named_by_all_others(
    where: str, name: str, count: int, victim: int, by_hand: bool
) -> None:
    ends = run_ranks(3, initialize, victim, where, name, count, by_hand=by_hand)
    killed = ends.pop(victim)
    assert killed.kind == "killed", killed
    for end in ends:
        assert end.kind == "PipelineFailure", f"{end.kind}: {end.text} {end.value}"
        assert f"rank {victim} was lost" in end.text
        assert end.at - killed.at < LIMIT

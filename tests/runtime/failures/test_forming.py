"""A rank that is killed, or fails alone, while the ranks form their pipelines: the others end with an error that names
it."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any
from unittest import mock

import pytest

from penstock.api import builder
from penstock.runtime.failures import watcher
from tests.support.ended import LIMIT, kill_self, run_ranks
from tests.support.families import FAMILIES, batch
from tests.support.hetero import make_plugin
from tests.support.pool import Pool
from tests.support.training import parallelize, run_step

pytestmark = pytest.mark.slow


def die_in(where: str, name: str, count: int) -> None:
    """Kill this process when it calls `name` of the module or class `where` for the `count`-th time."""
    module, _, owner_name = where.partition(":")
    owner: Any = importlib.import_module(module)
    if owner_name:
        owner = getattr(owner, owner_name)
    original, calls = getattr(owner, name), [0]
    has_store = os.environ["RANK"] == "0" and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            while has_store and not (watcher._watch and watcher._watch.ring.complete):
                time.sleep(0.01)  # without the store the others would not find each other
            kill_self()
        return original(*args, **kwargs)

    setattr(owner, name, call)


def initialize(victim: int, where: str, name: str, count: int) -> None:
    model = FAMILIES["gpt2"].build()
    if int(os.environ["RANK"]) == victim:
        die_in(where, name, count)
    # One that is not needed for the rest of it is missed in the first step.
    run_step(parallelize(model, 3, num_microbatches=2), batch("causal", 4))


@pytest.mark.parametrize(
    ("where", "name", "count", "victim", "by_hand"),
    [
        ("torch.distributed", "init_process_group", 1, 0, True),
        ("torch.distributed", "init_process_group", 1, 1, False),
        ("penstock.runtime.comm.exchange:Ranks", "differing", 1, 1, True),
        ("penstock.runtime.formation", "SplitModel", 1, 0, True),
        ("torch.distributed", "new_group", 1, 1, False),
        ("torch.distributed", "new_group", 2, 0, True),
        ("penstock.runtime.boundary.p2p:P2PChannels", "warm_up", 1, 1, True),
        ("penstock.runtime.formation", "copy_from_first_holders", 1, 1, False),
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


def fail_to_estimate(caller: str) -> None:
    """Rank 0 fails as it estimates what the units cost, and its process goes on."""
    model = FAMILIES["gpt2"].build()
    plugin = make_plugin(model, "2x2")
    failing = mock.Mock(side_effect=MemoryError("no memory is left"))
    with mock.patch.object(builder, "unit_costs", failing if os.environ["RANK"] == "0" else builder.unit_costs):
        if caller == "penstock.api.plugin":
            plugin.configure(model)
        else:
            parallelize(model, 2)


@pytest.mark.parametrize("caller", ["penstock.api.initialize", "penstock.api.plugin"])
def test_an_error_in_the_estimate_of_rank_0_is_one_on_every_rank(pool: Pool, caller: str) -> None:
    first, second = pool.run(2, fail_to_estimate, caller, outcomes=True, timeout=30)
    assert isinstance(first, MemoryError) and str(first) == "no memory is left"
    assert isinstance(second, RuntimeError) and str(second).startswith("rank 0 failed while "), second
    assert str(second).endswith("costs: MemoryError: no memory is left")

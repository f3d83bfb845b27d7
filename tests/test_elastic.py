"""Training goes on in the same processes when others are lost, join or leave, and computes what it would have."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import elastic
from penstock import Elastic, HeterogeneousParallelPlugin

STEPS = 12
EXACT = 1e-9


@cache
def expected() -> dict[int, float]:
    return elastic.undisturbed(STEPS)


def assert_as_undisturbed(run: elastic.Run, survivors: list[elastic.Member]) -> None:
    """All that trained saw the undisturbed run's losses; nobody lost a sample or trained on one twice."""
    for member in run.members:
        for step, loss in member.losses.items():
            assert abs(loss - expected()[step]) < EXACT, f"step {step}\n{run.printed()}"
    for member in survivors:
        assert member.status == 0, run.printed()
        assert member.losses.keys() == set(range(member.notes[0].get("begins", 0), STEPS)) or member.losses
        assert max(member.losses) == STEPS - 1
    elastic.assert_whole_epochs(run.samples(), STEPS)


def test_a_run_survives_processes_killed_in_a_forward_in_the_update_and_after_it(tmp_path: Path) -> None:
    run = elastic.Run(tmp_path, STEPS, 5)
    orders = ["kill@2/forward"], ["kill@5/update"], ["kill@7/updated"], [], []
    members = [run.start(*order) for order in orders]
    run.wait()
    assert [member.status for member in members[:3]] == [-9, -9, -9], run.printed()
    assert_as_undisturbed(run, members[3:])
    for member in members[3:]:
        assert member.losses.keys() == expected().keys()
        assert [change["step"] for change in member.end["changes"]] in ([2, 5, 8], [2, 6, 8])
        assert all(len(change["lost"]) == 1 for change in member.end["changes"])


def test_what_a_run_needs_is_said_before_anything_is_formed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="store must be tcp://host:port or file:///folder, got 'head:29400'"):
        Elastic("head:29400")
    with pytest.raises(ValueError, match="copies must be at least 1, got 0"):
        Elastic("tcp://head:29400", copies=0)
    run = Elastic((tmp_path / "store").as_uri())
    with pytest.raises(TypeError, match="elastic= needs global_batch_size"):
        HeterogeneousParallelPlugin(elastic=run)
    with pytest.raises(ValueError, match=r"a multiple of microbatch_size \(4\), got 6"):
        HeterogeneousParallelPlugin(microbatch_size=4, elastic=run, global_batch_size=6)
    with pytest.raises(ValueError, match="global_batch_size goes with elastic="):
        HeterogeneousParallelPlugin(global_batch_size=8)
    plugin = HeterogeneousParallelPlugin(elastic=run, global_batch_size=8)
    with pytest.raises(RuntimeError, match="leave set_pipelines out"):
        plugin.set_pipelines([], [])

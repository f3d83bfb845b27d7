"""What other stages would gain, from recorded steps whose optimum is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from rebalance import read_step, rebalance

from penstock.planning.profile import Profile, UnitCost
from penstock.schedule import Costs, build, simulate, write_timeline


def profile(head: float = 0.01) -> Profile:
    names = ["wte", *(f"h.{index}" for index in range(6)), "head"]
    seconds = {"wte": 0.001, "head": head}
    return Profile("gpt", tuple(UnitCost(name, *[seconds.get(name, 0.01)] * 3) for name in names))


def record(path: Path, schedule: str, stages: list[float]) -> Path:
    plan = build(schedule, len(stages), 8)
    return write_timeline(simulate(plan, Costs(forward=stages, backward=stages, weight=stages)).events, path)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_heavy_head_gives_blocks_away(tmp_path: Path, schedule: str) -> None:
    """The head takes as long as three blocks, which the profile did not know: 4 + 2 blocks are balanced, not 3 + 3."""
    path = record(tmp_path / "step.json", schedule, [0.031, 0.06])
    found = rebalance(profile(head=0.03), path, sizes=(4, 4))
    assert [len(units) for units in found.after] == [5, 3]
    assert found.after[0][-1] == "h.3"
    expected = simulate(build(schedule, 2, 8), Costs(*[[0.041, 0.05]] * 3)).makespan
    assert found.predicted[1] == pytest.approx(expected)
    assert found.measured == pytest.approx(found.predicted[0])
    assert "stage 0: wte, h.0-3 (123.0 ms a microbatch, now 93.0 ms)" in str(found)


def test_balanced_stages_stay(tmp_path: Path) -> None:
    found = rebalance(profile(), record(tmp_path / "step.json", "1f1b", [0.041, 0.03]))
    assert found.after == found.before and found.gain == 0
    assert "the stages are balanced" in str(found)


def test_the_recorded_schedule_is_read_back(tmp_path: Path) -> None:
    schedule, times, _ = read_step(record(tmp_path / "step.json", "zb-h1", [0.01, 0.02, 0.03]))
    assert schedule.actions == build("zb-h1", 3, 8).actions and schedule.splits_backward
    assert [sum(stage) for stage in times] == pytest.approx([0.03, 0.06, 0.09])


def test_what_is_no_recorded_step_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text('{"traceEvents": [{"cat": "F"}]}')
    with pytest.raises(ValueError, match="is no recorded step"):
        rebalance(profile(), path)
    with pytest.raises(ValueError, match="stages of 1, 2 parts do not fit 2 stages of 8 parts"):
        rebalance(profile(), record(path, "1f1b", [0.1, 0.1]), sizes=(1, 2))

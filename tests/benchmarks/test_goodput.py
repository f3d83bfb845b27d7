"""Goodput under failures, against closed formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from goodput import (
    STRATEGIES,
    Operation,
    best_interval,
    compare,
    expected_share,
    goodput,
    main,
    random_failures,
    read_failures,
)

HOUR, DAY = 3600.0, 86400.0
RECOVERY, RESTART, SPARES = STRATEGIES
# 1,000 devices of which one fails every five hours and is back at once: the setting of Young's and Daly's formulas.
MTBF = 5 * HOUR
ALWAYS_ALL = Operation(1000, HOUR, checkpoint=120, restart=300, repair=0.0)


def mean_goodput(operation: Operation, strategy: str, seeds: int = 6, horizon: float = 100 * DAY) -> float:
    traces = [random_failures(operation.devices, MTBF * operation.devices, horizon, seed) for seed in range(seeds)]
    return sum(goodput(operation, strategy, trace, horizon) for trace in traces) / seeds


@pytest.mark.parametrize("minutes", [10, 40, 120])
def test_restarts_follow_dalys_formula(minutes: float) -> None:
    operation = replace(ALWAYS_ALL, interval=minutes * 60)
    expected = expected_share(operation.interval, operation.checkpoint, operation.restart, MTBF)
    assert mean_goodput(operation, RESTART) == pytest.approx(expected, abs=0.01)


def test_the_best_interval_of_young_and_daly_is_best_in_the_simulation_too() -> None:
    best = best_interval(ALWAYS_ALL.checkpoint, MTBF)
    shares = {factor: mean_goodput(replace(ALWAYS_ALL, interval=factor * best), RESTART) for factor in (0.4, 1.0, 2.5)}
    assert max(shares, key=shares.__getitem__) == 1.0
    # And in the formula that it is the optimum of.
    exact = max(range(60, 20_000, 10), key=lambda t: expected_share(t, ALWAYS_ALL.checkpoint, 300.0, MTBF))
    assert best == pytest.approx(exact, rel=0.01)


def test_without_failures_only_checkpoints_cost() -> None:
    operation = Operation(10, 3000.0, checkpoint=100.0, spares=2)
    shares = compare(operation, [], 31_000.0)
    assert shares == pytest.approx({RECOVERY: 30 / 31, RESTART: 30 / 31, SPARES: 0.8 * 30 / 31})


@pytest.mark.parametrize(
    ("devices", "options", "failures", "expected"),
    [
        # 1000 s at full speed, half a step lost, 2 s of recovery, and 998 s with nine of ten devices.
        (10, {"recovery": 2.0, "step": 4.0}, [1000.0], (1000 - 0.9 * 2.0 + 0.9 * 998) / 2000),
        (10, {"recovery": 5.0, "restart": 100.0}, [1000.0, 1003.0], 0.8 * (2000 - 1103) / 2000),
        (2, {"recovery": 0.0, "step": 0.0, "repair": 500.0}, [1000.0], (1000 + 250 + 500) / 2000),
        (4, {"recovery": 0.0, "step": 0.0, "speed": {4: 1.0, 3: 0.5}.__getitem__}, [1000.0], 0.75),
    ],
    ids=["a step and the device's speed", "lost while others recover: a restart", "repaired", "a speed by plans"],
)
def test_recovery_loses_what_is_counted_by_hand(devices: int, options, failures: list[float], expected: float) -> None:
    operation = Operation(devices, 1e9, checkpoint=0.0, **{"repair": 1e9, **options})
    assert goodput(operation, RECOVERY, failures, 2000.0) == pytest.approx(expected)


def test_failures_are_read_from_a_file(tmp_path) -> None:
    path = tmp_path / "failures.csv"
    path.write_text("hours,node\n2.5,b\n0.5,a\n")
    assert read_failures(path) == [1800.0, 9000.0]
    path.write_text("1\nsoon\n")
    with pytest.raises(ValueError, match="line 2: 'soon' is no time in hours"):
        read_failures(path)
    with pytest.raises(ValueError, match="unknown strategy 'hope'"):
        goodput(ALWAYS_ALL, "hope", [], 1.0)


def test_the_script_prints_and_draws(tmp_path, capsys) -> None:
    path = tmp_path / "goodput.svg"
    main(100, 1000, days=10, plot=path)
    output = capsys.readouterr().out
    assert all(strategy in output for strategy in STRATEGIES)
    assert "Young and Daly" in output and path.read_text().count("<path") > 10

"""Which rank holds what, against definitions worked out by hand or by brute force."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from penstock.layout.layout import Layout, Place
from penstock.modeling.weights.whole import unit_of
from penstock.runtime.gradients.holders import find_holders
from penstock.simulation.describe import segments

UNITS = [f"u.{index}" for index in range(6)]


def split(units: list[str], ends: list[int]) -> list[list[str]]:
    return [units[a:b] for a, b in pairwise([0, *ends, len(units)])]


def test_pipelines_are_placed_one_after_another() -> None:
    layout = Layout.place([split(UNITS, [2, 4]), split(UNITS, []), split(UNITS, [3])])
    assert layout.world_size == 6
    assert [layout.place_of(rank) for rank in range(6)] == [
        *[Place(0, stage, 0) for stage in range(3)],
        Place(1, 0, 0),
        *[Place(2, stage, 0) for stage in range(2)],
    ]
    assert layout.holders("u.2") == (1, 3, 4) and layout.holders("u.5") == (2, 3, 5)
    with pytest.raises(ValueError, match="rank 6 is outside this layout of 6 ranks"):
        layout.place_of(6)


def test_several_stages_on_a_rank_make_no_more_ranks() -> None:
    layout = Layout.place([split(UNITS, [1, 3, 5])] * 2, [(0, 1, 1, 0)] * 2)
    assert layout.world_size == 4
    assert layout.pipelines[1].stages_of(0) == (0, 3) and layout.pipelines[1].stages_of(1) == (1, 2)
    assert layout.holders("u.0") == layout.holders("u.5") == (0, 2)


@pytest.mark.parametrize("seed", range(30))
def test_segments_are_the_runs_of_units_with_the_same_holders(seed: int) -> None:
    draw = random.Random(seed)
    units = [f"u.{index}" for index in range(draw.randint(1, 12))]
    pipelines = []
    for _ in range(draw.randint(1, 4)):
        size = draw.randint(1, len(units))
        pipelines.append(split(units, sorted(draw.sample(range(1, len(units)), size - 1))))
    layout = Layout.place(pipelines)
    found = segments(layout)
    assert [unit for segment in found for unit in segment.units] == units
    for segment in found:
        assert all(layout.holders(unit) == segment.ranks for unit in segment.units)
        assert len(segment.ranks) == len(pipelines)
    # Neighbours differ, so no segment could be longer; the number is bounded by the boundaries.
    assert all(one.ranks != other.ranks for one, other in pairwise(found))
    assert len(found) <= 1 + sum(len(stages) - 1 for stages in pipelines)


def test_a_tied_weight_is_held_by_all_stages_of_its_names_and_a_loose_one_by_everybody() -> None:
    layout = Layout.place([split(UNITS, [2, 4]), split(UNITS, [3])])
    aliases = [("u.0.weight", "u.5.weight"), ("u.2.weight",), ("scale",)]
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    local = {"u.0.weight": weights[0], "scale": weights[2]}
    held, shared = find_holders(layout, 0, aliases, local)
    assert [(one.name, one.parameter is weight, one.ranks) for one, weight in zip(held, weights[::2], strict=True)] == [
        ("u.0.weight", True, (0, 2, 3, 4)),
        ("scale", True, (0, 1, 2, 3, 4)),
    ]
    # Every set of several holders, also those this rank is not in: all ranks make all groups.
    assert shared == {(0, 2, 3, 4), (1, 3), (0, 1, 2, 3, 4)}


def test_a_parameter_belongs_to_the_unit_its_name_begins_with() -> None:
    units = {"layers.1", "layers.10", "head"}
    assert unit_of("layers.1.mlp.weight", units) == "layers.1"
    assert unit_of("layers.10.weight", units) == "layers.10"
    assert unit_of("head.weight", units) == "head"
    assert unit_of("layers.2.weight", units) is None

"""Balancing: the contiguous cut whose costliest stage is cheapest. Oracle: all cuts."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import transformers

from families import FAMILIES
from penstock.modeling.costs import balance, unit_costs
from penstock.modeling.units import list_units


def stage_costs(costs: list[float], sizes: tuple[int, ...] | list[int]) -> list[float]:
    ends = [0, *itertools.accumulate(sizes)]
    return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]


def test_balance_is_optimal() -> None:
    generator = random.Random(0)
    for _ in range(300):
        count = generator.randint(1, 9)
        costs = [generator.choice([0.0, generator.random(), float(generator.randint(1, 5))]) for _ in range(count)]
        num_stages = generator.randint(1, count)
        sizes = balance(costs, num_stages)
        assert len(sizes) == num_stages and sum(sizes) == count and min(sizes) >= 1
        every = [
            stage_costs(costs, [b - a for a, b in itertools.pairwise((0, *cuts, count))])
            for cuts in itertools.combinations(range(1, count), num_stages - 1)
        ]
        least = min(map(max, every))
        found = stage_costs(costs, sizes)
        assert max(found) <= least * (1 + 1e-9) + 1e-12
        evenest = min(sum(c * c for c in cost) for cost in every if max(cost) <= least * (1 + 1e-9) + 1e-12)
        assert sum(c * c for c in found) <= evenest * (1 + 1e-6) + 1e-9


def test_equal_units_are_shared_equally() -> None:
    assert balance([1.0] * 12, 4) == [3, 3, 3, 3]
    assert sorted(balance([1.0] * 30, 4)) == [7, 7, 8, 8]
    assert sum(balance([0.1] * 1000, 64)) == 1000


@pytest.mark.parametrize(("count", "num_stages"), [(3, 4), (3, 0), (0, 1)])
def test_impossible_numbers_of_stages_are_named(count: int, num_stages: int) -> None:
    with pytest.raises(ValueError, match=str(num_stages if num_stages < 1 else count)):
        balance([1.0] * count, num_stages)


def test_costs_follow_the_multiplications() -> None:
    """GPT-2's blocks do 24 h^2 + 4 s h multiply-adds' flops per token, its head 2 h V; embeddings do next to none."""
    config = transformers.GPT2Config()
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    units = list_units(model)
    costs = dict(zip(units, unit_costs(model, units, tokens=128), strict=True))
    hidden, tokens = config.n_embd, 128
    expected = 2 * hidden * config.vocab_size / (24 * hidden**2 + 4 * tokens * hidden)
    assert costs["lm_head"] / costs["transformer.h.0"] == pytest.approx(expected, rel=0.1)
    assert costs["transformer.h.0"] == pytest.approx(costs["transformer.h.11"])
    assert costs["transformer.wte"] < costs["transformer.h.0"] / 20
    assert sum(costs.values()) == pytest.approx(len(units))


def test_experts_count_although_they_cannot_run_on_meta_tensors() -> None:
    cheap = FAMILIES["mixtral"].build(dtype=torch.float32, intermediate_size=8)
    dear = FAMILIES["mixtral"].build(dtype=torch.float32, intermediate_size=512)
    units = list_units(cheap)
    ratios = [unit_costs(model, units)[1] / unit_costs(model, units)[-1] for model in (cheap, dear)]
    assert ratios[1] > 5 * ratios[0]

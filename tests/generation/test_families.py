"""generate() over stages gives every rank the tokens of the unsplit model, which is the oracle."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from penstock.modeling.graph.shapes import ShapeFunctions
from tests.support import generation_ranks as ranks
from tests.support.families import FAMILIES
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

# Tiny random models repeat themselves; without repetitions the order of all likely tokens counts.
NEW = {"no_repeat_ngram_size": 1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 7, "do_sample": False, **NEW},
    "beams": {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, **NEW},
    "sampling": {"max_new_tokens": 6, "do_sample": True, "temperature": 2.0, "top_k": 20},
    "without a cache": {"max_new_tokens": 4, "do_sample": False, "use_cache": False, **NEW},
}
# By number of ranks. The interleaved schedule has two stages on each.
SETUPS = {
    2: [
        *((family, "1f1b") for family in ("llama", "opt", "bloom", "mixtral", "bart")),
        *((family, "interleaved-1f1b") for family in ("gemma2", "t5")),
    ],
    3: [(family, "1f1b") for family in ("gpt2", "t5", "whisper")],
}


@pytest.mark.parametrize("num_ranks", SETUPS)
def test_every_rank_has_the_unsplit_tokens(pool: Pool, num_ranks: int) -> None:
    cases, setups = list(CASES.values()), SETUPS[num_ranks]
    expected = [ranks.run_cases(ranks.build(family), ranks.prompt(family), cases, seed=5) for family, _ in setups]
    for greedy, _, sampled, _ in expected:
        assert len(set(greedy.flatten().tolist())) > 4, "the oracle says more than one token"
        assert not torch.equal(greedy[:, : sampled.shape[1]], sampled[:, : greedy.shape[1]])
    for found in pool.run(num_ranks, ranks.generate, setups, cases, num_ranks, timeout=200):
        for setup, tokens, wanted in zip(setups, found, expected, strict=True):
            for name, one, other in zip(CASES, tokens, wanted, strict=True):
                assert torch.equal(one, other), f"{setup}, {name}: {one.tolist()} instead of {other.tolist()}"


def experts() -> tuple[torch.Tensor, int]:
    """Tokens of a model that is to give its router's logits, and how often a unit's shapes were worked out for them."""
    model, ids = ranks.parallel(FAMILIES["mixtral"].build(dtype=torch.float32).eval()), torch.arange(1, 9).reshape(2, 4)
    model.generate(ids, max_new_tokens=2, do_sample=False)
    with mock.patch.object(ShapeFunctions, "_attempt", autospec=True, side_effect=ShapeFunctions._attempt) as attempts:
        return model.generate(ids, max_new_tokens=9, do_sample=False), attempts.call_count


def test_experts_whose_shapes_are_assumed_do_not_hold_up_every_token(pool: Pool) -> None:
    unsplit: Any = FAMILIES["mixtral"].build(dtype=torch.float32).eval()
    expected = unsplit.generate(torch.arange(1, 9).reshape(2, 4), max_new_tokens=9, do_sample=False)
    for tokens, attempts in pool.run(2, experts):
        assert torch.equal(tokens, expected) and attempts < 9

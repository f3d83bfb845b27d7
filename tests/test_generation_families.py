"""generate() over stages gives every rank the tokens of the unsplit model, which is the oracle."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import generation_ranks as ranks
from pool import Pool

FAMILIES = ["gpt2", "llama", "opt", "bloom", "gemma2", "mixtral", "t5", "bart", "whisper"]
# Tiny random models repeat themselves; without repetitions the order of all likely tokens counts.
NEW = {"no_repeat_ngram_size": 1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 7, "do_sample": False, **NEW},
    "beams": {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, **NEW},
    "sampling": {"max_new_tokens": 6, "do_sample": True, "temperature": 2.0, "top_k": 20},
    "without a cache": {"max_new_tokens": 4, "do_sample": False, "use_cache": False, **NEW},
}


@cache
def expected(family: str) -> list[torch.Tensor]:
    return ranks.run_cases(ranks.build(family), ranks.prompt(family), list(CASES.values()), seed=5)


def check(pool: Pool, family: str, num_ranks: int, schedule: str) -> None:
    results = pool.run(num_ranks, ranks.generate, family, list(CASES.values()), num_ranks, schedule, timeout=120)
    for found in results:
        for name, tokens, reference in zip(CASES, found, expected(family), strict=True):
            assert torch.equal(tokens, reference), f"{name}: {tokens.tolist()} instead of {reference.tolist()}"


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_has_the_unsplit_tokens(pool: Pool, family: str, num_stages: int) -> None:
    check(pool, family, num_stages, "1f1b")


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "t5"])
def test_ranks_with_two_stages_each_have_the_unsplit_tokens(pool: Pool, family: str) -> None:
    check(pool, family, 2, "interleaved-1f1b")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_says_more_than_one_token(family: str) -> None:
    greedy, _, sampled, _ = expected(family)
    assert len(set(greedy.flatten().tolist())) > 4
    assert not torch.equal(greedy[:, : sampled.shape[1]], sampled[:, : greedy.shape[1]])

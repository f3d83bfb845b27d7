"""Errors in generate() reach every rank within seconds, and wrong arguments leave the pipeline usable."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support import generation_ranks as ranks
from tests.support.pool import Pool, WorkerDied

pytestmark = pytest.mark.slow

MISTAKES = [
    ({"nonsense": 1}, "ValueError.*nonsense"),
    ({"max_new_tokens": -1}, "ValueError.*max_new_tokens"),
    ({"input_ids": torch.empty(0, 9, dtype=torch.int64)}, r"ValueError.*empty: input_ids has shape \(0, 9\)"),
    ({"custom_generate": "someone/recipe"}, "NotImplementedError.*custom_generate"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "ValueError.*trust_remote_code"),
    ({"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}, "NotImplementedError.*contrastive"),
    ({"assistant_early_exit": 1}, "NotImplementedError.*assistant_early_exit"),
    ({"cache_implementation": "paged"}, "NotImplementedError.*continuous batching"),
    *(({"generation_groups": number}, "ValueError") for number in (0, -1, True, 1.5, "two")),
]


def test_wrong_arguments_are_refused_and_the_pipeline_goes_on(pool: Pool) -> None:
    expected = ranks.build("gpt2").generate(**ranks.prompt("gpt2"), **ranks.GREEDY)
    for errors, tokens, left in pool.run(2, ranks.after_errors, [mistake for mistake, _ in MISTAKES]):
        for error, (mistake, pattern) in zip(errors, MISTAKES, strict=True):
            assert re.search(pattern, error, re.DOTALL), f"{mistake}: {error}"
        assert torch.equal(tokens, expected)
        assert left == []


def test_quantised_caches_are_refused_by_name(pool: Pool) -> None:
    for errors in pool.run(2, ranks.with_quantised_caches):
        assert len(errors) == 3
        for error in errors:
            assert error.startswith("NotImplementedError: a quantised cache of keys and values")


def test_different_arguments_are_noticed_on_every_rank(pool: Pool) -> None:
    expected = ranks.build("gpt2").generate(**ranks.prompt("gpt2"), **ranks.GREEDY)
    wrong = [{"generation_groups": 1.5}, {"generation_groups": 3}, {"assistant_early_exit": 1}, {"max_new_tokens": "6"}]
    for errors, tokens, _ in pool.run(2, ranks.different_arguments, wrong):
        assert len(errors) == 1 + len(wrong)
        for error in errors:
            assert error.startswith("ValueError: generate() was given different arguments on ranks [0, 1]")
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize(
    ("where", "killed", "groups", "schedule"),
    [(1, False, False, "1f1b"), (0, True, False, "1f1b"), (2, True, True, "1f1b"), (1, False, True, "zb-v")],
)
def test_a_failure_on_one_rank_is_one_on_all(pool: Pool, where: int, killed: bool, groups: bool, schedule: str) -> None:
    """In a user's own processor, or in one of several groups."""
    results = pool.run(3, ranks.failing, where, killed, groups, schedule, outcomes=True)
    own = results.pop(where)
    assert isinstance(own, WorkerDied) if killed else own[0] == "ZeroDivisionError: on one rank"
    for said, threads, took in results:
        assert said.startswith("PipelineFailure: ")
        assert (f"rank {where}" if killed else f"rank {where} failed: ZeroDivisionError: on one rank") in said
        assert threads == []
        assert took < 10


def test_a_path_that_one_rank_takes_alone_is_named_on_all(pool: Pool) -> None:
    """It compares its new plan with the others, which do not: theirs is known."""
    for error in pool.run(3, ranks.another_path, 1, outcomes=True):
        assert error.startswith("PipelineFailure: ") and "this can never end" in error, error
        assert "while comparing arguments" in error


@pytest.mark.parametrize(
    ("interrupted", "group", "schedule"),
    [([1], 0, "1f1b"), ([2], 2, "1f1b"), ([0, 1, 2], 1, "1f1b"), ([0], 1, "zb-v")],
)
def test_an_interrupt_in_any_groups_turn_is_an_error_that_names_it_on_all_ranks(
    pool: Pool, interrupted: list[int], group: int, schedule: str
) -> None:
    """Ctrl-C is raised in the thread of the first group, whichever has the turn."""
    results = pool.run(3, ranks.interrupted, interrupted, group, schedule)
    assert any(errors[0].startswith("KeyboardInterrupt") for errors, _, _ in results)
    for rank, ((first, following), threads, took) in enumerate(results):
        who = f"rank {interrupted[0]} failed" if len(interrupted) == 1 else r"rank \d failed"
        named = rf"PipelineFailure: {who}: KeyboardInterrupt"
        assert re.match(rf"{named}|KeyboardInterrupt" if rank in interrupted else named, first)
        assert re.match(named, following)
        assert threads == []
        assert took < 10


@pytest.mark.parametrize(("schedule", "last"), [("1f1b", 2), ("zb-v", 0)])
def test_the_pipeline_goes_on_after_errors_in_one_group(pool: Pool, schedule: str, last: int) -> None:
    expected = ranks.build("gpt2").generate(**ranks.prompt("gpt2", 6), **ranks.GREEDY)
    for rank, (errors, tokens, threads) in enumerate(pool.run(3, ranks.usable_after_errors, schedule)):
        assert errors[0] == "ZeroDivisionError: on one rank"
        said = "probability tensor contains" if rank == last else f"rank {last}, which holds the last stage"
        assert said in errors[1]
        assert torch.equal(tokens, expected)
        assert threads == []

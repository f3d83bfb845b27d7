"""generate() of a batch in groups, one after another on each stage, gives the tokens of the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import generation_ranks as ranks
from tests.support.families import batch, gpt2
from tests.support.pool import Pool
from tests.support.training import parallelize

# Every third token ends a sequence, so that rows, and whole groups, end at different lengths.
ENDING: dict[str, Any] = {"eos_token_id": [*range(2, 97, 3), 52], "pad_token_id": 0}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 6, "do_sample": False},
    "greedy, ended": {"max_new_tokens": 14, "do_sample": False, **ENDING},
    "sampling": {"max_new_tokens": 6, "do_sample": True, "temperature": 2.0, "top_k": 20},
    "sampling, ended": {"max_new_tokens": 14, "do_sample": True, "temperature": 2.0, **ENDING},
    "returns": {"max_new_tokens": 5, "do_sample": True, "num_return_sequences": 3, "top_p": 0.9},
    "beams": {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "beams, ended": {"max_new_tokens": 14, "num_beams": 3, "early_stopping": True, **ENDING},
    "beam sampling": {"max_new_tokens": 5, "num_beams": 2, "do_sample": True},
    "processors": {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.5, "bad_words_ids": [[5], [7]]},
    "static cache": {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"},
    "without a cache": {"max_new_tokens": 4, "do_sample": False, "use_cache": False},
}
# A batch that two and three groups cut unevenly.
SIZE = 7


# All cases once, and in each family those in which it has another cache or another kind of input.
FAMILIES = {
    "gpt2": list(CASES),
    "llama": ["greedy, ended", "returns", "beam sampling", "processors"],
    "t5": ["greedy", "sampling, ended", "beams, ended", "without a cache"],
    "gemma2": ["greedy, ended", "sampling", "beams", "static cache"],
}


def check(
    pool: Pool, family: str, names: list[str], size: int, num_ranks: int, schedule: str = "1f1b", groups: int = 0
) -> list[torch.Tensor]:
    """The tokens and the random state afterwards are the unsplit model's, which are returned."""
    cases = [CASES[name] for name in names]
    wanted = ranks.with_states(ranks.build(family), family, cases, size)
    arguments = family, cases, size, num_ranks, schedule, groups or num_ranks
    found_on = pool.run(num_ranks, ranks.in_groups, *arguments, timeout=200)
    for rank, (found, told) in enumerate(found_on):
        assert told == [], "every case is decoded in groups"
        for name, (tokens, state), (expected, after) in zip(names, found, wanted, strict=True):
            assert torch.equal(tokens, expected), f"{name}: {tokens.tolist()} instead of {expected.tolist()}"
            assert rank or torch.equal(state, after), name
    return [tokens for tokens, _ in wanted]


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_give_the_unsplit_tokens_and_random_state(pool: Pool, family: str) -> None:
    oracle = check(pool, family, FAMILIES[family], SIZE, 3 if family == "gpt2" else 2)
    for name, tokens in zip(FAMILIES[family], oracle, strict=True):
        if family == "gpt2" and "ended" in name:
            ends = ENDING["eos_token_id"]
            lengths = [next(n for n, token in enumerate([*row, 2]) if token in ends) for row in tokens[:, 9:].tolist()]
            assert len({max(lengths[:3]), max(lengths[3:5]), max(lengths[5:])}) > 1, f"{name}: {lengths}"


@pytest.mark.parametrize(
    ("family", "names", "num_ranks", "schedule", "groups"),
    [
        ("gpt2", ["greedy, ended", "sampling, ended", "returns", "beams, ended", "static cache"], 3, "zb-v", 3),
        ("t5", FAMILIES["t5"], 2, "zb-v", 2),
        ("t5", FAMILIES["t5"][:2], 2, "zb-v", 3),
        ("gemma2", FAMILIES["gemma2"], 2, "interleaved-1f1b", 2),
        ("llama", ["greedy, ended", "sampling, ended"], 2, "zb-v", 7),
        ("lfm2", ["greedy", "sampling, ended"], 2, "zb-v", 2),
        ("llama", ["sampling, ended"], 3, "interleaved-1f1b", 2),
    ],
)
def test_groups_pass_between_two_stages_of_a_rank(
    pool: Pool, family: str, names: list[str], num_ranks: int, schedule: str, groups: int
) -> None:
    check(pool, family, names, SIZE, num_ranks, schedule, groups)


# Samples, wanted groups, options, and the groups that two ranks then make of it.
NUMBERS: list[tuple[int, Any, str, int]] = [
    *((4, "auto", "", 2), (3, "auto", "", 1), (3, 3, "", 3), (2, 8, "", 2), (4, 1, "", 1)),
    # Assisted decoding is of one sample.
    *((1 if name == "lookup" else 4, "auto", name, 1) for name in ranks.WATCHED),
]


def test_one_group_where_something_looks_at_the_whole_batch(pool: Pool) -> None:
    model = ranks.build("gpt2")
    for found, said in pool.run(2, ranks.numbers_of_groups, NUMBERS, timeout=120):
        for (size, _, name, number), (tokens, groups) in zip(NUMBERS, found, strict=True):
            assert groups == number, name
            assert torch.equal(tokens, ranks.watched(model, size, ranks.WATCHED.get(name, {}))), name
        # By the first rank only, and once.
        assert len(said) in (0, 1 + len(ranks.WATCHED)) and len(set(said)) == len(said)


def test_start_tokens_of_each_sample_keep_the_batch_together(pool: Pool) -> None:
    case = {"max_new_tokens": 5, "do_sample": False, "decoder_start_token_id": [3, 4, 5, 6]}
    ((expected, _),) = ranks.with_states(ranks.build("t5"), "t5", [case], 4)
    first, second = pool.run(2, ranks.in_groups, "t5", [case], 4, 2, "1f1b", 2)
    assert first[1] == ["decoder_start_token_id is given for each sample"]
    assert all(torch.equal(tokens, expected) for ((tokens, _),), _ in (first, second))


@pytest.mark.parametrize(
    ("family", "names", "schedule"),
    [
        ("gpt2", ["greedy, ended", "sampling", "returns", "beams", "without a cache"], "1f1b"),
        ("gemma2", ["sampling", "beams"], "1f1b"),
        ("gpt2", ["sampling", "beams"], "zb-v"),
    ],
)
def test_prompts_that_are_worked_on_in_parts_give_the_unsplit_tokens(
    pool: Pool, family: str, names: list[str], schedule: str
) -> None:
    """Groups of 59 and 58 samples of 9 tokens, each in two parts."""
    check(pool, family, names, 117, 2, schedule)


def test_long_prompts_cross_a_boundary_in_parts(pool: Pool) -> None:
    first, last = pool.run(2, ranks.messages_of_prompts, 117, "1f1b")
    assert first == {"activations between stages 0 and 1": 2 * 2}
    assert last == {"results for pipeline rank 0": 2}
    outer, inner = pool.run(2, ranks.messages_of_prompts, 117, "zb-v")
    assert outer == {"activations between stages 0 and 1": 2 * 2, "results for pipeline rank 1": 2}
    assert inner == {"activations between stages 2 and 3": 2 * 2}


def test_a_token_of_a_group_is_one_message_over_each_boundary(pool: Pool) -> None:
    """And one with the chosen tokens to each other rank; nobody announces shapes."""
    first, second, last = pool.run(3, ranks.messages_of_tokens, 5, 9)
    assert first == {"activations between stages 0 and 1": 3 * 4}
    assert second == {"activations between stages 1 and 2": 3 * 4}
    assert last == {"results for pipeline rank 0": 3 * 4, "results for pipeline rank 1": 3 * 4}


def generate_to_one_of_several_ends(ends: list[int]) -> torch.Tensor:
    model = parallelize(gpt2().eval(), 2)
    ids = batch("causal", 4)["input_ids"]
    more = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "generation_groups": 2}
    return model.generate(ids, eos_token_id=torch.tensor(ends), **more)


def test_end_tokens_in_a_tensor_are_of_all_samples(pool: Pool) -> None:
    """There are as many as samples, so they could be taken for one of each."""
    plain = gpt2().eval()
    ids = batch("causal", 4)["input_ids"]
    free = plain.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    ends = [int(row[-3]) for row in free][::-1]  # each sample's stands at another one's place
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(ids, eos_token_id=torch.tensor(ends), **given)
    for found in pool.run(2, generate_to_one_of_several_ends, ends):
        assert torch.equal(found, expected)

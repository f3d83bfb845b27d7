"""Options of generate() over stages, against the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import generation_ranks as ranks
from tests.support.pool import Pool

DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "processors": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7]], "num_beams": 2},
    "details": DETAILS,
    "details of beams": {**DETAILS, "num_beams": 3, "num_return_sequences": 2},
    "prompt in chunks": {"prefill_chunk_size": 4},
    "static cache": {"cache_implementation": "static"},
    "beam sampling": {"num_beams": 2, "do_sample": True},
}


def flat(result: Any) -> list[torch.Tensor]:
    """All tensors of a result but its cache's."""
    if isinstance(result, torch.Tensor):
        return [result]
    values = (
        [value for name, value in result.items() if name != "past_key_values"] if isinstance(result, dict) else result
    )
    return [tensor for value in values if value is not None for tensor in flat(value)]


def test_results_with_options_are_the_unsplit_ones(pool: Pool) -> None:
    cases = [{**ranks.GREEDY, **options} for options in OPTIONS.values()]
    expected = ranks.run_cases(ranks.build("llama"), ranks.prompt("llama"), cases, seed=5)
    for (results,) in pool.run(2, ranks.generate, [("llama", "1f1b")], cases, 2, timeout=120):
        for name, result, reference in zip(OPTIONS, results, expected, strict=True):
            assert_close(result, reference, name)


def assert_close(result: Any, reference: Any, name: str) -> None:
    assert len(flat(result)) == len(flat(reference)), name
    for found, wanted in zip(flat(result), flat(reference), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9, msg=lambda text: f"{name}: {text}")


def test_encoder_states_reach_every_rank(pool: Pool) -> None:
    case = {**ranks.GREEDY, "return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True}
    (expected,) = ranks.run_cases(ranks.build("t5"), ranks.prompt("t5"), [case], seed=5)
    for ((result,),) in pool.run(3, ranks.generate, [("t5", "1f1b")], [case], 3, timeout=120):
        assert_close(result, expected, "t5")


def test_objects_and_other_inputs(pool: Pool) -> None:
    expected = ranks.custom()
    for found in pool.run(2, ranks.custom, timeout=120):
        for kind, tokens, wanted in zip(ranks.KINDS, found, expected, strict=True):
            assert torch.equal(tokens, wanted), kind


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_each_rank_caches_its_own_layers_only(pool: Pool, family: str) -> None:
    expected = ranks.cache_layers(family)
    found = pool.run(2, ranks.cache_layers, family)
    owned = 0
    for layer, (keys, values) in enumerate(expected):
        for rank in range(2):
            its_keys, its_values = found[rank][layer]
            if its_keys.shape == keys.shape:
                owned += 1
                assert torch.equal(its_keys, keys)
                assert torch.equal(its_values, values)
            else:  # one head, one dimension: nothing but a length
                assert its_keys.shape == (keys.shape[0], 1, keys.shape[2], 1) == its_values.shape
    assert owned == len(expected)
    total = sum(keys.nbytes + values.nbytes for keys, values in expected)
    of_ranks = [sum(keys.nbytes + values.nbytes for keys, values in layers) for layers in found]
    assert total <= sum(of_ranks) < 1.1 * total


def test_a_cache_can_be_continued(pool: Pool) -> None:
    expected = ranks.continued()
    assert all(torch.equal(found, expected) for found in pool.run(2, ranks.continued))


@pytest.mark.parametrize(
    ("family", "schedule"), [("llama", "1f1b"), ("gpt2", "zb-v"), ("lfm2", "zb-v"), ("bart", "zb-v")]
)
def test_a_loop_that_decodes_by_hand_has_the_unsplit_tokens_logits_and_losses(
    pool: Pool, family: str, schedule: str
) -> None:
    expected = ranks.decode_by_hand(ranks.build(family), family)
    for seen, unlike in pool.run(2, ranks.decode_by_hand_on_stages, family, schedule):
        for one, other in zip(seen, expected, strict=True):
            # No label is left to compare with where one token is given.
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, equal_nan=True)
        if family != "bart":
            assert "given different arguments on ranks [0, 1]" in unlike


def test_one_rank_streams_unless_all_are_asked_to(pool: Pool) -> None:
    streamer = ranks.Collect()
    expected = ranks.build("gpt2").generate(**ranks.prompt("gpt2", 1), **ranks.GREEDY, streamer=streamer)
    cases = [([0, 1], False), ([0, 1], True), ([1], False)]
    for rank, found in enumerate(pool.run(2, ranks.stream, cases)):
        for (given, _), heard, (tokens, streamed) in zip(cases, ([0], [0, 1], [1]), found, strict=True):
            assert torch.equal(tokens, expected)
            # One that is not heard ends all the same, for whoever iterates over it.
            assert streamed == (streamer.tokens if rank in heard else ["end"] if rank in given else None)


def test_a_criterion_met_on_one_rank_stops_all(pool: Pool) -> None:
    whole = ranks.build("gpt2").generate(**ranks.prompt("gpt2"), **ranks.GREEDY)
    assert all(torch.equal(found, whole[:, :12]) for rank in pool.run(2, ranks.stop_on_one_rank) for found in rank)


def test_ranks_whose_clocks_differ_stop_together(pool: Pool) -> None:
    first, second = pool.run(2, ranks.stop_by_the_clock)
    assert torch.equal(first, second)
    assert first.shape[1] < 9 + 40


def test_random_states_are_the_first_ranks_during_generation_only(pool: Pool) -> None:
    torch.manual_seed(5)
    ranks.build("gpt2").generate(**ranks.prompt("gpt2"), max_new_tokens=6, do_sample=True)
    (_, first), (restored, _) = pool.run(2, ranks.random_states)
    assert torch.equal(first, torch.get_rng_state())  # moved on as the unsplit model's
    assert restored


def test_dropout_in_training_mode_does_not_depend_on_the_layout(pool: Pool) -> None:
    (one,) = pool.run(1, ranks.with_dropout, 1)
    for (tokens,), training in pool.run(3, ranks.with_dropout, 3):
        assert torch.equal(tokens, one[0][0])
        assert training


def test_pipelines_generate_independently(pool: Pool) -> None:
    for pipeline, tokens in pool.run(4, ranks.replicas):
        options = {"max_new_tokens": 3 + 5 * pipeline, "do_sample": False}
        assert torch.equal(tokens, ranks.build("gpt2").generate(**ranks.prompt("gpt2", size=2 + pipeline), **options))


def test_generation_between_training_steps_changes_nothing(pool: Pool) -> None:
    expected = ranks.build("gpt2").generate(**ranks.prompt("gpt2"), **ranks.GREEDY)
    for before, tokens, after in pool.run(2, ranks.between_steps):
        assert torch.equal(tokens, expected)
        assert before == after

"""Sequences that are shared out over several ranks: loss and gradients are the unsplit model's."""

from __future__ import annotations

import pytest

from penstock.runtime.comm.settings import BatchMismatch
from tests.support.context_parallel_ranks import (
    DECODERS,
    REFUSED,
    bytes_received,
    evaluate_in_parts,
    evaluate_on_all_but_the_last,
    evaluate_unsplit,
    logits_in_training,
    losses_with_shards,
    oracle,
    orders_of_a_shuffle,
    train_in_bfloat16,
    train_in_parts,
    train_of_criterion,
    train_refused,
    use_unlike_batches,
    weights_after_steps,
)
from tests.support.pool import Pool
from tests.support.training import EXACT, assert_steps_equal

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", DECODERS)
def test_two_parts_give_the_unsplit_loss_and_gradients(pool: Pool, family: str) -> None:
    rows = ["padded", "packed"][[*DECODERS].index(family) % 2]
    ranks = pool.run(2, train_in_parts, family, rows)
    assert_steps_equal(ranks, oracle(family, rows), replicas=2)


@pytest.mark.parametrize("family", ["opt", "gpt_oss", "llama_dynamic"])
def test_a_copy_counts_positions_and_attends_as_the_model_does(pool: Pool, family: str) -> None:
    """OPT counts the tokens of the mask; the attention of gpt-oss cannot go by heads; rotary embeddings that stretch
    are made of whole sequences, once."""
    ranks = pool.run(2, train_in_parts, family, "padded", copied=True)
    assert_steps_equal(ranks, oracle(family, "padded"), replicas=2)


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "gpt2"])
def test_two_stages_of_two_parts_give_the_unsplit_loss_and_gradients(pool: Pool, family: str, rows: str) -> None:
    ranks = pool.run(4, train_in_parts, family, rows, stages=2)
    assert_steps_equal(ranks, oracle(family, rows), replicas=2)


def test_a_criterions_own_labels_count_once_whatever_they_are_called(pool: Pool) -> None:
    """Sequences of 21 tokens are filled up to 24."""
    assert_steps_equal(pool.run(2, train_of_criterion), oracle("llama", "padded"), replicas=2)


def test_parts_combine_with_tensor_parallelism(pool: Pool) -> None:
    losses = pool.run(4, losses_with_shards)
    expected = sum(oracle("llama", "padded", vocab_size=100).losses)
    assert losses == [losses[0], losses[0], losses[2], losses[2]]
    assert abs(losses[0][0] + losses[2][0] - expected) < EXACT
    assert abs(losses[0][1] + losses[2][1] - losses[0][2]) < EXACT, "after an update"


@pytest.mark.parametrize("family", ["bloom", "mamba", "t5", "falcon_h1"])
def test_what_mixes_tokens_outside_of_attention_is_refused_by_name(pool: Pool, family: str) -> None:
    for error in pool.run(2, train_in_parts, family, "padded", outcomes=True):
        assert isinstance(error, NotImplementedError), error
        assert "context_parallel_size" in str(error)


@pytest.mark.parametrize("case", REFUSED)
def test_what_parts_cannot_compute_is_refused_by_name(pool: Pool, case: str) -> None:
    for error in pool.run(2, train_refused, case, outcomes=True):
        assert isinstance(error, NotImplementedError), error
        assert REFUSED[case] in str(error)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_an_evaluation_gives_the_unsplit_outputs(pool: Pool, family: str) -> None:
    loss, logits = evaluate_unsplit(family)
    for found_loss, found in pool.run(4, evaluate_in_parts, family, stages=2):
        assert abs(found_loss - loss) < EXACT
        assert found.shape == logits.shape and float((found - logits).abs().max()) < EXACT


@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluating"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_sequences_must_be_given_the_same_batch(pool: Pool, ranks: int, evaluates: bool) -> None:
    """Of four ranks two each share theirs; an evaluation is that of a group alone."""
    errors = pool.run(ranks, use_unlike_batches, evaluates, outcomes=True)
    for error in errors[2:] if evaluates and ranks == 4 else errors:
        assert isinstance(error, BatchMismatch), error
        assert "of pipelines that share their sequences must be given the same batch" in str(error)


def test_outputs_in_training_are_those_of_a_part(pool: Pool) -> None:
    for microbatches in pool.run(2, logits_in_training):
        assert len(microbatches) == 2
        for found, expected in microbatches:
            assert found.shape == expected.shape and float((found - expected).abs().max()) < EXACT


@pytest.mark.parametrize("key_value_heads", [2, 1])
def test_each_layer_receives_the_bytes_of_the_formula(pool: Pool, key_value_heads: int) -> None:
    """By heads, and by tokens where there is one head of keys for both parts."""
    for received, expected in pool.run(2, bytes_received, key_value_heads):
        assert received == expected


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "phi3", "qwen3_moe"])
def test_one_head_of_keys_for_all_parts_is_exact(pool: Pool, family: str, rows: str) -> None:
    ranks = pool.run(2, train_in_parts, family, rows, num_key_value_heads=1)
    assert_steps_equal(ranks, oracle(family, rows, num_key_value_heads=1), replicas=2)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "mistral", "opt"])
def test_rows_that_are_padded_on_the_left_with_positions_of_their_own_are_exact(pool: Pool, family: str) -> None:
    """Windows are of 5 tokens, where a part has 12."""
    ranks = pool.run(2, train_in_parts, family, "counted")
    assert_steps_equal(ranks, oracle(family, "counted"), replicas=2)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_recomputed_layers_and_logits_in_chunks_are_exact(pool: Pool, family: str) -> None:
    ranks = pool.run(4, train_in_parts, family, "packed", stages=2, recomputes=True, loss_chunk_tokens=5)
    assert_steps_equal(ranks, oracle(family, "packed"), replicas=2)


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_after_steps_are_the_unsplit_ones(pool: Pool, sharded: bool) -> None:
    """Of AdamW, also where the parts divide its state."""
    for found, expected in pool.run(4, weights_after_steps, sharded):
        assert found and all(float((value - expected[name]).abs().max()) < 1e-8 for name, value in found.items())


def test_bfloat16_is_as_near_to_double_precision_as_the_unsplit_model_is(pool: Pool) -> None:
    plain = train_in_bfloat16(False)
    for rank in pool.run(2, train_in_bfloat16, True):
        assert all(found < 1.5 * expected + 1e-3 for found, expected in zip(rank, plain, strict=True)), (rank, plain)


def test_a_pipeline_that_skips_an_evaluation_is_named_with_the_call_that_it_makes(pool: Pool) -> None:
    """Of four ranks two each share sequences: the others have evaluated theirs. All train on after that."""
    *others, second, third = pool.run(4, evaluate_on_all_but_the_last)
    assert [said for said, _ in others] == ["nothing"] * 2
    for said, _ in (second, third):
        assert "rank 2 entered evaluation" in said and "rank 3 entered training step" in said
        assert "every rank of a pipeline, and of those that share its sequences, must make the same calls" in said
    steps = [step for _, step in (*others, second, third)]
    for pair in (steps[:2], steps[2:]):
        loss = sum(sum(step.losses) for step in pair)
        assert abs(loss - sum(oracle("llama", "padded").losses) / 2) < EXACT


def test_a_shuffle_without_a_seed_is_the_same_on_ranks_that_share_sequences(pool: Pool) -> None:
    first, *others = pool.run(4, orders_of_a_shuffle)
    assert all(order == first for order in others) and first != sorted(first)


def test_four_parts_are_exact(pool: Pool) -> None:
    ranks = pool.run(4, train_in_parts, "gpt2", "padded", parts=4)
    assert_steps_equal(ranks, oracle("gpt2", "padded"), replicas=4)

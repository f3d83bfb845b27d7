"""Evaluation, generation, checkpoints and errors under tensor parallelism."""

from pathlib import Path

import pytest

from tests.support.pool import Pool
from tests.support.tensor_parallel_ranks import (
    evaluate_and_generate,
    in_double,
    overflow_is_shared,
    refusals,
    save_and_reshard,
)
from tests.support.tensor_parallel_uses import (
    costs,
    different_batches,
    go_on_with_another_size,
    optimizers_of_whole_matrices,
    recomputed_with_dropout,
    unlike_pipelines,
    with_a_plan_of_its_own,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("family", "stages"), [("gpt2", 2), ("llama", 1)])
def test_evaluation_and_generation_equal_the_unsplit_models(pool: Pool, family: str, stages: int) -> None:
    for result in pool.run(stages * 2, evaluate_and_generate, family, stages, 2):
        assert result.pop("loss") < 1e-6
        assert result.pop("logits") < 1e-10
        assert all(result.values()), result


@pytest.mark.parametrize(
    ("family", "layouts"), [("gpt2", [(2, 2), (1, 4), (2, 1)]), ("bert_mlm", [(2, 2), (4, 1), (1, 2)])]
)
def test_checkpoints_load_into_any_layout(
    pool: Pool, family: str, layouts: list[tuple[int, int]], tmp_path: Path
) -> None:
    files = pool.run(4, save_and_reshard, family, str(tmp_path), layouts)[0]
    expected = {f"pytorch_model_tp_{t}_pp_{p}.bin" for t in range(2) for p in range(2)}
    assert expected == {name for name in files if name.endswith(".bin")}


def test_refusals_name_the_quantity_and_what_would_do(pool: Pool) -> None:
    for messages in pool.run(6, refusals):
        heads, groups, vocabulary, family, world = messages
        assert "has 4 attention heads, which 3 does not divide: sizes that would do are [1, 2, 4]" in heads
        assert "attention heads, which 6 does not divide: sizes that would do are [1, 2]" in groups
        assert "97 entries in its vocabulary, which 2 does not divide" in vocabulary
        assert "resize_token_embeddings(98)" in vocabulary
        assert family.startswith("NotImplementedError: there is no tensor-parallel plan for FalconForCausalLM")
        assert "register_tensor_parallel_plan" in family
        assert "pipelines of 4 processes, but 6 processes were started" in world


def test_an_overflow_on_one_slice_is_one_everywhere(pool: Pool) -> None:
    assert pool.run(4, overflow_is_shared, "gpt2", 2, 2) == [1.0] * 4


def test_unlike_pipelines_of_shared_stages_train_as_the_unsplit_model(pool: Pool, tmp_path: Path) -> None:
    for result in pool.run(6, in_double, unlike_pipelines, "gpt2", "1x2,2x1", 12, str(tmp_path / "state"), "zb-v"):
        assert result["step"] < 1e-10
        assert result["parameters"] < 1e-8
        assert result["restored"]


def test_a_run_goes_on_with_another_tensor_parallel_size(pool: Pool, tmp_path: Path) -> None:
    """Its optimizer's state is cut as the weights are: from two slices to none and four, and other stages."""
    layouts = [("2x2,2x2", 1), ("1x4", 4)]
    for differences in pool.run(4, in_double, go_on_with_another_size, str(tmp_path), ("1x2,1x2", 2), layouts):
        assert len(differences) == 2 and max(differences) < 1e-10
    for differences in pool.run(4, in_double, go_on_with_another_size, str(tmp_path), ("4x4", 1), [("1x2,1x2", 2)]):
        assert max(differences) < 1e-10


def test_optimizers_that_need_whole_matrices_are_refused_and_their_states_are_not_cut(
    pool: Pool, tmp_path: Path
) -> None:
    for *steps, load in pool.run(2, optimizers_of_whole_matrices, str(tmp_path)):
        for kind, step in zip(("Adafactor", "Muon", "ByNorms"), steps, strict=True):
            assert step.startswith(f"{kind} computes an update from the whole of a matrix, but with tensor parallelism")
        assert "cannot shard the state lm_head.weight//row_var for tensor_parallel_size 2" in load


def test_a_registered_plan_is_followed(pool: Pool) -> None:
    for result in pool.run(4, in_double, with_a_plan_of_its_own, 2):
        assert max(result["loss"], result["gradient"]) < 1e-10


def test_recomputation_draws_the_same_dropout(pool: Pool) -> None:
    assert max(pool.run(2, recomputed_with_dropout)) < 1e-7


def test_different_batches_on_ranks_that_share_a_stage_are_refused(pool: Pool) -> None:
    for message in pool.run(2, different_batches):
        assert "rank 0 was given a batch" in message and "those that share a stage's weights included" in message


def test_a_layer_takes_two_sums_forward_and_two_backward_and_logits_are_never_gathered(pool: Pool) -> None:
    """Besides the layers' four each: the embedding's sum, the head's backward, and two in the loss."""
    for family in ("gpt2", "llama"):
        for result in pool.run(2, costs, family, 1, 2):
            assert result["sums"] == 4 * result["layers"] + 1 + 1 + 2
            assert result["gathers"] == 0
            assert result["share"] < 1.15

"""Tensor parallelism gives the unsplit model's loss and gradients."""

import pytest

from pool import Pool
from tensor_parallel_ranks import dropout_against_one_stage, in_double, optimize_and_clip, train_against_unsplit

FAMILIES = ["gpt2", "llama", "qwen3", "mistral", "mixtral", "opt", "bert_mlm", "bert_classification", "vit"]


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_unsplit_models(pool: Pool, family: str) -> None:
    for result in pool.run(4, in_double, train_against_unsplit, family, 2, 2):
        assert result["loss"] < 1e-10
        assert result["gradient"] < 1e-10


@pytest.mark.parametrize(
    ("family", "stages", "size", "options"),
    [
        ("gpt2", 1, 2, {}),
        ("gpt2", 1, 4, {}),
        ("llama", 1, 2, {}),
        ("mixtral", 1, 2, {}),
        ("vit", 1, 4, {}),
        ("gpt2", 3, 2, {}),
        ("bert_mlm", 3, 2, {}),
        ("gpt2", 2, 2, {"schedule": "zb-h1", "microbatches": 4}),
        ("llama", 2, 2, {"schedule": "interleaved-1f1b", "microbatches": 4}),
        ("mixtral", 2, 2, {"microbatches": 1, "model_settings": {"output_router_logits": True}}),
        ("gpt2", 1, 2, {"model_settings": {"tie_word_embeddings": False}}),
    ],
)
def test_other_layouts_and_schedules_too(pool: Pool, family: str, stages: int, size: int, options: dict) -> None:
    for result in pool.run(stages * size, in_double, train_against_unsplit, family, stages, size, **options):
        assert result["loss"] < 1e-10
        assert result["gradient"] < 1e-10


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_replicated_pipelines_with_an_optimizer_made_before_and_clipping(pool: Pool, family: str) -> None:
    for result in pool.run(4, in_double, optimize_and_clip, family, 1, 2):
        assert result["kept"] and result["only the slice"]
        assert max(result["norms"]) < 1e-9
        assert result["parameters"] < 1e-8


@pytest.mark.parametrize(
    ("family", "settings"), [("gpt2", {}), ("gpt2", {"attn_implementation": "eager"}), ("opt", {}), ("bert_mlm", {})]
)
def test_dropout_is_that_of_a_run_without_tensor_parallelism(pool: Pool, family: str, settings: dict) -> None:
    for result in pool.run(2, in_double, dropout_against_one_stage, family, 1, 2, **settings):
        assert result["loss"] < 1e-10
        assert result["gradient"] < 1e-10

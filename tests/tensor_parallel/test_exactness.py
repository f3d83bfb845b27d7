"""Tensor parallelism gives the unsplit model's loss and gradients."""

from functools import partial
from typing import Any

import pytest

from tests.support.pool import Pool
from tests.support.tensor_parallel_ranks import (
    dropout_against_one_stage,
    in_double,
    optimize_and_clip,
    train_against_unsplit,
)
from tests.support.training import in_turn

pytestmark = pytest.mark.slow

# By number of ranks: a family, stages, the size, and options.
CASES: dict[int, list[tuple[str, int, int, dict[str, Any]]]] = {
    2: [("llama", 1, 2, {}), ("gpt2", 1, 2, {"model_settings": {"tie_word_embeddings": False}})],
    4: [
        ("gpt2", 1, 4, {}),
        ("vit", 1, 4, {}),
        *((family, 2, 2, {}) for family in ("gpt2", "qwen3", "mistral", "mixtral", "opt", "bert_classification")),
        ("gpt2", 2, 2, {"schedule": "zb-h1", "microbatches": 4}),
        ("llama", 2, 2, {"schedule": "interleaved-1f1b", "microbatches": 4}),
        ("mixtral", 2, 2, {"microbatches": 1, "model_settings": {"output_router_logits": True}}),
    ],
    6: [("gpt2", 3, 2, {}), ("bert_mlm", 3, 2, {})],
}


@pytest.mark.parametrize("ranks", CASES)
def test_loss_and_gradients_equal_the_unsplit_models(pool: Pool, ranks: int) -> None:
    calls = []
    for family, stages, size, options in CASES[ranks]:
        shallow = {"n_layer" if family == "gpt2" else "num_hidden_layers": 2, **options.get("model_settings", {})}
        calls.append(partial(train_against_unsplit, family, stages, size, **{**options, "model_settings": shallow}))
    for case, results in zip(CASES[ranks], zip(*pool.run(ranks, in_double, in_turn, calls), strict=True), strict=True):
        for result in results:
            assert max(result["loss"], result["gradient"]) < 1e-10, case


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_replicated_pipelines_with_an_optimizer_made_before_and_clipping(pool: Pool, family: str) -> None:
    for result in pool.run(4, in_double, optimize_and_clip, family, 1, 2):
        assert result["kept"] and result["only the slice"]
        assert max(result["norms"]) < 1e-9
        assert result["parameters"] < 1e-8


@pytest.mark.parametrize(
    ("family", "settings"), [("gpt2", {}), ("gpt2", {"attn_implementation": "eager"}), ("bert_mlm", {})]
)
def test_dropout_is_that_of_a_run_without_tensor_parallelism(pool: Pool, family: str, settings: dict) -> None:
    for result in pool.run(2, in_double, dropout_against_one_stage, family, 1, 2, **settings):
        assert result["loss"] < 1e-10
        assert result["gradient"] < 1e-10

"""TRL's RewardTrainer and KTOTrainer with and without pipelines: the same script must give the same run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import HeterogeneousParallelPlugin
from penstock.integrations.trl import (
    PipelineDPOTrainer,
    PipelineGRPOTrainer,
    PipelineKTOTrainer,
    PipelineRewardTrainer,
)
from tests.support.feedback_runs import learn_all
from tests.support.pool import Pool
from tests.support.preference_runs import SIZES
from tests.support.quantised import write_base
from tests.support.trainer_runs import differences, differences_when_resumed

EXACT = 1e-10
ALWAYS = {"loss", "grad_norm", "num_tokens", "eval_loss", "eval_num_tokens", "weights"}
FIGURES = {
    "reward": ALWAYS | {"min_reward", "mean_reward", "max_reward", "accuracy", "margin", "eval_margin"},
    "KTO": ALWAYS | {
        "kl", "entropy", "logits/chosen", "logits/rejected", "logps/chosen", "logps/rejected", "rewards/chosen",
        "rewards/rejected", "rewards/margins", "eval_kl", "eval_rewards/margins",
    },
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "reward": {},
    "reward, further": {
        "margin": True, "center_rewards_coefficient": 0.1, "gradient_checkpointing": True, "lora": True,
    },
    "KTO": {"desirable_weight": 1.3},
    "KTO, adapters": {"lora": True, "gradient_checkpointing": True},
    "KTO, precomputed, without KL": {
        "precompute_ref_log_probs": True, "loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random",
    },
}  # fmt: skip


LAYOUTS: list[tuple[int, int, list[str]]] = [
    (2, 1, [*CASES]),
    (3, 1, ["reward", "KTO"]),
    (2, 2, ["reward, further", "KTO", "KTO, adapters"]),
]
Plain = tuple[dict[str, list[dict[str, float]]], Path]


@pytest.fixture(scope="module")
def plain_runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Plain]:
    """Those of so many plain processes as there are pipelines, once for all layouts."""

    @functools.cache
    def of(processes: int) -> Plain:
        folder = tmp_path_factory.mktemp("plain")
        cases = {case: CASES[case] for _, pipelines, some in LAYOUTS if pipelines == processes for case in some}
        return pool.run(processes, learn_all, folder, 0, processes, cases, init=False, timeout=240)[0], folder

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "pipelines", "cases"), LAYOUTS, ids=["2 stages", "3 stages", "2 pipelines of 2"])
def test_feedback_is_learned_alike_with_and_without_pipelines(
    pool: Pool, plain_runs: Callable[[int], Plain], tmp_path: Path, stages: int, pipelines: int, cases: list[str]
) -> None:
    """Losses, all figures that are logged, and weights. Several pipelines are held to as many plain processes."""
    chosen = {case: CASES[case] for case in cases}
    plain, folder = plain_runs(pipelines)
    for run in pool.run(stages * pipelines, learn_all, tmp_path, stages, pipelines, chosen, init=False, timeout=280):
        for case in cases:
            found = differences((run[case], tmp_path / case), (plain[case], folder / case))
            assert found.keys() >= FIGURES[case.split(",")[0]], case
            assert not {name: value for name, value in found.items() if value > EXACT}, case


def trained_then_resumed(folder: Path, stages: int, resume: bool) -> dict[str, list[dict[str, float]]]:
    case = {"lora": True, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "resume": resume}
    return learn_all(folder, stages, 1, {"reward": case, "KTO": case})


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_over_another_number_of_stages(pool: Pool, tmp_path: Path) -> None:
    for _, found in differences_when_resumed(pool, tmp_path, trained_then_resumed, 3, 2):
        # TRL counts tokens from where its process began.
        assert not {figure: value for figure, value in found.items() if value > EXACT and figure != "num_tokens"}


@pytest.mark.slow
def test_half_precision_and_a_base_in_4_bits_give_the_plain_run(pool: Pool, tmp_path: Path) -> None:
    """TRL makes adapters of a quantised base bfloat16, in which sums in another order are seen."""
    packed = write_base("llama", tmp_path / "base", **SIZES)
    half = {"dtype": torch.float32, "bf16": True, "learning_rate": 1e-4}
    few = {"steps": 2, "eval_strategy": "no"}
    packing = {"packed": packed, "lora": True, "dtype": torch.float32, "learning_rate": 1e-4}
    cases: dict[str, Any] = {
        "reward": {**half, **few},
        "reward, 4 bits": {**packing, "bf16": True, **few},  # the score's layer is bfloat16, too
        "KTO, half": {**half, **few},
        "KTO, 4 bits": {**packing, **few},
    }
    plain = learn_all(tmp_path / "plain", 0, 1, cases)
    for runs in pool.run(2, learn_all, tmp_path / "split", 2, 1, cases, init=False, timeout=240):
        for name, logs in runs.items():
            found = differences((logs, tmp_path / "split" / name), (plain[name], tmp_path / "plain" / name))
            assert not {figure: value for figure, value in found.items() if value > 5e-2}, name


@pytest.mark.slow
def test_single_precision_gives_the_same_figures_up_to_rounding(pool: Pool, tmp_path: Path) -> None:
    """With SGD: Adam divides gradients that are mere rounding by their own size."""
    single = {"dtype": torch.float32, "optim": "sgd", "steps": 2, "eval_steps": 2}
    cases: dict[str, Any] = {"reward": single, "KTO": single}
    plain = learn_all(tmp_path / "plain", 0, 1, cases)
    for runs in pool.run(3, learn_all, tmp_path / "split", 3, 1, cases, init=False, timeout=180):
        for name, logs in runs.items():
            found = differences((logs, tmp_path / "split" / name), (plain[name], tmp_path / "plain" / name))
            assert not {figure: value for figure, value in found.items() if value > 1e-5}, name


@pytest.mark.parametrize("kind", [PipelineDPOTrainer, PipelineRewardTrainer, PipelineKTOTrainer, PipelineGRPOTrainer])
@pytest.mark.parametrize(
    "options", [{}, {"elastic": penstock.Elastic("file:///run"), "global_batch_size": 4}], ids=["plain", "elastic"]
)
def test_a_plugin_and_so_an_elastic_run_is_refused_by_name(kind: Any, options: dict[str, Any]) -> None:
    plugin = HeterogeneousParallelPlugin(microbatch_size=2, **options)
    with pytest.raises(ValueError, match=rf"HeterogeneousParallelPlugin with {kind.__name__[8:]} does not work over"):
        kind(None, parallelism=plugin)

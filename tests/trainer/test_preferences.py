"""TRL's DPOTrainer with and without pipelines: the same script must give the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Pool
from tests.support.preference_runs import LOSSES, POLICY_LOSSES, prefer_all
from tests.support.trainer_runs import differences

pytestmark = pytest.mark.slow

EXACT = 1e-10
FIGURES = {
    "DPO": {
        "loss", "grad_norm", "learning_rate", "entropy", "num_tokens", "mean_token_accuracy", "logits/chosen",
        "logits/rejected", "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected", "weights",
        "rewards/accuracies", "rewards/margins", "eval_loss", "eval_rewards/margins", "eval_logps/chosen",
    },
    "GRPO": {
        "loss", "grad_norm", "entropy", "num_tokens", "reward", "reward_std", "frac_reward_zero_std", "weights",
        "completions/mean_length", "completions/clipped_ratio", "clip_ratio/region_mean",
    },
}  # fmt: skip
EVERY_LOSS: dict[str, Any] = {"losses": LOSSES, "steps": len(LOSSES), "label_smoothing": 0.1, "use_weighting": True}
CASES: dict[str, dict[str, Any]] = {
    "every loss": {**EVERY_LOSS, "eval_steps": 9},
    "adapters": {"lora": True},
    "precomputed": {"precompute_ref_log_probs": True},
    "rewarded": {"num_generations": 2, "eval_steps": 4},
    "rewarded, iterated": {
        "num_generations": 2,
        "loss_type": "bnpo",
        "num_iterations": 2,
        "beta": 0.1,
        "lora": True,
        "eval_strategy": "no",
    },
    "rewarded, every loss": {
        "num_generations": 2,
        "losses": POLICY_LOSSES,
        "steps": len(POLICY_LOSSES),
        "num_iterations": 2,
        "eval_strategy": "no",
    },
    "checkpointed": {"gradient_checkpointing": True, "max_length": 10},
}


def worst(
    pool: Pool, folder: Path, stages: int, pipelines: int, cases: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """By how much each case differs from the plain trainer, which has a process for each pipeline."""
    plain = pool.run(pipelines, prefer_all, folder / "plain", 0, pipelines, 4, cases, init=False, timeout=240)[0]
    runs = pool.run(stages * pipelines, prefer_all, folder, stages, pipelines, 4, cases, init=False, timeout=300)
    found: dict[str, dict[str, float]] = {}
    for case in cases:
        apart = [differences((run[case], folder / case), (plain[case], folder / "plain" / case)) for run in runs]
        found[case] = {name: max(one[name] for one in apart) for name in apart[0]}
    return found


@pytest.mark.parametrize(
    ("stages", "pipelines", "cases"),
    [
        (2, 1, ["every loss", "adapters", "rewarded, every loss"]),
        (3, 1, ["checkpointed", "precomputed", "rewarded"]),
        (2, 2, ["every loss", "adapters", "rewarded", "rewarded, iterated"]),
    ],
    ids=["2 stages", "3 stages", "2 pipelines of 2"],
)
def test_preferences_are_learned_alike_with_and_without_pipelines(
    pool: Pool, tmp_path: Path, stages: int, pipelines: int, cases: list[str]
) -> None:
    """Each loss, each figure that is logged, and the weights; the reference a second model, a base, or precomputed."""
    chosen = {case: CASES[case] for case in cases}
    for case, found in worst(pool, tmp_path, stages, pipelines, chosen).items():
        assert found.keys() >= FIGURES["GRPO" if "num_generations" in chosen[case] else "DPO"], case
        assert not {name: value for name, value in found.items() if value > EXACT}, case

"""TRL's DPOTrainer with and without pipelines: the same script must give the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pool import Pool
from preference_runs import LOSSES, prefer_all
from trainer_runs import differences

EXACT = 1e-10
# The Trainer adds up what it logs of losses in single precision, in which TRL counts and divides, too.
LOGGED = 1e-6
FIGURES = {
    "loss", "grad_norm", "learning_rate", "entropy", "num_tokens", "mean_token_accuracy", "logits/chosen",
    "logits/rejected", "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected", "rewards/accuracies",
    "rewards/margins", "eval_loss", "eval_rewards/margins", "eval_logps/chosen", "eval_num_tokens", "weights",
}  # fmt: skip
EVERY_LOSS: dict[str, Any] = {"losses": LOSSES, "steps": len(LOSSES), "label_smoothing": 0.1, "use_weighting": True}
CASES: dict[str, dict[str, Any]] = {
    "every loss": {**EVERY_LOSS, "eval_steps": 9},
    "adapters": {"lora": True},
    "precomputed": {"precompute_ref_log_probs": True},
    "checkpointed": {"gradient_checkpointing": True, "max_length": 10},
}


def worst(
    pool: Pool, folder: Path, stages: int, pipelines: int, cases: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """By how much each case differs from the plain trainer, over all ranks; several pipelines from as many processes."""
    plain = pool.run(pipelines, prefer_all, folder / "plain", 0, pipelines, cases, init=False, timeout=240)[0]
    runs = pool.run(stages * pipelines, prefer_all, folder, stages, pipelines, cases, init=False, timeout=300)
    found: dict[str, dict[str, float]] = {}
    for case in cases:
        apart = [differences((run[case], folder / case), (plain[case], folder / "plain" / case)) for run in runs]
        found[case] = {name: max(one[name] for one in apart) for name in apart[0]}
    return found


@pytest.mark.parametrize(
    ("stages", "pipelines", "cases"),
    [
        (2, 1, ["every loss", "adapters"]),
        (3, 1, ["checkpointed"]),
        (2, 2, ["every loss", "adapters"]),
    ],
    ids=["2 stages", "3 stages", "2 pipelines of 2"],
)
def test_preferences_are_learned_alike_with_and_without_pipelines(
    pool: Pool, tmp_path: Path, stages: int, pipelines: int, cases: list[str]
) -> None:
    """Each loss, each figure that is logged, and the weights; the reference a second model, a base, or precomputed."""
    chosen = {case: CASES[case] for case in cases}
    for case, found in worst(pool, tmp_path, stages, pipelines, chosen).items():
        assert found.keys() >= FIGURES, case
        assert found["weights"] < EXACT, (case, found)
        assert not {name: value for name, value in found.items() if value > LOGGED}, case

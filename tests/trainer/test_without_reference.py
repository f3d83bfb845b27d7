"""TRL's ORPOTrainer and CPOTrainer with and without pipelines: the same script must give the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from penstock.integrations.transformers import PipelineTrainerMixin
from tests.support.families import FAMILIES
from tests.support.pool import Pool
from tests.support.preference_runs import NUM_PAIRS, SIZES, OneLossEachStep, pairs
from tests.support.trainer_runs import (
    adapters,
    defaults,
    differences,
    if_evaluated,
    of_trl,
    over,
    precisely,
    run,
    tokenizer,
)

EXACT = 1e-10
# TRL averages the figures of its own in single precision.
LOGGED = 1e-5
FIGURES = {
    "loss", "grad_norm", "learning_rate", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
    "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "nll_loss", "weights", "eval_loss",
    "eval_rewards/margins", "eval_nll_loss",
}  # fmt: skip
# Attributes of a CPOTrainer in one step each: every loss, and what else changes it.
LOSSES: Sequence[Mapping[str, Any]] = [
    *({"loss_type": name} for name in ("sigmoid", "hinge", "ipo", "simpo")), {"alpha": 0.25}, {"cpo_alpha": 0.0},
]  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ORPO": {},
    # Over one microbatch, as a router's loss depends on which samples are together.
    "ORPO, experts": {
        "family": "mixtral", "steps": 2, "parallelism": {"num_microbatches": 1},
        "settings": {"output_router_logits": True, "router_aux_loss_coef": 0.3},
    },
    "CPO": {"loss_type": "simpo", "label_smoothing": 0.1, "losses": LOSSES, "steps": len(LOSSES)},
    "CPO, adapters": {"lora": True},
}  # fmt: skip


class PipelineORPOTrainer(PipelineTrainerMixin, ORPOTrainer):
    pass


class PipelineCPOTrainer(PipelineTrainerMixin, CPOTrainer):
    pass


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "ORPO": (ORPOTrainer, PipelineORPOTrainer, ORPOConfig),
    "CPO": (CPOTrainer, PipelineCPOTrainer, CPOConfig),
}


def prefer(
    folder: Path,
    name: str,
    stages: int,
    pipelines: int,
    steps: int = 4,
    family: str = "llama",
    lora: bool = False,
    losses: Sequence[Mapping[str, Any]] = (),
    parallelism: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    plain, split, arguments = KINDS[name]
    given = of_trl(folder, steps, pipelines, **{"beta": 0.5, "max_length": 64, **options})
    # The odds ratio is computed in single precision.
    doubled = mock.patch.object(torch.Tensor, "float", torch.Tensor.double) if name == "ORPO" else nullcontext()
    with precisely(torch.float64), doubled:
        trainer = (split if stages else plain)(
            FAMILIES[family].build(dtype=torch.float64, **{**SIZES, **(settings or {})}),
            args=arguments(**given),
            train_dataset=pairs(NUM_PAIRS, 1),
            eval_dataset=if_evaluated(given["eval_strategy"], pairs, pipelines),
            processing_class=tokenizer(),
            peft_config=adapters(lora),
            **over(stages, **(parallelism or {})),
        )
        if losses:
            trainer.add_callback(OneLossEachStep(trainer, losses, {}))
        return run(trainer, folder)


def prefer_all(folder: Path, stages: int, pipelines: int, cases: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    return {case: prefer(folder / case, case.split(",")[0], stages, pipelines, **CASES[case]) for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipelines", "cases"),
    [(1, ["ORPO", "ORPO, experts", "CPO"]), (2, ["ORPO", "CPO, adapters"])],
    ids=["2 stages", "2 pipelines of 2"],
)
def test_pairs_are_learned_from_alike_with_and_without_pipelines(
    pool: Pool, tmp_path: Path, pipelines: int, cases: list[str]
) -> None:
    """Losses, all figures that are logged, and weights. Several pipelines are held to as many plain processes."""
    plain = pool.run(pipelines, prefer_all, tmp_path / "plain", 0, pipelines, cases, init=False, timeout=240)[0]
    for runs in pool.run(2 * pipelines, prefer_all, tmp_path, 2, pipelines, cases, init=False, timeout=240):
        for case in cases:
            found = differences((runs[case], tmp_path / case), (plain[case], tmp_path / "plain" / case))
            assert found.keys() >= FIGURES, case
            # The softmax of a router is in single precision.
            assert found["weights"] < (LOGGED if "experts" in case else EXACT), (case, found)
            of_the_trainer = () if "experts" in case else ("loss", "grad_norm", "learning_rate", "eval_loss")
            limits = {name: EXACT if name in of_the_trainer else LOGGED for name in found}
            assert not {name: value for name, value in found.items() if value > limits[name]}, case


@pytest.mark.parametrize(
    ("family", "args", "named"),
    [
        ("t5", {}, "PipelineORPOTrainer with an encoder and a decoder"),
        ("llama", {"generate_during_eval": True}, "generate_during_eval"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, args: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr("trl.experimental.orpo.orpo_trainer.is_wandb_available", lambda: True)
    options = ORPOConfig(**{**defaults(tmp_path, 1, 1), "bf16": False, "max_completion_length": 16, **args})
    with pytest.raises(ValueError, match=f"{named} does not work over pipelines"):
        PipelineORPOTrainer(
            FAMILIES[family].build(),
            args=options,
            train_dataset=pairs(4, 1),
            eval_dataset=pairs(4, 2),
            processing_class=tokenizer(),
            **over(2),
        )

"""Scripts for TRL's RewardTrainer and KTOTrainer, with pipelines or without, as `preference_runs` has for others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from penstock.integrations.trl import PipelineKTOTrainer, PipelineRewardTrainer
from tests.support.families import FAMILIES
from tests.support.preference_runs import NUM_PAIRS, SIZES, pairs, second_model
from tests.support.quantised import load, quantisation
from tests.support.trainer_runs import adapters, if_evaluated, of_trl, over, precisely, run, tokenizer


def margins(data: Dataset) -> Dataset:
    return data.add_column("margin", [0.1 * (number % 4) for number in range(len(data))])


def judge(
    folder: Path,
    stages: int = 0,
    pipelines: int = 1,
    steps: int = 4,
    lora: bool = False,
    margin: bool = False,
    dtype: torch.dtype = torch.float64,
    parallelism: Mapping[str, Any] | None = None,
    resume: bool = False,
    packed: Path | None = None,
    compute_metrics: Any = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Train with RewardTrainer; with `margin` by how much a completion should be better, of unlike numbers. `packed`
    has a model that is to be loaded in 4 bits."""
    given = of_trl(folder, steps, pipelines, **options)
    data = [pairs(NUM_PAIRS, 1), if_evaluated(given["eval_strategy"], pairs, pipelines)]
    if margin:
        data = [one and margins(one) for one in data]
    with precisely(dtype):
        configuration = FAMILIES["llama"].build(**SIZES).config
        configuration.num_labels = 1
        torch.manual_seed(0)
        model: Any = (
            AutoModelForSequenceClassification.from_config(configuration).to(dtype)
            if packed is None
            else AutoModelForSequenceClassification.from_pretrained(
                packed, num_labels=1, dtype=dtype, quantization_config=quantisation("nf4")
            )
        )
        trainer: Any = (PipelineRewardTrainer if stages else RewardTrainer)(
            model,
            args=RewardConfig(**given),
            train_dataset=data[0],
            eval_dataset=data[1],
            processing_class=tokenizer(),
            peft_config=adapters(lora, modules_to_save=["score"]),
            compute_metrics=compute_metrics,
            **over(stages, **(parallelism or {})),
        )
        return run(trainer, folder, resume)


def unpaired(count: int, seed: int) -> Dataset:
    """Single completions, more of them desirable than not, so that some microbatches have one kind only."""
    both = pairs(count, seed)
    names = ["chosen" if number % 3 else "rejected" for number in range(count)]
    rows = zip(both["prompt"], (both[number][name] for number, name in enumerate(names)), names, strict=True)
    return Dataset.from_list(
        [{"prompt": prompt, "completion": text, "label": name == "chosen"} for prompt, text, name in rows]
    )


def approve(
    folder: Path,
    stages: int = 0,
    pipelines: int = 1,
    steps: int = 4,
    lora: bool = False,
    dtype: torch.dtype = torch.float64,
    parallelism: Mapping[str, Any] | None = None,
    resume: bool = False,
    packed: Path | None = None,
    compute_metrics: Any = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Train with KTOTrainer. The reference is the adapters' base, or another model. `packed` has a model that is to be
    loaded in 4 bits."""
    given = of_trl(folder, steps, pipelines, **{"beta": 0.5, **options})
    with precisely(dtype):
        trainer: Any = (PipelineKTOTrainer if stages else KTOTrainer)(
            FAMILIES["llama"].build(dtype=dtype, **SIZES) if packed is None else load("llama", packed, "nf4", False),
            ref_model=None if lora else second_model("llama", dtype, **SIZES),
            args=KTOConfig(**given),
            train_dataset=unpaired(NUM_PAIRS, 1),
            eval_dataset=if_evaluated(given["eval_strategy"], unpaired, pipelines),
            processing_class=tokenizer(),
            peft_config=adapters(lora),
            compute_metrics=compute_metrics,
            **over(stages, **(parallelism or {})),
        )
        return run(trainer, folder, resume)


def learn_all(
    folder: Path, stages: int, pipelines: int, cases: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, float]]]:
    """Several runs, each in a folder of its own; the names of those of KTOTrainer begin with it."""
    return {
        name: (approve if name.startswith("KTO") else judge)(folder / name, stages, pipelines, **case)
        for name, case in cases.items()
    }

"""Scripts for TRL's trainers with a loss of their own, with pipelines or without, as `trainer_runs` has for others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from penstock.integrations.trl import PipelineDPOTrainer, PipelineGRPOTrainer
from tests.support.families import FAMILIES
from tests.support.trainer_runs import adapters, if_evaluated, of_trl, over, precisely, run, tokenizer

NUM_PAIRS = 40
# Of the tiny models.
SIZES: Mapping[str, Any] = {"vocab_size": 62, "num_hidden_layers": 2}
# Attributes of a DPOTrainer in one step each: every loss of its list, weighted sums, and what else changes the loss.
LOSSES: Sequence[Mapping[str, Any]] = [
    *({"loss_types": [name]} for name in (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
        "discopop", "sft", "sigmoid_norm",
    )),
    {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    {"ld_alpha": 0.5},
    {"use_weighting": True},
    {"f_divergence_type": "js_divergence"},
    {"f_divergence_type": "forward_kl"},
]  # fmt: skip
# The same for a GRPOTrainer.
POLICY_LOSSES: Sequence[Mapping[str, Any]] = [
    {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
]


class OneLossEachStep(TrainerCallback):
    """Gives a trainer other attributes in each step, and takes them away after it."""

    def __init__(self, trainer: Any, losses: Sequence[Mapping[str, Any]], usually: Mapping[str, Any]) -> None:
        self.trainer, self.losses, self.usually = trainer, losses, usually
        self._before: dict[str, Any] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        chosen = {**self.usually, **self.losses[state.global_step % len(self.losses)]}
        self._before = {name: getattr(self.trainer, name) for name in chosen}
        vars(self.trainer).update(chosen)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        vars(self.trainer).update(self._before)


def pairs(count: int, seed: int) -> Dataset:
    """Prompts, and completions to prefer and to reject, of very different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> str:
        return " ".join(f"w{word}" for word in torch.randint(60, (length,), generator=generator).tolist())

    lengths = torch.randint(2, 9, (count, 3), generator=generator).tolist()
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_list(
        [{name: " " * (name != "prompt") + text(n) for name, n in zip(names, row, strict=True)} for row in lengths]
    )


def second_model(family: str, dtype: torch.dtype, **sizes: Any) -> Any:
    """A reference: the model that is trained, with smaller weights."""
    model = FAMILIES[family].build(dtype=dtype, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model


def prefer(
    folder: Path,
    stages: int = 0,
    pipelines: int = 1,
    steps: int = 4,
    lora: bool = False,
    dtype: torch.dtype = torch.float64,
    losses: Sequence[Mapping[str, Any]] = (),
    family: str = "llama",
    parallelism: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    model: Any = None,
    reference: Any = None,
    is_parallelised: bool = False,
    compute_metrics: Any = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Train with DPOTrainer. The reference is the adapters' base, or another model; of a given `model` it is the given
    one, or what TRL takes. `losses`: one for each step."""
    given = of_trl(folder, steps, pipelines, **{"beta": 0.5, **options})
    sizes = {**SIZES, **(settings or {})}
    with precisely(dtype):
        if not lora and model is None:
            reference = second_model(family, dtype, **sizes)
        trainer: Any = (PipelineDPOTrainer if stages else DPOTrainer)(
            model or FAMILIES[family].build(dtype=dtype, **sizes),
            ref_model=reference,
            args=DPOConfig(**given),
            train_dataset=pairs(NUM_PAIRS, 1),
            eval_dataset=if_evaluated(given["eval_strategy"], pairs, pipelines),
            processing_class=tokenizer(),
            peft_config=adapters(lora),
            compute_metrics=compute_metrics,
            **({} if is_parallelised else over(stages, **(parallelism or {}))),
        )
        if losses:
            usually = {"loss_weights": [1.0], "use_weighting": False}
            trainer.add_callback(OneLossEachStep(trainer, losses, usually))
        return run(trainer, folder, resume)


def prompts(count: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (count,), generator=generator).tolist()
    words = [torch.randint(60, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"prompt": " ".join(f"w{word}" for word in row)} for row in words])


class Rewards:
    """Rewards words of a low number, and logs how many words there are; notes in a file each completion that it is
    asked for."""

    __name__ = "low_words"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, completions: Sequence[str], **kwargs: Any) -> list[float]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"asked-{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{one}\n" for one in completions)
        kwargs["log_metric"]("words", sum(len(one.split()) for one in completions))
        kwargs["log_extra"]("word", [one.split()[-1:] for one in completions])
        return [sum(int(word[1:]) < 30 for word in one.split()) / (1 + len(one.split())) for one in completions]


def policy_arguments(folder: Path, steps: int, pipelines: int, **options: Any) -> GRPOConfig:
    completions = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.2}
    return GRPOConfig(**of_trl(folder, steps, pipelines, **{**completions, **options}))


def reinforce(
    folder: Path,
    stages: int = 0,
    pipelines: int = 1,
    steps: int = 4,
    lora: bool = False,
    dtype: torch.dtype = torch.float64,
    family: str = "llama",
    parallelism: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    reference: Path | None = None,
    model: Any = None,
    rewards: Callable[..., list[float]] | str | None = None,
    losses: Sequence[Mapping[str, Any]] = (),
    arguments: GRPOConfig | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Train with GRPOTrainer. The reference, with `beta`, is the adapters' base, or the model in a folder. `losses`:
    one for each step. `rewards`: a function, or the folder of a reward model. `arguments`: in place of `options`."""
    arguments = arguments or policy_arguments(folder, steps, pipelines, **options)
    sizes = {**SIZES, **(settings or {})}
    with precisely(dtype):
        model = model or FAMILIES[family].build(dtype=dtype, **sizes)
        if reference is not None:
            model.config._name_or_path = str(reference)
        trainer: Any = (PipelineGRPOTrainer if stages else GRPOTrainer)(
            model,
            reward_funcs=rewards or Rewards(folder),
            args=arguments,
            train_dataset=prompts(NUM_PAIRS, 1),
            eval_dataset=if_evaluated(arguments.eval_strategy, prompts, pipelines),
            processing_class=tokenizer(),
            peft_config=adapters(lora),
            **over(stages, **(parallelism or {})),
        )
        if losses:
            trainer.add_callback(OneLossEachStep(trainer, losses, {}))
        return run(trainer, folder, resume)


def prefer_all(
    folder: Path, stages: int, pipelines: int, steps: int, cases: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, float]]]:
    """Several runs, each in a folder of its own; one with `num_generations` is of GRPO."""
    return {
        name: (reinforce if "num_generations" in case else prefer)(
            folder / name, stages, pipelines, **{"steps": steps, **case}
        )
        for name, case in cases.items()
    }

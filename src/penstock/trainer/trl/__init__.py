"""TRL's trainers over pipelines: one adapter for each that has a loss or figures of its own. Imports nothing of TRL."""

from __future__ import annotations

from transformers import Trainer

from penstock.trainer.adapter import TrainerAdapter, not_over_pipelines
from penstock.trainer.trl.dpo import DPO
from penstock.trainer.trl.grpo import GRPO
from penstock.trainer.trl.sft import SFT

ADAPTERS: tuple[type[TrainerAdapter], ...] = (SFT, DPO, GRPO)

# What other trainers of TRL do in their `compute_loss`, and what to do instead.
RUNS_THE_MODEL = (
    "it runs the model itself. Write a loop of your own, with the loss as a criterion: docs/your_own_loss.md"
)


def adapter_of(kind: type[Trainer], mixin: type[Trainer]) -> type[TrainerAdapter]:
    """The adapter for a class of trainers with the mixin: that of the first class below it with a loss of its own.

    Raises:
        ValueError: there is none for a class with its own `compute_loss`; names it.
    """
    for one in kind.__mro__:
        if one is mixin or "compute_loss" not in vars(one):
            continue
        if one is Trainer:
            break
        of_trl = one.__module__.startswith("trl.")
        for adapter in ADAPTERS:
            if of_trl and one.__name__ == adapter.trainer_class:
                return adapter
        raise not_over_pipelines(f"{one.__name__}.compute_loss", RUNS_THE_MODEL if of_trl else "use compute_loss_func")
    return TrainerAdapter

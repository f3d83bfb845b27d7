"""Which adapter a Trainer over pipelines has: that of its class of TRL, `UsersLoss` for a loss of one's own, or the
plain one.
"""

from __future__ import annotations

from transformers import Trainer

from penstock.trainer.adapter import TrainerAdapter, not_over_pipelines
from penstock.trainer.trl.dpo import DPO
from penstock.trainer.trl.grpo import GRPO
from penstock.trainer.trl.kto import KTO
from penstock.trainer.trl.reward import Reward
from penstock.trainer.trl.sft import SFT
from penstock.trainer.users_loss import UsersLoss

ADAPTERS: tuple[type[TrainerAdapter], ...] = (SFT, DPO, KTO, Reward, GRPO)

# What other trainers of TRL do in their `compute_loss`, and what to do instead.
RUNS_THE_MODEL = (
    "it runs the model itself. Write a loop of your own, with the loss as a criterion: docs/your_own_loss.md"
)


def adapter_of(kind: type[Trainer], mixin: type[Trainer]) -> type[TrainerAdapter]:
    """The adapter for a class of trainers with the mixin: that of the first class below it with a loss of its own.

    Raises:
        ValueError: there is none for a class with its own `compute_loss`; names it.
    """
    owners = [one for one in kind.__mro__ if one is not mixin and "compute_loss" in vars(one)]
    owner = owners[0]
    if owner is Trainer:
        return TrainerAdapter
    name = f"{owner.__name__}.compute_loss"
    if owner in kind.__mro__[: kind.__mro__.index(mixin)]:
        raise not_over_pipelines(name, f"put {mixin.__name__} before the class that has it")
    of_trl = [one for one in owners if one.__module__.startswith("trl.")]
    if not of_trl:
        return UsersLoss
    for adapter in ADAPTERS:
        if of_trl[0] is owner and owner.__name__ == adapter.trainer_class:
            return adapter
    raise not_over_pipelines(name, RUNS_THE_MODEL if of_trl[0] is owner else "use compute_loss_func")

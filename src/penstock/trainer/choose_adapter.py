"""Which adapter a Trainer over pipelines has.

It is that of its class of TRL, `UsersLoss` for a loss of one's own, or the plain one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from transformers import Trainer

from penstock.trainer.trainer_adapter import TrainerAdapter, not_over_pipelines
from penstock.trainer.trl.dpo import DPO
from penstock.trainer.trl.grpo import GRPO
from penstock.trainer.trl.kto import KTO
from penstock.trainer.trl.orpo import CPO, ORPO
from penstock.trainer.trl.reward import Reward
from penstock.trainer.trl.sft import SFT
from penstock.trainer.users_loss import UsersLoss

ADAPTERS: tuple[type[TrainerAdapter], ...] = (SFT, DPO, KTO, Reward, GRPO, ORPO, CPO)

# The methods in which TRL's trainers compute a loss. An adapter names the means that this loss is the sum of, so a
# class derived from such a trainer is refused if it has one of these methods itself.
LOSS_METHODS = ("compute_loss", "_compute_loss", "get_batch_loss_metrics")
# Why another trainer of TRL is refused, and what to do instead.
NO_ADAPTER = (
    "Penstock has no adapter for this trainer. "
    'Write a loop of your own, with the loss as a criterion (docs/your_own_loss.md), or an adapter: "A trainer of TRL" '
    "in docs/where_to_change.md"
)

# What to do instead of another loss in a class derived from one of TRL's.
OTHER_LOSS = (
    "Write a loop of your own, with the loss as a criterion: docs/your_own_loss.md. SFT takes compute_loss_func"
)


def adapter_of(trainer: Trainer, mixin: type[Trainer]) -> TrainerAdapter:
    """The adapter for a trainer of a class with the mixin: that of the first class in its MRO with a loss of
    its own.

    Raises:
        ValueError: there is none, and names the class: it is a trainer of TRL's with a loss or a whole step of its own
            for which Penstock has no adapter, or one that changes the loss of another trainer of TRL's.
    """
    above, below = _around(mixin, type(trainer).__mro__)
    owners = [cls for cls in (*above, *below) if "compute_loss" in vars(cls)]
    if (owner := owners[0]) is Trainer:
        for cls in below:
            if "training_step" in vars(cls) and cls.__module__.startswith("trl."):
                raise not_over_pipelines(f"{cls.__name__}.training_step", NO_ADAPTER)
        return TrainerAdapter(trainer, owner)
    if owner in above:
        raise not_over_pipelines(f"{owner.__name__}.compute_loss", f"put {mixin.__name__} before the class that has it")
    of_trl = next((cls for cls in owners if cls.__module__.startswith("trl.")), None)
    if of_trl is None:
        return UsersLoss(trainer, owner)
    for cls in (*above, *below[: below.index(of_trl)]):
        for name in LOSS_METHODS:
            if name in vars(cls):
                raise not_over_pipelines(
                    f"{cls.__name__}.{name}", f"it is not the loss of {of_trl.__name__}. {OTHER_LOSS}"
                )
    for adapter in ADAPTERS:
        if _is_public(of_trl, adapter.trainer_class):
            return adapter(trainer, of_trl)
    raise not_over_pipelines(f"{of_trl.__name__}.compute_loss", NO_ADAPTER)


def _around(mixin: type, kinds: Sequence[type]) -> tuple[Sequence[type], Sequence[type]]:
    place = kinds.index(mixin)
    return kinds[:place], kinds[place + 1 :]


def _is_public(kind: type, path: str) -> bool:
    """Whether TRL gives users this class under this path. The name alone would not do: TRL's experimental part may have
    another class of the same name. The path's module is imported already, if the class comes from it."""
    module, _, name = path.rpartition(".")
    return kind.__name__ == name and getattr(sys.modules.get(module), name, None) is kind

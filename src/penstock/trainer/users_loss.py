"""A trainer of the user's own, whose `compute_loss` needs only the model's outputs and its inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import Trainer

from penstock.modeling.collectives import OwnCollective
from penstock.modeling.graph.dataflow import ReachedInside
from penstock.modeling.graph.loss import NUM_ITEMS, Criterion, CriterionError
from penstock.trainer.own_loss import OwnLoss
from penstock.trainer.trainer_adapter import Metrics, NoMetrics, not_over_pipelines

INSTEAD = "Use compute_loss_func, or a loop of your own with a criterion: docs/your_own_loss.md"


class UsersLoss(OwnLoss):
    """Which mean the loss is shows when it is followed before the first step, as with any criterion. What it needs
    besides outputs and inputs is missing there, and refused by name, on all ranks."""

    # An attribute with this name would be the user's.
    notes_in = ()

    def __init__(self, trainer: Trainer, owner: type[Trainer]) -> None:
        super().__init__(trainer, owner)
        self._followed = _FollowedLoss(self)

    @property
    def name(self) -> str:
        return f"{self.owner.__name__}.compute_loss"

    def step_inputs(
        self, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None
    ) -> Mapping[str, Any]:
        number = {} if num_items_in_batch is None else {NUM_ITEMS: torch.as_tensor(num_items_in_batch)}
        given = {**inputs, **number}
        arguments = self.arguments(given)
        for name in given.keys() & arguments.keys():
            if given[name] is not arguments[name]:
                raise not_over_pipelines(self.name, f"it gives the model another {name}. Change it in data_collator")
        self._followed.batch, self._followed.own_inputs = [*given], given.keys() - arguments.keys()
        return {**given, **arguments}

    @property
    def criterion(self) -> Criterion:
        return self._followed

    def metrics(self, inputs: Mapping[str, Any]) -> Metrics:
        return NoMetrics()

    def counting_labels(self) -> AbstractContextManager[None]:
        """`compute_loss` is given the number that the plain Trainer counts, and knows what it means."""
        return nullcontext()

    def _compute(self, trainer: Any, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        number = batch.get(NUM_ITEMS)
        inputs = {name: value for name, value in batch.items() if name != NUM_ITEMS}
        before = _sizes(trainer)
        try:
            loss: torch.Tensor = trainer.compute_loss_below(model, inputs, num_items_in_batch=number)
        except (CriterionError, ReachedInside, OwnCollective):
            raise
        except Exception as error:  # of whatever kind, in the user's code
            what = f"{type(error).__name__}: {error}"
            raise self._refusal(f"it needs more than the model's outputs and inputs ({what})") from error
        if noted := [name for name, size in _sizes(trainer).items() if before.get(name) != size]:
            raise self._refusal(f"it changes {', '.join(noted)} of the trainer, but runs on the last stage only")
        return loss

    def _trainer_view(self, model: Any, changes: Mapping[str, Any]) -> Any:
        view = super()._trainer_view(model, changes)
        view.log = self._refuse_log
        return view

    def answer_without_ranks(self, call: str, *args: Any, **kwargs: Any) -> Any:
        raise self._refusal(f"it calls accelerator.{call}, but runs on the last stage only")

    def _refuse_log(self, *_: Any, **__: Any) -> None:
        raise self._refusal("it calls log, but runs on the last stage only")

    def _refusal(self, reason: str) -> CriterionError:
        return CriterionError(str(not_over_pipelines(self.name, f"{reason}. {INSTEAD}")))


class _FollowedLoss:
    """The criterion of a `UsersLoss`.

    Attributes:
        batch: the names of the inputs that the trainer's batch has.
        own_inputs: of these, what the model is not given.
    """

    def __init__(self, adapter: UsersLoss) -> None:
        self._adapter = adapter
        self.batch: list[str] = []
        self.own_inputs: set[str] = set()

    def __call__(self, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        batch = {name: inputs[name] for name in self.batch if name in inputs}
        return self._adapter.loss_of_microbatch(outputs, batch, {})


def _sizes(trainer: Any) -> dict[str, tuple[int, int]]:
    """What shows whether attributes of a trainer were set, or containers among them filled."""
    held = {**vars(trainer), **{f"state.{name}": value for name, value in vars(trainer.state).items()}}
    return {name: (id(value), _size(value, inside=True)) for name, value in held.items()}


def _size(value: Any, inside: bool = False) -> int:
    """The length of a container; of a dictionary with those inside, as metrics are kept by name."""
    if not isinstance(value, dict | list | set | deque):
        return 0
    return len(value) + (sum(map(_size, value.values())) if inside and isinstance(value, dict) else 0)

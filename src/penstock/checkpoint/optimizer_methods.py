"""What is saved of an optimizer, of the plugin's or any other over stages, and of a learning rate scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.checkpoint.comm import CheckpointRanks
from penstock.checkpoint.model_methods import checkpoint_comm, saving_ranks
from penstock.checkpoint.plain_objects import load_object, restore_object, save_object, state_of
from penstock.checkpoint.rank_files import TRAINING_VARIANT, RankFiles
from penstock.checkpoint.save import Save
from penstock.checkpoint.save_pretrained import SaveOptions
from penstock.checkpoint.training_state import TrainingState, load_training_state
from penstock.optimizer import PipelineOptimizer
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.engine import Engine
from penstock.runtime.gradients.precision import LossScale

PathLike = str | os.PathLike[str]


def unwrapped(optimizer: Any) -> Optimizer | None:
    """The optimizer inside this library's or accelerate's wrapper. Raises TypeError if there is none."""
    inner = optimizer.unwrap() if isinstance(optimizer, PipelineOptimizer) else optimizer
    inner = getattr(inner, "optimizer", inner)
    if inner is not None and not isinstance(inner, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    return inner


@dataclass
class LossScaleState:
    """The state of float16's loss scale, which the engine of the optimizer uses as well."""

    optimizer: PipelineOptimizer
    scale: LossScale

    @classmethod
    def of(cls, optimizer: Any) -> LossScaleState | None:
        """None if there is none."""
        scale = optimizer.loss_scale if isinstance(optimizer, PipelineOptimizer) else None
        return None if scale is None else cls(optimizer, scale)

    def state_dict(self) -> dict[str, Any]:
        return self.scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale.load_state_dict(state)
        self.optimizer.pipeline.loss_scale = self.scale.scale


def save_optimizer_state(optimizer: Any, pipeline: Engine, folder: PathLike) -> None:
    """Write the state of an optimizer of this rank's stages, fp16's loss scale, and what decides the run's random
    numbers: a file for each stage. Every rank calls it. Raises CheckpointError."""
    scale, ranks = LossScaleState.of(optimizer), saving_ranks(pipeline)
    extra = {} if scale is None else {"loss_scale": scale.state_dict()}
    state = TrainingState(unwrapped(optimizer), step=pipeline.step_number, extra=extra)
    with pipeline.saving(Call.SAVE_OPTIMIZER):
        files = RankFiles(pipeline.split.model, SaveOptions(variant=TRAINING_VARIANT), state, with_model=False)
        Save(files, folder, **ranks).run()


def load_optimizer_state(optimizer: Any, pipeline: Engine, folder: PathLike) -> None:
    """Load what `save_optimizer_state` wrote, from any layout. Raises CheckpointError."""
    with pipeline.together(Call.LOAD_OPTIMIZER):
        state = load_training_state(
            pipeline.split.model,
            folder,
            TrainingState(unwrapped(optimizer)),
            pipeline=pipeline.place.pipeline,
            world_comm=checkpoint_comm(pipeline),
            variant=TRAINING_VARIANT,
        )
    pipeline.step_number = state.step
    if (scale := LossScaleState.of(optimizer)) is not None and "loss_scale" in state.extra:
        restore_object(scale, state.extra["loss_scale"], f"the loss scale in {folder}")


def save_lr_scheduler(lr_scheduler: LRScheduler, path: PathLike) -> None:
    """See `Booster.save_lr_scheduler`."""
    save_object(state_of(lr_scheduler), path, world_comm=_world())


def load_lr_scheduler(lr_scheduler: LRScheduler, path: PathLike) -> None:
    """See `Booster.load_lr_scheduler`."""
    content = load_object(path, world_comm=_world())
    restore_object(lr_scheduler, content, f"the scheduler's state in {path}")


def _world() -> CheckpointRanks:
    return CheckpointRanks(dist.group.WORLD if dist.is_initialized() else None)

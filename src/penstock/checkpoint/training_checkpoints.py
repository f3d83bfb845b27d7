"""The whole state of a training run, saved by all ranks together and resumed on any layout."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from penstock.arguments import check_count
from penstock.checkpoint.contents import find_checkpoints, remove_older, step_folder
from penstock.checkpoint.load import checked_weights
from penstock.checkpoint.model_methods import (
    checkpoint_ranks,
    loss_scale_of,
    progress_of,
    restore_progress,
    unwrapped,
)
from penstock.checkpoint.ranks import CheckpointRanks
from penstock.checkpoint.save import Saver, save_run_state
from penstock.checkpoint.training_state import (
    LOSS_SCALE,
    CommonState,
    TrainingState,
    checked_training_state,
    undone_if_it_fails,
)
from penstock.checkpoint.untrusted import CheckpointError, CheckpointMismatch
from penstock.modeling.instrumentation import record_of
from penstock.modeling.libraries import base_of, wrapper_of
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.recovery import NoRecovery, Recovery
from penstock.runtime.reforming import engine_of

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]
LATEST = "latest"


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` loaded.

    Attributes:
        path: the folder of the checkpoint itself.
        step: the step it was saved at.
        extra: the values of your own that were saved with it.
        damaged: newer checkpoints that could not be loaded, each with what is wrong with it.
    """

    path: str
    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)


def save_checkpoint(
    folder: PathLike,
    *,
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    scaler: Any = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    asynchronous: bool = False,
    **objects: Any,
) -> str:
    """Save everything that a run needs to go on, in the folder `step-<step>` of `folder`. Every rank calls it.

    Weights and optimizer are saved by the unsplit model's names, each once, so that any layout can load them; random
    generators and the run's dropout as well. If anything fails, or the job is killed, earlier checkpoints are as they
    were, and this one is whole or not there.

    Args:
        folder: on a file system that all ranks share; it may hold checkpoints of other steps.
        model: from `initialize`, `from_pretrained`, `from_config` or `Booster.boost`; or, in one process, a plain one.
        optimizer: as in the loop.
        lr_scheduler, dataloader, scaler: objects with `state_dict` and `load_state_dict`; the same on all ranks.
        step: number of steps done; by default how many training steps this model has begun, in an elastic run how many
            updates were made (`booster.step`). To be given with a plain model.
        extra: numbers, text, tensors and containers of them, which `load_checkpoint` returns.
        keep_last: once this checkpoint is whole, remove those of earlier steps, so that with it this many are left.
        asynchronous: return once everything is copied to host memory, and write the files while training goes on. What
            goes wrong with that is raised by the next save or load, or by `finish_saving`; else the program ends with
            status 1.
        objects: anything else of yours with `state_dict` and `load_state_dict`, alike on all ranks.

    Returns:
        the checkpoint's own folder. It is not there if an elastic run has gone back to an earlier one meanwhile.

    Raises:
        TypeError, ValueError: an argument that cannot be saved; before any communication.
        CheckpointError: some rank could not write, now or in the asynchronous save before; names the rank and the path.
            Or `extra` or an object's state has something that is no plain data.
        PipelineFailure: a rank was lost.
    """
    if keep_last is not None:
        check_count("keep_last", keep_last)
    folder = os.path.abspath(folder)  # of now: an asynchronous save ends later
    model = base_of(model)
    run = Participants(model)
    if (recovery := run.recovery).repeats and not recovery.in_call:  # else this is the call made by `_save_repeatedly`
        objects |= {"lr_scheduler": lr_scheduler, "dataloader": dataloader, "scaler": scaler}
        given = {"model": model, "optimizer": optimizer, "extra": extra, "keep_last": keep_last, **objects}
        return _save_repeatedly(recovery, folder, step, asynchronous, partial(save_checkpoint, folder, **given))
    number = run.steps_begun if step is None else step
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"step must be a whole number of steps done, got {number!r}")
    state = TrainingState(
        unwrapped(optimizer),
        _objects(optimizer, lr_scheduler=lr_scheduler, dataloader=dataloader, scaler=scaler, **objects),
        step=number,
        extra=dict(extra or {}),
        run=None if run.engine is None else progress_of(run.engine),
    )
    if step is None and run.engine is None:
        raise ValueError("step is missing: without pipelines nobody counts the steps that were made")
    run.warn_of_gradients(state.optimizer)
    path = step_folder(folder, number)
    with run.saving():
        run.finish_saving(model)
        save_run_state(
            model,
            path,
            state,
            world_comm=run.comm(),
            saver=_saver_of(model) if asynchronous else None,
            given_up=run.lost,
            afterwards=lambda: None if keep_last is None else remove_older(folder, keep_last, number),
        )
    if not asynchronous:
        run.advise(folder)
    return path


def _save_repeatedly(
    recovery: Recovery, folder: str, step: int | None, asynchronous: bool, save_step: Callable[..., str]
) -> str:
    """Save an elastic run, again after a rank was lost. Its step is the run's."""
    if asynchronous:
        raise ValueError(
            "with elastic= asynchronous=True is not possible: the ranks that write may be lost. Leave it out"
        )
    if recovery.accumulating:
        raise ValueError(
            "with elastic= gradients are not saved: call save_checkpoint after optimizer.step(), not in the middle "
            "of an accumulation"
        )
    number = recovery.step
    if step not in (None, number):
        raise ValueError(f"with elastic= the step is booster.step, which is {number}, got {step!r}: leave step out")

    def save() -> str:
        path = save_step(step=number)
        recovery.note_saved(path)
        return path

    return recovery.run_without_gradients(save, stale=partial(step_folder, folder, number))


def load_checkpoint(
    folder: PathLike,
    which: str | int = LATEST,
    *,
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    scaler: Any = None,
    **objects: Any,
) -> Checkpoint:
    """Load what `save_checkpoint` saved. The run goes on bit for bit on the same layout, within rounding on another.

    Pipelines, stages and tensor-parallel ranks may be other ones than in the run that saved, also a single process.
    Every rank calls it, and reads only what it needs. Nothing in a file is run. Values go into the objects that are
    given, which stay the same objects. What is not given is not loaded, except the states of random generators, the
    seed of dropout and the numbers of steps and evaluations begun, which always are.

    Args:
        folder: as given to `save_checkpoint`, or the folder of one of its checkpoints.
        which: "latest", the newest one that is whole; or the number of a step.
        model, optimizer, lr_scheduler, dataloader, scaler, objects: as for `save_checkpoint`.

    Raises:
        TypeError, ValueError: an argument that cannot be loaded into, or a wrong `which`; before any communication.
        CheckpointError: there is none that is whole, and says why of each; or the newest that is whole does not fit,
            as it is of another model or was saved without what is given here. Nothing has changed then.
        PipelineFailure: a rank was lost.
    """
    objects |= {"lr_scheduler": lr_scheduler, "dataloader": dataloader, "scaler": scaler}
    if (loaded := load_if_any(folder, model, which, optimizer, **objects)) is None:
        folder = os.path.abspath(folder)
        if not os.path.isdir(folder):
            raise CheckpointError(f"{folder} is no directory")
        found = [each for each in find_checkpoints(folder) if each.has_table]
        of_run = [each for each in found if each.path != folder or each.is_of_run]
        steps = ", ".join(str(each.step) for each in of_run if each.step is not None)
        wanted = "whole checkpoint" if which == LATEST else f"checkpoint of step {which}"
        others = f", but of {steps}" if steps and which != LATEST else ""
        if len(of_run) < len(found):
            others += "; it holds weights without a training state: load them alone, with from_parallelized"
        raise CheckpointError(f"{folder} holds no {wanted}{others}")
    return loaded


def load_if_any(
    folder: PathLike, model: nn.Module, which: str | int = LATEST, optimizer: Any = None, **objects: Any
) -> Checkpoint | None:
    """As `load_checkpoint`; None if there is nothing that it would try to load, as the first rank sees it. Checkpoints
    whose save did not finish do not count."""
    model = base_of(model)
    run = Participants(model)
    if which != LATEST and (isinstance(which, bool) or not isinstance(which, int)):
        raise ValueError(f'which must be "latest" or the number of a step, got {which!r}')
    state = TrainingState(unwrapped(optimizer), _objects(optimizer, **objects))
    if (recovery := run.recovery).repeats and not recovery.in_call:
        return _load_repeatedly(recovery, partial(load_if_any, folder, model, which, optimizer, **objects))
    with run.loading():
        run.finish_saving(model)
        loaded = _load_newest(os.path.abspath(folder), which, model, state, run, run.comm())
    if loaded is not None:
        run.advise(folder)
        if (scale := loss_scale_of(optimizer)) is not None and run.engine is not None:
            run.engine.loss_scale = scale.scale
    return loaded


def _load_repeatedly(recovery: Recovery, load: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """Load into an elastic run, again after a rank was lost. Its step is then that of what was loaded."""
    if recovery.accumulating:
        raise ValueError("with elastic= load between steps, not in the middle of an accumulation")
    found: Checkpoint | None = None

    def load_and_tell() -> int | None:
        nonlocal found
        found = load()
        return None if found is None else found.step

    recovery.load(load_and_tell)
    return found


def finish_saving(model: nn.Module) -> None:
    """Wait for what `save_checkpoint(..., asynchronous=True)` writes of `model`. Every rank calls it.

    Raises:
        CheckpointError: some rank could not write.
    """
    model = base_of(model)
    run = Participants(model)
    with run.saving():
        run.finish_saving(model)


# -- loading -----------------------------------------------------------------------------------------------------------


def _load_newest(
    folder: str,
    which: str | int,
    model: nn.Module,
    state: TrainingState,
    run: Participants,
    world: CheckpointRanks,
) -> Checkpoint | None:
    """Check, apply, copy: the newest checkpoint that is whole. After a damaged one the next older is tried; one that is
    whole but does not fit is an error, as to load an older one would lose steps. None if there is none at all."""
    damaged: dict[str, str] = {}

    def look() -> list[str]:
        found = [] if world.rank or not os.path.isdir(folder) else find_checkpoints(folder)
        of_run = [checkpoint for checkpoint in found if checkpoint.path != folder or checkpoint.is_of_run]
        return [checkpoint.path for checkpoint in of_run if which in (LATEST, checkpoint.step) and checkpoint.has_table]

    for path in world.together(f"looking for checkpoints to load from {folder}", look)[0]:
        try:
            copy_weights, manifest = checked_weights(model, path, world)
            apply, common = checked_training_state(model, path, state, world, manifest=manifest)
        except CheckpointMismatch:
            _log_damaged(damaged, world)
            raise
        except CheckpointError as error:
            damaged[path] = str(error)
            continue
        _log_damaged(damaged, world)
        with undone_if_it_fails(state):
            world.together(f"restoring the training state to load {path}", apply)
            world.together(f"copying the weights to load {path}", copy_weights)
        run.restore_progress(common)
        return Checkpoint(path, common.step, common.extra, damaged)
    if damaged:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in damaged.items())
        raise CheckpointError(f"no checkpoint in {folder} can be loaded: {reasons}")
    return None


def _log_damaged(damaged: Mapping[str, str], world: CheckpointRanks) -> None:
    for path, reason in damaged.items() if world.rank == 0 else ():
        logger.warning("passed over the checkpoint %s: %s", path, reason)


# -- who takes part ----------------------------------------------------------------------------------------------------


class Participants:
    """The ranks that save or load a model's run: those of its pipelines, or a single process."""

    def __init__(self, model: Any) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}")
        if (wrapper := wrapper_of(model)) is not None:
            raise TypeError(f"model is a {wrapper}, whose weights may have other names: give the model itself")
        self.engine = engine_of(model)
        if self.engine is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "the model is not parallelised, but there are several processes: give the model that "
                "penstock.initialize() or booster.boost() returned"
            )

    def saving(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.engine is None else self.engine.saving(Call.SAVE_CHECKPOINT)

    def loading(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.engine is None else self.engine.together(Call.LOAD_CHECKPOINT)

    def compare(self, *numbers: int) -> Mapping[int, Sequence[int]]:
        """Every rank's numbers."""
        if self.engine is None:
            return {0: numbers}
        with self.engine.together(Call.COMPARE_STEPS, numbers) as facts_by_rank:
            return {rank: list(facts[: len(numbers)]) for rank, facts in facts_by_rank.items()}

    def comm(self) -> CheckpointRanks:
        return checkpoint_ranks(self.engine)

    def finish_saving(self, model: Any) -> None:
        """Wait for the asynchronous save before this call, which can be loaded from then on."""
        if (path := _saver_of(model).finish(self.comm())) is not None:
            self.advise(os.path.dirname(path))

    @property
    def recovery(self) -> Recovery:
        """What becomes of their calls when one of them is lost."""
        return NoRecovery() if self.engine is None else self.engine.recovery

    def warn_of_gradients(self, optimizer: Optimizer | None) -> None:
        """Warn if there are gradients that no step of the optimizer has used: a save leaves them out. An elastic run
        has such only between its own calls, which it repeats after a loss."""
        pending = self.engine is None or (not self.recovery.repeats and self.engine.gradients_pending)
        groups = [] if optimizer is None else optimizer.param_groups
        if not pending or all(parameter.grad is None for group in groups for parameter in group["params"]):
            return
        # A single process without a pipeline does not know whether they were used.
        unless = "" if self.engine is not None else ", unless it has used them already: then call zero_grad() first"
        warnings.warn(
            "gradients are not saved, so a run that goes on from this checkpoint begins its accumulation anew: save "
            f"after optimizer.step(){unless}",
            stacklevel=3,
        )

    @property
    def steps_begun(self) -> int:
        return 0 if self.engine is None else self.engine.step_number

    def restore_progress(self, loaded: CommonState) -> None:
        if self.engine is not None:
            self.engine.note_loaded()
            restore_progress(self.engine, loaded)

    def lost(self) -> str | None:
        """Why a rank will not finish its save, or None."""
        board = None if self.engine is None else self.engine.board
        return None if board is None or board.failed is None else str(board.failed)

    def advise(self, folder: PathLike) -> None:
        """Set what an error about a lost rank says about going on."""
        if self.engine is not None:
            self.engine.board.resume.clear()
            self.engine.board.resume["checkpoint"] = f"penstock.load_checkpoint({os.fspath(folder)!r}, ...)"


def _saver_of(model: nn.Module) -> Saver:
    record = record_of(model)
    saver: Saver = record.saver or Saver()
    record.saver = saver
    return saver


def _objects(optimizer: Any, **given: Any) -> dict[str, Any]:
    """What has a state besides the optimizer, by name. Raises TypeError if something given has none."""
    objects = {name: value for name, value in given.items() if value is not None}
    for name, value in objects.items():
        if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
            advice = (
                "make it with model.prepare_dataloader or plugin.prepare_dataloader, whose loaders know their position"
                if isinstance(value, DataLoader)
                else "give it state_dict() and load_state_dict(), or save its values with extra={...}"
            )
            raise TypeError(f"{name} cannot be saved or loaded: a {type(value).__name__} has no state; {advice}")
    if (scale := loss_scale_of(optimizer)) is not None:
        objects[LOSS_SCALE] = scale
    return objects

"""Checkpoints for a training loop: every so many steps, and when the job is told to end; and resuming from them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from penstock.arguments import check_count
from penstock.checkpoint.contents import find_checkpoints
from penstock.checkpoint.model_methods import loss_scale_of
from penstock.checkpoint.training_checkpoints import (
    Checkpoint,
    Participants,
    finish_saving,
    load_checkpoint,
    load_if_any,
    save_checkpoint,
)
from penstock.checkpoint.untrusted import CheckpointError
from penstock.data.loader import HeterogeneousDataLoader
from penstock.modeling.libraries import base_of
from penstock.runtime.failures.interrupts import EXIT_CODE

logger = logging.getLogger(__name__)

# What schedulers and clouds send before they take a machine away.
SIGNALS = ("SIGTERM", "SIGUSR1")


class CheckpointManager:
    """Save a run every so many steps, and resume it. Every rank makes a manager and calls the same methods.

    ```python
    manager = penstock.CheckpointManager("run", model=model, optimizer=optimizer, every=100)
    for step in range(manager.resume() + 1, num_steps + 1):
        ...  # a training step
        manager.save(step)
    ```

    Args:
        folder: see `save_checkpoint`.
        model, optimizer, lr_scheduler, dataloader, scaler, objects: what is saved and loaded, see `save_checkpoint`.
        every: steps between two checkpoints; None saves only when `on_signal` asks for it.
        keep_last: how many checkpoints to keep; None for all of them.
        asynchronous: write files while training goes on; not possible with `elastic=`.
        on_signal: after a SIGTERM or SIGUSR1 to any rank, the next `save` saves on all ranks and ends the program with
            status `EXIT_CODE`, 75. Make the manager in the main thread then.

    With `elastic=` the run goes back to the newest checkpoint if every copy of some values is lost, and saves if all
    its processes are told to leave.

    Attributes:
        last: the checkpoint that was loaded last; None if there was none.

    Raises:
        ValueError: `every` or `keep_last` is below 1, or `on_signal` is not possible here.
        TypeError: one of them is no integer, or `model` is no torch module.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        scaler: Any = None,
        every: int | None = None,
        keep_last: int | None = None,
        asynchronous: bool = False,
        on_signal: bool = False,
        **objects: Any,
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last)):
            if value is not None:
                check_count(name, value)
        self.folder = os.path.abspath(folder)
        self.last: Checkpoint | None = None
        self._model = model
        self._state = {
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
            "dataloader": dataloader,
            "scaler": scaler,
            **objects,
        }
        self._participants = Participants(base_of(model))
        recovery = self._participants.recovery
        if recovery.repeats and on_signal:
            raise ValueError("with elastic= a process that gets a SIGTERM leaves the run: leave on_signal out")
        recovery.last_resort, recovery.save_unfinished = self, self._save_unfinished
        self._every, self._keep_last, self._asynchronous = every, keep_last, asynchronous
        self._on_signal = on_signal
        self._signalled = 0
        self._handlers: dict[int, Any] = {}
        if on_signal:
            self._listen()

    def resume(self) -> int:
        """Load the newest whole checkpoint. Returns its step, or 0 if there is none and a new run begins; in a process
        that joins an elastic run, the step of that run.

        Raises:
            CheckpointError: there are checkpoints, but none of them is whole, or the newest that is does not fit.
        """
        recovery = self._participants.recovery
        if not recovery.joined:  # a process that joins a run gets its state from the others
            self.last = load_if_any(self.folder, self._model, **self._state)
        loaded = 0 if self.last is None else self.last.step or 0
        return recovery.step if recovery.repeats else loaded

    def newest(self, objects: Mapping[str, Any]) -> tuple[int, str] | None:
        """Step and path of the newest whole checkpoint, as this process sees it; None if there is none, or if this
        manager does not save all of the run's `objects`."""
        optimizer = self._state["optimizer"]
        saved = [id(value) for value in (*self._state.values(), loss_scale_of(optimizer)) if value is not None]
        missing = ["optimizer"] * (optimizer is None) + [name for name, one in objects.items() if id(one) not in saved]
        if missing:
            logger.warning("the run cannot go back to %s, which is without %s", self.folder, ", ".join(missing))
            return None
        if not os.path.isdir(self.folder):
            return None
        try:
            found = find_checkpoints(self.folder)
        except CheckpointError as error:
            logger.warning("the run cannot go back to a checkpoint: %s", error)
            return None
        checkpoints = (checkpoint for checkpoint in found if checkpoint.fault is None and checkpoint.step is not None)
        return next(((checkpoint.step or 0, checkpoint.path) for checkpoint in checkpoints), None)

    def go_back(self, step: int) -> None:
        """Load the checkpoint of a step into a run under way; iterations of its loader go back as well.

        Raises:
            ValueError: it cannot be loaded.
        """
        try:
            self.last = load_checkpoint(self.folder, step, model=self._model, **self._state)
        except CheckpointError as error:
            raise ValueError(str(error)) from error
        if isinstance(loader := self._state["dataloader"], HeterogeneousDataLoader):
            loader.rewind()

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> bool:
        """After step number `step` (counted from 1): save if it is time to, or if the job was told to end.
        `extra` is saved too: numbers and tensors by name.

        Returns:
            whether it has saved; True also if an elastic run has gone back to an earlier checkpoint meanwhile.

        Raises:
            SystemExit: with status `EXIT_CODE`, on all ranks, after a signal to any of them. Everything is saved.
            CheckpointError: as `save_checkpoint`.
        """
        signalled = self._anyone_signalled(step) if self._on_signal else None
        if signalled is None and (self._every is None or step % self._every):
            return False
        self._write(step, extra, asynchronous=self._asynchronous and signalled is None)
        if signalled is not None:
            rank, number = signalled
            name = signal.Signals(number).name
            logger.warning("rank %d got %s: step %d is saved in %s, and all ranks end", rank, name, step, self.folder)
            self.close()
            raise SystemExit(EXIT_CODE)
        return True

    def _write(self, step: int, extra: Mapping[str, Any] | None = None, asynchronous: bool = False) -> None:
        save_checkpoint(
            self.folder,
            model=self._model,
            step=step,
            extra=extra,
            keep_last=self._keep_last,
            asynchronous=asynchronous,
            **self._state,
        )

    def _save_unfinished(self) -> None:
        """Save an elastic run that all its processes leave."""
        self._write(self._participants.recovery.step)

    def finish(self) -> None:
        """Wait for what is being written. Raises CheckpointError if some rank could not write."""
        finish_saving(self._model)

    def close(self) -> None:
        """Restore the signals' handlers."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._handlers.clear()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
        if kind is None:
            self.finish()

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("on_signal=True: only the main thread can listen to signals, so make the manager there")
        for name in SIGNALS:
            if (number := getattr(signal, name, None)) is not None:
                self._handlers[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = self._signalled or number

    def _anyone_signalled(self, step: int) -> tuple[int, int] | None:
        """The first rank that was signalled, and the signal's number; the same on all ranks."""
        facts_by_rank = self._participants.compare(step, self._signalled)
        if len(steps := {theirs for theirs, _ in facts_by_rank.values()}) > 1:
            raise ValueError(f"the ranks are at different steps: {sorted(steps)}; every rank must save the same one")
        return next(((rank, number) for rank, (_, number) in sorted(facts_by_rank.items()) if number), None)

"""What a user iterates over in training: the step's outputs.

It also says what happens if the iteration is not as it should be.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any

from penstock.modeling.graph.loss import LoopError
from penstock.runtime.failures.interrupts import Interrupts
from penstock.runtime.step import TrainingStep

logger = logging.getLogger(__name__)

HOW_TO_LOOP = (
    "in training, a parallelised model returns an iterator over the outputs of microbatches. Write "
    "`for out in model(...): out.loss.backward()` (the losses add up to the batch's), or evaluate under torch.no_grad()"
)


class OpenStep:
    """The training step under way on this rank, if any: nothing else may communicate meanwhile, and the handlers
    of signals wait."""

    def __init__(self, interrupts: Interrupts) -> None:
        self.interrupts = interrupts
        self._step: TrainingStep | None = None

    def refuse(self, doing: str) -> None:
        if self._step is not None:
            raise LoopError(
                f"{doing}: a training step is under way (microbatch {self._step.microbatch} of "
                f"{self._step.num_microbatches}): finish the loop first. An iterator that is kept in a variable is "
                "under way until it has ended or its close() is called"
            )

    def begin(self, step: TrainingStep) -> None:
        self.refuse("another training step")
        self.interrupts.hold()
        self._step = step

    def end(self, step: TrainingStep | None = None, deliver: bool = False) -> None:
        """`step`, or any, is not under way any more. `deliver`: see `Interrupts.release`."""
        if self._step is not None and step in (self._step, None):
            self._step = None
            self.interrupts.release(deliver)


class TrainingLoop(Iterator[Any]):
    """The iterator over a step's microbatches that `model(**batch)` returns.

    One that is dropped before its end leaves the step, as a `break` does; `close()` does so at once, and raises what
    dropping it can only log. It has no loss and no logits: asking for them is an error that says how to write the
    loop."""

    def __init__(self, step: TrainingStep, run: Callable[[], Generator[Any, None, None]], opened: OpenStep):
        self._step = step
        self._run = run
        self._opened = opened
        self._interrupts = opened.interrupts
        self._outputs: Generator[Any, None, None] | None = None
        self._over = False
        # Warns, unless it has begun or the caller was told that this is an iterator; also at the interpreter's end.
        self._forgotten = weakref.finalize(self, _warn_of_forgotten)
        # What ends a step that is under way then, while there is still an interpreter to end it with.
        self._at_exit = partial(_leave_at_exit, weakref.ref(self))

    @property
    def inputs(self) -> Mapping[str, Any]:
        """In the loop's body, the inputs of the microbatch whose output it has."""
        return self._step.inputs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._forgotten.detach()
        raise AttributeError(f"model(...).{name}: {HOW_TO_LOOP}")

    def __getitem__(self, key: Any) -> Any:
        self._forgotten.detach()
        raise TypeError(f"model(...)[{key!r}]: {HOW_TO_LOOP}")

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if self._outputs is None:
            self._over = True  # should a signal or another step under way prevent it
            self._forgotten.detach()
            self._opened.begin(self._step)
            atexit.register(self._at_exit)
            self._outputs = self._run()
            self._over = False
        interrupts = self._interrupts
        interrupts.busy = True
        try:
            output = next(self._outputs)
        except StopIteration:
            output = self  # stands for the end
        except BaseException:
            self._end()
            raise
        if output is self:
            self._end()
            raise StopIteration
        # From here on the loop's body runs; see `Interrupts`.
        interrupts.busy = False
        return output

    def close(self) -> None:
        """Leave the step here, as a `break` does: every rank must leave it, at whichever microbatch."""
        self._forgotten.detach()
        if self._over or self._outputs is None:
            self._over = True
            return
        self._interrupts.busy = True
        try:
            self._outputs.close()
        finally:
            self._end()

    def __del__(self) -> None:
        if self._over or self._outputs is None:
            return
        # Python would print and drop an error raised here. The board keeps a failure for the next call.
        self._interrupts.busy = True
        try:
            self._outputs.close()
        except Exception as error:
            logger.warning("%s", error)
        self._end(deliver=False)

    def _end(self, deliver: bool = True) -> None:
        self._over = True
        atexit.unregister(self._at_exit)
        self._opened.end(self._step, deliver)


def _warn_of_forgotten() -> None:
    warnings.warn(
        "the iterator of a training step was dropped before its first microbatch, so the step did not happen: iterate "
        "over model(**batch), or evaluate under torch.no_grad()",
        stacklevel=3,
    )


def _leave_at_exit(of: weakref.ref[TrainingLoop]) -> None:
    """Leave the step of an iterator that the program keeps to its end. Later the interpreter would, without modules."""
    loop = of()
    if loop is None:
        return
    if sys.exc_info()[1] is None and getattr(sys, "last_value", None) is None:
        try:
            loop.close()
        except Exception as error:
            logger.warning("%s", error)
    elif loop._outputs is not None:
        # An error ends the program, and with it the step on every rank: this one's is never run to its end.
        loop._over = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(loop._outputs))

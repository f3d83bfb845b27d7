"""Loops in threads of which exactly one runs at a time: how groups of a batch share a rank.

A loop passes its turn on where it would wait for another rank, and says when it is due again (by `decoding.Clock`). As
no two ever run together, they may share whatever a single one may use; what torch keeps for each thread is handed over
to all of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

T = TypeVar("T")


class LoopStopped(BaseException):
    """Ends a loop because another one failed. No `Exception`, so that nobody's code swallows it."""


class Turns:
    """Whose turn it is. `due`: when each loop's first turn is; of equals the first loop goes first. `begins`: called on
    its thread whenever a loop's turn begins. `error`: what ended the first loop that failed, or all of them."""

    def __init__(self, due: Sequence[int], begins: Callable[[], None]) -> None:
        self.current = 0
        self.error: BaseException | None = None
        self._begins = begins
        self._doors = [threading.Semaphore(0) for _ in due]
        self._due = dict(enumerate(due))
        self._lock = threading.Lock()

    def yield_until(self, due: int) -> None:
        """Let the loops that are due before `due` have their turns. Called by the one whose turn it is."""
        mine = self.current
        self._due[mine] = due
        if (following := self._next()) != mine:
            self._doors[following].release()
            self._wait(mine)

    def run(
        self, loops: Sequence[Callable[[], T]], device: torch.device, on_interrupt: Callable[[BaseException], Any]
    ) -> list[T]:
        """Run all loops, the first one in this thread; return their results in order, or raise the first error, after
        which every loop ends itself at the end of what it has begun. `on_interrupt`: called with what a signal raises
        in this thread, also in another loop's turn; must end whatever that loop waits for."""
        results: list[Any] = [None] * len(loops)
        settings = _ThreadSettings(device)

        def run(number: int) -> None:
            try:
                self._wait(number)
                results[number] = loops[number]()
            except LoopStopped:
                pass
            except BaseException as error:
                if self.current == number and isinstance(error, Exception):
                    self.error = self.error or error
                else:
                    interrupt(error)
            self._leave(number)

        def interrupt(error: BaseException) -> None:
            self.error = self.error or error
            on_interrupt(error)
            for door in self._doors:  # it is not known who was on the way through one
                door.release()

        threads = []
        for number in range(1, len(loops)):
            target = contextvars.copy_context().run
            threads.append(
                threading.Thread(target=target, args=(settings.run, run, number), name=f"group {number}", daemon=True)
            )
            threads[-1].start()
        try:
            self._doors[self._next()].release()
            run(0)
        except BaseException as error:  # a signal's, where this loop has ended
            interrupt(error)
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as error:
                    interrupt(error)
        if self.error is not None:
            raise self.error
        return results

    def _wait(self, number: int) -> None:
        self._doors[number].acquire()
        self.current = number
        if self.interrupted:
            raise LoopStopped
        self._begins()

    @property
    def interrupted(self) -> bool:
        """Whether a signal has ended all loops."""
        return self.error is not None and not isinstance(self.error, Exception)

    def _next(self) -> int:
        return min(self._due, key=lambda number: (self._due[number], number))

    def _leave(self, number: int) -> None:
        """A loop has ended. If it failed, the others find that out at their next turns."""
        with self._lock:  # those that are interrupted end together
            del self._due[number]
            if self._due:
                self._doors[self._next()].release()


def refusal_of_threads() -> str | None:
    """Why code of this thread cannot be run in others, None if it can."""
    if _get_current_function_mode_stack() or _get_current_dispatch_mode_stack():
        return "a mode of torch (a default device, a counter of operations) is active in this thread"
    return None


class _ThreadSettings:
    """What torch keeps for each thread, as this thread has it: gradients, inference mode, autocast, device, stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        caches = torch.is_autocast_cache_enabled()
        # Also where it is off: then weights that a forward casts for itself stay for the next one.
        self._autocast = [
            partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), caches)
            for kind in {"cpu", device.type}
        ]
        self._stream: Any = None
        if device.type != "cpu":
            current_stream = getattr(torch.get_device_module(device), "current_stream", None)
            self._stream = current_stream and current_stream(device)

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function` with these settings, in another thread."""
        with contextlib.ExitStack() as stack:
            if self._device.type != "cpu":
                module = torch.get_device_module(self._device)
                module.set_device(self._device)
                if self._stream is not None and hasattr(module, "stream"):
                    stack.enter_context(module.stream(self._stream))
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for autocast in self._autocast:
                stack.enter_context(autocast())
            function(*args)

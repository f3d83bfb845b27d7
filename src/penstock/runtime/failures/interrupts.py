"""Signals that end a run (Ctrl-C, a scheduler's SIGTERM), held back until they can do no harm.

Python runs a signal's handler between any two bytecodes, and what it raises in the middle of an action, of a backward
or of a save tears what the other ranks rely on: a message is received but not noted, a collective is entered by some.
So while a rank works together with others, handlers wait for the end of a step or of a save. One that is pressed for
again a second later, in the user's own code, is called at once, so that Ctrl-C, Ctrl-C still gets out of an endless
loop.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# Signals with which people, launchers and schedulers stop or warn a job. Only Python handlers are held back.
HELD = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT") if hasattr(signal, name)
)
# The status of a program that a signal ended before its last step: sysexits.h's EX_TEMPFAIL, "the user is invited to
# retry". Any status but 0 makes torchrun --max-restarts start again.
EXIT_CODE = 75
# A launcher may send one signal twice. One that comes again after this many seconds is meant as a second one.
REPEATED_AFTER = 1.0
# One that came while an iterator was taken down is sent again this many seconds later: Python drops what is raised
# there.
RESEND_AFTER = 0.02


class Interrupts:
    """Holds signal handlers back on this rank. `pending`: signals whose handlers were not called yet, with the time of
    each. `called`: those whose handlers were, since they were first held. `busy`: whether the pipeline's own code runs,
    which even a repeated signal does not interrupt."""

    def __init__(self) -> None:
        self.pending: dict[int, float] = {}
        self.called: set[int] = set()
        self.busy = False
        self._depth = 0
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def hold(self) -> None:
        """From here on handlers wait for `deliver`, until as many calls of `release`."""
        if not self._depth and threading.current_thread() is threading.main_thread():
            self.pending.clear()
            self.called.clear()
            for signum in HELD:
                handler = signal.getsignal(signum)
                if callable(handler) and handler != self._note:
                    self._handlers[signum] = handler
                    signal.signal(signum, self._note)
        self._depth += 1

    def release(self, deliver: bool = True) -> None:
        """Restore the signals' handlers, and call those of the signals that came; without `deliver`, where nobody would
        see what they raise, they are sent again a moment later."""
        if self._depth > 1 or threading.current_thread() is not threading.main_thread():
            self._depth -= 1
            return
        try:
            # SIGINT last: once its handler is back it may raise.
            for signum in HELD:
                if signum in self._handlers and signal.getsignal(signum) == self._note:
                    signal.signal(signum, self._handlers[signum])
        finally:
            self._depth = 0
            self.busy = False
            # A launcher's second signal, while the first one's exception was on its way.
            for signum in self.called & self.pending.keys():
                del self.pending[signum]
            if deliver:
                self.deliver()
            elif self.pending:
                again, self.pending = list(self.pending), {}
                resend = threading.Timer(RESEND_AFTER, _send_again, (again,))
                resend.daemon = True
                resend.start()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold handlers back for a call that must not be torn; they are called at its end."""
        self.hold()
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before
            self.release()

    def deliver(self) -> None:
        """Call the handlers of the signals that came, which may raise: here nothing is half done."""
        while self.pending:
            self._call(self.pending.popitem()[0], None)

    def wait(self, seconds: float) -> bool:
        """Wait for a signal; whether one came."""
        deadline = time.monotonic() + seconds
        while not self.pending and time.monotonic() < deadline:
            time.sleep(0.005)
        return bool(self.pending)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Replaces every held signal's handler."""
        now = time.monotonic()
        repeated = now - self.pending.get(signum, now) >= REPEATED_AFTER
        if self._depth and (self.busy or not repeated):
            self.pending.setdefault(signum, now)
        else:
            self.pending.pop(signum, None)
            self._call(signum, frame)

    def _call(self, signum: int, frame: FrameType | None) -> None:
        self.called.add(signum)
        self._handlers[signum](signum, frame)


def _send_again(signums: list[int]) -> None:
    for signum in signums:
        signal.pthread_kill(threading.main_thread().ident or 0, signum)

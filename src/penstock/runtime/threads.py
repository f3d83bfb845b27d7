"""Background threads that call into torch, and their end with the process."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

# How long they may hold up the end of the process, together.
ENDING_SECONDS = 1.0
_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_thread(target: Callable[..., Any], *arguments: Any, name: str) -> threading.Thread:
    """Run `target(*arguments)` in a new daemon thread; the end of the process waits a little for it to end first."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


# At exit this module runs after all handlers registered later, which tell their threads to end.
@atexit.register
def _wait_for_the_last() -> None:
    # A thread that returns from torch's C++ while the interpreter shuts down cannot take its lock any more, and
    # Python 3.11 then ends the whole process by an abort ("terminate called without an active exception").
    deadline = time.monotonic() + ENDING_SECONDS
    for thread in list(_started):
        thread.join(max(0.0, deadline - time.monotonic()))

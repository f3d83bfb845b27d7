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
# With what tells each to end.
_started: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def start_thread(
    target: Callable[..., Any], *arguments: Any, name: str, end: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Run `target(*arguments)` in a new daemon thread; the end of the process calls `end`, and waits a little for the
    thread to end first."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    _started[thread] = end
    thread.start()
    return thread


# At exit this module runs after all handlers registered later, which tell their threads to end.
@atexit.register
def _wait_for_the_last() -> None:
    # A thread that returns from torch's C++ while the interpreter shuts down cannot take its lock any more, and
    # Python 3.11 then ends the whole process by an abort ("terminate called without an active exception").
    deadline = time.monotonic() + ENDING_SECONDS
    threads = list(_started.items())
    for _, end in threads:
        end()
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))

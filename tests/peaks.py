"""By how much a piece of code raises this process's memory at its highest, as Linux tells."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_growth(work: Callable[[], object]) -> int:
    """By how many bytes `work` raises what is resident, pages of files included."""
    gc.collect()  # what went meanwhile would hide as much of the growth
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


@contextlib.contextmanager
def sampled_peak() -> Iterator[list[int]]:
    """By how many bytes memory grows that is no page of a file."""

    def watch() -> None:
        while not over.wait(0.0005):
            peak[0] = max(peak[0], _status("RssAnon") - before)

    gc.collect()
    before, peak, over = _status("RssAnon"), [0], threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
        peak[0] = max(peak[0], _status("RssAnon") - before)

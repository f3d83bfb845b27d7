"""By how much a piece of code raises this process's memory at its highest, as Linux tells."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_growth(work: Callable[[], object]) -> int:
    """By how many bytes `work` raises what is resident, pages of files included.

    It is done again where less is resident afterwards than before: what went meanwhile, as pages of files do where
    memory is short, hid as much of the growth.
    """
    for _ in range(10):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = _status("VmRSS")
        work()
        peak = _status("VmHWM")
        if _status("VmRSS") > before - 2**20:
            return peak - before
    raise RuntimeError("memory is too short here for its growth to be measured")


@contextlib.contextmanager
def sampled_peak() -> Iterator[list[int]]:
    """By how many bytes memory grows that is no page of a file."""

    def watch() -> None:
        while not over.wait(0.0005):
            peak[0] = max(peak[0], _status("RssAnon") - before)

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free, but still resident, would hide as much of the growth
    before, peak, over = _status("RssAnon"), [0], threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
        peak[0] = max(peak[0], _status("RssAnon") - before)

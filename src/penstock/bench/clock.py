"""Stopwatches that read time where the work is done: on the host for a CPU, in its stream for a GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch


class Stopwatch:
    """Seconds that one device spends in the marked stretches of its work.

    On a GPU the marks are events in the current stream, so that marking waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            yield
            end.record(stream)
            self._events.append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """The seconds since the last `take`. The device must be idle."""
        seconds = self._seconds + sum(begin.elapsed_time(end) / 1000 for begin, end in self._events)
        self._seconds, self._events = 0.0, []
        return seconds


class Clock:
    """Times an iteration and its phases on the devices that one process drives."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        # Equal CPU devices are one host clock.
        self._devices = list(dict.fromkeys(devices))
        self._phases: dict[str, list[Stopwatch]] = {}
        self._started = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A stretch of the iteration; stretches of one name add up."""
        watches = self._phases.setdefault(name, [Stopwatch(device) for device in self._devices])
        with contextlib.ExitStack() as stack:
            for watch in watches:
                stack.enter_context(watch.running())
            yield

    def start(self) -> None:
        """Begin an iteration, with all devices idle."""
        self.synchronize()
        self._started = time.perf_counter()

    def stop(self) -> tuple[float, dict[str, float]]:
        """The iteration's seconds until all devices are idle, and of each phase those of its slowest device."""
        self.synchronize()
        seconds = time.perf_counter() - self._started
        return seconds, {name: max(watch.take() for watch in watches) for name, watches in self._phases.items()}

    def synchronize(self) -> None:
        """Wait until the devices are idle."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

"""What a process can measure of its devices: seconds where the work is done, bytes, the speed of a matrix product; and
what a training step costs in arithmetic."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import ResNetForImageClassification

from kinds.configs import GPTConfig, ModelConfig
from penstock.planning.unit_cost import synchronize, timed

# A product must take this long to be measured well, and is then repeated.
LEAST_SECONDS = 0.02
REPETITIONS = 8
LARGEST_SIDE = {"cpu": 2048, "cuda": 16384}


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
            synchronize(device)


def memory_in_use(devices: Sequence[torch.device]) -> int:
    """Bytes: allocated on the fullest GPU, or resident in this process."""
    if devices[0].type == "cuda":
        return max(torch.cuda.memory_allocated(device) for device in devices)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_memory(devices: Sequence[torch.device]) -> int:
    """Bytes at most: allocated on the fullest GPU since `forget_peak_memory`, or resident in this process ever."""
    if devices[0].type == "cuda":
        return max(torch.cuda.max_memory_allocated(device) for device in devices)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak_memory(devices: Sequence[torch.device]) -> None:
    """Begin to look for the peak anew, where that can be done."""
    if devices[0].type == "cuda":
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)


def model_flops(config: ModelConfig, batch_size: int) -> float:
    """Operations of a training step on `batch_size` samples: a multiply-add counts two, the backward twice the forward.

    GPT: 72 B s l h^2 (1 + s/6h + V/12lh) (Narayanan et al. 2021, SC21, section 5.1, whose 96 is 72 and a recomputed
    forward). Recomputation is no progress, so it gets no credit. ResNet: counted over the operations of a forward.
    """
    if isinstance(config, GPTConfig):
        tokens, width, layers = config.block_size, config.n_embd, config.n_layer
        rest = 1 + tokens / (6 * width) + config.vocab_size / (12 * layers * width)
        return 72 * batch_size * tokens * layers * width**2 * rest
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        ResNetForImageClassification(config.to_transformers()).eval()(torch.empty(1, 3, *[config.image_size] * 2))
    return 3.0 * counter.get_total_flops() * batch_size


def matmul_peak(devices: Sequence[torch.device], dtype: torch.dtype) -> float:
    """Operations per second of the best square matrix product, per device, with all of `devices` at work together.

    Other processes should measure at the same time, as they will compute at the same time.
    """
    with ThreadPoolExecutor(len(devices)) as threads:
        peaks = list(threads.map(lambda device: _peak_of(device, dtype), devices))
    return sum(peaks) / len(peaks)


def _peak_of(device: torch.device, dtype: torch.dtype) -> float:
    side, seconds = 128, 0.0
    while True:
        first, second = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        product = partial(torch.mm, first, second)
        product()  # the first one sets up libraries
        seconds, _ = timed(product, device)
        if seconds >= LEAST_SECONDS or side >= LARGEST_SIDE[device.type]:
            break
        side *= 2
    best = min(timed(product, device)[0] for _ in range(REPETITIONS))
    return 2 * side**3 / best

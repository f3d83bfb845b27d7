"""A process group "emulated_nccl" for the device "gpu": the transport is gloo's, the rules are NCCL's.

CPU tensors and types that NCCL has not are refused, tensors must be contiguous, and there are no tags: messages between
two ranks match in the order in which they were posted. A transfer whose peer is gone ends only when its group is
aborted, and then without an error: what it should have brought is garbage.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from penstock.runtime.comm.groups import UNHANDLED
from tests.support.emulated_gpu.host_group import HostGroup, listed, rooted

TYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool,
}  # fmt: skip
NAME = "emulated_nccl"
# What was posted and not seen to end yet.
under_way: list[Work] = []
# How many transfers of each kind there were, in this process.
counts: dict[str, int] = {}
# What the watchdogs of groups have noted: a test sets it. And what is to be done then, as groups were told when made.
noted = ErrorType.SUCCESS
handling: list[list[str | None]] = []


class Work(dist._Work):
    """A transfer. `wait` blocks the host, which a real one does only when a value is read."""

    def __init__(self, group: EmulatedNccl, work: dist.Work, tensors: list[torch.Tensor]):
        super().__init__()
        # Into whose memory gloo may write until it is done.
        self._tensors = tensors
        self._group = group
        self._inner = work
        self._arrived = threading.Event()
        self._awaited = False
        under_way.append(self)

    def wait(self, timeout: Any = None) -> bool:
        if not self._awaited:  # gloo's are to be waited for once
            self._awaited = True
            threading.Thread(target=self._await, daemon=True).start()
        while not (self._arrived.wait(0.02) or self._group.aborted):
            pass
        if self in under_way:
            under_way.remove(self)
        return True

    def _await(self) -> None:
        # gloo says when the peer is gone; a kernel of NCCL goes on to wait for it.
        with contextlib.suppress(RuntimeError):
            self._inner.wait()
            self._arrived.set()

    def is_completed(self) -> bool:
        return self._arrived.is_set() or self._group.aborted


def synchronize(device: Any = None) -> None:
    """As `torch.cuda.synchronize()`: wait for every kernel that was launched, those of transfers too."""
    while under_way:
        under_way[0].wait()


class EmulatedNccl(HostGroup):
    """One communicator."""

    backend = NAME
    aborted = False

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        handling.append([os.environ.get(name) for name in UNHANDLED])

    # -- transfers -------------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        return self._start("send", tensors, lambda memory: self._inner.send(_bytes_of(memory), peer, 0))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        return self._start("recv", tensors, lambda memory: self._inner.recv(_bytes_of(memory), peer, 0))

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        options = options or dist.AllreduceOptions()
        return self._start("allreduce", tensors, lambda memory: self._inner.allreduce(memory, options))

    def reduce(self, tensors: list[torch.Tensor] | torch.Tensor, options: Any) -> Work:
        made = rooted(dist.ReduceOptions, options)
        return self._start("reduce", listed(tensors), lambda memory: self._inner.reduce(memory, made))

    def broadcast(self, tensors: list[torch.Tensor] | torch.Tensor, options: Any) -> Work:
        made = rooted(dist.BroadcastOptions, options)
        return self._start("broadcast", listed(tensors), lambda memory: self._inner.broadcast(memory, made))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Work:
        every = [[_memory_of(tensor) for tensor in output] for output in outputs]
        return self._start(
            "allgather",
            [*inputs, *itertools.chain.from_iterable(outputs)],
            lambda memory: self._inner.allgather(every, memory[: len(inputs)]),
        )

    def _start(self, what: str, tensors: list[torch.Tensor], call: Callable[[list[torch.Tensor]], dist.Work]) -> Work:
        counts[what] = counts.get(what, 0) + 1
        return Work(self, call([_memory_of(tensor) for tensor in tensors]), tensors)

    def get_error(self) -> ErrorType:
        return noted

    # -- its end ------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """It frees memory, for which it waits for the kernels of all communicators."""
        self.aborted = True
        while any(not work.is_completed() for work in list(under_way)):
            time.sleep(0.01)

    def shutdown(self) -> None:
        if not self.aborted:
            synchronize()


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "gpu":
        raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
    if tensor.dtype not in TYPES:
        raise RuntimeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    memory: torch.Tensor = torch.ops.emulated_gpu.alias(tensor.detach())
    return memory


def _bytes_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]


def register() -> None:
    """Make it the transport of tensors on "gpu"."""
    if NAME.upper() in dist.Backend._plugins:
        return
    EmulatedNccl.register("gpu")
    torch.get_device_module("gpu").synchronize = synchronize

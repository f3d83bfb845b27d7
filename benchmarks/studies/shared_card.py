"""A transport for ranks that share one GPU, where there is no NCCL: gloo's, through copies in the host's memory.

For checks only: each message is copied twice, and the ranks take turns on the card.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.emulated_gpu.host_group import HostGroup, listed, rooted
from tests.support.emulated_gpu.one_card import count_as_own


class Work(dist._Work):
    """A transfer of copies; `wait` brings what came to the device."""

    def __init__(self, work: dist.Work, outputs: list[tuple[torch.Tensor, torch.Tensor]], kept: list[torch.Tensor]):
        super().__init__()
        self._inner, self._outputs, self._kept = work, outputs, kept

    def wait(self, timeout: Any = None) -> bool:
        if self._kept:  # gloo's are waited for once
            self._inner.wait(*[] if timeout is None else [timeout])
            for tensor, copy in self._outputs:
                tensor.detach().copy_(copy.view(tensor.dtype).view_as(tensor))
            self._kept = []
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """What DistributedDataParallel asks for; done already."""
        self.wait()
        future = torch.futures.Future[list[torch.Tensor]]()
        future.set_result([tensor for tensor, _ in self._outputs])
        return future

    def is_completed(self) -> bool:
        return not self._kept or self._inner.is_completed()


class SharedCard(HostGroup):
    """A group of ranks on one card."""

    backend = "shared_card"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        return self._carry(tensors, [], lambda copies: self._inner.send(_as_bytes(copies), peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        copies = [torch.empty(tensor.nbytes, dtype=torch.uint8) for tensor in tensors]
        return Work(self._inner.recv(copies, peer, tag), list(zip(tensors, copies, strict=True)), copies)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        options = options or dist.AllreduceOptions()
        return self._carry(tensors, tensors, lambda copies: self._inner.allreduce(copies, options))

    def reduce(self, tensors: list[torch.Tensor] | torch.Tensor, options: Any) -> Work:
        made, each = rooted(dist.ReduceOptions, options), listed(tensors)
        return self._carry(each, each, lambda copies: self._inner.reduce(copies, made))

    def broadcast(self, tensors: list[torch.Tensor] | torch.Tensor, options: Any) -> Work:
        made, each = rooted(dist.BroadcastOptions, options), listed(tensors)
        return self._carry(each, each, lambda copies: self._inner.broadcast(copies, made))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Work:
        every = [[torch.empty_like(tensor, device="cpu") for tensor in output] for output in outputs]
        given = [tensor.cpu() for tensor in inputs]
        pairs = [pair for ours, theirs in zip(outputs, every, strict=True) for pair in zip(ours, theirs, strict=True)]
        return Work(self._inner.allgather(every, given), pairs, given)

    def _carry(
        self,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        call: Callable[[list[torch.Tensor]], dist.Work],
    ) -> Work:
        copies = [tensor.detach().cpu().contiguous() for tensor in inputs]
        return Work(call(copies), list(zip(outputs, copies, strict=False)), copies)

    def name(self) -> str:
        return "gloo"  # whose end it has, when a rank is lost

    def shutdown(self) -> None:
        pass


def _as_bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]


def use_shared_card(transport: str) -> None:
    """Let each rank count the card as its own; "host" for this transport, "nccl" for NCCL's sockets, or on the emulated
    device for what has NCCL's rules."""
    count_as_own()
    if transport == "host":
        SharedCard.register(torch.accelerator.current_accelerator().type)

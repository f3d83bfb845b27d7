"""Where activations are sharded as the weights are: what ranks of a tensor-parallel group exchange in a forward.

Megatron-LM's two conjugate operators (Shoeybi et al. 2019, section 3): entering is the identity forward and a sum
backward, leaving is a sum forward and the identity backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from penstock.modeling.sharding import GroupGuard
from penstock.runtime.comm.gloo import wait_for_all


class Collectives:
    """What the ranks of a stage exchange within its layers; counts collectives, and bytes of the tensors in them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, board: GroupGuard):
        self._group: dist.ProcessGroup | None = group
        self._ranks = dist.get_process_group_ranks(group)
        self._device = device
        self._board = board
        self._mesh: DeviceMesh | None = None
        self.num_sums = self.num_gathers = self.num_bytes = 0
        board.on_close(self.clear)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> None:
        """Maximum over the ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in order."""
        parts = [torch.empty_like(tensor) for _ in self._ranks]
        with self._board.guard("gathering slices of a tensor-parallel layer", self._ranks):
            self._wait(dist.all_gather(parts, tensor, group=self._alive(), async_op=True))
        self.num_gathers += 1
        self.num_bytes += tensor.numel() * tensor.element_size() * len(parts)
        return parts

    def sharded_by_last_dimension(self, tensor: torch.Tensor) -> torch.Tensor:
        """The distributed tensor whose slices the ranks hold; `full_tensor()` gathers it."""
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self._alive(), self._device.type)
        return DTensor.from_local(tensor, self._mesh, [Shard(tensor.dim() - 1)], run_check=False)

    def clear(self) -> None:
        """Release the group: one that is still referenced keeps its connections, and the ranks waiting on them."""
        self._group = self._mesh = None

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        with self._board.guard("summing within a tensor-parallel layer", self._ranks):
            self._wait(dist.all_reduce(tensor, operation, group=self._alive(), async_op=True))
        self.num_sums += 1
        self.num_bytes += tensor.numel() * tensor.element_size()

    def _wait(self, work: dist.Work) -> None:
        wait_for_all(work, self._alive(), self._device, self._board.check)

    def _alive(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this model's tensor-parallel group was closed")
        return self._group


class Region:
    """One rank's part in a tensor-parallel group.

    Attributes:
        inside: whether the forward is between a column-wise and a row-wise layer, where activations are shards.
        around: entered where such a stretch begins and left where it ends, if set.
        keep_logits_sharded: whether a vocabulary-parallel head gives this rank's shard of the logits.
        logits: what the head gave last in the forward that runs.
    """

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.collectives: Collectives | None = None
        self.inside = False
        self.around: Callable[[], AbstractContextManager[Any]] | None = None
        self.keep_logits_sharded = False
        self.logits: torch.Tensor | None = None
        self._open: AbstractContextManager[Any] | None = None
        # What was entered last, with its version; only until the region ends, so that it is not kept alive.
        self._entered: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        # Copies of a module (shape functions) refer to the same group.
        return self

    @property
    def ready(self) -> Collectives:
        if self.collectives is None:
            raise RuntimeError("a tensor-parallel layer was called before its group was made")
        return self.collectives

    def begin(self) -> None:
        """From here on, activations are shards."""
        if not self.inside:
            self.inside = True
            if self.around is not None:
                self._open = self.around()
                self._open.__enter__()

    def end(self) -> None:
        """After this, activations are whole again."""
        self.inside = False
        self._entered = None
        if self._open is not None:
            opened, self._open = self._open, None
            opened.__exit__(None, None, None)

    def enter(self, activation: torch.Tensor) -> torch.Tensor:
        """`activation`, whose gradient is summed over the ranks: each computes only its shards' part of it.

        Layers that take the same tensor (queries, keys and values) share one sum.
        """
        if activation.is_meta or not (torch.is_grad_enabled() and activation.requires_grad):
            return activation
        if self._entered is not None:
            source, entered, version = self._entered
            if source is activation and version == activation._version:
                return entered
        made: torch.Tensor = _EnterRegion.apply(self.ready, activation)  # type: ignore[no-untyped-call]  # torch's has no types
        self._entered = activation, made, activation._version
        return made

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the last dimension of a whole activation; a meta tensor stays whole."""
        width = whole.shape[-1] // self.size
        return whole if whole.is_meta else whole.narrow(-1, self.index * width, width)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `partial`."""
        if partial.is_meta:
            return partial
        whole: torch.Tensor = _LeaveRegion.apply(self.ready, partial)  # type: ignore[no-untyped-call]  # torch's has no types
        return whole

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' shards of the last dimension together; what follows is the same on every rank."""
        if part.is_meta:
            return part.new_empty((*part.shape[:-1], part.shape[-1] * self.size))
        whole: torch.Tensor = _Gather.apply(self.ready, self.index, part)  # type: ignore[no-untyped-call]  # torch's has no types
        return whole


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, activation: torch.Tensor) -> torch.Tensor:
        ctx.collectives = collectives
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.collectives.sum(total)
        return None, total


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, partial: torch.Tensor) -> torch.Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        collectives.sum(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, index: int, part: torch.Tensor) -> torch.Tensor:
        ctx.index, ctx.width = index, part.shape[-1]
        return torch.cat(collectives.gather(part.contiguous()), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, gradient.narrow(-1, ctx.index * ctx.width, ctx.width)

"""The collectives of one tensor-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from penstock.runtime.failures.board import FailureBoard


class GroupCollectives:
    """What the ranks of a stage exchange within its layers; counts what that takes.

    Attributes:
        num_sums, num_gathers: collectives so far. num_bytes: size of the tensors summed and gathered.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, board: FailureBoard):
        self._group: dist.ProcessGroup | None = group
        self._ranks = dist.get_process_group_ranks(group)
        self._device = device
        self._board = board
        self._mesh: DeviceMesh | None = None
        self.num_sums = self.num_gathers = self.num_bytes = 0
        board.on_abort(self.clear)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> None:
        """Maximum over the ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in order."""
        parts = [torch.empty_like(tensor) for _ in self._ranks]
        with self._board.guard("gathering slices of a tensor-parallel layer", self._ranks):
            dist.all_gather(parts, tensor, group=self._alive())
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
            dist.all_reduce(tensor, operation, group=self._alive())
        self.num_sums += 1
        self.num_bytes += tensor.numel() * tensor.element_size()

    def _alive(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this model's tensor-parallel group was closed")
        return self._group

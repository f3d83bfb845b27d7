"""A pipeline inside one process: a thread for each device, microbatches handed from thread to thread.

All forwards, then all backwards (GPipe, Huang et al. 2019), as torch's former `Pipe` did it. On a CPU the devices are
threads; the heavy operations release the interpreter's lock, so they compute side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call

from kinds.measure import Stopwatch
from kinds.models import DeviceLayers

# (output of the last partition, the microbatch's targets) -> its loss, shape ()
Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DevicePipeline(nn.Module):
    """Runs an `nn.Sequential` of partitions as a pipeline and returns the batch's mean loss.

    Autograd sees one node per partition. The backward of that node waits for the partition's thread and hands over its
    gradients, last partition first, so that DistributedDataParallel around this module reduces them while the
    partitions before are still at work.

    Args:
        partitions: from `sequential_gpt`.
        num_microbatches: that a batch is split into; it must divide the batch.
        criterion: the loss of a microbatch, a mean over its samples.
    """

    def __init__(self, partitions: nn.Sequential, num_microbatches: int, criterion: Criterion) -> None:
        super().__init__()
        self.partitions = partitions
        self.num_microbatches = num_microbatches
        self._criterion = criterion
        self._stages = [
            _Stage(cast(DeviceLayers, partition), criterion if index == len(partitions) - 1 else None)
            for index, partition in enumerate(partitions)
        ]

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss, shape (), on the CPU: a node on a device would block the thread that computes there.

        Args:
            inputs: of the first partition, (batch, ...).
            targets: what the criterion takes beside the last partition's output, (batch, ...).
        """
        arriving: list[Future[torch.Tensor]] = [_done(part) for part in inputs.chunk(self.num_microbatches)]
        wanted = targets.chunk(self.num_microbatches)
        if len(arriving) != self.num_microbatches or any(len(part) != len(arriving[0].result()) for part in wanted):
            raise ValueError(
                f"a batch of {len(inputs)} cannot be split into {self.num_microbatches} equal microbatches"
            )
        for stage in self._stages:
            arriving = stage.forward(arriving, wanted)
        losses = [loss.result() for loss in arriving]  # raises what any thread has raised
        value = torch.stack([loss.detach() for loss in losses]).mean().to("cpu")
        token = value
        run = _Backward(self._stages, self.num_microbatches)
        for index, stage in enumerate(self._stages):
            token = cast(torch.Tensor, _HandOver.apply(run, index, token, *stage.parameters))
        return token

    def take_busy_seconds(self) -> list[float]:
        """The seconds that each device has computed since the last call. The devices must be idle."""
        return [stage.watch.take() for stage in self._stages]


class _Stage:
    """One partition, its thread, and what it keeps of each microbatch between forward and backward."""

    def __init__(self, partition: DeviceLayers, criterion: Criterion | None) -> None:
        self.partition = partition
        self.parameters = list(partition.parameters())
        self.watch = Stopwatch(partition.device)
        self._criterion = criterion
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._weights: dict[str, torch.Tensor] = {}
        self._sums: list[torch.Tensor | None] = []

    def forward(
        self, arriving: Sequence[Future[torch.Tensor]], targets: Sequence[torch.Tensor]
    ) -> list[Future[torch.Tensor]]:
        """Start the forwards of a batch; returns futures of their outputs or losses."""
        self._thread.submit(self._begin).result()
        pairs = enumerate(zip(arriving, targets, strict=True))
        return [self._thread.submit(self._forward, index, future, target) for index, (future, target) in pairs]

    def backward(self, arriving: Sequence[Future[torch.Tensor]]) -> tuple[list[Future[torch.Tensor]], Future[Any]]:
        """Start the backwards of the batch; returns futures of the inputs' gradients and of the parameters' sums."""
        leaving = [self._thread.submit(self._backward, index, future) for index, future in enumerate(arriving)]
        return leaving, self._thread.submit(self._end)

    # What runs in the thread.

    def _begin(self) -> None:
        """Leaves on this device for all parameters: gradients are taken for them, and parameters see them at once."""
        self._kept.clear()
        self._weights = {
            name: parameter.detach().to(self.partition.device, non_blocking=True).requires_grad_()
            for name, parameter in self.partition.named_parameters()
        }
        self._sums = [None] * len(self._weights)

    def _forward(self, index: int, arriving: Future[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        value = arriving.result()
        device = self.partition.device
        with self.watch.running(), torch.enable_grad():
            received = value.detach().to(device, non_blocking=True)
            if received.is_floating_point():
                received.requires_grad_()
            output = functional_call(self.partition, self._weights, (received,))
            if self._criterion is not None:
                output = self._criterion(output, target.to(device, non_blocking=True))
        self._kept[index] = received, output
        return output.detach()

    def _backward(self, index: int, arriving: Future[torch.Tensor]) -> torch.Tensor:
        gradient = arriving.result()
        with self.watch.running():
            received, output = self._kept.pop(index)
            gradient = gradient.to(output.device, output.dtype, non_blocking=True)
            wanted = [*self._weights.values(), *([received] if received.requires_grad else [])]
            gradients = list(torch.autograd.grad(output, wanted, gradient))
            upstream = gradients.pop() if received.requires_grad else gradient
            for position, new in enumerate(gradients):
                total = self._sums[position]
                # The first two may share memory with other gradients; their sum is ours.
                self._sums[position] = new if total is None else total + new if index == 1 else total.add_(new)
        return upstream

    def _end(self) -> list[torch.Tensor | None]:
        sums, self._sums, self._weights = self._sums, [], {}
        return [
            None if total is None else total.to(parameter.device)
            for total, parameter in zip(sums, self.parameters, strict=True)
        ]


class _Backward:
    """The backward of one batch, over all stages."""

    def __init__(self, stages: Sequence[_Stage], num_microbatches: int) -> None:
        self._stages = stages
        self._num_microbatches = num_microbatches
        self._sums: list[Future[Any]] = []

    def gradients(self, index: int, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """The summed gradients of a stage's parameters; the first call starts all stages."""
        if not self._sums:
            arriving = [_done(gradient / self._num_microbatches)] * self._num_microbatches
            for stage in reversed(self._stages):
                arriving, sums = stage.backward(arriving)
                self._sums.insert(0, sums)
        result: list[torch.Tensor | None] = self._sums[index].result()
        return result


class _HandOver(torch.autograd.Function):
    """Autograd's node for one stage: passes the loss on, and in backward gives the stage's gradients."""

    @staticmethod
    def forward(ctx: Any, run: _Backward, index: int, token: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.index = run, index
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, gradients[0], *ctx.run.gradients(ctx.index, gradients[0])


def _done(value: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(value)
    return future

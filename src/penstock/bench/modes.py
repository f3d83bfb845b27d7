"""The contestants: one training step of the same model on the same tokens, each in its own kind of parallelism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from penstock.bench.activation import apply_policy
from penstock.bench.clock import Clock
from penstock.bench.configs import GPTConfig, ResNetSize
from penstock.bench.device_pipeline import DevicePipeline
from penstock.bench.models import GPT, ShardedGPT, next_token_loss, resnet, sequential_gpt, sharded_resnet
from penstock.bench.options import Options

Batch = Mapping[str, torch.Tensor]


class Contestant(ABC):
    """One rank's part in one mode.

    Attributes:
        parameters: for the optimizer.
    """

    parameters: list[nn.Parameter]

    @abstractmethod
    def step(self, batch: Batch, clock: Clock) -> torch.Tensor | float:
        """Forward, backward and reduction of the global batch; the phases "forward" and "backward" go to the clock.

        Returns this rank's part of the global loss: the parts of all ranks add up to it.
        """

    def efficiency(self, phases: dict[str, float]) -> float | None:
        """The share of forward and backward in which this rank's devices computed, for a pipeline whose devices' time
        can be told; may correct the phases."""
        return None

    def close(self) -> None:
        """Give up what needs giving up."""
        return


class Replicas(Contestant):
    """Modes "ddp" and "fsdp": every rank runs the whole model on its share, and averages gradients with the others."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self._chunks, self._device = options.chunks, device
        if options.mode == "ddp":
            self._model = self._replicated(options)
        else:
            self._model = self._sharded(options)
        self.parameters = list(self._model.parameters())

    def _replicated(self, options: Options) -> nn.Module:
        model: nn.Module
        if isinstance(options.config, GPTConfig):
            model = GPT(options.config, self._device, options.torch_dtype, options.seed)
        else:
            model = resnet(options.config, self._device, options.torch_dtype, options.seed)
        apply_policy(blocks_of(model), options.activation)
        return DistributedDataParallel(
            model.train(),
            device_ids=[self._device] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )

    def _sharded(self, options: Options) -> nn.Module:
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        model: Any
        if isinstance(options.config, ResNetSize):
            model = sharded_resnet(options.config, mesh, self._device, options.torch_dtype, options.seed)
        else:
            model = ShardedGPT(
                options.config,
                mesh,
                self._device,
                options.torch_dtype,
                options.seed,
                cpu_offload=options.cpu_offload,
                prefetch=options.prefetch,
            )
        apply_policy(blocks_of(model), options.activation)
        return model.train()

    def step(self, batch: Batch, clock: Clock) -> torch.Tensor:
        world, rank = dist.get_world_size(), dist.get_rank()
        mine = {name: tensor.chunk(world)[rank].to(self._device) for name, tensor in batch.items()}
        total = torch.zeros((), device=self._device)
        chunks = cut(mine, [self._chunks])[0]
        for index, chunk in enumerate(chunks):
            with self._accumulating(index < len(chunks) - 1):
                with clock.phase("forward"):
                    loss = self._model(**chunk).loss / len(chunks)
                with clock.phase("backward"):
                    loss.backward()
            total += loss.detach()
        return total / world

    def _accumulating(self, wanted: bool) -> Any:
        """Whether gradients only add up on this rank."""
        if isinstance(self._model, DistributedDataParallel):
            return self._model.no_sync() if wanted else nullcontext()
        model: Any = self._model
        model.set_requires_gradient_sync(not wanted)
        return nullcontext()


class PipelinedReplicas(Contestant):
    """Mode "pdp": every rank drives a pipeline over its devices, with DistributedDataParallel across ranks."""

    def __init__(self, options: Options, devices: Sequence[torch.device]) -> None:
        assert isinstance(options.config, GPTConfig)
        partitions = sequential_gpt(options.config, devices, options.torch_dtype, options.seed)
        apply_policy(blocks_of(partitions), options.activation)
        self._pipeline = DevicePipeline(partitions.train(), options.chunks, next_token_loss)
        self._model = DistributedDataParallel(self._pipeline, gradient_as_bucket_view=True)
        self.parameters = list(self._model.parameters())

    def step(self, batch: Batch, clock: Clock) -> torch.Tensor:
        world, rank = dist.get_world_size(), dist.get_rank()
        mine = batch["input_ids"].chunk(world)[rank]
        with clock.phase("forward"):
            loss = self._model(mine, mine)
        with clock.phase("backward"):
            loss.backward()
        return loss.detach() / world

    def efficiency(self, phases: dict[str, float]) -> float | None:
        busy = self._pipeline.take_busy_seconds()
        return sum(busy) / len(busy) / (phases["forward"] + phases["backward"])


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of a GPT, whole or in partitions, or of a ResNet."""
    for module in model.modules():
        if type(module).__name__.removeprefix("FSDP") in ("GPT2Block", "ResNetBasicLayer", "ResNetBottleNeckLayer"):
            yield module


def cut(batch: Batch, counts: Sequence[int]) -> list[list[dict[str, torch.Tensor]]]:
    """Cut a batch into `sum(counts)` equal microbatches, and these into consecutive runs of `counts`."""
    total = sum(counts)
    pieces = {name: tensor.chunk(total) for name, tensor in batch.items()}
    microbatches = [{name: piece[index] for name, piece in pieces.items()} for index in range(total)]
    runs, start = [], 0
    for count in counts:
        runs.append(microbatches[start : start + count])
        start += count
    return runs

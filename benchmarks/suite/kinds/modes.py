"""The contestants: one training step of the same model on the same tokens, each in its own kind of parallelism."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from kinds.configs import GPTConfig, ResNetSize
from kinds.device_pipeline import DevicePipeline
from kinds.measure import Clock
from kinds.models import GPT, ShardedGPT, apply_policy, next_token_loss, resnet, sequential_gpt, sharded_resnet
from kinds.options import Options
from penstock.data.batch import MicrobatchedBatch
from penstock.layout.layout import Layout
from penstock.layout.partition import partition, split_into
from penstock.modeling.graph.costs import unit_costs
from penstock.modeling.graph.units import list_units
from penstock.runtime.formation import parallelize
from penstock.runtime.options import EngineOptions
from penstock.schedule import build

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
        """Release the mode's resources."""
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
        chunks = split(mine, [self._chunks])[0]
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


class Pipelines(Contestant):
    """Mode "pp": one rank of `options.pipelines`, alike or not. Only its own stage's weights are ever made."""

    def __init__(self, options: Options, device: torch.device) -> None:
        assert isinstance(options.config, GPTConfig)
        model = GPT(options.config, device="meta", dtype=options.torch_dtype).train()
        layout = place(model, options)
        mine = layout.place_of(dist.get_rank()).pipeline
        self._device, self._index = device, mine
        self._counts = [microbatches for _, microbatches in options.pipelines]
        self.pipeline = parallelize(
            model,
            layout,
            partial(build, options.schedule, layout.pipelines[mine].num_ranks),
            make_weights=lambda device: model.materialize(device, options.seed),
            options=EngineOptions(num_microbatches=self._counts[mine]),
        )
        apply_policy(blocks_of(model), options.activation)
        split = self.pipeline.split
        self._clock: Clock | None = None
        # The engine runs forwards and backwards in turns; a forward is timed where it computes.
        split.forward = self._timed(split.forward)  # type: ignore[method-assign]  # on this object alone
        self.parameters = list(model.parameters())

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._clock is None:
                return forward(*args, **kwargs)
            with self._clock.phase("forward"):
                return forward(*args, **kwargs)

        return run

    def step(self, batch: Batch, clock: Clock) -> float:
        self._clock = clock
        on_device = {name: tensor.to(self._device) for name, tensor in batch.items()}
        mine = split(on_device, self._counts)[self._index]
        first = sum(self._counts[: self._index])
        share = MicrobatchedBatch(mine, len(batch["input_ids"]), first_microbatch=first)
        for out in self.pipeline.train(share):
            with clock.phase("backward"):
                out.loss.backward()
        report = self.pipeline.last_step
        assert report is not None
        return report.global_loss / dist.get_world_size()

    def efficiency(self, phases: dict[str, float]) -> float | None:
        """From the time this rank waited for others, which a GPU's host does not know: there it is None, and the
        backward's time includes waiting in the stream."""
        report = self.pipeline.last_step
        assert report is not None
        if report.bubble is None:
            return None
        phases["backward"] = max(0.0, report.seconds * (1 - report.bubble) - phases.get("forward", 0.0))
        return 1 - report.bubble

    def close(self) -> None:
        self.pipeline.close()


def place(model: GPT, options: Options) -> Layout:
    """The layout of `options.pipelines`, each with the model's units balanced over its stages by cost."""
    assert isinstance(options.config, GPTConfig)
    units = list_units(model)
    costs = unit_costs(model, units, tokens=options.config.block_size)
    stages_per_pipeline, stage_to_rank = [], []
    for ranks, _ in options.pipelines:
        mapping = build(options.schedule, ranks, 1).stage_to_rank
        stages_per_pipeline.append(split_into(units, partition(costs, [1.0] * len(mapping)).sizes))
        stage_to_rank.append(mapping)
    return Layout.place(stages_per_pipeline, stage_to_rank)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of a GPT, whole or in partitions, or of a ResNet."""
    for module in model.modules():
        if type(module).__name__.removeprefix("FSDP") in ("GPT2Block", "ResNetBasicLayer", "ResNetBottleNeckLayer"):
            yield module


def split(batch: Batch, counts: Sequence[int]) -> list[Sequence[dict[str, torch.Tensor]]]:
    """Split a batch into `sum(counts)` equal microbatches, and these into consecutive runs of `counts`."""
    total = sum(counts)
    pieces = {name: tensor.chunk(total) for name, tensor in batch.items()}
    microbatches = [{name: piece[index] for name, piece in pieces.items()} for index in range(total)]
    return split_into(microbatches, counts)

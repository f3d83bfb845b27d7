"""One rank of a pipeline of emulated devices: blocks that sleep instead of computing, so that many ranks fit few cores.

Run by `processes.Contestant`. Each stage sleeps `forward`, `backward` (input gradient) and `weight` seconds for each
microbatch. What is measured is then the schedule and the executor, free of contention for the cores.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from turns import Figures, Step, barrier, serve

import penstock
from penstock.layout.partition import split_into
from penstock.runtime.gradients.weight_gradients import DeferredGradient, WeightGradientQueues
from penstock.schedule import build

WIDTH = 16


_overslept = 0.0


def sleep(seconds: float) -> None:
    """Sleep. What the operating system sleeps too long is taken off the next one, so that the device keeps its pace."""
    global _overslept
    if not seconds:
        return
    start = time.perf_counter()
    end = start + max(0.0, seconds - _overslept)
    time.sleep(max(0.0, end - start - 0.0002))
    while time.perf_counter() < end:
        pass
    _overslept = max(0.0, time.perf_counter() - start - (seconds - _overslept))


class SleepConfig(PretrainedConfig):
    model_type = "sleeping"

    def __init__(self, num_blocks: int = 1, forward=0.0, backward=0.0, weight=0.0, **kwargs: Any):
        super().__init__(**{"vocab_size": WIDTH, "hidden_size": WIDTH, "num_hidden_layers": num_blocks, **kwargs})
        self.num_blocks, self.forward_seconds, self.backward_seconds, self.weight_seconds = (
            num_blocks,
            forward,
            backward,
            weight,
        )


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: SleepingBlock, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        sleep(block.forward_seconds)
        return hidden + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        block = ctx.block
        sleep(block.backward_seconds)
        if block.queues is not None and block.queues.takes_weight_gradients:
            block.queues.defer(DeferredGradient((), partial(sleep, block.weight_seconds)))
        else:
            sleep(block.weight_seconds)
        return None, gradient, gradient.sum((0, 1))


class SleepingBlock(nn.Module):
    queues: WeightGradientQueues | None = None

    def __init__(self, config: SleepConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.forward_seconds = config.forward_seconds
        self.backward_seconds = config.backward_seconds
        self.weight_seconds = config.weight_seconds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.is_meta:
            return hidden + self.weight
        return _Sleep.apply(self, hidden, self.weight)


class SleepingModel(PreTrainedModel, GenerationMixin):
    """A language model without cache and compute, in training and in generation."""

    config_class = SleepConfig

    def __init__(self, config: SleepConfig):
        super().__init__(config)
        self.blocks = nn.ModuleList(SleepingBlock(config) for _ in range(config.num_blocks))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        hidden = functional.one_hot(input_ids, WIDTH).float() if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            hidden = block(hidden)
        loss = None if labels is None else functional.mse_loss(hidden, labels)
        return CausalLMOutputWithPast(loss=loss, logits=hidden, past_key_values=past_key_values)


def plain(arguments: dict[str, Any]) -> Step:
    """One process that accumulates over the same microbatches."""
    costs = (arguments[name] for name in ("forward", "backward", "weight"))
    model = SleepingModel(SleepConfig(arguments["num_blocks"], *costs))
    count = arguments["num_microbatches"]
    data = torch.zeros(count, 4, WIDTH)

    def step() -> Figures:
        for part in data.chunk(count):
            (model(inputs_embeds=part, labels=part).loss / count).backward()
        return {}

    return step


def equal_pipelines(arguments: dict[str, Any]) -> Step:
    """Equal pipelines of one stage per rank, or of as many as the schedule has."""
    size = int(os.environ["WORLD_SIZE"])
    num_stages = build(arguments["schedule"], size, 1).num_stages
    # A rank's work is the same however many stages it is split into.
    per_rank = num_stages // size
    config = SleepConfig(
        arguments.get("num_blocks", num_stages),
        arguments["forward"] / per_rank,
        arguments["backward"] / per_rank,
        arguments["weight"] / per_rank,
    )
    model = penstock.initialize(
        SleepingModel(config),
        {
            "model_parallelism": {
                "pipeline_parallel_size": size,
                "num_microbatches": arguments["num_microbatches"],
                "schedule": arguments["schedule"],
            }
        },
    )
    return training_step(model, arguments["num_microbatches"])


def unlike_pipelines(arguments: dict[str, Any]) -> Step:
    """Pipelines of `arguments["stages"]` stages each, on a model of `num_blocks` blocks that cost the same.

    `arguments["speeds"]`, if there are any, are of the ranks: a rank of speed 0.5 sleeps twice as long.
    """
    costs = (arguments[name] for name in ("forward", "backward", "weight"))
    model = SleepingModel(SleepConfig(arguments["num_blocks"], *costs))
    names = [f"blocks.{index}" for index in range(arguments["num_blocks"])]
    templates = [penstock.PipelineTemplate("sleeping", split_into(names, sizes)) for sizes in arguments["stages"]]
    plugin = penstock.HeterogeneousParallelPlugin(microbatch_size=1, schedule=arguments["schedule"])
    plugin.set_pipelines(templates, arguments["num_microbatches"])
    model, *_ = plugin.configure(model)
    speed = arguments.get("speeds", {}).get(os.environ["RANK"], 1.0)
    for block in model.blocks:
        for kind in ("forward", "backward", "weight"):
            setattr(block, f"{kind}_seconds", arguments[kind] / speed)
    return training_step(model, arguments["num_microbatches"][plugin.pipeline_index])


def several_layouts(arguments: dict[str, Any]) -> Step:
    """Each of `arguments["layouts"]`, which are of as many ranks, in turn. A step's figures are the seconds of each."""
    steps = [unlike_pipelines({**arguments, **layout}) for layout in arguments["layouts"]]

    def step() -> Figures:
        seconds = {}
        for index, one in enumerate(steps):
            barrier()
            start = time.perf_counter()
            one()
            barrier()
            seconds[str(index)] = time.perf_counter() - start
        return seconds

    return step


def training_step(model: Any, num_samples: int) -> Step:
    """A step on a batch of one sample for each microbatch."""
    for block in model.blocks:
        block.queues = model.pipeline.weight_gradients
    sleep_once_per_action(model)
    data = torch.zeros(num_samples, 4, WIDTH)

    def step() -> Figures:
        for out in model(inputs_embeds=data, labels=data):
            out.loss.backward()
        return {}

    return step


def sleep_once_per_action(model: Any) -> None:
    """Let the last block of each stage sleep for all of them in the forward, the first in the backward.

    After each sleep the caches are cold and code runs some six times slower; no device pauses between its blocks.
    """
    split = model.pipeline.split
    for stage in split.local_stages:
        blocks = [split.model.get_submodule(name) for name in split.stages[stage]]
        for kind, place in (("forward", -1), ("backward", 0), ("weight", 0)):
            attribute = f"{kind}_seconds"
            total = sum(getattr(block, attribute) for block in blocks)
            for block in blocks:
                setattr(block, attribute, 0.0)
            setattr(blocks[place], attribute, total)


def torch_pipeline(arguments: dict[str, Any]) -> Step:
    from torch.distributed import pipelining

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    config = SleepConfig(1, arguments["forward"], arguments["backward"], arguments["weight"])
    stage = pipelining.PipelineStage(SleepingBlock(config), rank, size, torch.device("cpu"))
    kind = getattr(pipelining, arguments["schedule"])
    schedule = kind(stage, arguments["num_microbatches"], loss_fn=functional.mse_loss)
    data = torch.zeros(arguments["num_microbatches"], 4, WIDTH)

    def step() -> Figures:
        schedule.step(*([data] if rank == 0 else []), **({"target": data} if rank == size - 1 else {}))
        return {}

    return step


def by_hand(arguments: dict[str, Any]) -> Step:
    """1F1B of bare blocks on two ranks in the fewest calls: every receive posted ahead, no send waited for until the
    end. What messages and blocks take without any machinery. `losses`: whether the first rank gets each microbatch's
    loss, too, as Penstock gives it to the loop there."""
    dist.init_process_group("gloo")
    down, up = dist.new_group([0, 1]), dist.new_group([0, 1])
    is_last = dist.get_rank() == 1
    takes, gives, peer = (down, up, 0) if is_last else (up, down, 1)
    config = SleepConfig(1, arguments["forward"], arguments["backward"], arguments["weight"])
    block, count = SleepingBlock(config), arguments["num_microbatches"]
    data = torch.zeros(count, 4, WIDTH).split(1)
    passes_losses = arguments.get("losses", False)

    def step() -> Figures:
        buffers = [torch.empty(1, 4, WIDTH) for _ in data]
        receives = [takes.recv([buffer], peer, tag) for tag, buffer in enumerate(buffers)]
        losses = [torch.empty(()) for _ in data] if passes_losses else []
        if not is_last:
            losses_come = [takes.recv([loss], peer, count + tag) for tag, loss in enumerate(losses)]
        sends, inputs, outputs = [], [], []

        def forward(index: int) -> None:
            if is_last:
                receives[index].wait()
                inputs.append(buffers[index].requires_grad_())
                outputs.append(functional.mse_loss(block(inputs[index]), data[index]) / count)
                if losses:
                    sends.append(gives.send([outputs[index].detach()], peer, count + index))
            else:
                outputs.append(block(data[index]))
                sends.append(gives.send([outputs[index].detach()], peer, index))

        def backward(index: int) -> None:
            if is_last:
                outputs[index].backward()
                sends.append(gives.send([inputs[index].grad], peer, index))
            else:
                if losses:
                    losses_come[index].wait()
                receives[index].wait()
                outputs[index].backward(buffers[index])
            outputs[index] = None

        ahead = 0 if is_last else 1
        for index in range(min(ahead, count)):
            forward(index)
        for index in range(count):
            if index + ahead < count:
                forward(index + ahead)
            backward(index)
        for work in sends:
            work.wait()
        return {}

    return step


KINDS = {
    "by hand": by_hand,
    "plain": plain,
    "penstock": equal_pipelines,
    "torch": torch_pipeline,
    "heterogeneous": unlike_pipelines,
    "layouts": several_layouts,
}


if __name__ == "__main__":
    serve(KINDS)

"""One contestant's rank: builds the same 12-block GPT-2 and times training steps on the same tokens.

Run by `processes.Contestant` with JSON arguments: kind, schedule, num_microbatches, warmup, model sizes.
A step is forward, backward and gradient reduction of the whole batch; the optimizer is left out, as it is the same
for all.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel
from turns import Figures, Step, serve


def build(arguments: dict[str, Any]) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=arguments["vocabulary"],
        n_layer=arguments["layers"],
        n_embd=arguments["width"],
        n_head=arguments["heads"],
        n_positions=arguments["length"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def tokens(arguments: dict[str, Any]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (arguments["num_microbatches"] * arguments["micro_batch_size"], arguments["length"])
    return torch.randint(0, arguments["vocabulary"], shape, generator=generator)


def one_process(arguments: dict[str, Any]) -> Step:
    """The unsplit model, accumulating over the same microbatches."""
    model, ids = build(arguments), tokens(arguments)
    microbatches = ids.chunk(arguments["num_microbatches"])
    return lambda: {"loss": accumulate(model, model, microbatches, len(microbatches))}


def accumulate(model: nn.Module, call: nn.Module, microbatches: Any, total: int) -> float:
    model.zero_grad()
    loss_sum = 0.0
    for ids in microbatches:
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss / total
        loss.backward()
        loss_sum += loss.item()
    return loss_sum


def apart(arguments: dict[str, Any]) -> Step:
    """The unsplit model on each rank, which exchange nothing but the loss: what the cores allow whoever shares a step
    between them. It trains two models."""
    dist.init_process_group("gloo")
    model, mine = build(arguments), own_microbatches(arguments)
    return lambda: {"loss": mean_over_ranks(accumulate(model, model, mine, len(mine)))}


def own_microbatches(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """This rank's share of the microbatches."""
    share = tokens(arguments).chunk(dist.get_world_size())[dist.get_rank()]
    return share.chunk(arguments["num_microbatches"] // dist.get_world_size())


def data_parallel(arguments: dict[str, Any]) -> Step:
    dist.init_process_group("gloo")
    model, mine = build(arguments), own_microbatches(arguments)
    replica = nn.parallel.DistributedDataParallel(model)

    def step() -> Figures:
        with replica.no_sync():
            loss = accumulate(model, replica, mine[:-1], len(mine))
        last = replica(input_ids=mine[-1], labels=mine[-1], use_cache=False).loss / len(mine)
        last.backward()
        return {"loss": mean_over_ranks(loss + last.item())}

    return step


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def fully_sharded(arguments: dict[str, Any]) -> Step:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model, mine = build(arguments), own_microbatches(arguments)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step() -> Figures:
        model.zero_grad()
        total = 0.0
        for index, batch in enumerate(mine):
            model.set_requires_gradient_sync(index == len(mine) - 1)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss / len(mine)
            loss.backward()
            total += loss.item()
        return {"loss": mean_over_ranks(total)}

    return step


def penstock_pipeline(arguments: dict[str, Any], made: list[Any] | None = None) -> Step:
    """A step of a pipeline, whose model is put into `made`."""
    import penstock

    section = {
        "pipeline_parallel_size": int(os.environ["WORLD_SIZE"]),
        "num_microbatches": arguments["num_microbatches"],
        "schedule": arguments["schedule"],
        "trace": arguments.get("trace"),
    }
    model = penstock.initialize(build(arguments), {"model_parallelism": section})
    if made is not None:
        made.append(model)
    step = penstock_step(model, tokens(arguments))
    if not arguments.get("trace"):
        return step
    schedule = model.pipeline.make_schedule(1).name  # what "auto" has chosen
    return lambda: {**step(), "schedule": schedule}


def saved_and_loaded(arguments: dict[str, Any]) -> Step:
    """A checkpoint of two stages with the optimizer's state, written and read again."""
    import penstock

    step = penstock_pipeline({**arguments, "schedule": "1f1b"}, made := [])
    optimizer = torch.optim.Adam(made[0].parameters(), lr=0.0)
    step()
    optimizer.step()
    folder = Path(tempfile.gettempdir()) / f"checkpoint_of_port_{os.environ['MASTER_PORT']}"

    def save_and_load() -> Figures:
        state = {"model": made[0], "optimizer": optimizer}
        penstock.save_checkpoint(folder, step=1, keep_last=1, **state)
        penstock.load_checkpoint(folder, **state)
        return {"loss": 0.0}

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save_and_load


def one_stage_pipelines(arguments: dict[str, Any]) -> Step:
    """A pipeline of one stage on every rank, through the plugin: the layout of data parallelism."""
    import penstock

    model, world = build(arguments), int(os.environ["WORLD_SIZE"])
    template = penstock.PipelineTemplate("gpt2", [penstock.PipelineTemplate.get_modules(model)])
    plugin = penstock.HeterogeneousParallelPlugin(
        microbatch_size=arguments["micro_batch_size"], schedule=arguments["schedule"]
    )
    plugin.set_pipelines([template] * world, [arguments["num_microbatches"] // world] * world)
    model, *_ = plugin.configure(model)
    return penstock_step(model, tokens(arguments).chunk(world)[plugin.pipeline_index])


def penstock_step(model: Any, ids: torch.Tensor) -> Step:
    def step() -> Figures:
        model.zero_grad()
        for out in model(input_ids=ids, labels=ids):
            out.loss.backward()
        report = model.pipeline.last_step
        hidden = None if report.reduction is None else report.reduction.hidden
        return {"loss": report.global_loss, **({} if hidden is None else {"hidden": hidden})}

    return step


class TorchStage(nn.Module):
    """The same split for torch.distributed.pipelining: whole blocks, embeddings first, norm and head last."""

    def __init__(self, model: GPT2LMHeadModel, first: int, last: int):
        super().__init__()
        body = model.transformer
        self.blocks = nn.ModuleList(body.h[first:last])
        self.embeddings = nn.ModuleList([body.wte, body.wpe]) if first == 0 else None
        self.head = nn.Sequential(body.ln_f, model.lm_head) if last == len(body.h) else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embeddings is not None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            hidden = self.embeddings[0](hidden) + self.embeddings[1](positions)
        for block in self.blocks:
            output = block(hidden)
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden if self.head is None else self.head(hidden)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The model's own loss, for peers that take the head's output."""
    shifted = functional.pad(target, (0, 1), value=-100)[..., 1:]
    return functional.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten())


def torch_pipeline(arguments: dict[str, Any]) -> Step:
    from torch.distributed import pipelining

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, ids = build(arguments), tokens(arguments)
    bounds = [round(index * arguments["layers"] / size) for index in range(size + 1)]
    module = TorchStage(model, bounds[rank], bounds[rank + 1])
    del model
    stage = pipelining.PipelineStage(module, rank, size, torch.device("cpu"))

    kind = getattr(pipelining, arguments["schedule"])
    single = arguments["schedule"] in ("Schedule1F1B", "ScheduleGPipe")
    schedule = kind(stage if single else [stage], arguments["num_microbatches"], loss_fn=loss_of)

    def step() -> Figures:
        module.zero_grad()
        losses: list[torch.Tensor] = []
        extra = {"target": ids, "losses": losses} if rank == size - 1 else {}
        schedule.step(*([ids] if rank == 0 else []), **extra)
        return {"loss": float(torch.stack(losses).mean())} if losses else {}

    return step


def deepspeed_pipeline(arguments: dict[str, Any]) -> Step:
    """DeepSpeed's own engine. Its step cannot leave the optimizer out, so that is plain SGD."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    model, ids = build(arguments), tokens(arguments)
    layers = [TorchStage(model, index, index + 1) for index in range(arguments["layers"])]
    module = PipelineModule(layers, num_stages=dist.get_world_size(), loss_fn=loss_of, partition_method="uniform")
    settings = {
        "train_batch_size": len(ids),
        "train_micro_batch_size_per_gpu": arguments["micro_batch_size"],
        "gradient_accumulation_steps": arguments["num_microbatches"],
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    microbatches = [(part, part) for part in ids.chunk(arguments["num_microbatches"])]
    return lambda: {"loss": float(engine.train_batch(iter(microbatches)))}


KINDS = {
    "one process": one_process,
    "apart": apart,
    "ddp": data_parallel,
    "fsdp": fully_sharded,
    "penstock": penstock_pipeline,
    "checkpoint": saved_and_loaded,
    "one-stage pipelines": one_stage_pipelines,
    "torch": torch_pipeline,
    "deepspeed": deepspeed_pipeline,
}


if __name__ == "__main__":
    serve(KINDS)

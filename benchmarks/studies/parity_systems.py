"""What a user writes to train, or run, one model with each system on two ranks; see `parity.py`.

Each function is given a whole model and batches to accumulate over, and returns the losses and what holds the
gradients. Between two comments `# --` stands the user's own code, which is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

NUM_MICROBATCHES = 4
Batch = Mapping[str, torch.Tensor]
# Of parameters by their names in the whole model.
Gradients = dict[str, torch.Tensor]


@dataclass
class Found:
    """What one rank has after the backward of all batches: their losses, where they are known, and its gradients; of
    systems without a backward, the logits of the first batch."""

    losses: list[float]
    gradients: Gradients | None = None
    logits: torch.Tensor | None = None


def gradients_of(model: nn.Module) -> Gradients:
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def without_labels(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def token_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of a causal model's loss over its tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def num_tokens(labels: torch.Tensor) -> torch.Tensor:
    return (labels[:, 1:] != -100).sum()


def token_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def unsplit(model: Any, batches: Sequence[Batch], folder: Path) -> Found:
    losses = []
    # --
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        # --
        losses.append(loss.item())
    return Found(losses, gradients_of(model))


def penstock(model: Any, batches: Sequence[Batch], folder: Path, schedule: str = "1f1b") -> Found:
    import penstock

    losses = []
    # --
    config = {"pipeline_parallel_size": 2, "num_microbatches": NUM_MICROBATCHES, "schedule": schedule}
    model = penstock.initialize(model, config)
    for batch in batches:
        for out in model(**batch):
            out.loss.backward()
        # --
        losses.append(model.pipeline.last_step.global_loss)
    return Found(losses, gradients_of(model))


def data_parallel(model: Any, batches: Sequence[Batch], folder: Path, by_tokens: bool = False) -> Found:
    """DDP over two processes, half of each batch for each; with or without a count of the batch's tokens."""
    # --
    replica = nn.parallel.DistributedDataParallel(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    for number, batch in enumerate(batches):
        own = {name: value.tensor_split(world)[rank] for name, value in batch.items()}
        replica.require_backward_grad_sync = number == len(batches) - 1
        loss = replica(**own).loss
        if by_tokens:
            tokens = total = num_tokens(own["labels"])
            dist.all_reduce(total := tokens.clone())
            loss = loss * tokens / total * world
        loss.backward()
    # --
    return Found([], gradients_of(model))


# --
class LlamaStage(nn.Module):
    """A part of a Llama, written by hand for torch.distributed.pipelining."""

    def __init__(self, model: Any, first: int, last: int):
        super().__init__()
        self.config, body = model.config, model.model
        self.layers = nn.ModuleList(body.layers[first:last])
        self.rotary = body.rotary_emb
        self.embed = body.embed_tokens if first == 0 else None
        self.norm, self.head = (body.norm, model.lm_head) if last == len(body.layers) else (None, None)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        length = hidden.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        allowed = causal & attention_mask[:, None, None, :].bool() | torch.eye(length, dtype=torch.bool)
        mask = torch.zeros(allowed.shape, dtype=hidden.dtype).masked_fill(~allowed, torch.finfo(hidden.dtype).min)
        positions = torch.arange(length)[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return hidden if self.head is None else self.head(self.norm(hidden))


# --
def torch_by_hand(
    model: Any, batches: Sequence[Batch], folder: Path, schedule: str = "Schedule1F1B", by_tokens: bool = False
) -> Found:
    """torch.distributed.pipelining with hand-written stages; with its loss, a mean over microbatches, or one of the
    user's own over the batch's tokens and `scale_grads=False`."""
    from torch.distributed import pipelining

    names = names_of(model)
    losses: list[float] = []
    # --
    rank, world = dist.get_rank(), dist.get_world_size()
    single, total = schedule == "Schedule1F1B", 1.0
    count = world if single else 2 * world
    bounds = [round(index * len(model.model.layers) / count) for index in range(count + 1)]
    indices = [rank] if single else [rank, rank + world]
    modules = [LlamaStage(model, bounds[index], bounds[index + 1]) for index in indices]
    stages = [pipelining.PipelineStage(m, i, count, torch.device("cpu")) for m, i in zip(modules, indices, strict=True)]

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return token_sum(logits, labels) / total if by_tokens else token_mean(logits, labels)

    kind = getattr(pipelining, schedule)
    runner = kind(stages[0] if single else stages, NUM_MICROBATCHES, loss_fn=loss_fn, scale_grads=not by_tokens)
    for batch in batches:
        if by_tokens:
            total = float(num_tokens(batch["labels"]))
        found: list[torch.Tensor] = []
        last = {"target": batch["labels"], "losses": found} if rank == world - 1 else {}
        runner.step(*[batch["input_ids"]] * (rank == 0), attention_mask=batch["attention_mask"], **last)
        # --
        losses += [float(sum(found)) if by_tokens else float(torch.stack(found).mean())] if found else []
    held = [each for module in modules for each in module.parameters() if each.grad is not None]
    own = {name: each.grad for each in held if each.grad is not None for name in names[id(each)]}
    return Found(losses, own)


# --
class Logits(nn.Module):
    """A model whose output is a tensor, for systems that trace it."""

    def __init__(self, model: Any):
        super().__init__()
        self.whole = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.whole(input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


# --
def split_before(model: Any) -> str:
    """The second half of the blocks begins here."""
    return "whole.transformer.h.2" if hasattr(model, "transformer") else "whole.model.layers.2"


# --
def without_no_grad(model: Any) -> None:
    """Rotary embeddings are decorated with `torch.no_grad`, and torch's splitter loses the inputs of such a block: it
    raises "Expected positional argument for parameter ..., but one was not passed in" with torch 2.13."""
    for module in model.modules():
        if hasattr(type(module).forward, "__wrapped__") and type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(type(module).forward.__wrapped__, module)


# --
def torch_traced(model: Any, batches: Sequence[Batch], folder: Path) -> Found:
    """torch.distributed.pipelining's tracing front end, with the user's own loss over the batch's tokens."""
    from torch.distributed import pipelining

    losses: list[float] = []
    half = split_before(model)
    # --
    rank, world, total = dist.get_rank(), dist.get_world_size(), 1.0
    without_no_grad(model)
    example = [batches[0][name].tensor_split(NUM_MICROBATCHES)[0] for name in ("input_ids", "attention_mask")]
    split_spec = {half: pipelining.SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(Logits(model), mb_args=tuple(example), split_spec=split_spec)
    stage = pipe.build_stage(rank, torch.device("cpu"))

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return token_sum(logits, labels) / total

    runner = pipelining.Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
    for batch in batches:
        total = float(num_tokens(batch["labels"]))
        found: list[torch.Tensor] = []
        first = [batch["input_ids"], batch["attention_mask"]] if rank == 0 else []
        last = {"target": batch["labels"], "losses": found} if rank == world - 1 else {}
        runner.step(*first, **last)
        # --
        losses += [float(sum(found))] if found else []
    own = gradients_of(pipe.get_stage_module(rank))
    return Found(losses, {name.removeprefix("whole."): value for name, value in own.items()})


def transformers_pipeline(model: Any, batches: Sequence[Batch], folder: Path) -> Found:
    """transformers' own: forward only."""
    from transformers.distributed import DistributedConfig

    kind = type(model)
    # --
    model = kind.from_pretrained(folder, dtype=model.dtype, distributed_config=DistributedConfig(pp_size=2)).eval()
    with torch.no_grad():
        logits = model(**without_labels(batches[0])).logits
    # --
    return Found([], logits=logits)


def pippy(model: Any, batches: Sequence[Batch], folder: Path) -> Found:
    """accelerate's prepare_pippy: forward only. A chunk for each sample, as then nothing is padded; the logits stay on
    the last process, as `gather_output=True` fails over gloo (it makes a tensor of a shape that is a tensor)."""
    from accelerate import PartialState
    from accelerate.inference import prepare_pippy

    inputs, half = tuple(without_labels(batches[0]).values()), split_before(model)
    # --
    PartialState(cpu=True)
    without_no_grad(model)
    example = tuple(value[:1] for value in inputs)
    model = prepare_pippy(Logits(model.eval()), [half], example_args=example, num_chunks=len(inputs[0]))
    with torch.no_grad():
        logits = model(*inputs)
    # --
    return Found([], logits=logits)


def device_map(model: Any, batches: Sequence[Batch], folder: Path) -> Found:
    """accelerate's device_map: one process, whose devices take turns; here both are the CPU."""
    losses, kind = [], type(model)
    # --
    model = kind.from_pretrained(folder, dtype=model.dtype, device_map={"": "cpu"}).train()
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        # --
        losses.append(loss.item())
    return Found(losses, gradients_of(model))


# --
class Embedding(nn.Module):
    """DeepSpeed's first layer: a Llama's embedding. Layers hand on one tuple."""

    def __init__(self, model: Any):
        super().__init__()
        self.embed = model.model.embed_tokens

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.embed.weight
        return weight

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, attention_mask = inputs
        return self.embed(ids), attention_mask


class Block(nn.Module):
    def __init__(self, model: Any, index: int):
        super().__init__()
        self.layer, self.rotary = model.model.layers[index], model.model.rotary_emb

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, attention_mask = inputs
        length = hidden.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        allowed = causal & attention_mask[:, None, None, :].bool() | torch.eye(length, dtype=torch.bool)
        mask = torch.zeros(allowed.shape, dtype=hidden.dtype).masked_fill(~allowed, torch.finfo(hidden.dtype).min)
        positions = torch.arange(length)[None]
        rotary = self.rotary(hidden, positions)
        return self.layer(
            hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary
        ), attention_mask


class Norm(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.norm = model.model.norm

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(inputs[0])
        return hidden


class Head(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.head = model.lm_head

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.head.weight
        return weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits


# --
def deepspeed(model: Any, batches: Sequence[Batch], folder: Path, by_tokens: bool = False) -> Found:
    """DeepSpeed's PipelineModule. Its step updates the weights: the gradient is what plain SGD has subtracted. It clips
    gradients to a norm of 1 unless told otherwise."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    names = names_of(model)
    # --
    deepspeed.init_distributed("gloo")
    size, count = len(batches[0]["input_ids"]), NUM_MICROBATCHES * len(batches)

    def loss_fn(logits: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        labels, total = target
        return token_sum(logits, labels) / total * count if by_tokens else token_mean(logits, labels)

    if model.config.tie_word_embeddings:
        first, last = TiedLayerSpec("embed", Embedding, model), TiedLayerSpec("embed", Head, model)
    else:
        first, last = LayerSpec(Embedding, model), LayerSpec(Head, model)
    blocks = [LayerSpec(Block, model, index) for index in range(len(model.model.layers))]
    layers = [first, *blocks, LayerSpec(Norm, model), last]
    module = PipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    settings = {
        "train_batch_size": size // NUM_MICROBATCHES * count,
        "train_micro_batch_size_per_gpu": size // NUM_MICROBATCHES,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    parts = [
        ((ids, mask), (labels, num_tokens(batch["labels"])))
        for batch in batches
        for ids, mask, labels in zip(
            *(batch[name].tensor_split(NUM_MICROBATCHES) for name in ("input_ids", "attention_mask", "labels")),
            strict=True,
        )
    ]
    # --
    held = [each for each in module.parameters() if id(each) in names]
    before = [each.detach().clone() for each in held]
    # --
    loss = engine.train_batch(iter(parts))
    # --
    # Without a count of tokens it is a mean over the microbatches of all batches, where others add up the batches.
    scale = 1 if by_tokens else len(batches)
    pairs = zip(before, held, strict=True)
    own = {name: (old - new.detach()) * scale for old, new in pairs for name in names[id(new)]}
    return Found([float(loss) * scale], own)


# The system, the function, the options of it, and what of this file its user writes besides.
SYSTEMS: dict[str, tuple[Callable[..., Found], dict[str, Any], tuple[Any, ...]]] = {
    "Penstock, 1f1b": (penstock, {}, ()),
    "Penstock, zb-h1": (penstock, {"schedule": "zb-h1"}, ()),
    "torch pipelining, 1F1B, its scaling": (torch_by_hand, {}, (LlamaStage, token_mean)),
    "torch pipelining, 1F1B, by tokens": (torch_by_hand, {"by_tokens": True}, (LlamaStage, token_sum, num_tokens)),
    "torch pipelining, interleaved, by tokens": (
        torch_by_hand,
        {"schedule": "ScheduleInterleaved1F1B", "by_tokens": True},
        (LlamaStage, token_sum, num_tokens),
    ),
    "torch pipelining, zero bubble, by tokens": (
        torch_by_hand,
        {"schedule": "ScheduleInterleavedZeroBubble", "by_tokens": True},
        (LlamaStage, token_sum, num_tokens),
    ),
    "torch pipelining, traced, by tokens": (torch_traced, {}, (Logits, without_no_grad, token_sum, num_tokens)),
    "DeepSpeed PipelineModule, its scaling": (deepspeed, {}, (Embedding, Block, Norm, Head, token_mean)),
    "DeepSpeed PipelineModule, by tokens": (
        deepspeed,
        {"by_tokens": True},
        (Embedding, Block, Norm, Head, token_sum, num_tokens),
    ),
    "transformers, DistributedConfig(pp_size=2)": (transformers_pipeline, {}, ()),
    "accelerate, prepare_pippy": (pippy, {}, (Logits, without_no_grad)),
    "accelerate, device_map": (device_map, {}, ()),
    "DDP": (data_parallel, {}, ()),
    "DDP, by tokens": (data_parallel, {"by_tokens": True}, (num_tokens,)),
}
# Written for one family of models, or for decoders, here.
BY_HAND, DECODERS = (torch_by_hand, deepspeed), (torch_traced, pippy)

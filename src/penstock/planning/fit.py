"""Does a model fit on what one has, and what must be switched on? A row for each way to train it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from penstock.checking.check import build_on_meta
from penstock.modeling.graph.chunked_loss import ChunkedLossError
from penstock.planning.cluster import Cluster
from penstock.planning.memory import MemoryEstimate, memory_of_ranks
from penstock.planning.plan import Job, Plan
from penstock.planning.planner import Infeasible, make_plans
from penstock.planning.profile import held_by_stages
from penstock.planning.profiling import profile_model

# Tokens of a chunk: few enough that logits are small beside a block, and enough that the head works at full speed.
CHUNK = 1024


@dataclass(frozen=True)
class Way:
    """One way to train a model on given devices.

    Attributes:
        name: what is trained, and in which type.
        dtype: of the weights.
        checkpointing: whether activations are recomputed.
        loss_chunk_tokens: as in the configuration.
        lora_rank: of adapters, None where all weights are trained.
        plan: the best one; None if it does not fit, and then the one that it would be with more memory is in `larger`.
        reason: why it does not fit.
    """

    name: str
    dtype: torch.dtype
    checkpointing: bool
    loss_chunk_tokens: int | None
    lora_rank: int | None
    plan: Plan | None
    larger: Plan | None = None
    reason: str = ""

    @property
    def shown(self) -> Plan | None:
        return self.plan or self.larger

    def parts(self) -> dict[str, float]:
        """Bytes on the fullest device: weights, gradients, optimizer, activations, logits, messages."""
        assert self.shown is not None
        rank, whole = self.shown.fullest
        logits = whole.activations - self._without(rank, logits=True).activations
        messages = whole.activations - self._without(rank, messages=True).activations
        rest = max(0.0, whole.activations - logits - messages)
        return {
            "weights": whole.weights, "gradients": whole.gradients, "optimizer": whole.optimizer,
            "activations": rest, "logits": logits, "messages": messages,
        }  # fmt: skip

    def _without(self, rank: int, logits: bool = False, messages: bool = False) -> MemoryEstimate:
        """What a rank needs without what the head makes, or without messages."""
        assert self.shown is not None
        for pipeline in self.shown.pipelines:
            if rank < len(pipeline.devices):
                break
            rank -= len(pipeline.devices)
        stages = list(pipeline.stages)
        if logits:
            head = replace(stages[-1][-1], kept=0.0, working=0.0, splitting=0.0, deferred=0.0, output=0.0)
            stages[-1] = (*stages[-1][:-1], head)
        held = held_by_stages(stages)
        if messages:
            held = [replace(one, kept=one.kept - one.sent, received=0.0, sent=0.0) for one in held]
        return memory_of_ranks(pipeline.schedule, held)[rank]


def ways(
    subject: Any,
    cluster: Cluster,
    num_microbatches: int,
    microbatch: int,
    length: int,
    lora_rank: int | None,
    operations_per_second: float,
) -> list[Way]:
    """Every way to train the model on the devices, fitting or not, from its configuration alone.

    Raises:
        NotImplementedError: the model cannot be split.
    """
    model = subject if isinstance(subject, nn.Module) else build_on_meta(subject)
    found = []
    for name, dtype, rank in _kinds(lora_rank):
        model.to(dtype)
        if rank is not None:
            _adapt(model, rank)
        for chunk in (None, CHUNK):
            try:
                profile = profile_model(
                    model, microbatch, length, dtype, None, operations_per_second, loss_chunk_tokens=chunk
                )
            except ChunkedLossError:
                continue
            for checkpointing in (False, True):
                job = Job(profile, cluster, num_microbatches, checkpointing=checkpointing, schedules=("1f1b",))
                plan, larger, reason = _planned(job)
                found.append(Way(name, dtype, checkpointing, chunk, rank, plan, larger, reason))
    return found


def _kinds(lora_rank: int | None) -> Iterator[tuple[str, torch.dtype, int | None]]:
    yield "float32", torch.float32, None
    yield "bfloat16", torch.bfloat16, None
    if lora_rank is not None:
        yield f"LoRA {lora_rank}", torch.bfloat16, lora_rank


def _planned(job: Job) -> tuple[Plan | None, Plan | None, str]:
    try:
        return make_plans(job, 1)[0], None, ""
    except Infeasible as error:
        classes = tuple(replace(kind, memory=float("inf")) for kind in job.cluster.classes)
        whole = replace(job, cluster=replace(job.cluster, classes=classes))
        plans = make_plans(whole, 16)
        return None, min(plans, key=lambda plan: plan.fullest[1].total), str(error)


class _Adapted(nn.Module):
    """A frozen layer with an adapter, as PEFT makes them: in float32, of whatever type the layer is."""

    def __init__(self, layer: nn.Linear | Conv1D, rank: int) -> None:
        super().__init__()
        outer, inner = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        self.layer = layer
        self.down = nn.Linear(inner, rank, bias=False, device="meta", dtype=torch.float32)
        self.up = nn.Linear(rank, outer, bias=False, device="meta", dtype=torch.float32)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(input)
        return output + self.up(self.down(input.float())).to(output.dtype)


def _adapt(model: nn.Module, rank: int) -> None:
    """Freeze the model, and adapt every linear layer but the head, as `target_modules="all-linear"` does."""
    model.requires_grad_(False)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | Conv1D) and child is not head:
                setattr(parent, name, _Adapted(child, rank))


def best(found: Sequence[Way]) -> Way | None:
    """The first of the fastest that fit: what changes the model least comes first."""
    fitting = [way for way in found if way.plan is not None]
    return min(fitting, key=lambda way: way.plan.seconds if way.plan else 0.0, default=None)

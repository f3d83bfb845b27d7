"""Does a model fit on what one has, and what must be switched on? A row for each way to train it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from penstock.modeling.graph.chunked_loss import ChunkedLossError
from penstock.planning.cluster import Cluster
from penstock.planning.memory import MemoryEstimate, memory_of_ranks
from penstock.planning.plan import Job, Plan
from penstock.planning.planner import Infeasible, best_of, make_plans, shares_of
from penstock.planning.profile import Profile, held_by_stages
from penstock.planning.profiling import Followed, chunked_head, follow, profile_model

# Tokens of a chunk: few enough that logits are small beside a block, and enough that the head works at full speed.
CHUNK = 1024


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how its numbers are kept.

    Attributes:
        name: for the table.
        dtype: of the weights.
        lines: what to write for it.
        states: as `optimizer_states` of `profile_model`.
        sharded: whether the holders of a parameter divide its optimizer's state.
        change: what is done to the model, which the recipes before it have changed already.
    """

    name: str
    dtype: torch.dtype
    lines: tuple[str, ...] = ()
    states: float = 2
    sharded: bool = False
    change: Callable[[nn.Module], None] | None = None


@dataclass(frozen=True)
class Way:
    """One way to train a model on given devices.

    Attributes:
        checkpointing: whether activations are recomputed.
        loss_chunk_tokens: as in the configuration.
        plan: the best one; None if it does not fit, and then the one that it would be with more memory is in `larger`.
        reason: why it does not fit.
    """

    recipe: Recipe
    checkpointing: bool
    loss_chunk_tokens: int | None
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


def ways(profiles: Iterator[tuple[Recipe, int | None, Profile]], cluster: Cluster, num_microbatches: int) -> list[Way]:
    """Every way to train the model on the devices, fitting or not."""
    found = []
    for recipe, chunk, profile in profiles:
        job = Job(profile, cluster, num_microbatches, schedules=("1f1b",))
        shares = shares_of(job) if recipe.sharded else [0]
        if not shares:
            continue
        for checkpointing in (False, True):
            jobs = [replace(job, checkpointing=checkpointing, sharded=share) for share in shares]
            found.append(Way(recipe, checkpointing, chunk, *_planned(jobs)))
    return found


def profiles_of(
    model: nn.Module, recipes: Sequence[Recipe], microbatch: int, length: int, operations_per_second: float
) -> Iterator[tuple[Recipe, int | None, Profile]]:
    """The costs of a model in every way to train it, from its configuration alone: with whole logits and, if the model
    can, with those of a chunk. The model is changed; recipes of one type follow each other.

    Raises:
        NotImplementedError: the model cannot be split.
    """
    followed: dict[torch.dtype, Followed] = {}
    chunks: tuple[int | None, ...] = (None,)
    for recipe in recipes:
        if recipe.dtype not in followed:
            nn.Module.to(model, recipe.dtype)  # models of diffusers warn of it
            followed[recipe.dtype] = follow(model, microbatch, length)
            if len(followed) == 1:
                with contextlib.suppress(ChunkedLossError):
                    chunked_head(model, followed[recipe.dtype])
                    chunks = (None, CHUNK)
        if recipe.change is not None:
            recipe.change(model)
        for chunk in chunks:
            try:
                profile = profile_model(
                    model, microbatch, length, operations_per_second=operations_per_second,
                    optimizer_states=recipe.states, loss_chunk_tokens=chunk, followed=followed[recipe.dtype],
                )  # fmt: skip
            except RuntimeError as error:
                if recipe.change is None:
                    raise
                raise NotImplementedError(
                    f"{recipe.name}: this {type(model).__name__} computes with the weights of linear layers itself, "
                    f"which then are packed or have adapters: {error}"
                ) from error
            yield recipe, chunk, profile


def _planned(jobs: Sequence[Job]) -> tuple[Plan | None, Plan | None, str]:
    try:
        return best_of(jobs, 1)[0][0], None, ""
    except Infeasible as error:
        classes = tuple(replace(kind, memory=float("inf")) for kind in jobs[0].cluster.classes)
        whole = replace(jobs[0], cluster=replace(jobs[0].cluster, classes=classes))
        plans = make_plans(whole, 16)
        return None, min(plans, key=lambda plan: plan.fullest[1].total), str(error)


def best(found: Sequence[Way]) -> Way | None:
    """The first of the fastest that fit: what changes the model least comes first."""
    fitting = [way for way in found if way.plan is not None]
    return min(fitting, key=lambda way: way.plan.seconds if way.plan else 0.0, default=None)


def nearest(found: Sequence[Way]) -> Way:
    """The one whose fullest device needs least."""
    return min(found, key=lambda way: way.shown.fullest[1].total if way.shown else math.inf)

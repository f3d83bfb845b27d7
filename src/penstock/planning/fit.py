"""Does a model fit on what one has, and what must be switched on? A row for each way to train it.

A `Way` is a `Recipe` (the type of the weights, the optimizer, adapters) and what else may be switched on under it:
recomputed activations, the loss in chunks, shared sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from penstock.modeling.graph.chunked_loss import ChunkedLossError
from penstock.planning.cluster import Cluster
from penstock.planning.context_parallel import share_sequences
from penstock.planning.memory import HeldBytes, memory_of_ranks
from penstock.planning.plan import Job, Plan
from penstock.planning.planner import Infeasible, best_of, make_plans, shares_of
from penstock.planning.profile import Profile, held_by_stages
from penstock.planning.profiling import FollowedForward, chunked_head, follow, profile_model
from penstock.schedule.registry import PLAIN

# Tried in this order: of ways that are as fast `best` takes the first, and fewer parts change training less.
CONTEXT_PARALLEL_SIZES = (1, 2, 4, 8)
# Tokens of a chunk: few enough that logits are small beside a block, and enough that the head works at full speed.
CHUNK = 1024


@dataclass(frozen=True)
class Recipe:
    name: str
    dtype: torch.dtype  # of the weights
    lines: tuple[str, ...] = ()  # what to write for it
    states: float = 2  # as `optimizer_states` of `profile_model`
    sharded: bool = False  # whether the holders of a parameter divide its optimizer's state
    packed: bool = False  # whether a frozen base is unpacked for each product, which takes time that is not counted
    # What is done to the model, which the recipes before it have changed already.
    change: Callable[[nn.Module], None] | None = None


@dataclass(frozen=True)
class Way:
    """A row of the table."""

    recipe: Recipe
    checkpointing: bool  # whether activations are recomputed
    loss_chunk_tokens: int | None
    plan: Plan | None  # the best one; None if the model does not fit
    larger: Plan | None = None  # if it does not fit: of the fastest without a limit, the one that needs least memory
    reason: str = ""  # if it does not fit: why

    @property
    def shown(self) -> Plan:
        plan = self.plan or self.larger
        assert plan is not None
        return plan

    @property
    def context_parallel_size(self) -> int:
        return self.shown.job.context_parallel_size

    def bytes_by_kind(self) -> dict[str, float]:
        """Bytes on the fullest device: weights, gradients, optimizer, activations, logits, messages."""
        rank, memory = self.shown.fullest
        for pipeline in self.shown.pipelines:
            if rank < len(pipeline.devices):
                break
            rank -= len(pipeline.devices)

        def of_removed(rest: Sequence[HeldBytes]) -> float:
            """The bytes of what `rest` lacks."""
            return memory.activations - memory_of_ranks(pipeline.schedule, rest)[rank].activations

        *below, last = pipeline.stages
        logits = of_removed(held_by_stages([*below, (*last[:-1], last[-1].weights_alone())]))
        held = held_by_stages(pipeline.stages)
        messages = of_removed([replace(stage, kept=stage.kept - stage.sent, received=0.0, sent=0.0) for stage in held])
        return {
            "weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer,
            "activations": max(0.0, memory.activations - logits - messages), "logits": logits, "messages": messages,
        }  # fmt: skip


def ways(
    profiles: Iterator[tuple[Recipe, int | None, Profile]],
    cluster: Cluster,
    num_microbatches: int,
    schedule: str = PLAIN,
    in_parts: bool = True,
) -> list[Way]:
    """Every recipe, with each of what else may be switched on, and whether it fits. `in_parts`: whether devices may
    share sequences."""
    all_ways = []
    for recipe, chunk, profile in profiles:
        whole = Job(profile, cluster, num_microbatches, schedules=(schedule,))
        for size in CONTEXT_PARALLEL_SIZES if in_parts and "length" in profile.about else CONTEXT_PARALLEL_SIZES[:1]:
            job = share_sequences(whole, size)
            if job is None:
                continue
            shares = shares_of(job) if recipe.sharded else [0]
            for checkpointing in (False, True) if shares else ():
                jobs = [replace(job, checkpointing=checkpointing, sharded=share) for share in shares]
                all_ways.append(Way(recipe, checkpointing, chunk, *_planned(jobs)))
    return all_ways


def profiles_of(
    model: nn.Module,
    recipes: Sequence[Recipe],
    microbatch: int,
    length: int,
    operations_per_second: float,
    of_pairs: bool = False,
) -> Iterator[tuple[Recipe, int | None, Profile]]:
    """The costs of a model under every recipe, from its configuration alone: with whole logits and, if the model can,
    with those of a chunk. The model is changed; recipes of one type follow each other.

    Args:
        of_pairs: a sample is two sequences, which a reference model evaluates, too, as DPO has it. It is a second model
            over the same stages, or without its adapters the model itself. No logits are then made in chunks.
    """
    followed: dict[torch.dtype, FollowedForward] = {}
    chunks: tuple[int | None, ...] = (None,)
    has_base = False
    if of_pairs:
        microbatch *= 2
    for recipe in recipes:
        if recipe.dtype not in followed:
            nn.Module.to(model, recipe.dtype)  # models of diffusers warn of it
            followed[recipe.dtype] = follow(model, microbatch, length)
            if len(followed) == 1 and not of_pairs:
                with contextlib.suppress(ChunkedLossError):
                    chunked_head(model, followed[recipe.dtype])
                    chunks = (None, CHUNK)
        if recipe.change is not None:
            recipe.change(model)
            has_base = True
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
            yield recipe, chunk, _with_reference(profile, has_base) if of_pairs else profile


def _with_reference(profile: Profile, is_base: bool) -> Profile:
    """The costs with an evaluation by a reference model before each step, which has weights of its own unless it is the
    base of the adapters."""
    copies = 1 if is_base else 2
    units = [
        replace(
            unit,
            weights=copies * unit.weights,
            tied=tuple((name, copies * size, gradient) for name, size, gradient in unit.tied),
            # Not `forward`, which a recomputation repeats.
            backward=unit.backward + unit.forward,
        )
        for unit in profile.units
    ]
    about = dict(profile.about)
    if isinstance(rows := about.get("microbatch"), int):
        about["microbatch"] = rows // 2  # pairs, as the trainer counts them
    return replace(profile, units=tuple(units), about=about)


def _planned(jobs: Sequence[Job]) -> tuple[Plan | None, Plan | None, str]:
    try:
        return best_of(jobs, 1)[0][0], None, ""
    except Infeasible as error:
        classes = tuple(replace(kind, memory=float("inf")) for kind in jobs[0].cluster.classes)
        unlimited = replace(jobs[0], cluster=replace(jobs[0].cluster, classes=classes))
        plans = make_plans(unlimited, 16)
        return None, min(plans, key=lambda plan: plan.fullest[1].total), str(error)


def best(tried: Sequence[Way]) -> Way | None:
    """The first of the fastest that fit: what changes the model least comes first. A packed base only if no other
    fits, as it is slower than predicted."""
    fitting = [way for way in tried if way.plan is not None]
    fitting = [way for way in fitting if not way.recipe.packed] or fitting
    return min(fitting, key=lambda way: way.plan.seconds if way.plan else 0.0, default=None)


def nearest(tried: Sequence[Way]) -> Way:
    """The one whose fullest device needs least."""
    return min(tried, key=lambda way: way.shown.fullest[1].total)

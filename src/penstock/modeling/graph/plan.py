"""A plan: for one kind of forward, which unit calls each stage runs and which values cross each boundary."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from torch import nn

from penstock.modeling.graph.dataflow import ChangedTensor, Computed, LeftTensor, RandomDraw, Sources, Value
from penstock.modeling.graph.shapes import OutputShape
from penstock.modeling.graph.trace import ForwardFacts, Trace
from penstock.modeling.tensor_spec import TensorSpec
from penstock.random_state import key_of


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One planned call of a unit: its `index`-th, counted from 0. The leaves `like_input` of its output have the shape
    and dtype of its first argument."""

    unit: str
    index: int
    stage: int
    output: OutputShape
    like_input: tuple[int, ...]


@dataclass(frozen=True)
class DataflowPlan(ForwardFacts):
    """What every stage does in one kind of forward. The same on every rank.

    Attributes:
        entry: name of the function that is run, `"forward"` for the model itself.
        boundaries: the values that cross each, in the order in which they travel; `boundaries[i]` are those between
            stage i and i + 1.
        last_stage_decides: whether the path that the code takes after the units of all other stages depends on the last
            stage's values. The other stages cannot follow it: they leave the forward before.
        defaults: arguments that Penstock adds to the caller's (`use_cache=False`).
        last_calls: for each stage the position in `calls` of the last one it runs, -1 if it runs none.
        changed: attributes of modules outside of units that the forward changes.
        changed_later: those of them that it changes where some stage has left it.
        digest: a hash of what a stage's run depends on, which tells this rank's plans apart.
        checksum: of what every rank must have alike: which stage makes which call, and what crosses each boundary.
    """

    entry: str
    num_stages: int
    calls: tuple[PlannedCall, ...]
    boundaries: tuple[tuple[Value, ...], ...]
    last_stage_decides: bool
    defaults: tuple[tuple[str, Any], ...]
    last_calls: tuple[int, ...]
    changed: tuple[str, ...]
    changed_later: tuple[str, ...]
    digest: str = field(compare=False, default="")
    checksum: int = field(compare=False, default=0)

    @cached_property
    def shapes_vary(self) -> bool:
        """Whether what crosses a boundary may have other shapes for inputs of the same shapes: the code asks for their
        values, and a unit is called several times, as for each image."""
        return self.asks_inputs and any(value.call for boundary in self.boundaries for value in boundary)


def make_plan(
    trace: Trace,
    stage_of: Mapping[str, int],
    num_stages: int,
    entry: str = "forward",
    defaults: tuple[tuple[str, Any], ...] = (),
) -> DataflowPlan:
    """Place the calls of a trace on the stages of their units."""
    calls = tuple(
        PlannedCall(each.unit, each.index, stage_of[each.unit], each.output.without_shapes(), each.like_input)
        for each in trace.calls
    )
    stages = {(call.unit, call.index): call.stage for call in calls}
    last_calls = [-1] * num_stages
    for position, call in enumerate(calls):
        last_calls[call.stage] = position
    last_stage_using: dict[Value, int] = {}
    uses = [(call.stage, call.unit, traced.sources) for call, traced in zip(calls, trace.calls, strict=True)]
    for stage, user, sources in (*uses, (num_stages - 1, "the model's output", trace.output_sources)):
        for source in sorted(sources, key=str):  # so that all ranks refuse the same
            if isinstance(source, ChangedTensor) and stages[source.unit, source.call] != stage:
                raise NotImplementedError(
                    f"{source.unit} changes one of its arguments in place, and {user}, on another stage, uses it: put "
                    "both into one stage with `stages`, or let it change a copy"
                )
            if isinstance(source, LeftTensor) and stages[source.unit, source.call] != stage:
                where = f" in its attribute {source.where}" if source.where else ", in an object of Python's"
                raise NotImplementedError(
                    f"the forward of {source.unit} leaves a tensor behind{where}, and {user}, on another stage, uses "
                    "it, where it is not: let the forward return it"
                )
        for value in _values(sources):
            last_stage_using[value] = max(stage, last_stage_using.get(value, 0))
            if stages[value.unit, value.call] > stage:
                raise NotImplementedError(
                    f"{user} runs on stage {stage} but needs the output of {value.unit}, which runs later, on stage "
                    f"{stages[value.unit, value.call]}: values cannot flow backwards. Put both into one stage with "
                    "`stages`"
                )
    _refuse_control(trace, stages, last_calls)

    order = {(call.unit, call.index): position for position, call in enumerate(calls)}
    used = sorted(last_stage_using, key=lambda value: (order[value.unit, value.call], value.leaf))
    boundaries = (
        tuple(value for value in used if stages[value.unit, value.call] < stage <= last_stage_using[value])
        for stage in range(1, num_stages)
    )
    plan = DataflowPlan(
        entry=entry,
        num_stages=num_stages,
        calls=calls,
        boundaries=tuple(boundaries),
        last_stage_decides=bool(trace.controls) and num_stages > 1,
        defaults=defaults,
        last_calls=tuple(last_calls),
        changed=tuple(sorted(trace.changed)),
        changed_later=tuple(
            sorted(n for n, after in trace.changed.items() if after > min(last_calls[:-1], default=after))
        ),
        **{fact.name: getattr(trace, fact.name) for fact in fields(ForwardFacts)},
    )
    # A set prints in any order, and no stage's run depends on what the code asks, draws and leaves in attributes; ranks
    # whose stages have run may see others of these.
    asked_or_left = ("written", "asks_inputs", "asks_known", "draws", "batchwise", "changed", "changed_later")
    left_out = {*asked_or_left, "digest", "checksum"}
    values = [getattr(plan, attribute.name) for attribute in fields(plan) if attribute.name not in left_out]
    hashed = repr((*values, sorted(map(str, plan.written))))
    # Names and numbers only: what else units return may print an address of this process.
    compared = repr(([(call.unit, call.index, call.stage) for call in calls], plan.boundaries, entry))
    return replace(
        plan, digest=hashlib.sha256(hashed.encode()).hexdigest()[:32], checksum=zlib.crc32(compared.encode())
    )  # fmt: skip


def _values(sources: Sources) -> Sequence[Value]:
    return sorted((s for s in sources if isinstance(s, Value)), key=lambda v: (v.unit, v.call, v.leaf))


def _refuse_control(trace: Trace, stages: Mapping[tuple[str, int], int], last_calls: Sequence[int]) -> None:
    """Python's path must not depend on a value that some stage walking that path does not have."""
    last = len(last_calls) - 1
    for position, sources in trace.controls:
        if len(last_calls) > 1 and any(isinstance(source, RandomDraw) for source in sources):
            raise NotImplementedError(
                "its code takes a random path in training, such as skipping whole layers: set its layerdrop to 0"
            )
        computed = [source for source in sources if isinstance(source, Computed)]
        producing = {stages[source.unit, source.call] for source in computed}
        still_running = {stage for stage, last_call in enumerate(last_calls) if last_call >= position} | {last}
        if producing and (len(still_running) > 1 or producing != still_running):
            names = ", ".join(sorted({source.unit for source in computed}))
            raise NotImplementedError(
                f"what the model's code does next depends on values computed by {names}, which not every stage has"
                ": put these and all units after them into the last stage with `stages`"
            )


@dataclass(frozen=True, slots=True)
class StageCall:
    """What a stage does at one unit call. Values are copied where the model's code will change them in place."""

    call: PlannedCall
    own: bool
    last: bool  # the stage is done after this call
    sends: tuple[tuple[int, int, bool], ...]  # leaf of the output, position among the values to send, copy
    received: dict[int, tuple[int, bool]]  # {leaf: (position among the values received, copy)}
    # Whether every tensor that the call returns was received. If the call also makes entries in mappings, and none of
    # its tensors is written to, one that is like its first argument counts, too.
    known: bool
    writable: bool  # placeholders must bear being written to
    seeds: tuple[int, int]  # keys of the random state for the unit, and for the code after it


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one stage does in a forward, worked out once, so that running it looks nothing up."""

    calls: tuple[StageCall, ...]
    relayed: tuple[tuple[int, int], ...]  # positions among the values received and sent of what passes through
    num_received: int
    num_sent: int
    idle: bool  # the stage runs no unit and returns no output, so that its forward need not run at all


def make_stage_plan(plan: DataflowPlan, stage: int) -> StagePlan:
    last_stage = stage == plan.num_stages - 1
    incoming = {value: position for position, value in enumerate(plan.boundaries[stage - 1] if stage else ())}
    outgoing = {value: position for position, value in enumerate(() if last_stage else plan.boundaries[stage])}
    calls = []
    for position, call in enumerate(plan.calls):
        own, last = call.stage == stage, position == plan.last_calls[stage] and not last_stage
        leaves = [leaf for leaf, shape in enumerate(call.output.leaves) if isinstance(shape, TensorSpec)]
        values = [Value(call.unit, call.index, leaf) for leaf in leaves]
        sends = ((v.leaf, outgoing[v], v in plan.written) for v in values if own and v in outgoing)
        received = {value.leaf: (incoming[value], value in plan.written) for value in values if value in incoming}
        writable = any(value in plan.written for value in values)
        like_input = call.like_input if call.output.stored and not writable else ()
        known = all(value.leaf in received or value.leaf in like_input for value in values)
        seeds = key_of(call.unit, call.index), key_of(call.unit, call.index, "after")
        calls.append(StageCall(call, own, last, tuple(sends), received, known, writable, seeds))
    return StagePlan(
        calls=tuple(calls),
        relayed=tuple((incoming[value], outgoing[value]) for value in incoming if value in outgoing),
        num_received=len(incoming),
        num_sent=len(outgoing),
        idle=not last_stage and plan.last_calls[stage] < 0,
    )


def refusal(model: nn.Module, reason: str) -> NotImplementedError:
    """The error for a model that cannot be split. How it begins is part of the interface."""
    return NotImplementedError(f"Auto policy for {type(model).__name__} is not implemented... {reason}.")

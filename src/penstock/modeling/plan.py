"""A plan: for one kind of forward, which unit calls each stage runs and which values cross each cut."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.modeling.dataflow import Altered, Drawn, Sources, Value
from penstock.modeling.loss import LossRule
from penstock.modeling.shapes import OutputShape
from penstock.modeling.trace import Trace

__all__ = ["Call", "Plan", "Value", "make_plan"]


@dataclass(frozen=True, slots=True)
class Call:
    """One planned call of a unit.

    Attributes:
        unit: its name.
        index: which call of this unit in the forward, counted from 0.
        stage: the stage that runs it.
        output: the structure of what it returns.
        like_input: leaves of the output that have the shape and dtype of its first argument.
    """

    unit: str
    index: int
    stage: int
    output: OutputShape
    like_input: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What every stage does in one kind of forward. Equal, and of the same digest, on every rank.

    Attributes:
        entry: name of the function that is run, `"forward"` for the model itself.
        num_stages: stages of the pipeline.
        calls: all unit calls, in the order in which they happen.
        cuts: for each of the `num_stages - 1` cuts the values that cross it, in the order in which they travel.
        written: values that the model's code changes in place, and which therefore must not be shared.
        written_inputs: arguments that the model's code changes in place: every stage needs its own copy of them.
        loss: how the loss of a batch follows from its microbatches', None without a loss.
        controlled: whether the code after the last unit of every other stage takes a path that depends on values of
            the last stage, so that the others must leave the forward early.
        defaults: arguments that Penstock adds to the caller's (`use_cache=False`).
        asks_inputs: whether the code between units asks for values of the inputs alone, to decide what to do.
        last_calls: for each stage the position in `calls` of the last one it runs, -1 if it runs none.
        digest: a hash of all of this, to be compared between ranks.
    """

    entry: str
    num_stages: int
    calls: tuple[Call, ...]
    cuts: tuple[tuple[Value, ...], ...]
    written: frozenset[Value]
    written_inputs: tuple[str, ...]
    loss: LossRule | None
    controlled: bool
    defaults: tuple[tuple[str, Any], ...]
    last_calls: tuple[int, ...]
    asks_inputs: bool
    digest: str = field(compare=False)


def make_plan(
    trace: Trace,
    stage_of: Mapping[str, int],
    num_stages: int,
    entry: str = "forward",
    defaults: tuple[tuple[str, Any], ...] = (),
) -> Plan:
    """Place the calls of a trace on stages.

    Args:
        trace: from `penstock.modeling.trace.trace`.
        stage_of: the stage of each unit; floating modules need none, they run where their latest input is.
        num_stages: stages of the pipeline.

    Raises:
        NotImplementedError: with the bare reason, if these stages cannot run one after another.
    """
    calls = _placed(trace, stage_of)
    stages = {(call.unit, call.index): call.stage for call in calls}
    last_calls = [-1] * num_stages
    for position, call in enumerate(calls):
        last_calls[call.stage] = position
    needs: list[dict[Value, str]] = [{} for _ in range(num_stages)]
    for traced, call in zip(trace.calls, calls, strict=True):
        _refuse_altered(traced.sources, stages, call.stage, call.unit)
        for value in _values(traced.sources):
            needs[call.stage][value] = call.unit
    _refuse_altered(trace.output_sources, stages, num_stages - 1, "the model's output")
    for value in _values(trace.output_sources):
        needs[-1][value] = "the model's output"
    _refuse_control(trace, stages, last_calls)

    order = {(call.unit, call.index): position for position, call in enumerate(calls)}
    for stage, needed in enumerate(needs):
        for value, user in needed.items():
            if stages[value.unit, value.call] > stage:
                raise NotImplementedError(
                    f"{user} runs on stage {stage} but needs the output of {value.unit}, which runs later, on stage "
                    f"{stages[value.unit, value.call]}: values cannot flow backwards"
                )
    cuts = []
    for cut in range(num_stages - 1):
        crossing = {value for needed in needs[cut + 1 :] for value in needed if stages[value.unit, value.call] <= cut}
        cuts.append(tuple(sorted(crossing, key=lambda v: (order[v.unit, v.call], *_leaf_order(v.leaf)))))
    written, controlled = trace.written, bool(trace.controls) and num_stages > 1
    digest = _digest(
        entry,
        num_stages,
        calls,
        cuts,
        sorted(map(str, written)),
        trace.written_inputs,
        trace.loss,
        controlled,
        defaults,
    )
    return Plan(
        entry,
        num_stages,
        calls,
        tuple(cuts),
        written,
        trace.written_inputs,
        trace.loss,
        controlled,
        defaults,
        tuple(last_calls),
        trace.asks_inputs,
        digest,
    )


def _placed(trace: Trace, stage_of: Mapping[str, int]) -> tuple[Call, ...]:
    stages: dict[tuple[str, int], int] = {}
    calls = []
    for traced in trace.calls:
        if traced.floating:
            stage = max((stages[value.unit, value.call] for value in _values(traced.sources)), default=0)
        else:
            stage = stage_of[traced.unit]
        stages[traced.unit, traced.index] = stage
        calls.append(Call(traced.unit, traced.index, stage, traced.output.without_shapes(), traced.like_input))
    return tuple(calls)


def _values(sources: Sources) -> Sequence[Value]:
    return sorted((s for s in sources if isinstance(s, Value)), key=lambda v: (v.unit, v.call, str(v.leaf)))


def _leaf_order(leaf: int | str) -> tuple[int, str, int]:
    """Side outputs of a call come after its outputs."""
    if isinstance(leaf, int):
        return 0, "", leaf
    key, _, number = leaf.rpartition(".")
    return 1, key, int(number)


def _refuse_altered(sources: Sources, stages: Mapping[tuple[str, int], int], stage: int, user: str) -> None:
    for source in sources:
        if isinstance(source, Altered) and stages[source.altered_by, source.call] != stage:
            raise NotImplementedError(
                f"{source.altered_by} changes one of its arguments in place, and {user}, on another stage, uses it"
            )


def _refuse_control(trace: Trace, stages: Mapping[tuple[str, int], int], last_calls: Sequence[int]) -> None:
    """Python's path must not depend on a value that some stage walking that path does not have."""
    last = len(last_calls) - 1
    for position, sources in trace.controls:
        if len(last_calls) > 1 and any(isinstance(source, Drawn) for source in sources):
            raise NotImplementedError(
                "its code takes a random path in training, such as skipping whole layers: set its layerdrop to 0"
            )
        owners = {stages[value.unit, value.call] for value in _values(sources)}
        walkers = {stage for stage, last_call in enumerate(last_calls) if last_call >= position} | {last}
        if owners and (len(walkers) > 1 or owners != walkers):
            names = ", ".join(sorted({value.unit for value in _values(sources)}))
            raise NotImplementedError(
                f"what the model's code does next depends on values computed by {names}, which not every stage has"
            )


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

"""The part of a plan that one stage plays, worked out once, so that running it looks nothing up."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.modeling.plan import Call, Plan, Value
from penstock.modeling.randomness import key_of
from penstock.modeling.shapes import TensorShape


@dataclass(frozen=True, slots=True)
class Step:
    """What a stage does at one unit call.

    Attributes:
        call: the call.
        own: whether the stage runs the unit.
        last: whether the stage is done after this call.
        sends: (leaf, position among the values to send, copy) of outputs that cross the stage's outgoing cut; `copy`
            where the model's code will change the output in place.
        side_sends: (list, number of the entry, position among the values to send, copy) of side outputs that cross it.
        received: {leaf: (position among the values received, copy)}.
        complete: whether every tensor that the call returns was received.
        writable: whether placeholders must bear being written to.
        seeds: keys of the random state for the unit, and for the code after it.
    """

    call: Call
    own: bool
    last: bool
    sends: tuple[tuple[int, int, bool], ...]
    side_sends: tuple[tuple[str, int, int, bool], ...]
    received: dict[int | str, tuple[int, bool]]
    complete: bool
    writable: bool
    seeds: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Script:
    """All steps of one stage.

    Attributes:
        steps: one per unit call of the forward, in order.
        relayed: (position among the values received, position among the values to send) of what passes through.
        num_sent: how many values cross the stage's outgoing cut.
        idle: whether the stage runs no unit and returns no output, so that its forward need not run at all.
    """

    steps: tuple[Step, ...]
    relayed: tuple[tuple[int, int], ...]
    num_sent: int
    idle: bool


def make_script(plan: Plan, stage: int) -> Script:
    """The part of `plan` that concerns one stage."""
    last_stage = stage == plan.num_stages - 1
    incoming = {value: position for position, value in enumerate(plan.cuts[stage - 1] if stage else ())}
    outgoing = {value: position for position, value in enumerate(() if last_stage else plan.cuts[stage])}
    steps = tuple(
        _step(call, stage, position == plan.last_calls[stage] and not last_stage, incoming, outgoing, plan.written)
        for position, call in enumerate(plan.calls)
    )
    return Script(
        steps=steps,
        relayed=tuple((incoming[value], outgoing[value]) for value in incoming if value in outgoing),
        num_sent=len(outgoing),
        idle=not last_stage and plan.last_calls[stage] < 0,
    )


def _step(
    call: Call,
    stage: int,
    last: bool,
    incoming: dict[Value, int],
    outgoing: dict[Value, int],
    written: frozenset[Value],
) -> Step:
    own = call.stage == stage
    sends, side_sends, received = [], [], {}
    values = list(_values(call))
    for value in values:
        copied = value in written
        if value in incoming:
            received[value.leaf] = incoming[value], copied
        if own and value in outgoing:
            if isinstance(value.leaf, int):
                sends.append((value.leaf, outgoing[value], copied))
            else:
                key, _, number = value.leaf.rpartition(".")
                side_sends.append((key, int(number), outgoing[value], copied))
    return Step(
        call=call,
        own=own,
        last=last,
        sends=tuple(sends),
        side_sends=tuple(side_sends),
        received=received,
        complete=len(received) == len(values),
        writable=any(value in written for value in values),
        seeds=(key_of(call.unit, call.index), key_of(call.unit, call.index, "after")),
    )


def _values(call: Call) -> list[Value]:
    """The tensors that a call makes: those it returns, and side outputs that are not among them."""
    leaves: list[int | str] = [i for i, leaf in enumerate(call.output.leaves) if isinstance(leaf, TensorShape)]
    leaves += [entry.leaf for entry in call.output.captured if isinstance(entry.leaf, str)]
    return [Value(call.unit, call.index, leaf) for leaf in leaves]

"""Running one stage: the handler of unit calls during a stage's forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from penstock.modeling.graph.chunked_loss import ChunkedLogits
from penstock.modeling.graph.plan import PlannedCall, StageCall, StagePlan
from penstock.modeling.graph.shapes import OtherStructure, OutputShape, ShapeFunctions, flatten, lengths, side_outputs
from penstock.modeling.instrumentation import Intercepted
from penstock.modeling.placeholders.caches import frozen_cache
from penstock.modeling.placeholders.unreceived import Unreceived, other_path, refuse_unreceived
from penstock.modeling.stage.host_values import HostValues
from penstock.modeling.tensor_spec import TensorSpec
from penstock.random_state import key_of, mixed

_START = key_of("the code before the first unit")


class StageDone(BaseException):
    """Ends a stage's forward after its last unit. No `Exception`, so that model code cannot swallow it."""


@dataclass(eq=False)
class StageRun:
    """Handles the unit calls of one forward of one stage, see `SplitModel`. `host_values` are active in the code
    between units, and not inside of them."""

    plan: StagePlan
    functions: ShapeFunctions
    received: Sequence[torch.Tensor]
    find_device: Callable[[], torch.device]
    early_exit: bool = True
    hand_over: Callable[[tuple[torch.Tensor, ...]], None] | None = None
    # What is no argument stays the class's until it is set: there is a run for each microbatch.
    host_values: HostValues | None = field(default=None, init=False)
    # The unit that makes its logits where a loss asks for them, of so many tokens at once.
    head: str | None = field(default=None, init=False)
    chunk_tokens: int = field(default=0, init=False)
    # The unit that runs; empty between units.
    inside: str = field(default="", init=False)
    _seed: int = field(default=0, init=False)
    _seed_generators: Callable[[int], None] | None = field(default=None, init=False)
    _position: int = field(default=0, init=False)

    @property
    def device(self) -> torch.device:
        """Where placeholders are made, which hardly any forward needs."""
        return self.find_device()

    def __post_init__(self) -> None:
        self._sends: list[torch.Tensor | None] = [None] * self.plan.num_sent
        if self.plan.idle and self.hand_over is not None:
            self.hand_over(self.finished())

    def seed_with(self, seed_generators: Callable[[int], None], seed: int) -> None:
        """Seed the random generators now, and before and after every unit, from the forward's seed."""
        seed_generators(mixed(seed, _START))
        self._seed_generators, self._seed = seed_generators, seed

    def finished(self) -> tuple[torch.Tensor, ...]:
        """The values to hand to the next stage, once the last unit of this one has run."""
        # Not earlier: what was received may still be on its way when the forward begins.
        for incoming, outgoing in self.plan.relayed:
            self._sends[outgoing] = self.received[incoming]
        if any(value is None for value in self._sends):
            raise other_path("it skipped a unit, and has to call the same ones each time")
        # A unit may have used one that it was not given: read from an object, say.
        refuse_unreceived("what is sent to the next stage", *self._sends)
        return tuple(self._sends)  # type: ignore[arg-type]  # no None is left

    def call(self, unit: Intercepted, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls, position = self.plan.calls, self._position
        planned = calls[position] if position < len(calls) else None
        if planned is None or planned.call.unit != unit.name:
            expected = "no further unit" if planned is None else f"the unit {planned.call.unit}"
            raise other_path(f"{expected} was due, but {unit.name} was called")
        self._position = position + 1
        seed, host_values = self._seed_generators, self.host_values
        if seed is not None and planned.own:
            seed(mixed(self._seed, planned.seeds[0]))
        compute = self._run if planned.own else self._answer
        if host_values is None:
            output = compute(planned, unit, module, args, kwargs)
        else:
            with host_values.aside():
                output = compute(planned, unit, module, args, kwargs)
        self.inside = ""
        if planned.last:
            if self.hand_over is not None:
                self.hand_over(self.finished())
            if self.early_exit:
                raise StageDone
        if seed is not None:
            seed(mixed(self._seed, planned.seeds[1]))
        return output

    def _run(
        self, planned: StageCall, unit: Intercepted, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a unit of this stage, and keep what the next stage needs of its output."""
        refuse_unreceived(unit.name, *args, *kwargs.values())
        shape, self.inside = planned.call.output, unit.name
        side_lengths = lengths(side_outputs()) if shape.captured else {}
        # Before the unit runs, as it may lengthen a cache on which shapes depend.
        expected = self._expected(planned.call, args, kwargs) if shape.assumed else None
        if unit.name == self.head:
            call = lambda hidden: unit.run(module, (hidden,), {})  # noqa: E731
            return ChunkedLogits.of(module, call, _first(args, kwargs), self.chunk_tokens)
        output = unit.run(module, args, kwargs)
        if planned.sends or expected is not None:
            try:
                leaves = shape.flatten(output, flatten((args, kwargs))[0] if shape.stored else (), side_lengths)
            except OtherStructure as error:
                raise RuntimeError(
                    f"The unit {unit.name} returned {error} was found when its forward was followed, so that the next "
                    "stage would take one tensor for another. A forward hook that returns something of its own is not "
                    "followed: put what it does into the forward of a module"
                ) from error
            if expected is not None:
                _check_assumption(planned.call, leaves, expected)
            for leaf, position, copied in planned.sends:
                self._sends[position] = leaves[leaf].clone() if copied else leaves[leaf]
        return output

    def _expected(self, call: PlannedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What ghosts of a unit take the shapes of its output to be."""
        if len(call.output.leaves) == 1 and call.like_input:
            return (TensorSpec.shape_of(_first(args, kwargs)),)
        return self._shape(call, args, kwargs).leaves

    def _shape(self, call: PlannedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputShape:
        """What a unit's call would return for these arguments."""
        shape = self.functions(call.unit, args, kwargs, call.output.known)
        if shape.spec != call.output.spec:  # one leaf would be taken for another
            raise RuntimeError(
                f"The unit {call.unit} would return {shape.structure}, but {call.output.structure} was found when its "
                "forward was followed. Let it return the same structure for every microbatch"
            )
        return shape

    def _answer(
        self, planned: StageCall, unit: Intercepted, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call of another stage's unit returns: the values received, or placeholders."""
        answer, growth = self._received_or_placeholder(planned, args, kwargs), planned.call.output.cache
        if growth is not None:  # afterwards, as shapes depend on the cache's length
            given: Sequence[Any] = (*args, *kwargs.values())
            if not any(isinstance(each, Cache) for each in given) or not isinstance(given[0], torch.Tensor):
                given = flatten((args, kwargs))[0]  # which takes longer than the rest of this call
            growth.apply(given, self.device)
        return answer

    def _received_or_placeholder(self, planned: StageCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, output, received = planned.call, planned.call.output, planned.received
        if len(output.leaves) == 1 and output.spec.is_leaf() and not output.captured:  # nearly always
            if 0 in received:
                return self._value(received[0])
            if 0 in call.like_input and not planned.writable:
                return _standing_for(_first(args, kwargs))
        lazily = not (planned.known or self.early_exit or planned.writable or output.captured)
        later = self._shapes_later(call, args, kwargs) if lazily else None
        like_first = planned.known or lazily
        if not like_first:
            # What is not received is made as this microbatch has it.
            output = (
                self._shape(call, args, kwargs) if received else self.functions(call.unit, args, kwargs, output.known)
            )

        def tensor(leaf: int, shape: TensorSpec) -> torch.Tensor:
            if leaf in received:
                return self._value(received[leaf])
            if like_first and leaf in call.like_input:
                return _standing_for(_first(args, kwargs))
            if later is not None:
                return Unreceived.later(lambda: later()[leaf].expanded_zeros(self.device))
            return Unreceived.of(shape.zeros(self.device) if planned.writable else shape.expanded_zeros(self.device))

        return output.make_output(tensor, flatten((args, kwargs))[0] if output.stored else ())

    def _shapes_later(
        self, call: PlannedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], tuple[Any, ...]]:
        """Works out the shapes of a call's output only if somebody looks; the caches may have grown by then."""
        given, structure = flatten((args, kwargs))
        layers = call.output.cache.layers if call.output.cache else ()
        frozen = [frozen_cache(value, layers) for value in given]

        @functools.cache
        def shapes() -> tuple[Any, ...]:
            args, kwargs = pytree.tree_unflatten(frozen, structure)
            return self._shape(call, args, kwargs).leaves

        return shapes

    def _value(self, received: tuple[int, bool]) -> torch.Tensor:
        position, copied = received
        # A received value is a leaf of the autograd graph, which must not be written to.
        return self.received[position].clone() if copied else self.received[position]


def _standing_for(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a value of this tensor's shape and type. It has memory of its own: what is written to it, or
    computed from it, has nothing to do with the tensor's."""
    return Unreceived.of(TensorSpec.shape_of(tensor).expanded_zeros(tensor.device))


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _check_assumption(call: PlannedCall, output: Sequence[Any], expected: tuple[Any, ...]) -> None:
    """Something was assumed of the unit, see `OutputShape.assumed`: check that the real leaves have these shapes."""
    real = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in output]
    planned = [leaf.shape if isinstance(leaf, TensorSpec) else None for leaf in expected]
    if real != planned:
        raise RuntimeError(
            f"The unit {call.unit} returned tensors of shapes {real}, but {planned} was expected of it: it cannot "
            "run on meta tensors, so values that it asks for, or that a part of it keeps its input's shape, were "
            "assumed. Make it run on meta tensors, without a look at values."
        )

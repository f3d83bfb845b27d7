"""Running one stage: the handler of unit calls during a stage's forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from penstock.modeling import capture, ghost_cache
from penstock.modeling.host_values import HostValues
from penstock.modeling.instrumentation import Intercepted
from penstock.modeling.placeholder import LatePlaceholder, as_of_now
from penstock.modeling.plan import Call
from penstock.modeling.randomness import key_of, mixed
from penstock.modeling.script import Script, Step
from penstock.modeling.shapes import ShapeFunctions, TensorShape, flatten

_START = key_of("the code before the first unit")


class StageDone(BaseException):
    """Ends a stage's forward after its last unit. No `Exception`, so that model code cannot swallow it."""


class StageRun:
    """Handles the unit calls of one forward of one stage.

    Args:
        received: the values of the incoming cut.
        early_exit: whether to leave the forward after the stage's last unit.
        device: where placeholders live.
        hand_over: takes the values for the next stage as soon as they are there, before the forward goes on.
        host_values: what is active in the code between units, and not inside of them.
    """

    __slots__ = (
        "_device",
        "_early_exit",
        "_functions",
        "_hand_over",
        "_host_values",
        "_position",
        "_received",
        "_script",
        "_seed",
        "_seed_generators",
        "sends",
    )

    def __init__(
        self,
        script: Script,
        functions: ShapeFunctions,
        received: Sequence[torch.Tensor],
        early_exit: bool,
        device: torch.device,
        hand_over: Callable[[tuple[torch.Tensor, ...]], None] | None = None,
        host_values: HostValues | None = None,
    ) -> None:
        self._host_values = host_values
        self._script = script
        self._functions = functions
        self._received = received
        self._seed_generators: Callable[[int], None] | None = None
        self._seed = 0
        self._early_exit = early_exit
        self._device = device
        self._position = 0
        self._hand_over = hand_over
        self.sends: list[torch.Tensor | None] = [None] * script.num_sent
        if script.idle and hand_over is not None:
            hand_over(self.finished())

    def seed_with(self, seed_generators: Callable[[int], None], seed: int) -> None:
        """Seed the random generators now, and before and after every unit, from the forward's seed."""
        seed_generators(mixed(seed, _START))
        self._seed_generators = seed_generators
        self._seed = seed

    def finished(self) -> tuple[torch.Tensor, ...]:
        """The values to hand to the next stage, once its last unit has run."""
        # Not earlier: what was received may still be on its way when the forward begins.
        for incoming, outgoing in self._script.relayed:
            self.sends[outgoing] = self._received[incoming]
        for value in self.sends:
            if value is None:
                raise RuntimeError("The model took another path than it was planned for: it skipped a unit.")
        return tuple(self.sends)  # type: ignore[arg-type]  # no None is left

    def call(self, unit: Intercepted, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        steps, position = self._script.steps, self._position
        step = steps[position] if position < len(steps) else None
        if step is None or step.call.unit != unit.name:
            expected = "no further unit" if step is None else f"the unit {step.call.unit}"
            raise RuntimeError(
                f"The model took another path than it was planned for: {expected} was due, but {unit.name} was called. "
                "Its control flow depends on the contents of the inputs, which a pipeline cannot follow."
            )
        self._position = position + 1
        seed = self._seed_generators
        if seed is not None and step.own:
            seed(mixed(self._seed, step.seeds[0]))
        if self._host_values is None:
            output = self._run(unit, module, step, args, kwargs) if step.own else self._stand_in(step, args, kwargs)
        else:
            with self._host_values.aside():
                output = self._run(unit, module, step, args, kwargs) if step.own else self._stand_in(step, args, kwargs)
        if step.last:
            if self._hand_over is not None:
                self._hand_over(self.finished())
            if self._early_exit:
                raise StageDone
        if seed is not None:
            seed(mixed(self._seed, step.seeds[1]))
        return output

    def _run(
        self, unit: Intercepted, module: nn.Module, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = capture.lengths(capture.collected()) if step.side_sends else {}
        # Before the unit runs, as it may lengthen a cache on which shapes depend.
        expected = self._expected(step.call, args, kwargs) if step.call.output.assumed else None
        output = unit.original(module, *args, **kwargs)
        if expected is not None:
            _check_assumption(step.call, output, expected)
        if step.sends:
            if isinstance(output, torch.Tensor):
                _, position, copied = step.sends[0]
                self.sends[position] = output.clone() if copied else output
            else:
                leaves, _ = flatten(output)
                for leaf, position, copied in step.sends:
                    self.sends[position] = leaves[leaf].clone() if copied else leaves[leaf]
        if step.side_sends:
            lists = capture.collected()
            for key, number, position, copied in step.side_sends:
                tensor = lists[key][before[key] + number]
                self.sends[position] = tensor.clone() if copied else tensor
        return output

    def _expected(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What ghosts of a unit take the shapes of its output to be."""
        if call.output.spec.is_leaf() and call.like_input:
            first = _first(args, kwargs)
            return (TensorShape(tuple(first.shape), first.dtype),)
        return self._functions(call.unit, args, kwargs).leaves

    def _stand_in(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = self._answer(step, args, kwargs)
        output = step.call.output
        if output.cache_layers or output.state_layers:  # afterwards, as shapes depend on the cache's length
            self._advance_cache(step.call, args, kwargs)
        return answer

    def _answer(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of another stage's unit returns: the values received, or placeholders."""
        call = step.call
        output = call.output
        plain = len(output.leaves) == 1 and output.spec.is_leaf()
        if plain and not output.captured:  # nearly always
            if 0 in step.received:
                return self._value(step.received[0])
            if 0 in call.like_input and not step.writable:
                return _first(args, kwargs)
        if not step.complete and not self._early_exit and not step.writable and not output.captured:
            leaves = self._late_leaves(step, args, kwargs)
            return leaves[0] if plain else pytree.tree_unflatten(leaves, output.spec)
        if step.complete:
            shape = output
        else:
            shape = self._functions(call.unit, args, kwargs)
        leaves = [self._leaf(step, index, leaf) for index, leaf in enumerate(shape.leaves)]
        if shape.captured:
            lists = capture.collected()
            for entry in shape.captured:
                if entry.key in lists:
                    if isinstance(entry.leaf, int):
                        lists[entry.key].append(leaves[entry.leaf])
                    else:
                        lists[entry.key].append(
                            None if entry.leaf is None else self._leaf(step, entry.leaf, entry.shape)
                        )
        return leaves[0] if plain else pytree.tree_unflatten(leaves, output.spec)

    def _late_leaves(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of an answer, with shapes worked out only if somebody looks; the caches may have grown by then."""
        call = step.call
        given, structure = flatten((args, kwargs))
        frozen = [as_of_now(value, call.output.cache_layers) for value in given]

        @functools.cache
        def shapes() -> tuple[Any, ...]:
            return self._functions(call.unit, *pytree.tree_unflatten(frozen, structure)).leaves

        def leaf(index: int, planned: Any) -> Any:
            if not isinstance(planned, TensorShape):
                return planned
            if index in step.received:
                return self._value(step.received[index])
            if index in call.like_input:
                return _first(args, kwargs)
            return LatePlaceholder(lambda: shapes()[index].zeros(self._device))

        return [leaf(index, planned) for index, planned in enumerate(call.output.leaves)]

    def _leaf(self, step: Step, leaf: int | str, shape: Any) -> Any:
        if not isinstance(shape, TensorShape):
            return shape
        received = step.received.get(leaf)
        if received is not None:
            return self._value(received)
        return shape.writable_zeros(self._device) if step.writable else shape.zeros(self._device)

    def _value(self, received: tuple[int, bool]) -> torch.Tensor:
        position, copied = received
        # A received value is a leaf of the autograd graph, which must not be written to.
        return self._received[position].clone() if copied else self._received[position]

    def _advance_cache(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, _ = flatten((args, kwargs))
        cache = next((leaf for leaf in leaves if isinstance(leaf, Cache)), None)
        if cache is not None:
            like = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            for layer in call.output.cache_layers:
                ghost_cache.advance(cache, layer, like.to(self._device) if like.is_meta else like, like.shape[1])
            for layer in call.output.state_layers:
                ghost_cache.step(cache, layer)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _check_assumption(call: Call, output: Any, expected: tuple[Any, ...]) -> None:
    """A part of the unit was taken for shape-preserving; see that the real output has the shapes that follow."""
    leaves, _ = flatten(output)
    real = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    planned = [leaf.shape if isinstance(leaf, TensorShape) else None for leaf in expected]
    if real != planned:
        raise RuntimeError(
            f"The unit {call.unit} returned tensors of shapes {real}, but {planned} was expected of it: part of it "
            "cannot run on meta tensors and was assumed to keep its input's shape."
        )

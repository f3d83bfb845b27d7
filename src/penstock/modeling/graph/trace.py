"""Tracing one forward of a model whose units are replaced by their shape functions.

It finds which unit calls happen, in which order, and from which values each was computed. It knows nothing of stages;
see `graph.plan`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from penstock.modeling.collectives import CriterionCollective, OwnCollective
from penstock.modeling.graph.attributes import Attributes, KeptByFunction, LeftValue, Variables, leave
from penstock.modeling.graph.chunked_loss import KEY, ChunkedLogits, ChunkedLossError
from penstock.modeling.graph.dataflow import (
    ChangedTensor,
    Computed,
    DataFlow,
    ForwardArgument,
    LeftTensor,
    ReachedInside,
    ReadObserver,
    Sources,
    TakesLonger,
    TensorInsideUnit,
    TensorOutsideUnits,
    Value,
)
from penstock.modeling.graph.loss import LOSS_FUNCTIONS, Criterion, CriterionError, LoopError, LossRule, loss_by
from penstock.modeling.graph.loss_trace import LossTrace, label_placeholder, with_more_samples
from penstock.modeling.graph.meta_operations import Untraceable
from penstock.modeling.graph.reductions import is_same_way
from penstock.modeling.graph.shapes import OutputShape, ShapeFunctions, flatten
from penstock.modeling.instrumentation import Intercepted, Interceptor
from penstock.modeling.placeholders.caches import narrow_copy
from penstock.modeling.placeholders.ghosts import stripped_tensors
from penstock.modeling.stage.outputs import OutputForm, Shapes, form_of, named_output, refuse_hidden_tensors, shapes_of
from penstock.modeling.tensor_spec import TensorSpec
from penstock.modeling.weights.whole import names_in_units, outside_of_units, unit_of
from penstock.nested import map_tensors, named_tensors
from penstock.random_state import (
    OUTSIDE_TORCH,
    TORCH,
    all_restored,
    draws_from_now,
    generators_in_use,
    held_sources,
    seedable,
)

# Longer tensors are not looked into, as shapes hardly depend on them.
MAX_KNOWN = 4096

# Whether it matters what Python reads of tensors is tried with values about as large as these. Code may take one for a
# size, so that larger ones would fill the memory.
_NOISES = (1.0, -1.0, 1e3, -1e3)


@dataclass(frozen=True, slots=True)
class TracedCall:
    """Call number `index`, from 0, of a unit. The leaves `like_input` of its output have the shape and dtype of its
    first argument."""

    unit: str
    index: int
    sources: Sources
    output: OutputShape
    like_input: tuple[int, ...]


@dataclass(frozen=True)
class ForwardFacts:
    """What is known about a forward, wherever its units run.

    Attributes:
        written: values that the model's code changes in place after a unit returned them: they must not be shared.
        written_inputs: arguments that the model's code changes in place: every stage needs its own copy of them.
        asks_inputs: whether the code between units asks for values of the inputs alone, to decide what to do.
        asks_known: whether it asks for values of the inputs alone, or for values that depend on nothing, such as
            positions counted from 0.
        loss: how the loss of a batch follows from its microbatches', None without a loss.
        draws: from what it draws random numbers, by the names in `random_state`.
        batchwise: the operations in it whose backward depends on the whole batch.
        fields: the names of the output's fields, also of those that are None in this forward.
        form: how these make up what the forward returned; None if that is a `ModelOutput`.
        head: the unit whose logits are made a chunk of tokens at a time, None if no loss asks for that.
    """

    written: frozenset[Value]
    written_inputs: tuple[str, ...]
    asks_inputs: bool
    asks_known: bool
    loss: LossRule | None
    draws: tuple[str, ...]
    batchwise: tuple[str, ...]
    fields: tuple[str, ...]
    form: OutputForm | None
    head: str | None


@dataclass(frozen=True)
class Trace(ForwardFacts):
    """What a forward does with its units.

    Attributes:
        controls: for each time that Python read what a unit had computed, or a random number, the number of calls made
            before, and the sources of what it read.
        changed: attributes of modules outside of units that the forward changes, with the number of calls made before.
        shapes: shape and dtype of each value in this forward (for reports; plans do not use them).
        output_shapes: the shapes of the output's tensors.
    """

    calls: tuple[TracedCall, ...]
    output_sources: Sources
    controls: tuple[tuple[int, Sources], ...]
    changed: Mapping[str, int]
    shapes: Mapping[Value, TensorSpec]
    output_shapes: Shapes


class UnitInAutogradFunction(Untraceable):
    """A unit is called inside a `torch.autograd.Function` of the model's code, which writes its own backward. `module`
    is the innermost one whose code applies the function."""

    def __init__(self, unit: str, function: str, module: nn.Module) -> None:
        super().__init__(
            f"its code runs {unit} inside {function}, a torch.autograd.Function with a backward of its own"
        )
        self.module = module


class ChangedBuffer(Untraceable):
    """The model's code between units leaves other values in a buffer, which `module` has (its name). Stages would
    disagree about them: each runs it with zeros for what other stages compute, and not to its end."""

    def __init__(self, buffer: str) -> None:
        super().__init__(
            f"its forward changes the buffer {buffer} outside of the modules that stages hold, which would leave other "
            "values on each stage. Put the buffer and the code that changes it into the forward of a module of its own"
        )
        self.module = buffer.rpartition(".")[0]


def trace(
    model: nn.Module,
    functions: ShapeFunctions,
    interceptor: Interceptor,
    inputs: Mapping[str, Any],
    call: Callable[..., Any] | None = None,
    criterion: Callable[..., Any] | None = None,
    for_criterion: Collection[str] = (),
    batch_dim: Mapping[str, int | None] | None = None,
    head: str | None = None,
) -> Trace:
    """Run `call(**inputs)`, or the model, with every unit replaced by its shape function.

    Changes nothing: the model's parameters, buffers and modes, gradients, the inputs, caches and the state of the
    random generators are as before.

    Args:
        model: its units are intercepted through `interceptor`.
        criterion: gives the loss in place of the output's own. If it has an attribute `reduction` that is "sum", the
            losses of microbatches add up to the batch's.
        for_criterion: names of inputs that the criterion alone is given.
        head: the unit whose logits only a loss over chunks of tokens may use.
    """
    functions.sync()
    follow = partial(_follow, model, functions, interceptor, call, criterion, for_criterion, head)
    recorder, losses, draws, output, loss = follow(inputs)
    if head is not None and loss is not None and not losses.in_chunks:
        raise ChunkedLossError(
            f"{KEY}: the loss of {type(model).__name__} is no cross-entropy of what {head} returns: another loss, or "
            f"another forward, is in use. Leave {KEY} out"
        )

    def again(times: int) -> tuple[LossTrace, torch.Tensor] | None:
        """The loss with so many times as many samples, None if the model's code does not work with these."""
        try:
            _, losses, _, _, loss = follow(with_more_samples(inputs, times, batch_dim or {}))
        except Exception:  # whatever that code says
            return None
        return None if loss is None else (losses, loss)

    flow = recorder.flow
    rule = (
        None if loss is None else losses.rule(loss, named_output(output), again, getattr(criterion, "reduction", None))
    )
    if (
        rule is not None
        and rule.exact
        and loss is not None
        and flow.controls
        and _reads_matter(flow, loss, partial(follow, inputs))
    ):
        reason = "a number that Python reads of what units compute enters it, or decides how it is made"
        rule = replace(rule, exact=False, reason=reason)
    leaves, _ = flatten(output)
    fielded = named_output(output)
    refuse_hidden_tensors(fielded)
    form = form_of(fielded)
    return Trace(
        calls=tuple(recorder.calls),
        output_sources=flow.sources(leaves) | flow.sources(loss),
        controls=tuple(flow.controls),
        changed=recorder.outside.changed,
        written=frozenset(flow.written),
        written_inputs=tuple(sorted(flow.written_inputs)),
        asks_inputs=flow.asks_inputs,
        asks_known=flow.asks_known,
        loss=rule,
        draws=tuple(sorted(draws)),
        batchwise=tuple(sorted(functions.seen.batchwise)),
        shapes=recorder.shapes,
        output_shapes=shapes_of(fielded),
        fields=tuple(field.name for field in fields(fielded)) if form is None else form.names,
        form=form,
        head=head,
    )


def _reads_matter(flow: DataFlow, loss: torch.Tensor, again: Callable[..., Any]) -> bool:
    """Whether the loss, or what units are given, is made in another way where units compute other values, as Python
    reads these and does not only print them. `again` follows the forward once more."""
    way, num_failed = flow.record.way_to(loss), 0
    for noise in _NOISES:
        try:
            recorder, *_, other = again(noise=noise, most_operations=2 * flow.num_operations + 1000)
        except TakesLonger:
            return True
        except Exception:  # whatever the model's code says of them
            num_failed += 1
            continue
        try:
            same = other is not None and is_same_way(way, recorder.flow.record.way_to(other))
        except Exception:  # of tensors that torch cannot compare
            same = False
        if not same:
            return True
    return num_failed == len(_NOISES)


def _follow(
    model: nn.Module,
    functions: ShapeFunctions,
    interceptor: Interceptor,
    call: Callable[..., Any] | None,
    criterion: Callable[..., Any] | None,
    for_criterion: Collection[str],
    head: str | None,
    inputs: Mapping[str, Any],
    noise: float = 0.0,
    most_operations: float = math.inf,
) -> tuple[_CallRecorder, LossTrace, Collection[str], Any, torch.Tensor | None]:
    """One forward, followed: what was noted of it and of its losses, from what it draws, its output and its loss.
    `noise` and `most_operations`: see `DataFlow`."""
    homes = names_in_units(model, functions.units)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        all_restored(generators_in_use()),
        seedable(held_sources(model)),
        _real_outside(model, homes) as real,
    ):
        arguments = {
            name: narrow_copy(value) if isinstance(value, Cache) else map_tensors(label_placeholder, name, value)
            for name, value in inputs.items()
        }
        tensors = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
        variables, kept = Variables(model.modules()), KeptByFunction(criterion, model)
        outside = Attributes(outside_of_units(model, homes), with_tensors=True)
        recorder = _CallRecorder(model, functions, device, head, outside)
        flow = recorder.flow
        flow.noise, flow.most_operations = noise, most_operations
        _mark_tensors(model, homes, flow)
        named = named_tensors(arguments)
        for name, tensor in named.items():
            flow.mark_input(tensor, name)
        losses = LossTrace({**arguments, **named}, flow)
        interceptor.handler, drawn = recorder, draws_from_now(OUTSIDE_TORCH, device)
        try:
            with flow, ReadObserver(flow, dict.fromkeys(LOSS_FUNCTIONS, losses.observe)):
                output = (call or model)(**{n: value for n, value in arguments.items() if n not in for_criterion})
                with nullcontext() if criterion is None else OwnNumbers(model):
                    loss = _loss_by(criterion, output, arguments)
                _refuse_changed(model, real, flow)
            outside.look(len(recorder.calls))
            draws = drawn() | ({TORCH} if functions.seen.draws else set())
        except (ReachedInside, CriterionError, ChunkedLossError, TakesLonger):
            raise
        except CriterionCollective as error:
            raise LoopError(str(error)) from error
        except Untraceable as error:
            error.num_calls = len(recorder.calls)
            raise
        except OwnCollective as error:
            raise Untraceable(str(error)) from error
        except Exception as error:
            where = f" (after the call of {recorder.calls[-1].unit})" if recorder.calls else ""
            failure = Untraceable(f"{type(error).__name__}: {error}{where}{_assumed(functions)}")
            failure.num_calls = len(recorder.calls)
            raise failure from error
        finally:
            interceptor.handler = None
            functions.seen.end_calls()
            for take_away in reversed(recorder.undo):
                take_away()
            outside.set_back()
            variables.set_back()
            kept.set_back()
    return recorder, losses, draws, output, loss


def _loss_by(criterion: Criterion | None, output: Any, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    try:
        return loss_by(criterion, output, inputs)
    except ReachedInside as error:
        raise CriterionError(
            f"the criterion uses the weight {error.tensor}, which only the rank of its stage has. A penalty on weights "
            "is no part of the batch's loss: use the optimizer's weight_decay, or add its gradient on each rank to "
            "those of model.parameters() after the loop over microbatches"
        ) from error


class OwnNumbers(TorchFunctionMode):
    """Raises CriterionError where a criterion uses a trained number that is not the model's, such as a parameter of a
    module of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._known = {id(parameter) for parameter in model.parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf and id(leaf) not in self._known:
                raise CriterionError(
                    f"the criterion uses a trained number of its own, of shape {tuple(leaf.shape)}: only the rank of "
                    "the last stage would train it. Put it into the model, in a module that its forward calls, and let "
                    "the criterion take what that returns; or freeze it (requires_grad=False)"
                )
        return func(*args, **(kwargs or {}))


class _CallRecorder:
    """Answers the calls of units with placeholders and notes what they depend on."""

    def __init__(
        self,
        model: nn.Module,
        functions: ShapeFunctions,
        device: torch.device,
        head: str | None,
        outside: Attributes,
    ) -> None:
        self._model, self._head, self.outside = model, head, outside
        self.calls: list[TracedCall] = []
        self.shapes: dict[Value, TensorSpec] = {}
        self.flow = DataFlow(lambda: len(self.calls), functions.seen)
        self._functions = functions
        self._device = device
        self._counts: Counter[str] = Counter()
        # Take what units leave behind away again.
        self.undo: list[Callable[[], None]] = []

    def call(self, unit: Intercepted, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, index = unit.name, self._counts[unit.name]
        _refuse_enclosed(name)
        self._counts[name] += 1
        self.outside.look(len(self.calls))
        leaves, _ = flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, nn.Module):
                self._refuse_module(name, leaf)
        sources = self.flow.sources(leaves)
        self.flow.record.use(leaves)
        facts = self._functions.seen
        if facts.where:
            raise Untraceable(f"the unit {facts.where} calls {name}, which is a unit of its own: call it beside that")
        facts.begin_call(LeftTensor(name, index), self.flow)
        with self.flow.pause():
            shape = self._functions(name, args, kwargs, _plain_values(leaves, self.flow))
            _refuse_reached(name, facts.reads)
            _refuse_unknown(name, shape.leaves)
            output = shape.make_output(lambda leaf, spec: self._stand_in(Value(name, index, leaf), spec), leaves)
            for position in shape.written:
                self.flow.mark_changed(leaves[position], ChangedTensor(name, index))
            if shape.cache is not None:
                shape.cache.apply(leaves)
            for left in shape.left:
                self._leave(left, module, LeftTensor(name, index, f"{left.module}.{left.attribute}".lstrip(".")))
        first = args[0] if args else next(iter(kwargs.values()), None)
        like = TensorSpec.shape_of(first) if isinstance(first, torch.Tensor) else None
        like_input = tuple(leaf for leaf, spec in enumerate(shape.leaves) if like is not None and spec == like)
        self.calls.append(TracedCall(name, index, sources | facts.reads, shape, like_input))
        return ChunkedLogits.standing_for(output) if name == self._head else output

    def _stand_in(self, value: Value, spec: TensorSpec) -> torch.Tensor:
        tensor = self.flow.stand_in(spec, self._device)
        self.flow.mark_computed(tensor, value)
        self.shapes[value] = spec
        return tensor

    def _leave(self, left: LeftValue, module: nn.Module, source: LeftTensor) -> None:
        """Put stand-ins where the call of a unit leaves tensors."""

        def stand_in(spec: Any) -> Any:
            if not isinstance(spec, TensorSpec):
                return spec
            tensor = self.flow.stand_in(spec, self._device)
            self.flow.mark_computed(tensor, source)
            return tensor

        is_leaf = lambda node: isinstance(node, TensorSpec)  # noqa: E731
        value = pytree.tree_map(stand_in, left.value, is_leaf=is_leaf)
        self.undo.append(leave(replace(left, value=value), module))
        self.outside.look_past()

    def _refuse_module(self, unit: str, given: nn.Module) -> None:
        """Raise `ReachedInside` if a unit is given a module of another one, whose weights it uses itself."""
        homes = names_in_units(self._model, self._functions.units)
        full = next((homes.get(name, name) for name, module in self._model.named_modules() if module is given), "")
        owner = unit_of(full, self._functions.units)
        tensors = chain(given.named_parameters(), given.named_buffers(), stripped_tensors(given))
        held = next((name for name, _ in tensors), None)
        if owner not in (None, unit) and held is not None:
            raise ReachedInside(f"{full}.{held}")


def _refuse_reached(unit: str, sources: Collection[Any]) -> None:
    """Raise `ReachedInside` if a unit's code uses a tensor of another unit."""
    inside = (source.name for source in sources if isinstance(source, TensorInsideUnit))
    if others := sorted(name for name in inside if not name.startswith(f"{unit}.")):
        raise ReachedInside(others[0])


def _refuse_enclosed(unit: str) -> None:
    """Raise `UnitInAutogradFunction` if the code under way is that of a `torch.autograd.Function`."""
    frame: FrameType | None = sys._getframe(1)
    function = ""
    while frame is not None and (code := frame.f_code) is not _follow.__code__:
        owner = frame.f_locals.get("self") if function else None
        if isinstance(owner, nn.Module):
            raise UnitInAutogradFunction(unit, function, owner)
        if "ctx" in code.co_varnames[: code.co_argcount]:
            context = frame.f_locals["ctx"]
            if isinstance(context, torch.autograd.function.FunctionCtx):
                function = type(context).__name__.removesuffix("Backward")
        frame = frame.f_back


def _assumed(functions: ShapeFunctions) -> str:
    """The likely reason why a forward cannot be followed: the first unit that could not run unchanged."""
    for name, reason in functions.guessed.items():
        return (
            f"; before that, the shape of what {name} returns was guessed, as its code depends on values that are "
            f"computed in it ({reason})"
        )
    return ""


def _plain_values(leaves: Sequence[Any], flow: DataFlow) -> tuple[int, ...]:
    """Indices of the leaves that are short tensors of integers and come from the inputs alone: sizes of images, say."""
    return tuple(
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
        and leaf.dtype in (torch.int32, torch.int64)
        and not leaf.is_meta
        and leaf.numel() <= MAX_KNOWN
        and all(isinstance(source, ForwardArgument) for source in flow.sources(leaf))
    )


def _refuse_unknown(unit: str, leaves: Sequence[Any]) -> None:
    """Raise `Untraceable` for an output with a leaf that is no tensor, but may hold some: ranks may differ in it."""
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, (TensorSpec, bool, int, float, str, Cache))):
            raise Untraceable(
                f"the unit {unit} returns a {type(leaf).__name__}, whose tensors cannot be followed"
                ": let it return tensors, or tuples, lists, dictionaries or data classes of them"
            )


def _mark_tensors(model: nn.Module, homes: Mapping[str, str], flow: DataFlow) -> None:
    """Mark the tensors of units (not to be touched, as they are not on every stage) and those outside of units.
    `homes`: `names_in_units`."""
    for prefix, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            if isinstance(tensor, torch.Tensor):
                full = f"{homes.get(prefix, prefix)}.{name}" if prefix else name
                flow.mark(tensor, (TensorInsideUnit(full) if prefix in homes else TensorOutsideUnits(full),))


@contextmanager
def _real_outside(model: nn.Module, homes: Mapping[str, str]) -> Iterator[dict[str, torch.Tensor]]:
    """Inside, zeros are in the place of meta tensors outside of units (in a model built on the meta device), and copies
    in that of buffers, since the model's code may update them. Gives all of these by name."""
    real = {}
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and prefix not in homes and (tensor.is_meta or name in module._buffers):
                made = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()
                full = f"{prefix}.{name}" if prefix else name
                real[full] = nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made
    with _reparametrize_module(model, dict(real)):
        yield real


def _refuse_changed(model: nn.Module, real: Mapping[str, torch.Tensor], flow: DataFlow) -> None:
    """Raise `ChangedBuffer` if the forward has changed a buffer that is saved, or any other by what a unit returned."""
    for full, before in real.items():
        prefix, _, name = full.rpartition(".")
        module = model.get_submodule(prefix)
        now = module._buffers.get(name)
        if isinstance(before, nn.Parameter) or (now is before and not before._version):
            continue
        is_saved = name not in module._non_persistent_buffers_set
        if is_saved or any(isinstance(source, Computed) for source in flow.sources(now)):
            raise ChangedBuffer(full)

"""Data flow: which values a tensor was computed from, followed through everything the model's own code does.

Marks are kept per storage, so views share them; an operation's outputs, and what it writes to, carry the marks of all
its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, overrides
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.modeling.graph.loss import NUM_ITEMS
from penstock.modeling.graph.meta_operations import TraceFacts, draws, written_arguments
from penstock.modeling.graph.reductions import OperationRecord, storage_of
from penstock.modeling.tensor_spec import TensorSpec

# A tensor of more elements that is computed from a unit's value, such as logits, is followed without its storage.
MOST_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor that one call of a unit, counted from 0 in the forward, returns: a leaf of its `OutputShape`."""

    unit: str
    call: int
    leaf: int


@dataclass(frozen=True)
class NamedValue:
    """A named value that a tensor was computed from."""

    name: str


class TensorOutsideUnits(NamedValue):
    """A parameter or buffer that belongs to no unit."""


class TensorInsideUnit(NamedValue):
    """A unit's own parameter or buffer, reached without calling the unit."""


class ForwardArgument(NamedValue):
    """An argument of the forward."""


class DataDependentTensor(NamedValue):
    """A tensor whose shape depends on data: the result of an operation such as `nonzero`, or of a boolean index."""


class RandomDraw(NamedValue):
    """A random number that an operation of the model's code draws between units."""


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor as a unit's call has left it, changed in place."""

    unit: str
    call: int


@dataclass(frozen=True)
class LeftTensor:
    """A tensor that a unit's call has computed and not returned: left in an attribute, say, `where` of the unit."""

    unit: str
    call: int
    where: str = ""


# What units compute.
Computed = Value | ChangedTensor | LeftTensor
Source = Computed | NamedValue
Sources = frozenset[Source]
NOTHING: Sources = frozenset()


class DataFlow(TorchDispatchMode):
    """Marks tensors while active, and lets `seen` note what operations do besides.

    Attributes:
        paused: operations are not followed (a unit's shape function, say).
        observer: sees what this mode does not, and pauses with it.
        controls: for every time that Python read what a unit has computed, or a random number, by which it may decide
            what to do next, what `position()` returned then, and the sources of what it read.
        asks_inputs: whether values of the arguments alone were asked for.
        asks_known: whether these were, or values that depend on nothing, such as positions counted from 0.
        written, written_inputs: values changed in place after their unit returned them, and arguments changed in place.
        record: the operations on what depends on the arguments.
        noise: how large the numbers are that stand for what units compute. Zeros do, but to see what depends on them.
        num_operations: those so far; with more than `most_operations` it raises `TakesLonger`.
    """

    def __init__(self, position: Callable[[], int], seen: TraceFacts | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._seen = TraceFacts() if seen is None else seen
        self.paused = False
        self.observer: ReadObserver | None = None
        self.controls: list[tuple[int, Sources]] = []
        self.asks_inputs = self.asks_known = False
        self.noise = 0.0
        self.num_operations, self.most_operations = 0, math.inf
        self.written: set[Value] = set()
        self.written_inputs: set[str] = set()
        self.record = OperationRecord()
        self._position = position
        self._marks: dict[int, Sources] = {}
        self._values: dict[int, Value] = {}
        self._inputs: dict[int, str] = {}
        # A weak reference keeps the storage's address from being used again, but not its memory.
        self._references: dict[int, StorageWeakRef] = {}
        self._hollow: set[int] = set()
        self._num_noisy = 0

    def stand_in(self, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        """Zeros, or `noise`, in place of a value; a large one occupies a single element, and what is computed from it
        as well."""
        is_large = math.prod(spec.shape) > MOST_ELEMENTS
        tensor = (spec._replace(shape=()) if is_large else spec).zeros(device)
        if self.noise:
            self._make_noise(tensor)
        if not is_large:
            return tensor
        storage = storage_of(tensor)
        self._references[storage._cdata] = StorageWeakRef(storage)
        self._hollow.add(storage._cdata)
        return tensor.expand(spec.shape)

    def _make_noise(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with numbers that no other one has, the same on all ranks; of whole ones with 0 or 1."""
        if not tensor.is_floating_point():
            tensor.fill_(self.noise > 0)
            return
        waves = (torch.arange(tensor.numel(), device=tensor.device) + self._num_noisy).sin()
        self._num_noisy += tensor.numel()
        most = torch.finfo(tensor.dtype).max ** 0.5  # of which the square is a number, too
        tensor.copy_(waves.mul(max(-most, min(self.noise, most))).view(tensor.shape))

    def is_hollow(self, tree: Any) -> bool:
        return bool(self._hollow) and any(storage_of(t)._cdata in self._hollow for t in _tensors(tree))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asks: bool) -> Any:
        """The operation's result; of one on hollow tensors only the shape, unless it `asks` for what is in them."""
        if func.is_view or asks or not self.is_hollow((args, kwargs)):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0] if self.is_hollow(args[0]) else func(*args, **kwargs)
        device = next(tensor.device for tensor in _tensors((args, kwargs)))
        given, named = on_meta((args, {name: value for name, value in kwargs.items() if name != "device"}))
        try:
            shapes = func(*given, **named)
        except (NotImplementedError, RuntimeError):  # no kernel for meta tensors
            return func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: self.stand_in(TensorSpec.shape_of(t), device), shapes)

    def sources(self, tree: Any) -> Sources:
        """What the tensors in `tree` were computed from; looks two levels into objects of unknown classes."""
        sources: set[Source] = set()
        for tensor in _tensors(tree):
            sources |= self._marks.get(storage_of(tensor)._cdata, NOTHING)
        return frozenset(sources)

    def mark(self, tensor: torch.Tensor, sources: Iterable[Source]) -> None:
        """Add sources to a tensor (and to everything that shares its storage)."""
        storage = storage_of(tensor)
        key = storage._cdata
        if key not in self._references:
            self._references[key] = StorageWeakRef(storage)
        self._marks[key] = self._marks.get(key, NOTHING) | frozenset(sources)

    def mark_computed(self, tensor: torch.Tensor, source: Computed) -> None:
        """Mark a tensor that a unit has computed."""
        self.mark(tensor, (source,))
        self.record.begin(tensor, of_unit=True)
        if isinstance(source, Value):
            self._values[storage_of(tensor)._cdata] = source

    def mark_changed(self, tensor: torch.Tensor, source: ChangedTensor) -> None:
        """Mark an argument that a unit has changed in place."""
        self.note_write(tensor)
        self.mark_computed(tensor, source)
        if self.noise and not self.is_hollow(tensor) and not isinstance(tensor, nn.Parameter):
            tensor.copy_(self.stand_in(TensorSpec.shape_of(tensor), tensor.device))

    def mark_input(self, tensor: torch.Tensor, name: str) -> None:
        self.mark(tensor, (ForwardArgument(name),))
        self._inputs[storage_of(tensor)._cdata] = name
        self.record.begin(tensor, given=name, number=name == NUM_ITEMS)

    def note_write(self, tensor: torch.Tensor) -> None:
        key = storage_of(tensor)._cdata
        if key in self._values:
            self.written.add(self._values[key])
        if key in self._inputs:
            self.written_inputs.add(self._inputs[key])

    def note_control(self, sources: Sources) -> None:
        """Note that Python reads a value of these sources, which may decide what it does next."""
        if all(isinstance(source, ForwardArgument) for source in sources):
            self.asks_known = True
            self.asks_inputs |= bool(sources)
        if any(isinstance(source, Computed | RandomDraw) for source in sources):
            self.controls.append((self._position(), sources))

    @contextmanager
    def pause(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        with ExitStack() as aside:
            # Each mode is taken off if it is the innermost of its kind: one that does nothing takes its time, too.
            if self.observer is not None and overrides._get_current_function_mode() is self.observer:
                aside.enter_context(overrides._pop_mode_temporarily())
            if _python_dispatch._get_current_dispatch_mode() is self:
                aside.enter_context(_python_dispatch._pop_mode_temporarily())
            aside.callback(setattr, self, "paused", before)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        self.num_operations += 1
        if self.num_operations > self.most_operations:
            raise TakesLonger
        self._seen.note(func, args, kwargs)
        sources = self.sources((args, kwargs))
        # The first by name, so that all ranks find the same.
        leaked = min((source.name for source in sources if isinstance(source, TensorInsideUnit)), default=None)
        if leaked is not None:
            raise ReachedInside(leaked)
        if any(isinstance(source, LeftTensor) for source in sources):  # of a unit's run on meta tensors
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._real, (args, kwargs))
        deciding, asks = selectors(func, args), torch.Tag.data_dependent_output in func.tags
        output = self._run(func, args, kwargs, asks or bool(deciding))
        if asks:
            self.note_control(sources)
            if args[0].dtype == torch.bool:  # a number that is asked for may be logged; a truth value decides
                self.record.ask(args[0])
        if draws(func, args, kwargs):
            sources |= {RandomDraw(str(func))}
        elif func is torch.ops.aten.lt.Scalar and isinstance(args[1], (int, float)) and args[1] <= 0:
            # Whether something is below a probability of zero, which no uniform number is.
            sources = frozenset(s for s in sources if not (isinstance(s, RandomDraw) and s.name.startswith(_UNIFORM)))
        if deciding:
            self.note_control(self.sources(deciding))
            sources |= {DataDependentTensor(str(func))}
        written = written_arguments(func, args, kwargs)
        for tensor in written:
            self.note_write(tensor)
        if sources:
            for tensor in (*_tensors(output), *written):
                self.mark(tensor, sources)
            self.record.note(func, args, kwargs, output, bool(deciding), with_number=bool(self.controls))
        return output

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor of a unit's run on meta tensors."""
        if not tensor.is_meta:
            return tensor
        made = self.stand_in(TensorSpec.shape_of(tensor), torch.device("cpu"))
        self.record.begin(made, of_unit=True)
        return made


class TakesLonger(Exception):
    """A forward does more operations than it was allowed."""


class ReachedInside(Exception):
    """The model's code uses a unit's tensor without calling the unit."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"its code uses {tensor} without calling the module that holds it")
        self.tensor = tensor


# Draws from 0 to 1.
_UNIFORM = "aten.rand."


def selectors(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors whose contents decide the shape of what an operation returns."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return []
    if func is torch.ops.aten.index.Tensor:  # by booleans, that is; integers only say where
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if func is torch.ops.aten.masked_select.default:
        return [args[1]]
    return [argument for argument in args if isinstance(argument, torch.Tensor)]


# What Python reads data by that the dispatcher does not see.
READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class ReadObserver(TorchFunctionMode):
    """Sees what the dispatcher does not: data read by Python on the CPU, and calls of the functions in `observers`,
    `{function: observe(function, args, kwargs, result)}`, called after the function."""

    def __init__(self, flow: DataFlow, observers: dict[Callable[..., Any], Callable[..., None]]) -> None:
        super().__init__()
        self._flow = flow
        self._observers = observers
        flow.observer = self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._flow.paused and func in READS:
            self._flow.note_control(self._flow.sources(args[0]))
        result = func(*args, **kwargs)
        if not self._flow.paused and func in self._observers:
            self._observers[func](func, args, kwargs, result)
        return result


def on_meta(tree: Any) -> Any:
    """`tree` with meta tensors of the same shapes in place of its tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), tree)


_CONTAINERS = (tuple, list, dict)
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout})


def _tensors(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    kind = type(tree)
    if kind is torch.Tensor:
        yield tree
    elif kind in _CONTAINERS:  # nothing else is in most arguments of operations, and torch takes longer to walk them
        for each in tree.values() if kind is dict else tree:
            if type(each) not in _PLAIN:
                yield from _tensors(each, depth)
    else:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif depth < 2 and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)):
                yield from _tensors(list(vars(leaf).values()), depth + 1)

"""What Penstock adds to a model's modules and removes again: one attribute, swapped classes, interception.

The class of an intercepted module is swapped for a subclass whose `__call__` asks the active handler first. A forward
hook could not do this: `forward`, and with some versions of transformers also hooks, run inside the region that
gradient checkpointing recomputes, where a value received from another stage would be taken for a constant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.modeling.sharding import WeightSharding

_ATTRIBUTE = "_penstock"


class QuantisedLayer(Protocol):
    """Marks a module that has a weight which a library keeps packed."""

    @property
    def parameter(self) -> str:
        """The weight's name in the module."""

    @property
    def num_weights(self) -> int:
        """Of the module as it was before it was packed."""

    @property
    def is_saved(self) -> bool:
        """Whether a library reads what is saved of it."""

    def stand_in(self, module: nn.Module) -> nn.Module:
        """What takes the module's place in a copy on the meta device."""

    def inside(self, module: nn.Module) -> dict[nn.Parameter, list[torch.Tensor]]:
        """The plain tensors that each of its own parameters consists of."""

    def release(self, value: nn.Module | torch.Tensor) -> None:
        """Let go of the tensors of the module, or of one of its weights."""


@dataclass
class Record:
    """What Penstock knows about one module; kept in the module's `_penstock` attribute."""

    intercepted: Intercepted | None = None
    absent: dict[str, Absent] | None = None  # what the module lacks as a ghost, by name; None if it is no ghost
    packed: QuantisedLayer | None = None
    region: object = None  # through which a tensor-parallel layer exchanges
    # Of which arguments a tensor-parallel attention takes its own heads, with the dimension of the heads.
    by_heads: dict[str, int] = field(default_factory=dict)
    # The others are a whole model's. The names of each of its parameters before it was split:
    aliases: list[tuple[str, ...]] = field(default_factory=list)
    tensor_parallel: WeightSharding | None = None
    shards: dict[str, torch.Tensor] = field(default_factory=dict)  # until `WeightSharding.apply` takes them
    engine: Any = None  # runs it; see `runtime.reforming.engine_of`
    # The last of these takes the calls of the model for now; without one a call is a step or an evaluation.
    call_targets: list[Callable[[dict[str, Any]], Any]] = field(default_factory=list)
    configuration: Any = None  # what `initialize()` was asked for
    # What gives its loss (a `graph.loss.Criterion`); None for the model's own.
    criterion: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None
    stand_in: nn.Parameter | None = None  # for the optimizer of a rank that has nothing to train
    saver: Any = None  # writes its checkpoints in the background
    example_inputs: dict[str, Any] | None = None  # of a forward, with which its units are found
    copied_from: Any = None  # of a copy, what runs the original; the copy has no engine until it is used
    shown: bool = False  # whether a ghost has what it lacks for the moment, see `shown_whole`

    def __reduce__(self) -> Any:
        # Copies and pickles of a module are not intercepted, and nothing runs them.
        kept = (self.absent, self.packed, self.region, self.by_heads, self.aliases, self.tensor_parallel, self.shards)
        return Record, (None, *kept)


def record_of(module: nn.Module) -> Record:
    """The record of a module, made if it has none."""
    record: Record = module.__dict__.setdefault(_ATTRIBUTE, Record())
    return record


@contextmanager
def calls_redirected(model: nn.Module, target: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Inside, a call of the parallelised model calls `target` with its arguments by name."""
    targets = record_of(model).call_targets
    targets.append(target)
    try:
        yield
    finally:
        targets.pop()


def known_of(module: nn.Module) -> Record:
    """The record of a module, an empty one if it has none."""
    return module.__dict__.get(_ATTRIBUTE) or Record()


# -- ghosts --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Absent:
    """A tensor that a ghost lacks. The meta tensor under its name tells shape and dtype.

    Attributes:
        kind: `"parameter"`, `"buffer"` (persistent) or `"temporary"` (a buffer that no checkpoint holds).
        tensor: the `Parameter` itself, or an empty one in the place of a packed one; of a temporary buffer its values,
            on the CPU; of a persistent one a meta tensor; None where the module has None under the name.
    """

    kind: str
    tensor: torch.Tensor | None


def absent_of(module: nn.Module) -> Mapping[str, Absent]:
    """The tensors that a module lacks, by name; none if it is no ghost."""
    record = module.__dict__.get(_ATTRIBUTE)
    return {} if record is None else record.absent or {}


def _convert_absent(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a change of the model's dtype or device, such as `model.to(torch.bfloat16)`, to what ghosts lack."""
    for child in module.modules():
        for name, absent in absent_of(child).items():
            tensor, placeholder = absent.tensor, vars(child).get(name)
            if tensor is None or placeholder is None:
                continue
            dtype = function(torch.empty(0, dtype=placeholder.dtype)).dtype
            if placeholder.dtype != dtype:
                child.__dict__[name] = placeholder.to(dtype)
            if absent.kind != "parameter":
                absent.tensor = tensor.to(dtype)
            elif not tensor.numel():  # otherwise a local unit holds it, too
                data = function(tensor.data)
                if torch._has_compatible_shallow_copy_type(tensor, data):
                    tensor.data = data
                else:  # between kinds of devices that torch does not know well; as `nn.Module.to` does
                    torch.utils.swap_tensors(tensor, nn.Parameter(data, tensor.requires_grad))


def _types_in(module: nn.Module) -> list[torch.dtype]:
    """The types of a module's tensors, also of those that it lacks as a ghost."""
    absent = (vars(child).get(name) for child in module.modules() for name in absent_of(child))
    tensors = chain(module.parameters(), module.buffers(), absent)
    return [tensor.dtype for tensor in tensors if tensor is not None]


def _devices_of(module: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in chain(module.parameters(), module.buffers())}


# -- classes -------------------------------------------------------------------------------------------------------

_subclasses: dict[tuple[type, type], type] = {}
_originals: dict[type, type] = {}


class _Mixed(type):
    """The metaclass of what `mix_in` makes. Python lets an object change to a class that adds nothing to its layout,
    and tells this by the first base alone. So the first base is the object's class, and `mro` puts what is mixed in
    before it."""

    def mro(cls) -> list[type]:
        if vars(cls).get("_mixed") is None:
            return super().mro()  # somebody has derived from a class that was made here
        base, mixin = cls.__bases__
        before = [each for each in (_Unnoticed, *mixin.__mro__) if each not in base.__mro__]
        return [cls, *before, *base.__mro__]


class _Unnoticed:
    """What a class does when another is derived from it, such as entering that in a list, is not done for ours."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def mix_in(module: nn.Module, mixin: type) -> None:
    """Make `module` an instance of a subclass of `mixin` and of its own class. The subclass has the name of the
    latter, for error messages, repr and transformers' registries (which are keyed by str(class))."""
    base: Any = type(module)
    if (base, mixin) not in _subclasses:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        metaclass = type(base)
        bases = (_Mixed, metaclass) if metaclass is not type else (_Mixed,)
        kind: Any = metaclass if issubclass(metaclass, _Mixed) else type(metaclass.__name__, bases, {})
        made = kind(base.__name__, (base, mixin), {**names, "_mixed": mixin})
        _subclasses[base, mixin], _originals[made] = made, base
    object.__setattr__(module, "__class__", _subclasses[base, mixin])


def original_class(cls: type) -> type:
    """The class that `mix_in` made `cls` from; `cls` itself for any other class."""
    return _originals.get(cls, cls)


class KeepsForward:
    """Marks what is mixed into a layer and leaves its class's own forward as it is, such as a tensor-parallel call."""


def plain_class(module: nn.Module) -> type:
    """The class of a module; of one with a mixin that keeps its forward, the class that this was made from."""
    cls = type(module)
    return original_class(cls) if issubclass(cls, KeepsForward) else cls


# -- interception --------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Interceptor:
    """Intercepts the calls of some modules of one model for the handler that is active, if any: its
    `call(unit, module, args, kwargs)` gives what they return."""

    handler: Any = None
    converted: bool = False  # whether a module was given another type since somebody reset this
    moved: bool = False  # likewise, another device

    def install(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            _uninstall(module)
            record_of(module).intercepted = Intercepted(name, type(module).__call__, self)
            mix_in(module, _InterceptedModule)

    def remove(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            _uninstall(module)

    @contextmanager
    def installed(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        self.install(modules)
        try:
            yield
        finally:
            self.remove(modules.values())


def _uninstall(module: nn.Module) -> None:
    record = known_of(module)
    if record.intercepted is not None:
        object.__setattr__(module, "__class__", original_class(type(module)))
        record.intercepted = None
        if record == Record():
            del module.__dict__[_ATTRIBUTE]


@dataclass(slots=True)
class Intercepted:
    """How one module is intercepted: its name in the model, its class's own call, and by whom."""

    name: str
    original: Callable[..., Any]
    interceptor: Interceptor

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's own call. Where torch only says that two types differ, the error says which are given here."""
        try:
            return self.original(module, *args, **kwargs)
        except RuntimeError as error:
            tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            given, held = ({t.dtype for t in each if t.is_floating_point()} for each in (tensors, module.parameters()))
            if type(error) is not RuntimeError or "type" not in str(error) or not held or given <= held:
                raise
            types, own = (", ".join(sorted(map(str, kinds))) for kinds in (given, held))
            raise RuntimeError(
                f"the unit {self.name} was given values of {types}, but its weights are of {own} ({error}): give the "
                "model inputs of the type of its weights, or change that before it is parallelised"
            ) from error


class OnAnotherStage(RuntimeError):
    """A part of the model was called directly on a rank that does not hold it."""


class _InterceptedModule:
    """Mixed into the class of an intercepted module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit: Any = self.__dict__[_ATTRIBUTE].intercepted
        handler = unit.interceptor.handler
        if handler is None:
            if self.__dict__[_ATTRIBUTE].absent is not None:
                raise OnAnotherStage(on_another_stage(unit.name))
            return unit.run(self, args, kwargs)
        return handler.call(unit, self, args, kwargs)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        types, devices = _types_in(self), _devices_of(self)
        _convert_absent(self, fn)
        applied = super()._apply(fn, recurse)  # type: ignore[misc]  # a mixin
        interceptor = self.__dict__[_ATTRIBUTE].intercepted.interceptor
        interceptor.converted = interceptor.converted or _types_in(self) != types
        interceptor.moved = interceptor.moved or _devices_of(self) != devices
        return applied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles of an intercepted module are plain modules, of the class that it had before."""
        state = {**self.__dict__, "_compiled_call_impl": None}  # which no copy can have, see torch's own
        return _new_module, (original_class(type(self)),), state


def on_another_stage(name: str) -> str:
    return (
        f"{name} is on another stage, so this rank cannot compute it: call the whole model, model(...), on every rank, "
        "and neither its forward() nor a part of it; under torch.no_grad() it returns one ordinary output"
    )


def _new_module(cls: Any) -> Any:
    return cls.__new__(cls)


def tensors_of(module: nn.Module) -> dict[nn.Parameter, list[torch.Tensor]]:
    """The tensors that each parameter consists of: itself, or of a packed one its bytes and its scales."""
    tensors = {parameter: [parameter.detach()] for parameter in module.parameters()}
    for each in module.modules():
        if (packed := known_of(each).packed) is not None:
            tensors |= packed.inside(each)
    return tensors

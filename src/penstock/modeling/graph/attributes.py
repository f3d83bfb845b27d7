"""Plain attributes of modules, in which code may leave what it computes beside what it returns: seen, and set back."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from numbers import Number
from types import CellType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

# What torch itself keeps in every module; buffers are looked after elsewhere.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# What Penstock and transformers note of what they have done to a module for good.
_LASTING = frozenset({"_penstock", "_output_capturing_hooks_installed"})
# Elements of tensors of which copies are made to set them back, and entries of a list.
_MOST_COPIED, _MOST_ENTRIES = 1 << 20, 10_000
_CONTAINERS = (list, deque, dict, OrderedDict, defaultdict)
_PLAIN = (bool, int, float, str, type(None), torch.Size)

# How a value was put into an attribute: the attribute is another, or what is in it has other contents, or more.
WHOLE, CONTENTS, APPENDED = "whole", "contents", "appended"


@dataclass(frozen=True, slots=True)
class LeftValue:
    """What a call has left in an attribute of a module, by the module's name: `value`, put there as `how` says, or, if
    there is a `key`, as an entry of a mapping, or an attribute of an object, under this one."""

    module: str
    attribute: str
    how: str
    value: Any
    key: Any = None


class Attributes:
    """The plain attributes of some modules, by the modules' names, with what is in lists, mappings and plain objects
    that they hold, as they are when this is made.

    Attributes:
        changed: by full name, the number that `look` was given when an attribute was last seen to be changed.

    Args:
        with_tensors: whether `set_back` also restores what is in tensors, but large ones.
    """

    def __init__(self, modules: Mapping[str, nn.Module], with_tensors: bool = False) -> None:
        self._modules = modules
        self.changed: dict[str, int] = {}
        self._before = self._latest = self._values()
        registries = (registry for module in modules.values() for registry in _registries(module))
        self._registered = [(registry, [*registry, *registry.values()]) for registry in registries]
        values = (each for value, _, *contents in self._before.values() for each in (value, *contents))
        self._tensors = _Copies(values if with_tensors else ())

    def look(self, number: int) -> None:
        """Note what was changed since the last look."""
        now, was = self._values(), self._latest
        for place in now.keys() | was.keys():
            after, before = now.get(place), was.get(place)
            if not _same(after, before) and not _alike(after, before):  # the first takes less time
                prefix, name = place
                self.changed[f"{prefix}.{name}" if prefix else name] = number
        self._latest = now

    def look_past(self) -> None:
        """Take what was changed since the last look as if it had been so."""
        self._latest = self._values()

    def left(self) -> Iterator[LeftValue]:
        """The tensors that were put into attributes since this was made."""
        for (prefix, name), (value, _, *contents) in self._values().items():
            was, _, *before = self._before.get((prefix, name), (_ABSENT, 0))
            if value is not was:
                if has_tensors(value):
                    yield LeftValue(prefix, name, WHOLE, value)
            elif type(value) in (list, deque):
                if not _same(contents[: len(before)], before):
                    yield LeftValue(prefix, name, CONTENTS, contents)
                elif has_tensors(contents[len(before) :]):
                    yield LeftValue(prefix, name, APPENDED, contents[len(before) :])
            else:
                known = dict(_pairs(before))
                for key, entry in _pairs(contents):
                    if entry is not known.get(key, _ABSENT) and has_tensors(entry):
                        yield LeftValue(prefix, name, CONTENTS, entry, key)

    def set_back(self) -> None:
        """Let all be as it was, and the same parameters, buffers and modules be registered."""
        for prefix, module in self._modules.items():
            own = vars(module)
            for name in [name for name in own if name not in OF_EVERY_MODULE]:
                if (prefix, name) not in self._before and name not in _LASTING:
                    del own[name]
        for (prefix, name), (value, _, *contents) in self._before.items():
            vars(self._modules[prefix])[name] = value
            _fill(value, contents)
        for registry, entries in self._registered:
            _fill(registry, entries)
        self._tensors.set_back()

    def _values(self) -> dict[tuple[str, str], tuple[Any, ...]]:
        """By module and name: the value, what changes of it in place, and what is in it."""
        return {
            (prefix, name): (value, _state(value), *_contents(value))
            for prefix, module in self._modules.items()
            for name, value in vars(module).items()
            if name not in OF_EVERY_MODULE and name not in _LASTING
        }


class Variables:
    """The variables outside of functions that forwards of modules name, if they are numbers or hold something: `STORE`
    in a script. As they are when this is made."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        forwards = {type(module).forward for module in modules}
        self._before = {
            (id(scope), name): (scope, name, value, _contents(value))
            for function in {function for forward in forwards for function in _with_wrapped(forward)}
            if (scope := getattr(function, "__globals__", None)) is not None
            for name in function.__code__.co_names
            if type(value := scope.get(name)) in (*_CONTAINERS, int, float)
        }

    def changed(self) -> Iterator[str]:
        """Names of those that are others now, or have other contents."""
        for scope, name, value, contents in self._before.values():
            if scope.get(name) is not value or not _same(_contents(value), contents):
                yield f"{scope.get('__name__', '')}.{name}"

    def set_back(self) -> None:
        for scope, name, value, contents in self._before.values():
            scope[name] = value
            _fill(value, contents)


def _with_wrapped(function: Any) -> Iterator[Any]:
    """A function, and those that decorators have wrapped in it."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


class KeptByFunction:
    """What a function of the user's, such as a criterion, keeps beside its arguments: attributes of it and of its
    object (of a module also of those in it), what it closes over or is given by `partial`, and what is in lists,
    mappings and tensors (but large ones) there. As it is when this is made.

    Args:
        model: whose modules are looked after elsewhere.
    """

    def __init__(self, function: Any, model: nn.Module) -> None:
        function, roots = _without_partials(function)
        self._cells = [(cell, cell.cell_contents) for cell in _cells(function)]
        roots += (function, getattr(function, "__self__", None), *(value for _, value in self._cells))
        others = set(map(id, model.modules()))
        modules = (root for root in roots if isinstance(root, nn.Module) and id(root) not in others)
        roots += [inner for module in [*modules] for inner in module.modules()]
        self._insides = [
            (inside, dict(inside))
            for root in roots
            if id(root) not in others
            and not isinstance(root, type | ModuleType)
            and type(inside := getattr(root, "__dict__", None)) is dict
        ]
        values = [*roots, *(value for _, before in self._insides for value in before.values())]
        values += [entry for value in values if _is_short(value) for entry in _contents(value)]
        self._contents = [(value, _contents(value)) for value in values if _is_short(value)]
        self._tensors = _Copies(values)

    def set_back(self) -> None:
        for cell, value in self._cells:
            cell.cell_contents = value
        for inside, before in self._insides:
            for name in inside.keys() - before.keys():
                del inside[name]
            inside.update(before)
        for value, contents in self._contents:
            _fill(value, contents)
        self._tensors.set_back()


class _Copies:
    """What is in some tensors, but large ones, among these values, as it is when this is made."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._before: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        room = _MOST_COPIED
        for value in values:
            if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_inference():
                continue
            if value.numel() <= room and value.is_contiguous():  # no element of which stands for several
                room -= value.numel()
                self._before.append((value, value._version, value.clone()))

    def set_back(self) -> None:
        for tensor, version, was in self._before:
            if tensor._version != version and tensor.shape == was.shape:
                tensor.copy_(was)


def _is_short(value: Any) -> bool:
    return type(value) in _CONTAINERS and len(value) <= _MOST_ENTRIES


def _cells(function: Any) -> list[CellType]:
    """The variables that a function closes over, as far as they have values."""
    return [cell for cell in getattr(function, "__closure__", None) or () if cell != _EMPTY_CELL]


def _without_partials(function: Any) -> tuple[Any, list[Any]]:
    """What the `partial`s around a function call, and the arguments that they give it."""
    given: list[Any] = []
    while isinstance(function, partial):
        given += (*function.args, *function.keywords.values())
        function = function.func
    return function, given


def held_by(hook: Any) -> Iterator[Any]:
    """What a function can reach beside its arguments: what it closes over, its object, and what is in these."""
    hook, given = _without_partials(hook)
    yield from given
    for value in (getattr(hook, "__self__", None), *(cell.cell_contents for cell in _cells(hook))):
        yield value
        if isinstance(value, nn.Module) or is_shareable(value):
            yield from (vars(value).values() if hasattr(value, "__dict__") else ())


def tensors_held_by(hook: Any) -> set[int]:
    """Of the tensors in lists, mappings and plain objects that a function can reach, what tells them from others."""
    held = [_contents(value) for value in held_by(hook)]
    return {id(leaf) for leaf in pytree.tree_leaves(held) if isinstance(leaf, torch.Tensor)}


def leave(left: LeftValue, module: nn.Module) -> Callable[[], None]:
    """Put a value into the attribute of the module of that name inside `module`; gives what takes it out again."""
    before = Attributes({left.module: module.get_submodule(left.module)})
    own = vars(module.get_submodule(left.module))
    held: Any = own.get(left.attribute)
    if left.how == WHOLE or not is_shareable(held):
        own[left.attribute] = left.value if left.how == WHOLE or left.key is None else {left.key: left.value}
    elif left.key is not None:
        (held if isinstance(held, dict) else vars(held))[left.key] = left.value
    else:
        if left.how == CONTENTS:
            held.clear()
        held.extend(left.value)
    return before.set_back


def shared_values(owners: Mapping[str, str], model: nn.Module) -> dict[int, Any]:
    """By identity: lists, mappings and plain objects, without tensors or modules in them, that modules of different
    owners hold. `owners`: those of modules, by the modules' names."""
    first: dict[int, str] = {}
    shared: dict[int, Any] = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if (
                name in OF_EVERY_MODULE
                or not is_shareable(value)
                or owners[prefix] == first.setdefault(id(value), owners[prefix])
            ):
                continue
            if not any(isinstance(each, (torch.Tensor, nn.Module)) for each in pytree.tree_leaves(_contents(value))):
                shared[id(value)] = value
    return shared


def is_shareable(value: Any) -> bool:
    """Whether code may put something into a value: a container, or an object of a class that does nothing else then."""
    kind: Any = type(value)
    return kind in _CONTAINERS or (_is_plain(kind) and hasattr(value, "__dict__"))


@cache
def _is_plain(kind: Any) -> bool:
    """Whether getting and setting attributes of a class's objects runs no code, and they are no functions."""
    usual = kind.__setattr__ is object.__setattr__ and kind.__getattribute__ is object.__getattribute__
    return usual and not any({"__getattr__", "__call__"} & vars(base).keys() for base in kind.__mro__)


def has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


_ABSENT = object()
_EMPTY_CELL = CellType()


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def _contents(value: Any) -> list[Any]:
    """What is in a value that code may put something into: entries, or the keys of a mapping and then its values."""
    if not is_shareable(value):
        return []
    if type(value) in _CONTAINERS and not isinstance(value, dict):
        return list(value)
    inside = value if isinstance(value, dict) else vars(value)
    return [*inside, *inside.values()]


def _pairs(contents: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The entries of a mapping, by their keys."""
    half = len(contents) // 2
    return zip(contents[:half], contents[half:], strict=True)


def _fill(value: Any, contents: list[Any]) -> None:
    """Put back what was in a value, if it is something else now."""
    if not _same(_contents(value), contents):
        inside = value if type(value) in _CONTAINERS else vars(value)
        inside.clear()
        inside.update(_pairs(contents)) if isinstance(inside, dict) else inside.extend(contents)


def _same(some: Sequence[Any] | None, others: Sequence[Any] | None) -> bool:
    """Whether two lists have the very same entries."""
    return some is not None and others is not None and len(some) == len(others) and all(map(operator.is_, some, others))


def _alike(one: Any, other: Any, depth: int = 5) -> bool:
    """Whether a forward that finds one value in place of another goes on as it would with that. Deeper than `depth` is
    not looked: objects may lead to each other."""
    kind = type(one)  # and not `isinstance`, which runs code of a configuration's class
    if one is other or kind is not type(other):
        return one is other
    if issubclass(kind, (*_PLAIN, Number, torch.device)):
        return repr(one) == repr(other)  # in which NaN is NaN
    if issubclass(kind, torch.Tensor):
        # Another step could not go on with what is of a graph: it is computed anew in each forward.
        return one.grad_fn is not None and other.grad_fn is not None
    if not depth:
        return False
    if issubclass(kind, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key], depth - 1) for key in one)
    if issubclass(kind, (tuple, list, deque)):
        return len(one) == len(other) and all(map(_alike, one, other, repeat(depth - 1)))
    return is_shareable(one) and _alike(vars(one), vars(other), depth - 1)


def _state(value: Any) -> Any:
    """What changes of a value in place that has no `_contents`."""
    kind = type(value)
    if kind in _PLAIN:  # nearly always
        return 0
    if issubclass(kind, torch.Tensor):
        return 0 if value.is_inference() or value.grad_fn is not None else value._version
    if issubclass(kind, tuple):
        return tuple(map(_state, value))
    return len(value) if kind in (set, Counter) else 0

"""Operations on meta tensors: what they do besides computing, and their results, which are remembered.

torch spends up to a millisecond on the shape of each, and a unit has some twenty. The layers of a model are alike, and
it is traced several times, so nearly all of them have been seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.modeling.collectives import refuse_operation


class Untraceable(Exception):
    """The forward cannot be followed; the message says why. Raised inside a unit or between units.

    Attributes:
        num_calls: how many calls of units there were before.
    """

    num_calls = 0


class Marks(Protocol):
    """What tensors were computed from."""

    def sources(self, tree: Any) -> Any: ...

    def mark(self, tensor: torch.Tensor, sources: Iterable[Any]) -> None: ...

    def mark_computed(self, tensor: torch.Tensor, source: Any) -> None: ...


class TraceFacts:
    """What was seen of the operations of one trace.

    Attributes:
        where: the unit under way, empty between units.
        draws: whether one draws from torch's random numbers, or may have done so where that could not be seen.
        batchwise: of operations whose backward depends on the whole batch, what says so, and where.
    """

    def __init__(self) -> None:
        self.where = ""
        self.draws = False
        self.batchwise: set[str] = set()
        # Of the call under way, of which every tensor that it computes is marked so, while a forward is followed.
        self._call: Any = None
        self._marks: Marks | None = None
        self.reads: set[Any] = set()

    def begin_call(self, call: Any, marks: Marks) -> None:
        """Mark what is computed from tensors of `mark_own` from now on as that of `call`. `reads` then takes up what
        other marked tensors, which the unit is not given, were computed from, and `call` itself if it writes to one of
        these."""
        self._call, self._marks, self.reads = call, marks, set()

    @property
    def follows_call(self) -> bool:
        """Whether a unit runs while a forward is followed."""
        return self._marks is not None

    def end_calls(self) -> None:
        self._call = self._marks = None
        self.reads = set()

    def mark_own(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._marks is not None:
            for tensor in tensors:
                self._marks.mark(tensor, (self._call,))

    def read(self, tree: Any) -> bool:
        """Take up what is in `tree` beside the call's own tensors; gives whether there is anything."""
        foreign = set() if self._marks is None else self._marks.sources(tree) - {self._call}
        self.reads |= foreign
        return bool(foreign)

    def follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Take up what an operation of the call under way reads and writes to beside the call's own tensors; gives its
        arguments, as meta tensors if there is any of this. A view stays one, as it may be written to."""
        aside = self.read((args, kwargs)) and not func.is_view
        if self._marks is not None:
            for tensor in written_arguments(func, args, kwargs):
                if not tensor.is_meta and self._call not in self._marks.sources(tensor):
                    self._marks.mark_computed(tensor, self._call)
                    self.reads.add(self._call)
                    aside = True
        return _on_meta((args, kwargs)) if aside else (args, kwargs)

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note an operation, if `_traits` finds something in it. Raises `OwnCollective` if it communicates with other
        processes."""
        traits = _traits(func)
        if not traits:
            return
        refuse_operation(func, self.where)
        self.draws = self.draws or draws(func, args, kwargs)
        if "scale_grad_by_freq" in traits and _given(func, "scale_grad_by_freq", args, kwargs):
            where = f"the unit {self.where}" if self.where else "the model's code between units"
            self.batchwise.add(f"{func._schema.name} with scale_grad_by_freq=True in {where}")


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: of those that may, attention does not if it drops nothing."""
    traits = _traits(func)
    return "draws" in traits and ("dropout_p" not in traits or bool(_given(func, "dropout_p", args, kwargs)))


@cache
def _traits(func: Any) -> frozenset[str]:
    """What there is to look at in an operation; nothing in nearly all."""
    traits = {each.name for each in func._schema.arguments} & {"dropout_p", "scale_grad_by_freq"}
    if torch.Tag.nondeterministic_seeded in func.tags:
        traits.add("draws")
    if func.namespace != "aten":
        traits.add("foreign")
    return frozenset(traits)


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    declared = func._schema.arguments
    given = {**dict(zip((each.name for each in declared), args, strict=False)), **kwargs}
    written = [given.get(each.name) for each in declared if each.alias_info is not None and each.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def _given(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The argument `name` of an operation's call."""
    place = next(place for place, each in enumerate(func._schema.arguments) if each.name == name)
    return args[place] if place < len(args) else kwargs.get(name, func._schema.arguments[place].default_value)


# Emptied when it grows beyond this; an entry takes about a kilobyte.
MAX_REMEMBERED = 8192

# Code that repeats something until it is told otherwise gets no further answers.
MAX_ANSWERS = 10_000

_remembered: dict[Any, Any] = {}
_PLAIN = (torch.Tensor, nn.Parameter)
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Description(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class RememberedOperations(TorchDispatchMode):
    """Answers an operation on meta tensors alone with what torch found for the same shapes, strides and types before;
    any other is computed. For use without gradients: its answers require none. `seen` notes what operations do
    besides."""

    def __init__(self, seen: TraceFacts | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._seen = TraceFacts() if seen is None else seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._seen.note(func, args, kwargs)
        args, kwargs = self._seen.follow(func, args, kwargs)
        output = self._answer(func, args, kwargs)
        if not func.is_view or func is torch.ops.aten.lift_fresh.default:  # a view has its storage's marks
            self._seen.mark_own(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
        return output

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = _key_of(func, args, kwargs) if _makes_fresh_tensors(func) else None
        if key in _remembered:
            return _made(_remembered[key])
        if key is None:
            args, kwargs = _on_one_device(func, args, kwargs)
        output = func(*args, **kwargs)
        description = None if key is None else _description(output)
        if description is not None:
            if len(_remembered) >= MAX_REMEMBERED:
                _remembered.clear()
            _remembered[key] = description
        return output


class KnownValues(TorchDispatchMode):
    """Allows a few tensors with values in a run on meta tensors: results computed only from them have values, too. So a
    module's code may ask how large each image is, say, and slice its meta tensors accordingly."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors and _makes_integers(args, kwargs):  # offsets, say, into which known sizes are written
            kwargs = {**kwargs, "device": torch.device("cpu")}
        unknown = any(tensor.is_meta for tensor in tensors)
        if unknown and not all(tensor.is_meta for tensor in written_arguments(func, args, kwargs)):
            raise RuntimeError("its code writes unknown values into a tensor whose values are known")
        return func(*args, **kwargs)


def _makes_integers(args: Any, kwargs: Any) -> bool:
    """Whether an operation without tensors makes integers on the meta device."""
    if kwargs.get("device") != torch.device("meta"):
        return False
    dtype = kwargs.get("dtype")
    numbers = [value for value in pytree.tree_leaves(args) if isinstance(value, (int, float))]
    return all(isinstance(number, int) for number in numbers) if dtype is None else dtype in (torch.int32, torch.int64)


class AssumedValues(TorchDispatchMode):
    """Answers every question for values, which meta tensors do not have, with the same answer: if `yes`, what is asked
    for is true, or 1, and all of a mask is chosen; otherwise false, or 0, and none."""

    def __init__(self, yes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._yes = yes
        self._left = MAX_ANSWERS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, asked = kwargs or {}, args[0] if args else None
        if not isinstance(asked, torch.Tensor) or not asked.is_meta:
            return func(*args, **kwargs)
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            self._left -= 1
            if not self._left:
                raise RuntimeError("its code asks for values again and again")
            return torch.full((), self._yes, dtype=asked.dtype, device="cpu").item()
        if func is aten.equal.default:
            return self._yes
        if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):  # of tolist()
            return torch.full(asked.shape, self._yes, dtype=kwargs.get("dtype") or asked.dtype, device="cpu")
        if func is aten.nonzero.default:
            return asked.new_empty((self._chosen(asked), asked.dim()), dtype=torch.long)
        if func is aten.index.Tensor:
            places: list[Any] = []
            for index in args[1]:
                is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
                number = index.dim() if is_mask else 1
                chosen = [index.new_empty(self._chosen(index), dtype=torch.long)] if is_mask else [index]
                places += chosen * number
            args = (asked, places)
        return func(*args, **kwargs)

    def _chosen(self, mask: torch.Tensor) -> int:
        return mask.numel() if self._yes else 0


def _on_one_device(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation's arguments, as meta tensors if some are, and others have values: known ones, or those of a tensor
    that a unit's code reads beside its arguments."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if len({tensor.is_meta for tensor in tensors}) < 2 or (func is torch.ops.aten.index.Tensor and args[0].is_meta):
        return args, kwargs
    return _on_meta((args, kwargs))


def _on_meta(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t if t.is_meta else t.to("meta"), tree)


@cache
def _makes_fresh_tensors(func: Any) -> bool:
    """Whether an operation changes nothing and shares no memory, and its output's shape follows from its arguments'."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    shared = any(each.alias_info for each in (*func._schema.arguments, *func._schema.returns))
    return not shared and not func._schema.is_mutable and not tags.intersection(func.tags)


def _key_of(func: Any, args: Any, kwargs: Any) -> Any:
    """A key of an operation and its arguments' shapes; None if an argument carries more than that."""
    parts: list[Any] = [func]
    for value in (*args, *kwargs.items()):
        if not _add(value, parts):
            return None
    return tuple(parts)


def _add(value: Any, parts: list[Any]) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        if not value.is_meta or value.layout != torch.strided or value.is_complex():
            return False
        parts += (value.shape, value.stride(), value.dtype)
        return True
    if kind in (tuple, list):
        parts += (kind, len(value))
        return all(_add(each, parts) for each in value)
    parts += (kind, value)
    return kind in _CONSTANTS


def _description(output: Any) -> Any:
    if type(output) is torch.Tensor and output.is_meta and output.layout == torch.strided:
        return _Description(output.shape, output.stride(), output.dtype)
    if type(output) is tuple:
        parts = tuple(_description(each) for each in output)
        return None if None in parts else parts
    return None


def _made(description: Any) -> Any:
    if isinstance(description, _Description):
        return torch.empty_strided(description.size, description.stride, dtype=description.dtype, device="meta")
    return tuple(map(_made, description))

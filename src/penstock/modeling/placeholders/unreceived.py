"""Tensors that stand for values which a stage was not sent, and the model's code between units that computes from them.

By the plan nothing of a stage uses such a value. If the code takes another path than the one that was followed, as the
inputs' values or an attribute are others, something here may use one all the same: a unit, what is sent on, the output,
or a question for its contents. Its zeros would be taken for the value, so that is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.modeling.graph.dataflow import READS, selectors
from penstock.modeling.graph.meta_operations import written_arguments
from penstock.modeling.graph.reductions import storage_of
from penstock.nested import is_record, items_of

# What asks a tensor for its shape, type or device, in the words of `torch.overrides`.
_GETTER = "__get__"
# What nearly all values are that a unit is given, and the fastest to tell.
_NOT_UNRECEIVED = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})
_CAUSES = (
    "Its control flow depends on the values of inputs, weights or variables, on what its forwards leave behind, or on "
    "random numbers such as those that leave layers out (set that probability to 0), which a pipeline cannot follow"
)


def other_path(what: str) -> RuntimeError:
    """The error for a forward that does something else than when it was followed."""
    return RuntimeError(f"The model took another path than it was planned for: {what}. {_CAUSES}.")


def uses_unreceived(user: str) -> RuntimeError:
    return other_path(
        f"{user} depends on a value of another stage, which did not matter to it when the forward was followed"
    )


class Unreceived(torch.Tensor):
    """Such a tensor, or what was computed from one. Operations are told apart as by tracing: what only takes another
    one's shape or type was not computed from it. Of what is written to, the tensor that the write names becomes one;
    views of its memory that were taken before do not."""

    @staticmethod
    def of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(Unreceived) if type(tensor) is torch.Tensor else tensor

    @staticmethod
    def later(make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The one that `make()` gives, which is called when an operation, or a look at its shape, first needs it."""
        return _Later(make)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return Unreceived.of(self.detach().as_subclass(torch.Tensor).clone())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == _GETTER:
                result = func(*args, **kwargs)
                return result.as_subclass(cls) if type(result) is torch.Tensor else result
            if func in READS:
                raise uses_unreceived("what its code does next")
            given = _tensors((args, kwargs))
            with _Reached(leaf for leaf in given if type(leaf) is cls) as reached:
                result = func(*args, **kwargs)
            for leaf in given:
                if type(leaf) is torch.Tensor and reached.by_writes(leaf):
                    leaf.__class__ = cls
            return pytree.tree_map_only(
                torch.Tensor, lambda t: t.as_subclass(cls) if type(t) is torch.Tensor and reached.has(t) else t, result
            )


class _Later(Unreceived):
    """While a model generates, the shapes of attention weights and position biases change with every token. Working
    them out takes a run of the unit's meta copy, and hardly ever does anybody look at them on a stage that was not sent
    the value."""

    made: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, make: Callable[[], torch.Tensor]) -> _Later:
        self = torch.Tensor._make_subclass(cls, torch.empty(0))
        self.made = cache(lambda: Unreceived.of(make()))
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(_Later, lambda each: vars(each)["made"](), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Reached(TorchDispatchMode):
    """The storages that some tensors, and what is computed from them meanwhile, are in."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._storages = {storage_of(tensor)._cdata: tensor for tensor in tensors}
        self._written: set[int] = set()

    def has(self, tree: Any) -> bool:
        return any(storage_of(tensor)._cdata in self._storages for tensor in _tensors(tree))

    def by_writes(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor)._cdata in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # there an operation that consists of others comes as a whole
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        if not self.has((args, kwargs)):
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags or self.has(selectors(func, args)):
            raise uses_unreceived("what its code does next")
        output, written = func(*args, **kwargs), written_arguments(func, args, kwargs)
        self._storages |= {storage_of(t)._cdata: t for t in (*_tensors(output), *written)}
        self._written |= {storage_of(t)._cdata for t in written}
        return output


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def has_unreceived(*values: Any) -> bool:
    """Whether one is among these, or in a list, tuple, mapping or data class among them."""
    for value in values:
        if type(value) in _NOT_UNRECEIVED:
            continue
        if isinstance(value, torch.Tensor):
            found = isinstance(value, Unreceived)
        elif isinstance(value, (tuple, list)):
            found = has_unreceived(*value)
        elif isinstance(value, Mapping):
            found = has_unreceived(*value.values())
        else:
            found = is_record(value) and has_unreceived(*(item for _, item in items_of(value) or ()))
        if found:
            return True
    return False


def refuse_unreceived(user: str, *values: Any) -> None:
    """Raise RuntimeError if what a unit of this stage, or the caller, is given depends on a value that another stage
    computes and does not send here. Every call of a unit is looked at."""
    if has_unreceived(*values):
        raise uses_unreceived(user)

"""Random initialisation of a part of a model, drawing from the random stream exactly what the whole model would draw.

A model's constructor draws random numbers twice for most parameters (the layer's own default, then the model's
``_init_weights``), in the order in which modules are made. A stage keeps only its own parameters real; for every other
one the same numbers are drawn into a temporary and thrown away. So the values, and the state of the generator
afterwards, are those of the unsplit model, while memory holds the stage and at most one foreign parameter at a time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import initialization

from .scratch import Scratch
from .slice_init import SliceKeeper
from .tensor_parallel import Slicing

_DETERMINISTIC = frozenset({"constant_", "ones_", "zeros_", "eye_", "dirac_"})

# Random operations of which the shape says how many numbers they draw. (A Poisson number takes as many as it takes.)
_DRAWN_BY_SHAPE = frozenset(
    [
        *("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_"),
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "bernoulli"),
        *("dropout", "native_dropout"),
    ]
)


class _DrawForMeta(TorchDispatchMode):
    """Random operations on meta tensors draw what they would draw on real ones."""

    def __init__(self, scratch: Scratch, keeper: SliceKeeper | None) -> None:
        super().__init__()
        self._scratch = scratch
        self._keeper = keeper

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._keeper is not None and self._keeper.write(func, args, kwargs):
            return args[0]
        if torch.Tag.nondeterministic_seeded in func.tags and _touches_meta(args, kwargs):
            name = func.overloadpacket.__name__
            if name not in _DRAWN_BY_SHAPE:
                raise NotImplementedError(f"how many random numbers {name} draws depends on values that are not here")
            real_args, real_kwargs = pytree.tree_map(self._real, (args, kwargs))
            func(*real_args, **real_kwargs)
        return func(*args, **kwargs)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:
            return self._scratch.like(value).fill_(1)  # a probability, where one is asked for
        if isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        return value


def _touches_meta(args: Any, kwargs: Any) -> bool:
    return any(
        (isinstance(leaf, torch.Tensor) and leaf.is_meta) or (isinstance(leaf, torch.device) and leaf.type == "meta")
        for leaf in pytree.tree_leaves((args, kwargs))
    )


def _draw_into(
    scratch: Scratch, keeper: SliceKeeper | None, function: Callable[..., Any], random: bool
) -> Callable[..., Any]:
    """On meta tensors `torch.nn.init` returns early, and some of it draws by value (trunc_normal_): run it for real."""

    def initialize(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_meta:
            return function(tensor, *args, **kwargs)
        whole = None if keeper is None else keeper.whole(tensor, overwritten=True)
        if whole is not None or random:
            function(scratch.like(tensor) if whole is None else whole, *args, **kwargs)
        return tensor

    return initialize


@contextlib.contextmanager
def drawing_for_meta(keeper: SliceKeeper | None = None) -> Iterator[None]:
    """Inside, initialising a meta tensor draws from the CPU's generator what initialising a real one would.

    Args:
        keeper: of the meta tensors that it watches, slices are kept.
    """
    functions: dict[str, Any] = initialization.TORCH_INIT_FUNCTIONS
    modules = [sys.modules[name] for name in initialization.TORCH_MODULES_TO_PATCH if name in sys.modules]
    scratch = Scratch()
    with contextlib.ExitStack() as undo:
        for name, original in list(functions.items()):
            wrapped = _draw_into(scratch, keeper, original, random=name not in _DETERMINISTIC)
            undo.callback(functions.__setitem__, name, original)
            functions[name] = wrapped
            for module in modules:
                # A layer file may hold its own reference, from `from torch.nn.init import ...`.
                if getattr(module, name, None) is original:
                    undo.callback(setattr, module, name, original)
                    setattr(module, name, wrapped)
        with _DrawForMeta(scratch, keeper):
            yield


class Numbering:
    """Parameters by the order in which they were registered.

    Attributes:
        places: for each number, the module and the name it was registered under.
    """

    def __init__(self) -> None:
        self.places: list[tuple[nn.Module, str]] = []

    def of(self, model: nn.Module) -> dict[str, int]:
        """Number of each parameter of `model` by name, tied names with one number. Can be taken once."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        numbers = {name: parameter._number for name, parameter in parameters.items()}  # type: ignore[attr-defined]
        for parameter in {id(parameter): parameter for parameter in parameters.values()}.values():
            del parameter._number  # type: ignore[attr-defined]
        return numbers

    def replaced(self, model: nn.Module, numbers: dict[str, int]) -> dict[str, int]:
        """Number by name of parameters that are gone because others were computed from them (`weight_norm`)."""
        prefixes = {id(module): prefix for prefix, module in model.named_modules()}
        names = {}
        for number, (module, name) in enumerate(self.places):
            if id(module) in prefixes:
                full_name = f"{prefixes[id(module)]}.{name}".lstrip(".")
                if full_name not in numbers:
                    names[full_name] = number
        return names


@contextlib.contextmanager
def numbering_parameters(
    keep: Collection[int] | None = None,
    sliced: Mapping[int, Slicing] | None = None,
    keeper: SliceKeeper | None = None,
) -> Iterator[Numbering]:
    """Inside, parameters are numbered as they are registered.

    Args:
        keep: the numbers that stay as they are; others move to meta when they are registered. None: all stay.
        sliced: how those are cut that move to meta, but of which `keeper` keeps a slice.
    """
    original = nn.Module.register_parameter
    numbering = Numbering()

    def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not hasattr(parameter, "_number"):
            # The model may register one object under two names, through a variable of its own.
            known = getattr(parameter, "_moved", None)
            if known is None:
                number, known = len(numbering.places), parameter
                numbering.places.append((module, name))
                if keep is not None and number not in keep:
                    known = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
                    parameter._moved = known  # type: ignore[attr-defined]  # lives as long as the model's variable
                    if sliced and number in sliced:
                        assert keeper is not None
                        keeper.watch(known, sliced[number], parameter.data)
                known._number = number  # type: ignore[attr-defined]  # until Numbering.of
            parameter = known
        original(module, name, parameter)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign,assignment]  # restored below
    try:
        yield numbering
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]

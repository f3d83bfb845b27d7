"""Shape functions: what a unit would return, found by running a meta copy of it, without any compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache
from transformers.utils import output_capturing

from penstock.modeling.graph.meta_operations import RememberedOperations
from penstock.modeling.placeholders.caches import CacheUse, shape_cache
from penstock.modeling.placeholders.ghosts import meta_placeholder, sync_capture_hooks
from penstock.modeling.tensor_spec import TensorSpec

# Output shapes are remembered per unit and argument shapes; the memory is emptied when it grows beyond this.
MAX_REMEMBERED = 4096

# How many modules inside one unit may lack meta kernels before the whole unit is taken for shape-preserving.
MAX_RETRIES = 8


# Stands for a tensor where shape and dtype do not matter.
SOME_TENSOR = TensorSpec((), torch.float32)


@dataclass(frozen=True, slots=True)
class Captured:
    """One entry that a call appends to a side output.

    Attributes:
        key: the list, such as `"router_logits"`.
        leaf: the output leaf it is (an index), its own name (`"router_logits.0"`), or None where None is appended.
        shape: its shape, None with `leaf` None.
    """

    key: str
    leaf: int | str | None
    shape: TensorSpec | None


@dataclass(frozen=True, slots=True)
class OutputShape:
    """The structure of what a unit's call returns.

    Attributes:
        leaves: for each leaf of the output a `TensorSpec`, or the leaf itself if it is no tensor.
        spec: how the leaves are put together.
        captured: side outputs in the order in which they are appended.
        cache_layers: indices of the cache layers that the call lengthens.
        state_layers: indices of those whose convolution's or recurrence's state it carries on.
        written: indices of the argument leaves that the call changes in place.
        assumed: whether a part of the unit has no meta kernel and was taken for shape-preserving, so that the unit's
            owner must check the real shapes.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    captured: tuple[Captured, ...] = ()
    cache_layers: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    assumed: bool = False

    def without_shapes(self) -> OutputShape:
        """The same structure for tensors of any shape."""
        leaves = tuple(SOME_TENSOR if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves)
        captured = tuple(replace(entry, shape=entry.shape and SOME_TENSOR) for entry in self.captured)
        return replace(self, leaves=leaves, captured=captured)


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of nested outputs or arguments; a cache is one leaf."""
    return pytree.tree_flatten(tree, is_leaf=lambda node: isinstance(node, Cache))


class ShapeFunctions:
    """The shape functions of a model's units.

    Args:
        units: name and module of each unit. Owned units and ghosts are treated alike, so that every rank finds the
            same shapes.

    Attributes:
        units: the same.
        around: entered with the unit's name around each run of a copy, if set.
    """

    def __init__(self, units: dict[str, nn.Module]) -> None:
        self.units = units
        self._copies = {name: meta_placeholder(module) for name, module in units.items()}
        self._remembered: dict[Any, OutputShape] = {}
        self._assumed: dict[str, int] = {}
        # Of layers of caches with a convolution's or a recurrence's state, how a call left them.
        self._states: dict[int, Any] = {}
        self.around: Callable[[str], AbstractContextManager[None]] | None = None

    def renew(self) -> None:
        """Copy the modules anew, which were converted to another type."""
        self._copies = {name: meta_placeholder(module) for name, module in self.units.items()}
        self._remembered.clear()

    def sync(self) -> None:
        """Follow changes of the modules since the copies were made; called before planning."""
        for name, module in self.units.items():
            if sum(1 for _ in module.modules()) != sum(1 for _ in self._copies[name].modules()):
                self._copies[name] = meta_placeholder(module)  # adapters were put in
        self._remembered.clear()

    def assumed_parameters(self, name: str) -> int:
        """Elements of the parameters in those parts of a unit that were taken for shape-preserving in its last run."""
        return self._assumed.get(name, 0)

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputShape:
        """The shape of what the unit `name` returns for these arguments.

        Raises:
            NotImplementedError: the unit cannot run on meta tensors and has no tensor argument to be shaped like.
        """
        leaves, spec = flatten((args, kwargs))
        if name not in self.units:  # a dropout between units, which may run on another stage
            first = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            return OutputShape((_shape_of(first),), flatten(first)[1])
        lasting = self.around is None and not any(isinstance(leaf, Cache) for leaf in leaves)
        key = (name, *map(_shape_key, leaves), *lengths(side_outputs()).items())
        known = self._remembered.get(key) if lasting else None
        if known is not None:
            return known
        found = self._run(name, leaves, spec)
        if lasting:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = found
        return found

    def _run(self, name: str, leaves: list[Any], spec: pytree.TreeSpec) -> OutputShape:
        placeholder = self._copies[name]
        assumed: list[nn.Module] = []
        try:
            for _ in range(MAX_RETRIES):
                try:
                    return self._attempt(name, leaves, spec, bool(assumed))
                except Exception as error:
                    # A kernel without a meta version (grouped matmul of mixture-of-experts layers) or data-dependent
                    # code: take the innermost module that failed for one that keeps its input's shape, or else the one
                    # around it.
                    running = _running(placeholder, error.__traceback__)
                    culprit = next((module for module in running if module not in assumed), None)
                    if culprit is None or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                        raise NotImplementedError(
                            f"the unit {name} cannot be run on meta tensors: {type(error).__name__}: {error}"
                        ) from error
                    culprit.forward = _first_tensor
                    assumed.append(culprit)
            if placeholder not in assumed:
                placeholder.forward = _first_tensor
                assumed.append(placeholder)
            return self._attempt(name, leaves, spec, True)
        finally:
            # Forgotten at once: what one rank assumed while running must not enter a plan that all ranks make.
            self._assumed[name] = sum(p.numel() for module in assumed for p in module.parameters())
            for module in assumed:
                del module.forward

    def _attempt(self, name: str, leaves: list[Any], spec: pytree.TreeSpec, assumed: bool) -> OutputShape:
        use = CacheUse()
        with torch.inference_mode(False):  # inference tensors have no version counter
            batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
            meta_leaves = [
                shape_cache(leaf, use, self._states, batch) if isinstance(leaf, Cache) else _to_meta(leaf)
                for leaf in leaves
            ]
        versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in meta_leaves]
        args, kwargs = pytree.tree_unflatten(meta_leaves, spec)
        with torch.inference_mode(False), torch.no_grad(), torch.device("meta"), side_outputs_aside() as lists:
            if lists:  # transformers installs its hooks when something is collected for the first time
                sync_capture_hooks(self.units[name], self._copies[name])
            before = lengths(lists)
            with RememberedOperations(), self.around(name) if self.around else nullcontext():
                output = self._copies[name](*args, **kwargs)
        self._states.update(use.states)
        output_leaves, output_spec = flatten(output)
        written = tuple(
            index
            for index, (leaf, version) in enumerate(zip(meta_leaves, versions, strict=True))
            if isinstance(leaf, torch.Tensor) and leaf._version != version
        )
        captured = []
        for key, values in lists.items():
            for index, value in enumerate(values[before[key] :]):
                captured.append(_captured(key, index, value, output_leaves))
        shapes = tuple(_shape_of(leaf) for leaf in output_leaves)
        return OutputShape(
            shapes, output_spec, tuple(captured), tuple(use.lengthened), tuple(use.states), written, assumed
        )


def _captured(key: str, index: int, value: Any, output_leaves: list[Any]) -> Captured:
    if not isinstance(value, torch.Tensor):
        return Captured(key, None, None)
    for leaf_index, leaf in enumerate(output_leaves):
        if leaf is value:  # the same tensor: it need not travel twice
            return Captured(key, leaf_index, _shape_of(value))
    return Captured(key, f"{key}.{index}", _shape_of(value))


def _shape_of(leaf: Any) -> Any:
    return TensorSpec.shape_of(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _shape_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    return type(leaf).__name__


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        # A fresh tensor even for one that is meta already, so that its version counter is its own.
        return torch.empty_like(leaf, device="meta", requires_grad=False)
    return leaf


class _Assumed(torch.Tensor):
    """The output of a module that was taken for shape-preserving: one tensor, not to be unpacked like a tuple."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch itself does

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a module that returns several tensors was taken for one that keeps its input's shape")


def _first_tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
    first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return torch.empty_like(first).as_subclass(_Assumed)


def _running(root: nn.Module, traceback: TracebackType | None) -> list[nn.Module]:
    """The modules at or below `root` with a method on the stack of an exception, the innermost first."""
    members = set(map(id, root.modules()))
    found: list[nn.Module] = [root]
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in members:
            found.append(owner)
        traceback = traceback.tb_next
    return found[::-1]


# Lists by key ("hidden_states", "router_logits", ...). Names with an underscore hold the collector's own settings.
Collected = dict[str, list[Any]]


def side_outputs() -> Collected:
    """The lists that are being filled now; empty when nothing is collected."""
    active = output_capturing._active_collector.get()
    if not active:
        return {}
    return {key: value for key, value in active.items() if isinstance(value, list) and not key.startswith("_")}


@contextmanager
def side_outputs_aside() -> Iterator[Collected]:
    """Collect into a copy of the active lists, so that what is appended meanwhile does not reach the model's output."""
    active = output_capturing._active_collector.get() or {}
    aside = {key: list(value) if isinstance(value, list) else value for key, value in active.items()}
    token = output_capturing._active_collector.set(aside)
    try:
        yield {key: value for key, value in aside.items() if isinstance(value, list) and not key.startswith("_")}
    finally:
        output_capturing._active_collector.reset(token)


def lengths(lists: Collected) -> dict[str, int]:
    """How much each list holds."""
    return {key: len(values) for key, values in lists.items()}

"""Shape functions: what a unit would return, found by running a meta copy of it, without any compute."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributions import Distribution
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache
from transformers.utils import output_capturing

from penstock.modeling.collectives import OwnCollective
from penstock.modeling.graph.attributes import Attributes, LeftValue, Variables, shared_values
from penstock.modeling.graph.meta_operations import (
    AssumedValues,
    KnownValues,
    RememberedOperations,
    TraceFacts,
    Untraceable,
)
from penstock.modeling.instrumentation import mix_in
from penstock.modeling.placeholders.caches import CacheGrowth, CacheUse, note_use, shape_cache
from penstock.modeling.placeholders.ghosts import meta_placeholder, sync_capture_hooks
from penstock.modeling.tensor_spec import TensorSpec
from penstock.modeling.weights.whole import names_in_units, unit_of
from penstock.nested import PLAIN, is_record, show_record_to_torch

# Output shapes are remembered per unit and argument shapes; the memory is emptied when it grows beyond this.
MAX_REMEMBERED = 4096

# Of these arguments all that a shape depends on is in `_shape_key`.
_SHARED = (torch.Tensor, bool, int, float, str, type(None))

# With these a unit refuses the model. With any other exception it cannot run on meta tensors, and something is assumed.
_REFUSALS = (Untraceable, OwnCollective)

_LEAF = pytree.tree_structure(0)

# Stands for a tensor where shape and dtype do not matter.
SOME_TENSOR = TensorSpec((), torch.float32)


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry that a call makes in the mapping at a `position` among the leaves of its arguments, for later calls:
    keys and values to share, say."""

    position: int
    key: Any
    spec: pytree.TreeSpec


@dataclass(frozen=True, slots=True)
class OutputShape:
    """The structure of what a unit's call returns."""

    # Of the output, then of the entries in `stored`, then what else is `captured`: a `TensorSpec`, or no tensor.
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    # What the call appends to side outputs, in order: the key of each list, and which leaf; or None.
    captured: tuple[tuple[str, int | None], ...] = ()
    cache: CacheGrowth | None = None  # what the call does to a cache among its arguments
    written: tuple[int, ...] = ()  # indices of the argument leaves that the call changes in place
    # Values were assumed, or a part was taken for shape-preserving: the unit's owner must check the real shapes.
    assumed: bool = False
    known: tuple[int, ...] = ()  # indices of the argument leaves on whose values the shapes depend
    stored: tuple[StoredEntry, ...] = ()  # entries that the call makes in mappings among its arguments
    cost: float = field(default=0.0, compare=False)  # what `ShapeFunctions.meter` has counted
    # What the call leaves in attributes of the unit's modules: `TensorSpec`s in place of tensors.
    left: tuple[LeftValue, ...] = field(default=(), compare=False, repr=False)
    # Elements of the parameters of what was taken for shape-preserving.
    kept: int = field(default=0, compare=False, repr=False)

    @property
    def structure(self) -> str:
        """The structure in words."""
        return _in_words(self.spec)

    def unflatten(self, leaves: Sequence[Any], given: Sequence[Any]) -> Any:
        """What the call returns, of all `leaves`; those of `stored` go into the mappings among the leaves `given`."""
        end = self.spec.num_leaves
        output = leaves[0] if self.spec.is_leaf() else pytree.tree_unflatten(leaves[:end], self.spec)
        for entry in self.stored:
            start, end = end, end + entry.spec.num_leaves
            given[entry.position][entry.key] = pytree.tree_unflatten(leaves[start:end], entry.spec)
        return output

    def flatten(self, output: Any, given: Sequence[Any], before: Mapping[str, int]) -> list[Any]:
        """The inverse of `unflatten`, after a call; `before` are the lengths that side outputs had."""
        leaves: list[Any]
        leaves, spec = ([output], _LEAF) if isinstance(output, torch.Tensor) else flatten(output)
        if spec != self.spec:
            raise OtherStructure(f"{_in_words(spec)}, but {self.structure}")
        if not (self.stored or self.captured):  # nearly always
            return leaves
        leaves = leaves + [leaf for entry in self.stored for leaf in flatten(given[entry.position][entry.key])[0]]
        lists = side_outputs() if self.captured else {}
        appended = {key: iter(values[before[key] :]) for key, values in lists.items()}
        for key, leaf in self.captured:
            value = next(appended.get(key, iter(())), None)
            if leaf == len(leaves):
                leaves.append(value)
        return leaves

    def make_output(self, tensor: Callable[[int, TensorSpec], torch.Tensor], given: Sequence[Any]) -> Any:
        """Placeholders for what the call returns; also makes the call's entries in side outputs and in mappings.
        `tensor` gives that for a leaf, by its index, and its shape."""
        leaves = [tensor(i, leaf) if isinstance(leaf, TensorSpec) else leaf for i, leaf in enumerate(self.leaves)]
        lists = side_outputs() if self.captured else {}
        for key, leaf in self.captured:
            if key in lists:
                lists[key].append(None if leaf is None else leaves[leaf])
        return self.unflatten(leaves, given)

    def without_shapes(self) -> OutputShape:
        """The same structure for tensors of any shape."""
        return replace(self, leaves=tuple(SOME_TENSOR if isinstance(x, TensorSpec) else x for x in self.leaves))


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of nested outputs or arguments, data classes among them; a cache is one leaf."""
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda node: isinstance(node, Cache))
    unknown = {type(leaf) for leaf in leaves if not isinstance(leaf, PLAIN) and is_record(leaf)}
    for kind in unknown:
        show_record_to_torch(kind)
    return flatten(tree) if unknown else (leaves, spec)


class OtherStructure(RuntimeError):
    """A unit's call has returned tensors in another structure than when it was followed; the message has both."""


class ChangesArgument(Untraceable, NotImplementedError):
    """A unit changes a list, dictionary or data class among its arguments in place."""


class ShapeFunctions:
    """The shape functions of a model's units, owned or ghosts alike: every rank finds the same shapes.

    Attributes:
        meter: makes what each run of a copy is counted by, in its attribute `cost`; None counts nothing.
        seen: what the runs since the last `sync` did besides.
        guessed: why a unit could not be run as it is, so that something was assumed of it: the first error of each in
            words, as an error itself would keep alive what its callers hold.
    """

    def __init__(self, units: dict[str, nn.Module], model: nn.Module | None = None) -> None:
        self.units = units
        # What copies do not have copies of: modules of the model that are not inside of them, and what several modules
        # use to hand each other something.
        self._beside: dict[int, Any] = {}
        if model is not None:
            homes = names_in_units(model, units)
            owners = {name: unit_of(homes.get(name, name), units) or "" for name, _ in model.named_modules()}
            self._beside = {id(module): module for module in model.modules()} | shared_values(owners, model)
        self._copies = {name: self._copy_of(module) for name, module in units.items()}
        # By copy, and by what is alike: the number of the kind.
        self._kinds: dict[Any, int] = {}
        self._remembered: dict[Any, OutputShape] = {}
        self.guessed: dict[str, str] = {}
        # Units whose code reads values of their arguments, or tensors beside these, so that shapes may depend on them.
        self._reads_values: set[str] = set()
        self._reads_beside: set[str] = set()
        # Of layers of caches with a convolution's or a recurrence's state, how a call left them.
        self._states: dict[int, Any] = {}
        self.meter: Callable[[], Any] | None = None
        self.seen = TraceFacts()
        # Whether each module of a unit was in training mode at the last `sync`.
        self._modes = {name: bytes(1) for name in units}

    def _copy_of(self, module: nn.Module) -> nn.Module:
        made = meta_placeholder(module, self._beside)
        for each in made.modules():
            if "layer_idx" in vars(each):
                mix_in(each, _IndexedModule)
        return made

    def sync(self) -> None:
        """Follow changes of the modules since the copies were made; called before planning."""
        for name, module in self.units.items():
            modules = [*module.modules()]
            if len(modules) != sum(1 for _ in self._copies[name].modules()):
                self._copies[name] = self._copy_of(module)  # adapters were put in
            self._modes[name] = bytes(each.training for each in modules)
        self._remembered.clear()
        self.seen = TraceFacts()

    def __call__(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[int, ...] = ()
    ) -> OutputShape:
        """The shape of what the unit `name` returns for these arguments. `known` are those leaves of which every stage
        has the values, as they come from the inputs alone; the unit's code may ask for them."""
        leaves, spec = flatten((args, kwargs))
        lasting, collected = not any(isinstance(leaf, Cache) for leaf in leaves), lengths(side_outputs())
        key = (name, *map(_shape_key, leaves), *collected.items(), self._modes[name])
        if name in self._reads_values:
            key += tuple(tuple(leaves[index].flatten().tolist()) for index in known)
        remembered = self._remembered.get(key) if lasting else None
        if remembered is not None:
            return remembered
        # What another unit that is alike has returned, if its code asks neither where it stands nor for values.
        plain = not collected and all(isinstance(leaf, _SHARED) for leaf in leaves)
        shared = (self._kind_of(name), str(spec), *key[1:]) if plain else None
        if shared is not None and shared in self._remembered:
            return self._remembered[shared]
        read_values, num_reads = name in self._reads_values, _IndexedModule.num_reads
        variables = Variables(self._copies[name].modules())
        shape = self._run(name, leaves, spec, known)
        if self.seen.follows_call:  # another call would leave something there, too, which later ones may read
            lasting = lasting and not any(variables.changed())
        else:
            variables.set_back()
        if read_values != (name in self._reads_values):
            return shape  # the key did not tell the values yet
        if self.seen.reads:
            self._reads_beside.add(name)
        if lasting and name not in self._reads_beside:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = shape
            if shared is not None and num_reads == _IndexedModule.num_reads and not read_values:
                self._remembered[shared] = shape
        return shape

    def _kind_of(self, name: str) -> int:
        """The same for units that differ in no more than their weights' values and their `layer_idx`."""
        copied = self._copies[name]
        if copied not in self._kinds:
            outline = tuple(
                (prefix, type(module), *((key, _likeness(key, value)) for key, value in vars(module).items()))
                for prefix, module in copied.named_modules()
            )
            self._kinds[copied] = self._kinds.setdefault(outline, len(self._kinds))
        return self._kinds[copied]

    def _run(self, name: str, leaves: list[Any], spec: pytree.TreeSpec, known: tuple[int, ...]) -> OutputShape:
        failures: list[tuple[tuple[int, ...], Exception]] = []
        # First as it went before; without the values there is less that a shape is remembered by.
        ways = dict.fromkeys([known, ()] if name in self._reads_values else [(), known])
        trains = self._trains(name)
        for training in (True, False) if trains else (False,):
            # What cannot run in training mode on meta tensors (a path by chance, say) mostly can in evaluation mode.
            self.seen.draws = self.seen.draws or (trains and not training)
            for values in ways:
                if len(failures) == 3 and len({str(error) for _, error in failures}) == 1:
                    continue  # neither the mode nor the values alone change what it fails with
                try:
                    shape = self._attempt(name, leaves, spec, False, values, training=training)
                except _REFUSALS:
                    raise
                except Exception as error:
                    failures.append((values, error))
                    continue
                if values:
                    self._reads_values.add(name)
                return shape
        failure = next(error for values, error in reversed(failures) if not values)
        first_line = str(failure).strip().partition("\n")[0]
        self.guessed.setdefault(name, f"{type(failure).__name__}: {first_line}")
        # Costs are those of the parts that run, and of the parameters of those that cannot.
        alike = None if self.meter is not None else self._if_any_value_does(name, leaves, spec, str(failure))
        return self._assuming(name, leaves, spec, failure) if alike is None else alike

    def _trains(self, name: str) -> bool:
        """Whether something in a unit is in training mode. Costs are compared in evaluation mode."""
        return self.meter is None and any(self._modes[name])

    @contextmanager
    def _in_mode(self, name: str, training: bool) -> Iterator[None]:
        """The modules of a unit's copy are in the unit's own modes, if `training`, otherwise in evaluation mode."""
        modules = [*self._copies[name].modules()]
        modes = self._modes[name] if training else bytes(len(modules))
        for module, mode in zip(modules, modes, strict=True):
            module.training = bool(mode)
        self.seen.where = name
        try:
            yield
        finally:
            self.seen.where = ""

    def _if_any_value_does(
        self, name: str, leaves: list[Any], spec: pytree.TreeSpec, before: str
    ) -> OutputShape | None:
        """The shape of what a unit returns whose code asks for values, if it is the same whatever they are; else None.
        `before` is what the unit failed with where no value was given."""
        shapes = []
        for yes in (False, True):
            try:
                shapes.append(self._attempt(name, leaves, spec, True, assumed_values=AssumedValues(yes)))
            except Exception as error:
                if str(error) == before:  # it does not fail for want of a value
                    return None
        return shapes[0] if shapes and shapes[0] == shapes[-1] else None

    def _assuming(self, name: str, leaves: list[Any], spec: pytree.TreeSpec, error: Exception) -> OutputShape:
        """The shape of what a unit returns if modules that cannot run keep their input's shape: those inside it, which
        return it alone or in a tuple, or else the unit as a whole. The unit's owner checks the real shapes. `error` is
        why the unit could not be run as it is."""
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        whole = self._copies[name]
        inside = [*whole.modules()][1:]
        for modules, in_tuple in ((inside, False), (inside, True), ([whole], False)):
            if first is None:
                break
            try:
                with _keeping_shapes(modules, first.shape[-1:], in_tuple) as kept:
                    shape = self._attempt(name, leaves, spec, True)
            except Exception as failure:
                error = failure
            else:
                return replace(shape, kept=sum(p.numel() for p in {p for module in kept for p in module.parameters()}))
        reason = f"the unit {name} cannot be run on meta tensors: {type(error).__name__}: {error}"
        raise NotImplementedError(reason) from error

    def _attempt(
        self,
        name: str,
        leaves: list[Any],
        spec: pytree.TreeSpec,
        assumed: bool,
        known: tuple[int, ...] = (),
        assumed_values: AbstractContextManager[Any] | None = None,
        training: bool = False,
    ) -> OutputShape:
        use = CacheUse()
        with torch.inference_mode(False):  # inference tensors have no version counter
            batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
            meta_leaves = [
                shape_cache(leaf, use, self._states, batch)
                if isinstance(leaf, Cache)
                else leaf.detach().to("cpu", copy=True)
                if index in known
                else _to_meta(leaf)
                for index, leaf in enumerate(leaves)
            ]
        entries = {index: dict(leaf) for index, leaf in enumerate(meta_leaves) if _is_mapping(leaf)}
        versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in meta_leaves]
        args, kwargs = pytree.tree_unflatten(meta_leaves, spec)
        self.seen.mark_own(leaf for leaf in meta_leaves if isinstance(leaf, torch.Tensor))
        attributes = Attributes(dict(self._copies[name].named_modules()))
        with (
            ExitStack() as afterwards,
            torch.inference_mode(False),
            torch.no_grad(),
            torch.device("meta"),
            # Arguments of distributions have no values. torch.compile turns these checks off for the whole process.
            mock.patch.object(Distribution, "_validate_args", False),
            mock.patch.object(torch.autocast, "__init__", _init_autocast),
            mock.patch.object(torch, "is_autocast_enabled", _is_autocast_enabled),
            side_outputs_aside() as lists,
        ):
            afterwards.callback(attributes.set_back)
            if lists:  # transformers installs its hooks when something is collected for the first time
                sync_capture_hooks(self.units[name], self._copies[name])
            before = lengths(lists)
            with (
                self._in_mode(name, training),
                RememberedOperations(self.seen),
                KnownValues() if known else nullcontext(),  # type: ignore[no-untyped-call]  # torch's has no types
                assumed_values or nullcontext(),
                self.meter() if self.meter else nullcontext() as counted,
            ):
                output = self._copies[name](*args, **kwargs)
            left_behind = tuple(map(_spec_of_left, attributes.left()))
        after = flatten((args, kwargs))[0]
        if len(after) != len(meta_leaves) or any(a is not b for a, b in zip(after, meta_leaves, strict=True)):
            raise ChangesArgument(
                f"the unit {name} puts other values into a container that it is given, where other stages would not "
                "see them: let it return them"
            )
        self._states.update(use.states)
        output_leaves, output_spec = flatten(output)
        self.seen.read([leaf for leaf in output_leaves if isinstance(leaf, torch.Tensor)])
        written = tuple(
            index
            for index, (leaf, version) in enumerate(zip(meta_leaves, versions, strict=True))
            if isinstance(leaf, torch.Tensor) and leaf._version != version
        )
        stored = []
        for position, before_call in entries.items():
            for key, value in meta_leaves[position].items():
                if value is not before_call.get(key):
                    entry_leaves, entry_spec = flatten(value)
                    output_leaves = output_leaves + entry_leaves
                    stored.append(StoredEntry(position, key, entry_spec))
        captured = []
        for key, values in lists.items():
            for value in values[before[key] :]:
                # The same tensor need not travel twice.
                place = next((index for index, leaf in enumerate(output_leaves) if leaf is value), None)
                if place is None and isinstance(value, torch.Tensor):
                    place, output_leaves = len(output_leaves), [*output_leaves, value]
                captured.append((key, place))
        shapes = tuple(_shape_of(leaf) for leaf in output_leaves)
        return OutputShape(
            shapes, output_spec, tuple(captured), use.growth(meta_leaves), written, assumed, tuple(known),
            tuple(stored), 0.0 if counted is None else counted.cost, left_behind,
        )  # fmt: skip


def _spec_of_left(left: LeftValue) -> LeftValue:
    return replace(left, value=pytree.tree_map(_shape_of, left.value))


class _IndexedModule:
    """Mixed into the copy of a module that knows its place among others: counts how often its code reads it."""

    num_reads = 0

    def _read(self) -> Any:
        _IndexedModule.num_reads += 1
        return vars(self)["layer_idx"]

    layer_idx = property(_read, lambda self, value: vars(self).update(layer_idx=value))


def _likeness(key: str, value: Any) -> Hashable:
    """What two attributes under one name have in common if a module's code cannot tell them apart."""
    kind = type(value)
    if key in ("layer_idx", "training") or (kind in (dict, OrderedDict, set) and not value):
        return None
    if key == "_modules":
        return tuple(value)
    if isinstance(value, torch.Tensor):
        return kind, value.shape, value.stride(), value.dtype
    if kind in (dict, OrderedDict):
        return kind, *((name, _likeness("", each)) for name, each in value.items())
    if kind in (list, tuple):
        return kind, *(_likeness("", each) for each in value)
    return (kind, value) if kind in (bool, int, float, str) else id(value)


@contextmanager
def _keeping_shapes(modules: Sequence[nn.Module], width: Sequence[int], in_tuple: bool) -> Iterator[set[nn.Module]]:
    """Inside, those of `modules` that fail keep their input's shape; gives them. They have no meta kernel, as the
    grouped matmul of experts, or ask after values. Of several arguments that one is kept which has `width`. A cache is
    taken to be lengthened where `layer_idx` says."""
    kept: set[nn.Module] = set()

    def keeping(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return run(*args, **kwargs)
            except _REFUSALS:
                raise
            except Exception:
                given = flatten((args, kwargs))[0]
                tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
                if not tensors:
                    raise
                layers: list[Any] = [getattr(each, "layer_idx", None) for each in module.modules()]
                for cache in (leaf for leaf in given if isinstance(leaf, Cache)):
                    note_use(cache, {index for index in layers if isinstance(index, int)})
                kept.add(module)
                wide = (each for each in tensors if each.shape[-1:] == width and each.is_floating_point())
                made = torch.empty_like(next(wide, tensors[0]), device="meta")
                return (made,) if in_tuple else made

        return forward

    with ExitStack() as undo:
        for module in modules:
            module.forward = keeping(module, module.forward)
            undo.callback(vars(module).pop, "forward", None)
        yield kept


# Units ask torch for the autocast of `x.device.type`. It has none for the meta device; nor has any an effect there.
_own_init, _own_is_enabled = torch.autocast.__init__, torch.is_autocast_enabled


def _init_autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
    if device_type == "meta":
        _own_init(self, "cpu", enabled=False)
    else:
        _own_init(self, device_type, *args, **kwargs)


def _is_autocast_enabled(*device_type: str) -> bool:
    return device_type != ("meta",) and _own_is_enabled(*device_type)


def _in_words(spec: pytree.TreeSpec) -> str:
    return "a tensor" if spec.is_leaf() else f"a {getattr(spec.type, '__name__', spec.type)} of {spec.num_leaves}"


def _shape_of(leaf: Any) -> Any:
    dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    return TensorSpec.shape_of(leaf) if dense else leaf


def _shape_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    if _is_mapping(leaf):
        entries, spec = flatten(dict(leaf))
        return type(leaf).__name__, str(spec), *map(_shape_key, entries)
    return type(leaf).__name__


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        # A new tensor even for one that is meta already, so that it has a version counter of its own.
        return torch.empty_like(leaf, device="meta", requires_grad=False)
    if _is_mapping(leaf):
        entries = pytree.tree_map(_to_meta, dict(leaf))
        leaf = copy.copy(leaf)
        leaf.clear()
        leaf.update(entries)
    return leaf


def _is_mapping(leaf: Any) -> bool:
    """Whether an argument may be given entries. An ordinary dictionary is no leaf."""
    return isinstance(leaf, MutableMapping)


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
    return {key: len(values) for key, values in lists.items()}

"""The forwards of one model by their kind, each followed once: what a plan is made from, wherever the stages are."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from penstock.modeling.graph.chunked_loss import KEY, ChunkedLossError, head_unit, refuse_head
from penstock.modeling.graph.dataflow import ReachedInside
from penstock.modeling.graph.dummy_inputs import refuse_arguments
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.graph.meta_operations import Untraceable
from penstock.modeling.graph.plan import refusal
from penstock.modeling.graph.shapes import ShapeFunctions, flatten
from penstock.modeling.graph.trace import Trace, trace
from penstock.modeling.instrumentation import Interceptor, original_class
from penstock.modeling.libraries import configuration_of
from penstock.modeling.placeholders.caches import cache_kind
from penstock.modeling.weights.whole import names_in_units, outside_of_units

# Attributes of these types have values that code decides by.
_PLAIN_VALUES = (bool, int, float, str, type(None))

# Kinds of inputs that are remembered; more than a run has, unless an argument has another value in every step.
MOST_KINDS = 64


@dataclass(eq=False)
class TracedForward:
    """A kind of forward, followed; knows nothing of stages. `entry` and `defaults`: see `DataflowPlan`.

    Attributes:
        sizes: the first dimension of each tensor that it was followed with.
        fixed: whether its calls of units are known not to depend on these.
    """

    entry: str
    trace: Trace
    defaults: tuple[tuple[str, Any], ...]
    sizes: tuple[int, ...]
    fixed: bool

    @property
    def units(self) -> list[str]:
        return [call.unit for call in self.trace.calls]


class Forwards:
    """Trace a model's forwards, once for each kind of inputs. Its units are intercepted from `install` on.

    The kind of inputs is which arguments are given, the values of those that are no tensors, and what plain attributes
    of the modules outside of units have for values, training mode among them; not the contents of tensors, nor their
    sizes, unless the number of a unit's calls depends on how many samples, or images, there are.

    Attributes:
        functions: the units' shape functions; made at once if none are given, or those of other modules.
        batch_dim: of inputs, the dimension that has the samples, or None, where it is not the first.
        call: the model's own forward, whatever a call of the model means later.
    """

    def __init__(self, model: nn.Module, units: dict[str, nn.Module], functions: ShapeFunctions | None = None) -> None:
        self.model = model
        self.units = units
        same = functions is not None and functions.units == units
        self.functions = functions if functions is not None and same else ShapeFunctions(units, model)
        self.interceptor = Interceptor()
        self.call = MethodType(original_class(type(model)).__call__, model)
        self._signature = inspect.signature(model.forward)
        self.batch_dim: Mapping[str, int | None] = {}
        self._known: dict[Any, TracedForward] = {}
        self._module_names: dict[int, str] = {}
        # The modules outside of units, and those of their attributes that forwards change themselves.
        self._outside: Mapping[str, nn.Module] = {}
        self._changing: set[str] = set()

    def install(self) -> None:
        self._outside = outside_of_units(self.model, names_in_units(self.model, self.units))
        self._module_names = {id(module): name for name, module in self.model.named_modules()}
        self.interceptor.install(self.units)

    def renew(self) -> None:
        """Take up modules that were put in the place of units. What was followed is forgotten."""
        units = {name: self.model.get_submodule(name) for name in self.units}
        self.interceptor.remove(module for name, module in self.units.items() if module is not units[name])
        self.units, self.functions = units, ShapeFunctions(units, self.model)
        self._known.clear()
        self.install()

    def convert(self) -> None:
        """Forget what was followed before units were given another type."""
        self.interceptor.converted = False
        self.functions = ShapeFunctions(self.units, self.model)
        self._known.clear()

    def of_kind(
        self,
        inputs: Mapping[str, Any],
        call: Callable[..., Any] | None = None,
        criterion: Criterion | None = None,
        in_chunks: bool = False,
    ) -> TracedForward:
        """The forward by inputs of this kind. Arguments and errors are those of `follow`."""
        entry = _entry_of(self._module_names, call)
        criterion_key, kind = _criterion_key(criterion), _kind_of(inputs)
        path = self._is_one_unpadded(inputs), self._is_padded_on(inputs)
        key = (entry, self._attributes(), criterion_key, kind, path, in_chunks)
        known = self._known.get(key)
        if known is None:
            self._make_room()
            followed = self.follow(inputs, call, criterion, in_chunks)
            if not followed.trace.changed.keys() <= self._changing:  # they have another value in each forward
                self._changing.update(followed.trace.changed)
                key = (entry, self._attributes(), criterion_key, kind, path, in_chunks)
            known = self._known.setdefault(key, followed)
        if known.fixed:
            return known
        # A unit that is called several times may be called once for each image, say.
        sizes = _sizes(inputs)
        if sizes == known.sizes:
            return known
        other = self._known.get((*key, sizes))
        if other is None:
            other = self._known[(*key, sizes)] = self.follow(inputs, call, criterion, in_chunks)
        if other.units != known.units:
            return other
        known.fixed = all(one != another for one, another in zip(known.sizes, sizes, strict=False))
        return known

    def _attributes(self) -> tuple[Any, ...]:
        """The values of plain attributes of the modules outside of units, by name, that their code may ask for; not of
        those that forwards change themselves: what is not planned for there is an error in the stage's run."""
        found: list[tuple[str, Any]] = []
        for prefix, module in self._outside.items():
            for name, value in vars(module).items():
                if issubclass(type(value), _PLAIN_VALUES):  # not isinstance, which may run a configuration's code
                    full = f"{prefix}.{name}" if prefix else name
                    if full not in self._changing:
                        found.append((full, value))
        return (*found, *((name, unit.training) for name, unit in self.units.items()))

    def _make_room(self) -> None:
        """Forget all kinds once there are so many that more can be expected in every step."""
        if len(self._known) < MOST_KINDS:
            return
        kinds = [{"criterion": key[2], **dict(key[1]), **dict(key[3])} for key in self._known]
        attributes = dict([*self._known][-1][1])
        new = [name for name in kinds[-1] if len({kind.get(name) for kind in kinds}) > MOST_KINDS // 2]
        self._known.clear()
        # From now on a path that changes with one of these attributes is an error in the stage's run.
        self._changing.update(name for name in new if name in attributes)
        warnings.warn(
            f"the forward was followed anew for {MOST_KINDS} kinds of inputs, as {' and '.join(new) or 'something'} is "
            "new again and again; each takes 0.1 s or more. Pass an argument that changes as a tensor",
            stacklevel=2,
        )

    def _is_one_unpadded(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a classifier without a token for padding, which refuses several samples, is given a single one."""
        unpadded = getattr(configuration_of(self.model), "pad_token_id", 0) is None
        classifies = any(kind.__name__.endswith("SequenceClassification") for kind in type(self.model).__mro__)
        return unpadded and classifies and _sizes(inputs)[:1] == (1,)

    def _is_padded_on(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the length is no multiple of an attention's window: LED then calls its embedding once more."""
        windows = getattr(configuration_of(self.model), "attention_window", None) or 1
        window = windows if isinstance(windows, int) else max(windows)
        tokens = inputs.get("input_ids")
        return isinstance(tokens, torch.Tensor) and tokens.dim() == 2 and tokens.shape[1] % window > 0

    def follow(
        self,
        inputs: Mapping[str, Any],
        call: Callable[..., Any] | None = None,
        criterion: Criterion | None = None,
        in_chunks: bool = False,
    ) -> TracedForward:
        """Follow a forward without computing it; the arguments are those of `SplitModel.plan`."""
        asked = "use_cache" in inputs or inputs.get("past_key_values") is not None
        # No cache of keys and values unless the caller asks for one: no stage could return it as a whole.
        silent = call is None and not asked and "use_cache" in self._signature.parameters
        defaults: tuple[tuple[str, Any], ...] = (("use_cache", False),) if silent else ()
        try:
            traced = trace(
                self.model, self.functions, self.interceptor, {**inputs, **dict(defaults)},
                call or self.call, criterion, self.for_criterion(inputs, criterion), self.batch_dim,
                self._head(criterion) if in_chunks else None,
            )  # fmt: skip
        except (Untraceable, ReachedInside, NotImplementedError) as error:
            if call is None and not inputs.get("fused_lm_head"):  # the arguments may be the reason, and not the model
                left_out = self.for_criterion(inputs, criterion)
                given = {name: value for name, value in inputs.items() if name not in left_out}
                refuse_arguments(self.model, given, self._signature)
            instead = ""
            if inputs.get("fused_lm_head"):  # TRL's, which multiplies with the head's weight itself
                instead = f'. Leave fused_lm_head out, and write "{KEY}": 1024 in the configuration for the same memory'
            raise refusal(self.model, f"{error}{instead}") from error
        units = [each.unit for each in traced.calls]
        once = len(set(units)) == len(units)
        return TracedForward(_entry_of(self._module_names, call), traced, defaults, _sizes(inputs), once)

    def _head(self, criterion: Criterion | None) -> str:
        """The unit that makes the logits. Raises ChunkedLossError if they cannot be made in chunks."""
        if criterion is not None:
            raise ChunkedLossError(f"{KEY}: the loss is a criterion's, which has the logits. Leave one of the two out")
        name = head_unit(self.model, self.units)
        refuse_head(None if name is None else self.units[name], self.model)
        assert name is not None
        return name

    def for_criterion(self, inputs: Mapping[str, Any], criterion: Criterion | None) -> Collection[str]:
        """Names of inputs that only a criterion is given: those that it names in an attribute `own_inputs`, or those
        that the model's forward does not take."""
        if criterion is None:
            return ()
        if (own := getattr(criterion, "own_inputs", None)) is not None:
            return frozenset(own)
        return self.not_taken(inputs)

    def not_taken(self, inputs: Mapping[str, Any]) -> Collection[str]:
        """Names of inputs that the model's forward does not take."""
        taken = self._signature.parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
            return ()
        return inputs.keys() - taken.keys()


def _sizes(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    leaves, _ = flatten(dict(inputs))
    return tuple(leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())


def _entry_of(module_names: Mapping[int, str], call: Callable[..., Any] | None) -> str:
    """The name of what is run; `module_names` are those of the model's modules, by identity."""
    if call is None:
        return "forward"
    owner = getattr(inspect.unwrap(call), "__self__", getattr(call, "__self__", None))
    name = module_names.get(id(owner))
    if name is not None:
        return f"{name}.{getattr(call, '__name__', 'forward')}"
    return str(getattr(call, "__qualname__", type(call).__name__))


def _kind_of(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The part of some inputs that a trace depends on; cheap, because every forward computes it."""
    kinds = []
    generating = False
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) or value is None or isinstance(value, (bool, int, float, str)):
            kind: Any = _kind_of_leaf(value)
        elif isinstance(value, Cache):
            kind, generating = cache_kind(value), True
        else:
            leaves, spec = pytree.tree_flatten(value)
            kind = (
                str(spec),
                *(type(leaf).__name__ if isinstance(leaf, str) else _kind_of_leaf(leaf) for leaf in leaves),
            )
        kinds.append((name, kind))
    if generating:  # one token at a time takes other paths than a prompt
        lengths = [inputs[n].shape[1] for n in ("input_ids", "decoder_input_ids") if inputs.get(n) is not None]
        kinds.append(("one token", lengths[-1:] == [1]))
    return tuple(sorted(kinds, key=lambda pair: pair[0]))


def _kind_of_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dim(), value.is_floating_point()
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _criterion_key(criterion: Callable[..., Any] | None) -> Any:
    """A key that distinguishes criteria. A lambda inside a loop is a new function each time, but the same code."""
    if inspect.isfunction(criterion) and not (
        criterion.__closure__ or criterion.__defaults__ or criterion.__kwdefaults__
    ):
        return criterion.__code__, getattr(criterion, "reduction", None)
    return criterion

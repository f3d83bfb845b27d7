"""Units: the named modules of a model that are placed as a whole, in the order in which the forward calls them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.modeling.graph.dataflow import ReachedInside
from penstock.modeling.graph.dummy_inputs import InputsNeeded, dummy_inputs, refuse_arguments
from penstock.modeling.graph.meta_operations import Untraceable
from penstock.modeling.graph.plan import refusal
from penstock.modeling.graph.shapes import ShapeFunctions
from penstock.modeling.graph.trace import ChangedBuffer, Trace, UnitInAutogradFunction, trace
from penstock.modeling.instrumentation import Interceptor, known_of
from penstock.modeling.libraries import base_of, is_adapter_layer, modules_inside
from penstock.modeling.weights.whole import unit_of

# Arguments that a text-only forward lacks.
MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
# How often the choice of units is corrected by what a trace shows before giving up.
MAX_CORRECTIONS = 100


def list_units(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> list[str]:
    """Names of the model's units, in forward order.

    Units are the repeated blocks and what stands beside them: every parameter outside of them is small glue that stays
    on every stage. Nothing is computed: the model's own code runs with shape functions in place of its units.

    Args:
        model: a whole model, or one built on the meta device. It is left as it was, but for `separate_shared_blocks`.
            Of a PeftModel, the names are those in the model inside.
        inputs: arguments of a forward, for a model that does not run on dummy inputs made from its configuration.
    """
    return units_and_functions(model, inputs)[0]


def units_and_functions(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> tuple[list[str], ShapeFunctions]:
    """See `list_units`; with the units' shape functions."""
    if isinstance(model, nn.Module) and not isinstance(base_of(model), PreTrainedModel):
        separate_shared_blocks(model)
    units, _, functions, _ = traced_units(base_of(model), inputs)
    return list(units), functions


def separate_shared_blocks(model: nn.Module) -> None:
    """Where several entries of a list are one module, or share one, put twins with the same parameters in its place.

    These are tied weights then, and each entry can be on a stage of its own. A module that another list has as well is
    left alone: that is a second name.
    """
    twins: dict[nn.Module, list[nn.Module]] = {}
    seen = set[nn.Module]()

    def separate(module: nn.Module, prefix: str, uses: Counter[nn.Module] | None) -> None:
        if uses is None and isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            uses = Counter()  # of what is in this list
        for name, child in module._modules.items():
            if child is None or isinstance(child, PreTrainedModel) or (child in seen and uses is None):
                continue
            seen.add(child)
            if uses is not None:
                used, uses[child] = uses[child], uses[child] + 1
                if used and _has_parameters(child):
                    if (
                        buffers := child.state_dict().keys()
                        - dict(child.named_parameters(remove_duplicate=False)).keys()
                    ):
                        reason = f"{prefix}{name} stands elsewhere, too, and has a buffer that is saved: {min(buffers)}"
                        raise refusal(model, f"{reason}. Make a module for each place")
                    known = twins.setdefault(child, [])
                    known += [_twin(child)] if len(known) < used else []
                    child = module._modules[name] = known[used - 1]
            separate(child, f"{prefix}{name}.", uses)

    separate(model, "", None)


def _twin(module: nn.Module) -> nn.Module:
    """A copy of a module with the same parameters, buffers, hooks and other attributes."""
    twin = type(module).__new__(type(module))
    twin.__dict__.update(vars(module))
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        twin.__dict__[name] = vars(module)[name].copy()
    twin.__dict__["_modules"] = {name: child and _twin(child) for name, child in module._modules.items()}
    return twin


def traced_units(
    model: nn.Module, inputs: Mapping[str, Any] | None = None, shape_functions: type[ShapeFunctions] = ShapeFunctions
) -> tuple[list[str], Trace, ShapeFunctions, Mapping[str, Any]]:
    """The units, the trace they were found with, its shape functions, and its inputs."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model is needed to list its units, not a {type(model).__name__}")
    failures = []
    given = known_of(model).example_inputs if inputs is None else inputs
    if given is not None:
        refuse_arguments(model, given)
    for arguments in dummy_inputs(model) if inputs is None else (inputs,):
        if inputs is None:
            arguments = without_cache(model, _on_device_of(model, arguments))
        try:
            return *_units_for(model, arguments, shape_functions), arguments
        except (Untraceable, NotImplementedError) as error:
            failures.append(error)
    # What the likeliest inputs led to says most, unless others led further.
    failure = max(failures, key=lambda failure: getattr(failure, "num_calls", 0))
    of_models_code = failure.__cause__ is not None
    if given is None and not isinstance(model, PreTrainedModel) and of_models_code:
        raise InputsNeeded(model, str(failure)) from failure
    raise refusal(model, str(failure)) from failure


def _units_for(
    model: nn.Module, arguments: Mapping[str, Any], shape_functions: type[ShapeFunctions]
) -> tuple[list[str], Trace, ShapeFunctions]:
    """The units in forward order, a forward on `arguments` with them, and their shape functions."""
    units = _apart(model, _Candidates(model).found)
    if not units:
        raise Untraceable(
            "it has no modules that follow one another: make blocks of its layers, in an nn.ModuleList or nn.Sequential"
        )
    tried = set[tuple[str, ...]]()
    for _ in range(MAX_CORRECTIONS):
        tried.add(tuple(units))
        inner_calls: dict[str, set[str]] = {name: set() for name in units}
        try:
            functions = shape_functions({name: model.get_submodule(name) for name in units}, model)
            traced = trace_units(model, functions, arguments, inner_calls)
        except ReachedInside as leak:
            units = _apart(model, _divided(model, units, leak.tensor, inner_calls))
            continue
        except UnitInAutogradFunction as enclosed:
            units = _joined(model, units, enclosed, tried)
            continue
        except ChangedBuffer as changed:  # by a module without parameters, called as a whole: it belongs on one stage
            if changed.module in ("", *units) or _has_parameters(model.get_submodule(changed.module)):
                raise
            units.append(changed.module)
            continue
        called = {call.unit for call in traced.calls}
        called_inside_only = [unit for unit in units if unit not in called and inner_calls[unit]]
        if not called_inside_only:
            return _ordered(model, units, traced, arguments), traced, functions
        units = _apart(
            model, [p for unit in units for p in (_parts(model, unit) if unit in called_inside_only else [unit])]
        )
    raise Untraceable(
        "no modules were found that its forward calls as a whole"
        ": let it call its blocks themselves (block(x)), and not what is inside of them"
    )


def trace_units(
    model: nn.Module,
    functions: ShapeFunctions,
    inputs: Mapping[str, Any],
    inner_calls: Mapping[str, set[str]] | None = None,
    head: str | None = None,
) -> Trace:
    """A trace with the units that have these shape functions. They are intercepted only meanwhile.

    Args:
        inner_calls: takes up, for each unit, the names of the modules inside it that the model's code calls directly.
        head: the unit whose logits only a loss over chunks of tokens may use.
    """
    interceptor = Interceptor()
    with ExitStack() as undo:
        for name, calls in (inner_calls or {}).items():
            for inner, child in functions.units[name].named_modules(prefix=name):
                if inner != name:
                    note = lambda *_, calls=calls, inner=inner: calls.add(inner)  # noqa: E731
                    undo.enter_context(child.register_forward_pre_hook(note))
        undo.enter_context(interceptor.installed(functions.units))
        return trace(model, functions, interceptor, inputs, head=head)


class _Candidates:
    """Looks for units in a model, in its order: entries of module lists, and modules with parameters beside them."""

    def __init__(self, model: nn.Module) -> None:
        self.found: list[str] = []
        self._sequences = _sequences(model, _is_sequence(model))
        # A module under several names is one unit, under the first of them.
        self._seen: set[nn.Module] = set()
        self._uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
        self._blocks = getattr(model, "_no_split_modules", None) or {
            name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()
        }
        self._descend("", model)

    def _descend(self, prefix: str, module: nn.Module) -> None:
        for name, child in module._modules.items():
            full = f"{prefix}.{name}" if prefix else name
            if child is None or child in self._seen:
                continue
            self._seen.add(child)
            in_list = self._is_block_list(child) or self._is_block_list(module)
            if not _has_parameters(child) and not (in_list and _has_saved_buffers(child)):
                # An activation between two layers: as a unit, it runs on one stage, and not again on those after it.
                if module in self._sequences and self._uses[child] == 1:
                    self.found.append(full)
            elif is_adapter_layer(child):  # in one piece, as merging adapters takes all its weights
                self.found.append(full)
            elif self._is_block_list(child):
                self._descend(full, child)
            elif self._is_block(child) or not self._holds_blocks(child, self._is_block_list(module)):
                self.found.append(full)
            else:
                self._descend(full, child)

    def _holds_blocks(self, module: nn.Module, in_list: bool) -> bool:
        """Whether to look for units inside a module. A list inside an entry of a list is no list of blocks (experts,
        heads), unless transformers names its entries."""
        inner = list(modules_inside(module))
        lists = list(filter(self._is_block_list, inner))
        if in_list and not any(entries in self._sequences for entries in lists):
            return any(self._is_block(entry) for entries in lists for entry in entries.children())
        return bool(lists) or any(map(self._is_block, inner))

    def _is_block_list(self, module: nn.Module) -> bool:
        return (isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 0) or module in self._sequences

    def _is_block(self, module: nn.Module) -> bool:
        """Whether transformers says that modules of this class must stay in one piece."""
        return type(module).__name__ in self._blocks


def _sequences(module: nn.Module, is_list: bool, in_list: bool = False) -> set[nn.Module]:
    """The `nn.Sequential`s at and below `module` that are lists of blocks, as it is itself if `is_list`. transformers'
    own code has none. Inside an entry of a list (`in_list`), where a block may have a Sequential of its layers, they
    are those that repeat a module of several layers, as the stages of a convolutional network do."""
    sequences = {module} if is_list else set()
    if type(module).__module__.startswith("transformers."):
        return sequences
    in_list = in_list or is_list or isinstance(module, (nn.ModuleList, nn.ModuleDict))
    for child in module.children():
        sequences |= _sequences(child, _is_sequence(child) and (not in_list or _repeats(child)), in_list)
    return sequences


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and len(module) > 0


def _repeats(sequence: nn.Module) -> bool:
    kinds = [type(entry) for entry in sequence.children() if next(entry.children(), None) is not None]
    return len(kinds) > 1 and len(set(kinds)) == 1 and len(kinds) == len(list(sequence.children()))


def bare_modules(model: nn.Module, units: Collection[str]) -> set[str]:
    """The names of modules beside the units that have no parameters, such as a dropout: no stage has to hold them."""
    return {
        name for name, module in model.named_modules() if not _has_parameters(module) and unit_of(name, units) is None
    }


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_saved_buffers(module: nn.Module) -> bool:
    """Whether a checkpoint has something of a module's although it may have no parameters: blocks that are not trained
    may keep their weights so."""
    return any(
        name not in part._non_persistent_buffers_set
        for part in module.modules()
        for name, _ in part.named_buffers(recurse=False)
    )


def _parts(model: nn.Module, unit: str) -> list[str]:
    """The children of a unit that hold parameters."""
    return [f"{unit}.{name}" for name, child in model.get_submodule(unit).named_children() if _has_parameters(child)]


def _apart(model: nn.Module, units: list[str]) -> list[str]:
    """`units` without those that are parts of others under a second name, and each once."""
    modules = {unit: model.get_submodule(unit) for unit in units}
    inside = {part for module in modules.values() for part in module.modules() if part is not module}
    first: dict[nn.Module, str] = {}
    for unit, module in modules.items():
        if module not in inside:
            first.setdefault(module, unit)
    return list(first.values())


def _divided(model: nn.Module, units: list[str], tensor: str, inner_calls: Mapping[str, set[str]]) -> list[str]:
    """The units with one of them divided: the model's code used its `tensor` without calling it. If the code called a
    module inside this unit that has the tensor, the unit's parts become units. Otherwise the code read the tensor
    itself, which then must be outside of units, on every stage; small as a rule: a buffer of positions beside an
    embedding."""
    kept = []
    for unit in units:
        if not tensor.startswith(f"{unit}."):
            kept.append(unit)
        elif any(tensor.startswith(f"{inner}.") for inner in inner_calls.get(unit, ())):
            kept += _parts(model, unit)
        else:
            kept += _divided(model, _parts(model, unit), tensor, {})
    return kept


def _joined(
    model: nn.Module, units: list[str], enclosed: UnitInAutogradFunction, tried: Collection[tuple[str, ...]]
) -> list[str]:
    """Joins the units inside the module of an autograd function (`enclosed.module`), where no boundary can be, into one
    unit: the module. If that was tried before, leaves the module out: the model's code uses a tensor in it, which then
    is on every stage."""
    whole = next((name for name, module in model.named_modules() if module is enclosed.module), "")
    inside = [unit for unit in units if unit.startswith(f"{whole}.")]
    if not whole or not inside or len(units) - len(inside) < 1:
        raise Untraceable(str(enclosed))
    joined = [whole if unit == inside[0] else unit for unit in units if unit == inside[0] or unit not in inside]
    return [unit for unit in joined if unit != whole] if tuple(joined) in tried else joined


def _ordered(model: nn.Module, units: list[str], traced: Trace, arguments: Mapping[str, Any]) -> list[str]:
    """Units by their first call; one that is never called stands before the unit that is defined after it. If the trace
    had no images or sounds, although the model takes some, units that were not called are for these, and stand before
    the first block at the latest: what they compute goes into its input."""
    first: dict[str, int] = {}
    for position, call in enumerate(traced.calls):
        first.setdefault(call.unit, position)
    blocks = [position for unit, position in first.items() if unit.rpartition(".")[2].isdigit()]
    media = [*filter(inspect.signature(model.forward).parameters.__contains__, MEDIA)]
    latest = min(blocks) if blocks and media and not any(name in arguments for name in media) else len(traced.calls)
    following = len(traced.calls)
    place: dict[str, tuple[int, int]] = {}
    for index in range(len(units) - 1, -1, -1):
        unit = units[index]
        if unit in first:
            following = first[unit]
            place[unit] = (following, len(units))
        else:
            place[unit] = (min(following, latest), index)
    return sorted(units, key=place.__getitem__)


def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a forward as in training, which keeps no keys and values."""
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False, **inputs} if has_cache else dict(inputs)


def _on_device_of(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    device = next((tensor.device for tensor in model.parameters() if not tensor.is_meta), torch.device("cpu"))
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}

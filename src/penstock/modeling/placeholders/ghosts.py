"""Ghosts: modules without storage that stand where another stage's unit stands.

A ghost keeps its class, its children and its Python attributes. Its parameters and buffers have left the module's
registries, so it contributes nothing to `parameters()`, `state_dict()` or an optimizer; a plain meta tensor stays
under each name, so that model code may still ask for `module.weight.dtype` or `.shape`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from penstock.modeling.instrumentation import Absent, OnAnotherStage, absent_of, known_of, on_another_stage, record_of


def strip(module: nn.Module, kept_modules: Collection[nn.Module] = ()) -> None:
    """Turn `module` and everything below it into a ghost, in place, but for `kept_modules`, which are also parts of
    others; `restore` is the way back. Parameters that are not packed are left alone: whoever still holds one (an
    optimizer, a tied holder) keeps it whole."""
    for child in module.modules():
        if child in kept_modules:
            continue
        record = record_of(child)
        absent = record.absent = record.absent or {}
        for registry, kind in ((child._parameters, "parameter"), (child._buffers, "buffer")):
            for name, tensor in list(registry.items()):
                temporary = kind == "buffer" and name in child._non_persistent_buffers_set
                del registry[name]
                # Straight into __dict__, whatever __setattr__ a class has. A later assignment of a Parameter under this
                # name still registers it and removes this entry.
                placeholder = child.__dict__[name] = None if tensor is None else tensor.detach().to("meta")
                kept = tensor if kind == "parameter" else placeholder
                if record.packed is not None and isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter:
                    record.packed.release(tensor)
                    kept = nn.Parameter(torch.empty(0, dtype=tensor.dtype, device=tensor.device), requires_grad=False)
                if temporary and tensor is not None and not tensor.is_meta:
                    kept = tensor.detach().cpu()
                absent[name] = Absent("temporary" if temporary else kind, kept)
        if record.packed is not None:
            record.packed.release(child)
        child._non_persistent_buffers_set = set()
        # transformers must not try to initialise what is no longer there.
        child.__dict__["_is_hf_initialized"] = True


def restore(module: nn.Module, device: torch.device) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Register again what `strip` took out of `module`: the same parameters, under the same names. Buffers come without
    values, but for temporary ones; parameters as they are, which may be without storage.

    Gives for each tensor that may lack its values its name relative to `module`, itself, and for a parameter a meta
    tensor of its shape."""
    for prefix, child in module.named_modules():
        lacked, known_of(child).absent = absent_of(child), None
        for name, absent in lacked.items():
            placeholder, tensor = vars(child).pop(name, None), absent.tensor
            if name in child._parameters or name in child._buffers:  # something else was put there
                continue
            full = f"{prefix}.{name}" if prefix else name
            if absent.kind == "parameter":
                child._parameters[name] = cast(Any, tensor)
                if tensor is not None:
                    yield full, tensor, placeholder
                continue
            if absent.kind == "temporary":
                child._non_persistent_buffers_set.add(name)
            lacking = tensor is not None and tensor.is_meta
            if tensor is not None:
                tensor = torch.empty_like(tensor, device=device) if lacking else tensor.to(device)
            child._buffers[name] = tensor
            if lacking and tensor is not None:
                yield full, tensor, None


def absent_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that `strip` took out of `module` and the modules below it, with their names relative to it."""
    for prefix, child in module.named_modules():
        for name, absent in absent_of(child).items():
            if isinstance(absent.tensor, nn.Parameter):
                yield (f"{prefix}.{name}" if prefix else name), absent.tensor


def make_absent_real(model: nn.Module, device: torch.device) -> None:
    """Put parameters on `device`, without storage, in the place of absent ones on the meta device, as a model has that
    was made for one stage. They could not be given storage on a real device."""
    held = set(model.parameters())
    made: dict[nn.Parameter, nn.Parameter] = {}

    def real(parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta and parameter not in held and parameter not in made:
            empty = torch.empty(0, dtype=parameter.dtype, device=device)
            made[parameter] = nn.Parameter(empty, parameter.requires_grad)
        return made.get(parameter, parameter)

    replace_parameters(model, real)


def replace_parameters(model: nn.Module, replacement: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put other parameters in the place of some, wherever they are held or lacked: what was tied stays tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replacement(parameter)
        for absent in absent_of(module).values():
            if isinstance(absent.tensor, nn.Parameter):
                absent.tensor = replacement(absent.tensor)


def guard_ghosts(model: nn.Module, active: Callable[[], bool], device: Callable[[], torch.device]) -> None:
    """Let ghosts answer the model's own code while `active()` (a forward is run or traced), and refuse other calls.

    Model code asks `next(self.encoder.parameters()).dtype`: then `parameters()` of a module that has none left gives a
    placeholder for each, of no storage to speak of, on `device()`; to everybody else none, as before. Calls
    of `forward`, and of what is inside of units, are refused; the units themselves are intercepted."""

    def parameters(module: nn.Module, recurse: bool = True) -> Iterator[torch.Tensor]:
        if active():
            for _, tensor in stripped_tensors(module):
                yield torch.zeros((), dtype=tensor.dtype, device=device()).expand(tensor.shape)
        else:
            yield from type(module).parameters(module, recurse)

    def forward(name: str, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not active():
            raise OnAnotherStage(on_another_stage(name))
        return _own_forward(module, *args, **kwargs)

    for name, module in model.named_modules():
        for method in ("parameters", "forward"):
            if isinstance(vars(module).get(method), OwnMethod):
                del module.__dict__[method]
        if next(stripped_tensors(module), None) is None:
            continue
        if next(module.parameters(), None) is None:
            module.__dict__["parameters"] = OwnMethod(parameters, module, nn.Module.parameters)
        if is_ghost(module) and "forward" not in vars(module):
            module.__dict__["forward"] = OwnMethod(partial(forward, name), module, _own_forward)


class OwnMethod:
    """A method of one module alone. A copy or a pickle of the module has its class's `own`."""

    def __init__(self, function: Callable[..., Any], module: nn.Module, own: Callable[..., Any]) -> None:
        self._function, self._module, self._own = function, module, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module, *args, **kwargs)

    def __reduce__(self) -> Any:
        return partial, (self._own, self._module)


def _own_forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def is_ghost(module: nn.Module) -> bool:
    """Whether `module` is a ghost, itself or as a part of one."""
    return known_of(module).absent is not None


def stripped_tensors(module: nn.Module, kind: str = "parameter") -> Iterator[tuple[str, torch.Tensor]]:
    """Names, relative to `module`, and meta tensors of what of a kind (see `Absent`) `strip` took out of it."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, absent in absent_of(child).items():
            held = name in child._parameters or name in child._buffers
            if absent.kind == kind and absent.tensor is not None and not held:
                yield (f"{prefix}.{name}" if prefix else name), vars(child)[name]


@contextmanager
def shown_whole(model: nn.Module, themselves: bool = False) -> Iterator[None]:
    """Inside, the parameters and buffers of ghosts are in the model again, as meta tensors: for code that asks for
    names and shapes only, as `state_dict()`. With `themselves`, parameters as they are, maybe without storage."""
    with ExitStack() as undo:
        for child in model.modules():
            for name, absent in absent_of(child).items():
                tensor, registry = absent.tensor, cast(dict[str, Any], child._parameters)
                if absent.kind == "temporary" or tensor is None or name in registry or name in child._buffers:
                    continue
                if absent.kind == "parameter":
                    registry[name] = tensor if themselves else nn.Parameter(vars(child)[name], False)
                else:
                    registry = child._buffers
                    registry[name] = vars(child)[name]
                undo.callback(registry.pop, name)
            if is_ghost(child):
                undo.callback(setattr, known_of(child), "shown", False)
                known_of(child).shown = True
        yield


def all_parameter_names(model: nn.Module) -> list[str]:
    """Names of every parameter of the unsplit model, those of ghosts included, tied ones under each of their names."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names.update(name for name, _ in stripped_tensors(model))
    order: list[str] = []
    for prefix, child in model.named_modules(remove_duplicate=False):
        here = [*child._parameters, *absent_of(child)]
        order += [name for n in here if (name := f"{prefix}.{n}" if prefix else n) in names]
    return list(dict.fromkeys(order))


class _Memo(dict[int, Any]):
    """Of `deepcopy`: with what has no copy, unless it is `inside`."""

    def __init__(self, beside: Mapping[int, Any], inside: Collection[int]) -> None:
        super().__init__()
        self._beside, self._inside = beside, inside

    def get(self, key: int, default: Any = None) -> Any:
        found = super().get(key, _ABSENT)
        if found is _ABSENT:
            return default if key in self._inside else self._beside.get(key, default)
        return found


_ABSENT = object()


def meta_placeholder(module: nn.Module, beside: Mapping[int, Any] = MappingProxyType({})) -> nn.Module:
    """A copy of `module` whose tensors are all meta tensors, in eval mode; `module` is left alone and not copied.

    What is `beside`, by identity, is not copied, unless it is inside of the module. Forward hooks are not taken over,
    except those with which transformers collects side outputs (see `sync_capture_hooks`): a user's hook must see real
    values only.
    """
    memo = _Memo(beside, {id(child) for child in module.modules()})
    for child in module.modules():
        if (packed := known_of(child).packed) is not None:
            memo[id(child)] = packed.stand_in(child)
            continue
        absent = [each.tensor for each in absent_of(child).values()]
        for tensor in [*child._parameters.values(), *child._buffers.values(), *_loose_tensors(child), *absent]:
            if tensor is not None and id(tensor) not in memo:
                # Dense in place of sparse: hardly any operation on sparse tensors works without values.
                dense = tensor.layout is torch.strided
                meta = (
                    tensor.detach().to("meta", copy=True)  # else one that is there would have its own storage
                    if dense
                    else torch.empty_like(tensor, device="meta", layout=torch.strided)
                )
                if isinstance(tensor, nn.Parameter):
                    meta = nn.Parameter(meta, requires_grad=False)
                memo[id(tensor)] = meta
        for name, value in vars(child).items():
            # Hooks may hold the whole model in a closure or a bound method. A module has a dozen empty dictionaries for
            # them, and `deepcopy` takes long for each.
            if name in _HOOKS or (type(value) in (OrderedDict, dict, set) and not value):
                memo[id(value)] = type(value)()
            # One configuration for both, because some of it may be changed later (`set_attn_implementation`).
            elif isinstance(value, PretrainedConfig):
                memo[id(value)] = value
    made: nn.Module = copy.deepcopy(module, memo)
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    made.eval()  # returns nothing in some models that override `train`
    return made


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)


def sync_capture_hooks(module: nn.Module, placeholder: nn.Module) -> None:
    """Give `placeholder` the output-capturing hooks that transformers has put on `module` (it installs them lazily)."""
    for child, copied in zip(module.modules(), placeholder.modules(), strict=True):
        copied._forward_hooks.clear()
        for key, hook in child._forward_hooks.items():
            if getattr(hook, "__module__", None) == "transformers.utils.output_capturing":
                copied._forward_hooks[key] = hook


def _loose_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors held in plain attributes of one module, also inside lists, tuples and dictionaries."""
    stack: list[Any] = [value for name, value in vars(module).items() if not name.startswith("_")]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())

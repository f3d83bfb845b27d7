"""The unsplit model's weights, as a rank knows them that holds a part: names, ties, units, shapes, shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from penstock.modeling.instrumentation import known_of, record_of
from penstock.modeling.placeholders.ghosts import absent_parameters, all_parameter_names, is_ghost, shown_whole, strip
from penstock.modeling.sharding import Sharding, WeightSharding


def unit_of(name: str, units: Collection[str]) -> str | None:
    """The unit that a module or tensor of this name is, or is part of; None for one outside of all units."""
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name or None


def outside_of_units(model: nn.Module, homes: Container[str]) -> dict[str, nn.Module]:
    """The modules that every stage has, by name: the model itself, and what is neither a unit nor a part of one.
    `homes`: `names_in_units`."""
    return {name: module for name, module in model.named_modules() if name not in homes}


def names_in_units(model: nn.Module, units: Collection[str]) -> dict[str, str]:
    """For every name of a module that is a unit, or a part of one, its name in that unit. A module is itself and not
    its name: `self.last_norm = self.blocks[3].norm` is a part of `blocks.3`, wherever else it is registered."""
    inside: dict[nn.Module, str] = {}
    for unit in units:
        for name, module in model.get_submodule(unit).named_modules(prefix=unit):
            inside.setdefault(module, name)
    everywhere = model.named_modules(remove_duplicate=False)
    return {
        name: inside[module] if unit_of(name, units) is None else name
        for name, module in everywhere
        if module in inside
    }


def unit_with(tensor: str, homes: Mapping[str, str], units: Collection[str]) -> str | None:
    """The unit that holds the tensor of this name; None for one outside of all units. `homes`: `names_in_units`."""
    module = tensor.rpartition(".")[0]
    return unit_of(homes.get(module, module), units)


def refuse_common_memory(model: nn.Module, units: Collection[str]) -> None:
    """Raise NotImplementedError if trained parameters of different units are not one, but views of the same memory: an
    update of one is an update of the other, which no other stage would see."""
    homes = names_in_units(model, units)
    extents = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.layout is torch.strided and parameter.numel():
            start = int(parameter.storage_offset())
            reach = zip(parameter.shape, parameter.stride(), strict=True)
            end = start + sum((size - 1) * stride for size, stride in reach)
            extents.append((parameter.untyped_storage()._cdata, start, end, name))
    common = []
    for _, views in groupby(sorted(extents), key=itemgetter(0)):
        furthest: dict[str | None, tuple[int, str]] = {}  # of each unit, the parameter that ends last so far
        for _, start, end, name in views:
            unit = unit_with(name, homes, units)
            common += [
                sorted((name, other)) for where, (last, other) in furthest.items() if where != unit and start <= last
            ]
            furthest[unit] = max(furthest.get(unit, (end, name)), (end, name))
    if common:
        name, other = min(common)  # on all ranks the same
        raise NotImplementedError(
            f"{name} and {other} are two parameters with one memory, such as a weight and its transpose: stages would "
            "update them apart. Make them one parameter, or two with memory of their own (leave out PEFT's "
            "ensure_weight_tying)"
        )


def foreign_units(stages: Sequence[Sequence[str]], local_stages: Collection[int]) -> list[str]:
    return [unit for stage, units in enumerate(stages) if stage not in local_stages for unit in units]


def held_names(names: Iterable[str], stages: Sequence[Sequence[str]], local_stages: Collection[int]) -> set[str]:
    """Those of `names` that a rank with `local_stages` holds: in its own units, or in no unit at all."""
    foreign = set(foreign_units(stages, local_stages))
    return {name for name in names if unit_of(name, foreign) is None}


def strip_foreign(model: nn.Module, stages: Sequence[Sequence[str]], local_stages: Collection[int]) -> None:
    """Turn the units of other stages into ghosts."""
    local = (unit for stage in local_stages for unit in stages[stage])
    kept = {part for unit in local for part in model.get_submodule(unit).modules()}
    for unit in foreign_units(stages, local_stages):
        strip(model.get_submodule(unit), kept)


def stage_sizes(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[int]:
    """For each stage the elements of the parameters it holds: those of its units, and those outside of all units. A
    tied weight counts once on each stage that holds it, so the sum may exceed the model's size."""
    units = {unit: stage for stage, names in enumerate(stages) for unit in names}
    homes, everywhere = names_in_units(model, units), range(len(stages))
    held: list[set[nn.Parameter]] = [set() for _ in stages]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = unit_with(name, homes, units)
        for stage in everywhere if unit is None else (units[unit],):
            held[stage].add(parameter)
    return [sum(parameter.numel() for parameter in parameters) for parameters in held]


def alias_groups(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of the unsplit model's parameters, those that are one and the same parameter together. Identity decides;
    where a name belongs to a ghost, transformers' own list of ties, as the parameter is not there."""
    here = dict(model.named_parameters(remove_duplicate=False))
    keys = {name: id(here[name]) if name in here else name for name in all_parameter_names(model)}
    has_ghosts = any(is_ghost(module) for module in model.modules())
    for target, source in ties_of(model).items() if has_ghosts else ():
        if target in keys and source in keys and not (target in here and source in here):
            merged, into = keys[target], keys[source]
            keys = {name: into if key == merged else key for name, key in keys.items()}
    return _grouped(keys)


def alias_groups_by_identity(model: nn.Module) -> list[tuple[str, ...]]:
    """`alias_groups` of a model that was split here: what its ghosts lack are the parameters themselves."""
    held: dict[str, nn.Parameter] = dict(absent_parameters(model))
    held.update(model.named_parameters(remove_duplicate=False))
    return _grouped({name: id(held[name]) for name in all_parameter_names(model)})


def _grouped(keys: Mapping[str, int | str]) -> list[tuple[str, ...]]:
    """Names by their keys, in order."""
    groups: dict[int | str, list[str]] = {}
    for name, key in keys.items():
        groups.setdefault(key, []).append(name)
    return [tuple(group) for group in groups.values()]


def ties_of(model: nn.Module) -> Mapping[str, str]:
    """`{target: source}` of the names that transformers ties in this model."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The unsplit model's `state_dict`; what other ranks hold stands there as meta tensors, plain data as None."""
    with shown_whole(model):
        return dict(model.state_dict())


def packed_weights(model: nn.Module) -> dict[str, int]:
    """How many numbers each packed weight of the unsplit model has, by name: its tensor has fewer."""
    modules = model.named_modules()
    packed = ((name, layer) for name, each in modules if (layer := known_of(each).packed) is not None)
    return {f"{name}.{layer.parameter}": layer.num_weights for name, layer in packed}


def sharding_in(model: nn.Module) -> WeightSharding | None:
    """How the weights of a tensor-parallel model are sharded; None for any other model."""
    return known_of(model).tensor_parallel


def shards_of(model: nn.Module) -> Mapping[str, Sharding]:
    """How the parameters of a tensor-parallel model are sharded, by their names; nothing for any other model."""
    sharding = sharding_in(model)
    return {} if sharding is None else sharding.shards


def tensor_parallel_place(model: nn.Module) -> tuple[int, int]:
    """This rank's index among the ranks that hold shards of the same stage, and their number."""
    sharding = sharding_in(model)
    return (0, 1) if sharding is None else (sharding.index, sharding.size)


def whole_shape(model: nn.Module, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The unsplit model's shape of a tensor of `whole_state(model)`; this rank may have a slice of it."""
    sharding = sharding_in(model)
    return tuple(tensor.shape) if sharding is None else sharding.whole_shape(name, tensor.shape)


def leave_shards(model: nn.Module, shard_of: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Leave the shards that `shard_of` has of a model's meta tensors of whole shape for `WeightSharding.apply`."""
    parameters = model.named_parameters(remove_duplicate=False)
    record_of(model).shards = {name: part for name, each in parameters if (part := shard_of(each)) is not None}


def take_shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `leave_shards` left, by name."""
    record = known_of(model)
    shards, record.shards = record.shards, {}
    return shards

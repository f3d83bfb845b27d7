"""An optimizer's state by the names of the unsplit model's parameters, so that any layout can take it up again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.checkpoint.manifest import SEPARATOR, Manifest
from penstock.checkpoint.reader import Resharding, sharding_in_manifest
from penstock.checkpoint.tensors import first_of_tied, tied_groups
from penstock.checkpoint.untrusted import CheckpointError, CheckpointMismatch
from penstock.modeling.instrumentation import known_of
from penstock.modeling.weights.whole import shards_of, tensor_parallel_place, whole_shape


@dataclass
class OptimizerState:
    """What one rank's optimizer holds for the parameters of this rank: of each group the settings, and the names of its
    parameters; of each of these the states that are no tensors; and the tensors by `<parameter>//<state>`."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    members: list[list[str]] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def logical_names(model: nn.Module) -> dict[int, str]:
    """For each parameter of this rank, by its `id`, one name that is the same on every rank that holds it: of a tied
    weight's names the alphabetically first."""
    first = first_of_tied(tied_groups(model))
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), first.get(name, name))
    return names


def keeps_state(model: nn.Module) -> Callable[[torch.Tensor], bool]:
    """Tells whether this rank keeps the state of a parameter: with a sharded optimizer not each of its holders does."""
    engine = known_of(model).engine
    held = () if engine is None else engine.held
    others = {id(weight.parameter) for weight in held if weight.owners and engine.rank not in weight.owners}
    return lambda parameter: id(parameter) not in others


def written_elsewhere(model: nn.Module, collected: OptimizerState) -> OptimizerState:
    """What a rank of another pipeline than the first holds, no rank of the first keeps, and so this one writes; and
    all its groups."""
    engine = known_of(model).engine
    held, first = ((), set()) if engine is None else (engine.held, set(engine.layout.pipelines[0].ranks()))
    index = 0 if engine is None else engine.place.tensor_parallel_rank
    alone = [
        weight
        for weight in held
        if weight.owners and first.isdisjoint(weight.owners) and weight.counted_by(engine.rank, index)
    ]
    names = logical_names(model)
    mine = {names[id(weight.parameter)] for weight in alone}
    return OptimizerState(
        groups=collected.groups,
        values={name: state for name, state in collected.values.items() if name in mine},
        tensors={name: tensor for name, tensor in collected.tensors.items() if name.partition(SEPARATOR)[0] in mine},
    )


def parameters_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer that this rank holds, by their logical names, in the optimizer's order."""
    names = logical_names(model)
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {names[id(parameter)]: parameter for parameter in every if id(parameter) in names}


def collect_optimizer(model: nn.Module, optimizer: Optimizer) -> OptimizerState:
    """Read an optimizer's state. Raises CheckpointError for a state that cannot be saved, and as `names_in_groups`."""
    state = OptimizerState(members=names_in_groups(model, optimizer))
    for group in optimizer.param_groups:
        state.groups.append({key: value for key, value in group.items() if key not in ("params", "param_names")})
    for name, parameter in parameters_by_name(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state.tensors[f"{name}{SEPARATOR}{key}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                state.values.setdefault(name, {})[key] = value
            else:
                kind = type(value).__name__
                raise CheckpointError(
                    f"cannot save state {key!r} of {name}: it is a {kind}, no tensor or number"
                    ". Take an optimizer whose state is of these"
                )
    return state


def names_in_groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The logical names of the parameters in each of an optimizer's groups that this rank holds; those of other stages
    were emptied when the model was split. Raises CheckpointMismatch for a parameter that is not the model's."""
    names, stand_in = logical_names(model), known_of(model).stand_in
    members: list[list[str]] = []
    for group in optimizer.param_groups:
        members.append([])
        for parameter in group["params"]:
            if (name := names.get(id(parameter))) is not None:
                members[-1].append(name)
            elif parameter.numel() and parameter is not stand_in:
                raise CheckpointMismatch(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not the model's"
                    ": make the optimizer of model.parameters() alone"
                )
    return members


def described_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups, to compare: numbers, and texts of all else; without a rate that a
    scheduler makes of another setting, or that Adafactor does not use."""
    return [
        {
            key: value if type(value) in (int, float) else str(getattr(value, "tolist", lambda value=value: value)())
            for key, value in group.items()
            if key != "lr" or not ("initial_lr" in group or group.get("relative_step"))
        }
        for group in groups
    ]


def refuse_unlike_groups(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Raise CheckpointMismatch if ranks have other groups than the first: a checkpoint has the settings of its groups,
    and one state of a scheduler, for all ranks. What some ranks alone have is no difference: an optimizer may set it
    where a group has parameters, as DeepSpeed's does its number of steps. `by_rank`: see `described_groups`."""
    first = by_rank[0]
    for rank, groups in enumerate(by_rank):
        if len(groups) != len(first):
            found = f"rank 0 has {len(first)}, rank {rank} has {len(groups)}"
        else:
            unlike = [
                f"in group {number} rank 0 has {key}={theirs[key]}, rank {rank} has {key}={mine[key]}"
                for number, (theirs, mine) in enumerate(zip(first, groups, strict=True))
                for key in theirs.keys() & mine.keys()
                if str(theirs[key]) != str(mine[key])
            ]
            if not unlike:
                continue
            found = unlike[0]
        raise CheckpointMismatch(
            f"the optimizers' parameter groups differ: {found}. A checkpoint has one list of groups for all ranks: "
            "make the same groups on every rank, in this order, with an empty list where a rank has no such parameters"
        )


def completed_groups(
    groups: Sequence[Mapping[str, Any]], by_rank: Iterable[Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """An optimizer's groups with the numbers that it has on other ranks alone; see `refuse_unlike_groups`."""
    completed = [dict(group) for group in groups]
    for theirs in by_rank:
        for group, settings in zip(completed, theirs, strict=False):
            numbers = {key: value for key, value in settings.items() if isinstance(value, (int, float))}
            group.update({key: value for key, value in numbers.items() if key not in group})
    return completed


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    whole: OptimizerState,
    tensors: Iterable[tuple[str, torch.Tensor]],
    kind: str,
) -> None:
    """Give an optimizer the state saved for the parameters of this rank, through its own `load_state_dict`. `whole` is
    of the whole model, without tensors; `tensors`, of this rank's, are copied one by one. Raises CheckpointError if the
    parameter groups are not those that were saved, by an optimizer of the class `kind`."""
    names, parameters, keeps = logical_names(model), parameters_by_name(model, optimizer), keeps_state(model)
    group_of = {name: number for number, group in enumerate(whole.members) for name in group}
    if len(whole.groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the saved one had {len(whole.groups)}"
            ": make it with the groups of the saved one, or load without it"
        )
    states: dict[str, dict[str, Any]] = {name: dict(state) for name, state in whole.values.items()}
    for key, tensor in tensors:
        name, _, state = key.partition(SEPARATOR)
        # A copy: the optimizer writes into it, and the file's pages should be given back.
        states.setdefault(name, {})[state] = _laid_out_like(parameters.get(name), tensor)
    content: dict[str, Any] = {"state": {}, "param_groups": []}
    index = 0
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, whole.groups, strict=True)):
        indices = []
        for parameter in group["params"]:
            logical = names.get(id(parameter))
            if logical is not None:
                if group_of.get(logical) != number:
                    where = f"in group {group_of[logical]}" if logical in group_of else "in none"
                    raise CheckpointError(
                        f"{logical} is in group {number} of the optimizer, but was {where} when saved"
                        ": make it with the groups of the saved one, or load without it"
                    )
                if logical in states and keeps(parameter):
                    content["state"][index] = states[logical]
            indices.append(index)
            index += 1
        _check_settings(number, saved, group, f"{kind}, but the optimizer here is {type(optimizer).__name__}")
        content["param_groups"].append({**saved, "params": indices})
    optimizer.load_state_dict(content)


def _laid_out_like(parameter: torch.Tensor | None, saved: torch.Tensor) -> torch.Tensor:
    """A copy of a saved state, in the strides in which the optimizer itself would have made it."""
    if parameter is None or parameter.shape != saved.shape:
        return saved.clone()
    return torch.empty_like(parameter, dtype=saved.dtype, device=saved.device, requires_grad=False).copy_(saved)


def _check_settings(number: int, saved: Mapping[str, Any], here: Mapping[str, Any], kinds: str) -> None:
    """Check that a saved group has a number where the optimizer has one, and as many values where it has several."""
    for key, value in here.items():
        there = saved.get(key)
        if _is_number(value):
            fits, expected = _is_number(there), "a number"
        elif isinstance(value, tuple):
            fits = isinstance(there, (tuple, list)) and len(there) == len(value)
            expected = f"{len(value)} values"
        else:
            continue
        if not fits:
            has = f"{key} is {there!r:.80}" if key in saved else f"there is no {key!r}"
            raise CheckpointError(
                f"the saved state is that of {kinds}, which it does not fit: in its group {number} {has}, expected "
                f"{expected}, as {value} here. Make the optimizer that was saved, or load without one"
            )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def reshardings_of(
    model: nn.Module, optimizer: Optimizer, manifest: Manifest, saved_shapes: Mapping[str, Sequence[int]]
) -> dict[str, Resharding]:
    """The saved state tensors of this rank's parameters, and how they are sharded: as the parameter if of its shape.
    `saved_shapes` are those of the first tensor-parallel rank of the saving run. Raises CheckpointError if a state of
    another shape, and of several numbers, belongs to a parameter that is sharded otherwise than it was."""
    parameters, held, (_, size) = parameters_by_name(model, optimizer), shards_of(model), tensor_parallel_place(model)
    reshardings: dict[str, Resharding] = {}
    keeps = keeps_state(model)
    for key, shape in saved_shapes.items():
        name = key.partition(SEPARATOR)[0]
        if name not in parameters or not keeps(parameters[name]):
            continue
        whole = whole_shape(model, name, parameters[name])
        sharding = Resharding(
            sharding_in_manifest(manifest, name, whole, manifest.tensor_parallel_size), held.get(name)
        )
        part = whole if sharding.saved is None else tuple(sharding.saved.shape(whole, manifest.tensor_parallel_size))
        if tuple(shape) == part:
            reshardings[key] = sharding
        elif math.prod(shape) == 1:  # a count of steps
            reshardings[key] = Resharding()
        elif sharding == Resharding() or (sharding.saved == sharding.wanted and manifest.tensor_parallel_size == size):
            reshardings[key] = sharding
        else:
            raise CheckpointMismatch(
                f"cannot shard the state {key} for tensor_parallel_size {size}: it was saved with "
                f"{manifest.tensor_parallel_size} and the shape {list(shape)}, where the parameter has {list(part)}"
                f". Resume with tensor_parallel_size {manifest.tensor_parallel_size}, or load without the optimizer"
            )
    return reshardings

"""Gradients that a run holds in the middle of an accumulation, which a checkpoint takes along.

A parameter that several ranks hold has either the sum of its gradient on all of them, which is written once, or, after
steps under `no_sync`, on each of them a part of it. Then each rank writes its part under a name of its own, those of
other pipelines too. Where all that had a part hold the parameter again, each goes on with its own, bit for bit. On any
other layout all holders get the sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from .optimizer_state import SEPARATOR, parameters_by_name
from .untrusted import CheckpointError

# In the files of the optimizer, beside its states: `<parameter>//.gradient`, or with the place of the rank whose part
# it is, `<parameter>//.gradient.<pipeline>.<pipeline rank>`.
_GRADIENT = re.compile(r"\.gradient(?:\.([0-9]{1,6})\.([0-9]{1,6}))?", re.ASCII)

# A pipeline, and a pipeline rank in it.
Place = tuple[int, int]


@dataclass(frozen=True)
class GradientKeeper:
    """How a rank's gradients stand.

    By default as in a single process, which cannot know whether gradients were used already: they are saved if there
    are any.

    Attributes:
        pending: whether there may be gradients that no step of the optimizer has used.
        is_part: whether other ranks hold a parameter too, and its gradient is not summed over them yet.
        note: is told which parameters were given gradients that are summed over all holders, and which parts of such.
    """

    pending: Callable[[], bool] = lambda: True
    is_part: Callable[[torch.Tensor], bool] = lambda parameter: False
    note: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = lambda whole, parts: None


def is_gradient(key: str) -> bool:
    """Whether this is the name of a gradient, rather than of an optimizer's state."""
    return SEPARATOR in key and key.rpartition(SEPARATOR)[2].startswith(".gradient")


def is_part(key: str) -> bool:
    """Whether this is the name of one rank's part of a gradient."""
    return is_gradient(key) and _place_of(key) is not None


def collect_gradients(
    model: nn.Module, optimizer: Optimizer, keeper: GradientKeeper, place: Place
) -> dict[str, torch.Tensor]:
    """This rank's gradients that are pending, of the optimizer's parameters, by their names in a file.

    Raises:
        CheckpointError: one of them is no dense tensor.
    """
    found: dict[str, torch.Tensor] = {}
    if not keeper.pending():
        return found
    where = ".".join(map(str, place))
    for name, parameter in parameters_by_name(model, optimizer).items():
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided or gradient.is_quantized:
            raise CheckpointError(
                f"cannot save the gradient of {name} in the middle of an accumulation: it is {gradient.layout}, not "
                "dense; save after optimizer.step() and zero_grad()"
            )
        part = f".{where}" if keeper.is_part(parameter) else ""
        found[f"{name}{SEPARATOR}.gradient{part}"] = gradient.detach()
    return found


def restore_gradients(
    model: nn.Module,
    optimizer: Optimizer,
    keeper: GradientKeeper,
    place: Place,
    holders: Mapping[str, Collection[Place]],
    keys: Iterable[str],
    read: Callable[[str], torch.Tensor],
) -> Callable[[], None]:
    """Give the parameters of this rank the gradients that were saved, or none.

    Args:
        place: this rank's.
        holders: of each parameter the places of the ranks that hold it now.
        keys: names of what was saved for the parameters of this rank.
        read: a tensor as this rank holds it.

    Returns:
        what tells the keeper of it, to be called once everything is loaded on all ranks.

    Raises:
        CheckpointError: a gradient's name or shape does not fit.
    """
    saved: dict[str, dict[Place | None, str]] = {}
    for key in keys:
        saved.setdefault(key.partition(SEPARATOR)[0], {})[_place_of(key)] = key
    whole: list[torch.Tensor] = []
    with_parts: list[torch.Tensor] = []
    for name, parameter in parameters_by_name(model, optimizer).items():
        parts = saved.get(name, {})
        gradient: torch.Tensor | None = None
        if None not in parts and parts.keys() <= set(holders.get(name, ())):
            with_parts.append(parameter)
            if (own := parts.get(place)) is not None:
                gradient = torch.empty_like(parameter, requires_grad=False).copy_(_fitting(read(own), name, parameter))
        else:
            whole.append(parameter)
            gradient = torch.zeros_like(parameter, requires_grad=False)
            for key in sorted(parts.values()):  # in one order on all ranks
                gradient += _fitting(read(key), name, parameter).to(gradient)
        parameter.grad = gradient
    return partial(keeper.note, whole, with_parts)


def _place_of(key: str) -> Place | None:
    found = _GRADIENT.fullmatch(key.rpartition(SEPARATOR)[2])
    if found is None:
        raise CheckpointError(f"the checkpoint's table of contents is damaged: {key!r:.120} is not a gradient's name")
    return None if found[1] is None else (int(found[1]), int(found[2]))


def _fitting(gradient: torch.Tensor, name: str, parameter: torch.Tensor) -> torch.Tensor:
    if gradient.shape != parameter.shape:
        shapes = f"{list(gradient.shape)}, the parameter {list(parameter.shape)}"
        raise CheckpointError(f"the saved gradient of {name} does not fit: it has the shape {shapes}")
    return gradient

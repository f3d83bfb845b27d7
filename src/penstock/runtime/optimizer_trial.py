"""What an optimizer's update of a weight depends on, as it is seen on tiny weights.

A fresh optimizer of the same class and options takes a few steps on one, on that beside another, and on its halves. The
norm of all gradients is no dependence if torch's `clip_grad_norm_` or `get_total_norm` takes it: over stages it is that
of the whole model, which every rank must ask for, also one without gradients.

Only what these steps show is found: not what begins later, and nothing of an optimizer that draws random numbers, or
that cannot be made anew."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from types import CellType
from typing import Any

import torch
from torch.optim import optimizer as torchs
from torch.optim.optimizer import Optimizer

from penstock.modeling.collectives import OwnCollective, RefusedCollectives
from penstock.random_state import all_restored, generators_in_use

# Some optimizers begin to update in the second step.
NUM_STEPS = 3
SIZE = 4
# Two updates that differ by more than this, relative to the larger one, are not equal. Some compute in half precision.
TOLERANCE = 0.03
# Of what a group holds, what is no option of its optimizer.
_ADDED = ("params", "param_names", "initial_lr")


class Dependence(IntEnum):
    """What the update of one number of a weight depends on, besides its own gradients; the worst last."""

    NOTHING = 0
    MATRIX = 1  # on the rest of its weight
    PARAMETERS = 2  # on other weights
    RANKS = 3  # on what other ranks have


def dependence(optimizer: Optimizer, device: torch.device) -> Dependence:
    """What updates of `optimizer`, whose weights are on `device`, depend on, as far as its steps show it."""
    return max((_dependence(optimizer, group, device) for group in _kinds(optimizer)), default=Dependence.NOTHING)


def clips(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether steps of `optimizer` on `device` take the norm of all gradients by torch's functions, as far as they show
    it."""
    history, _ = _histories(device)
    with suppress(Exception), _apart():
        return any(_takes_norm(optimizer, group, history) for group in _kinds(optimizer))
    return False


def _dependence(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> Dependence:
    history, other = _histories(device)
    top, bottom = history.chunk(2, dim=1)
    left, right = history.chunk(2, dim=2)
    try:
        with _apart():
            (alone,), (again,) = _updates(optimizer, group, [history]), _updates(optimizer, group, [history])
            together, _ = _updates(optimizer, group, [history, other])
            rows = torch.cat(_updates(optimizer, group, [top, bottom]), dim=0)
            columns = torch.cat(_updates(optimizer, group, [left, right]), dim=1)
            # A rank whose weights have no gradients would let the others wait for it.
            asks_alike = not _takes_norm(optimizer, group, history) or _takes_norm(optimizer, group, history[:1])
    except OwnCollective:
        return Dependence.RANKS
    except _NormOfSome:
        return Dependence.PARAMETERS
    except Exception:  # whatever a class of the user's raises that cannot be made like this
        return Dependence.NOTHING
    if not asks_alike:
        return Dependence.PARAMETERS
    if not _nearly_equal(alone, again):  # it draws random numbers
        return Dependence.NOTHING
    if not _nearly_equal(alone, together):
        return Dependence.PARAMETERS
    return Dependence.NOTHING if _nearly_equal(alone, rows) and _nearly_equal(alone, columns) else Dependence.MATRIX


def _histories(device: torch.device) -> torch.Tensor:
    """Of two weights the values at first, and the gradients in each step."""
    random = torch.Generator().manual_seed(0)
    # Rows and columns are unlike, and so large that what limits a norm does it.
    scale = torch.arange(1, SIZE + 1, dtype=torch.float64)
    matrices = torch.randn(2 * (1 + NUM_STEPS), SIZE, SIZE, dtype=torch.float64, generator=random)
    return torch.stack((matrices * scale * scale.unsqueeze(1)).to(device).chunk(2))


def _updates(optimizer: Optimizer, group: Mapping[str, Any], histories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the steps of a fresh optimizer add to some weights. `histories`: of each the first value and the gradients
    of all steps."""
    weights = [torch.nn.Parameter(first.clone()) for first, *_ in histories]
    fresh = _like(optimizer, group, weights)
    for step in range(NUM_STEPS):
        for weight, history in zip(weights, histories, strict=True):
            weight.grad = history[1 + step].clone()
        with _norms_of(weights):
            fresh.step()
    return [weight.detach() - first for weight, (first, *_) in zip(weights, histories, strict=True)]


def _takes_norm(optimizer: Optimizer, group: Mapping[str, Any], history: torch.Tensor) -> bool:
    """Whether one of a few steps of a fresh optimizer takes the norm of all gradients by torch's functions. `history`:
    the first value of a weight, and its gradients in each step, if it gets any."""
    first, *gradients = history
    weight = torch.nn.Parameter(first.clone())
    fresh = _like(optimizer, group, [weight])
    for step in range(NUM_STEPS):
        weight.grad = gradients[step].clone() if gradients else None
        with _norms_of([weight]) as asked, suppress(Exception):  # some cannot do without gradients, but ask before
            fresh.step()
        if asked:
            return True
    return False


class _NormOfSome(Exception):
    """A norm was asked for that is not of all gradients. Each rank would give it other ones."""


@contextmanager
def _norms_of(weights: Sequence[torch.nn.Parameter]) -> Iterator[list[str]]:
    """Inside, the norm of all gradients of `weights` is 1, as it is given to the optimizer; another one is an error.
    Gives the functions that it was asked of."""
    gradients = {id(weight.grad) for weight in weights if weight.grad is not None}
    asked = list[str]()

    def norm_of_all(tensors: Any, *_: Any, **__: Any) -> torch.Tensor:
        asked.append("get_total_norm")
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if {*map(id, given)} != gradients:
            raise _NormOfSome
        return given[0].new_ones(()) if given else torch.ones(())

    def clip(*args: Any, **kwargs: Any) -> Any:
        asked.append("clip_grad_norm_")  # which may need no norm where there are no gradients
        return clip_of_torch(*args, **kwargs)

    norms, clipping = inner_function(torch.nn.utils.get_total_norm), inner_function(torch.nn.utils.clip_grad_norm_)
    norm_of_torch, norms.cell_contents = norms.cell_contents, norm_of_all
    clip_of_torch, clipping.cell_contents = clipping.cell_contents, clip
    try:
        yield asked
    finally:
        norms.cell_contents, clipping.cell_contents = norm_of_torch, clip_of_torch


def inner_function(wrapper: Any) -> CellType:
    """Where a wrapper of torch's for torch.no_grad keeps its function."""
    cell: CellType = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    return cell


@contextmanager
def _apart() -> Iterator[None]:
    """Steps inside exchange nothing with other ranks and leave random numbers as they were; hooks for the steps of all
    optimizers do not hear of them. One of these may be under way."""
    before = torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks
    torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks = OrderedDict(), OrderedDict()
    try:
        with RefusedCollectives(lambda: "an optimizer"), all_restored(generators_in_use()), torch.no_grad():
            yield
    finally:
        torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks = before


def _like(optimizer: Optimizer, group: Mapping[str, Any], weights: Sequence[torch.nn.Parameter]) -> Optimizer:
    """A fresh optimizer for `weights`, as `optimizer` is for a group of its own. Raises TypeError if it cannot be told
    what its class was made with."""
    kind: Any = type(optimizer)
    # Copies: a step may change in place what it finds in its group, such as a counter.
    options = copy.deepcopy(_options(group))
    if "lr" in options:  # a warm-up may begin at 0
        options["lr"] = torch.full_like(options["lr"], 0.01) if isinstance(options["lr"], torch.Tensor) else 0.01
    arguments: dict[str, Any] = {}
    for parameter in [*inspect.signature(kind).parameters.values()][1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in options:
            arguments[parameter.name] = options[parameter.name]
        elif parameter.name in vars(optimizer):
            arguments[parameter.name] = copy.deepcopy(vars(optimizer)[parameter.name])
        else:
            raise TypeError(f"{kind.__name__} does not keep its argument {parameter.name}")
    made: Optimizer = kind([{**options, "params": list(weights)}], **arguments)
    return made


def _kinds(optimizer: Optimizer) -> list[dict[str, Any]]:
    """One group for each set of options, whatever its learning rate."""
    return list({str({**_options(group), "lr": 0}): group for group in optimizer.param_groups}.values())


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _ADDED}


def _nearly_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * torch.maximum(one.abs().max(), other.abs().max()))

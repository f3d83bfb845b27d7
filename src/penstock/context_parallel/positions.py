"""Tables that depend on all positions of a sequence are made of whole sequences, and then a part is taken.

Rotary embeddings that stretch with the largest position have such a table.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.context_parallel.sequence import SequencePart

# How many positions a table is tried with.
FEW = 8


def hook_position_tables(model: nn.Module, under_way: Callable[[], SequencePart | None]) -> None:
    """Have the modules of `model` whose tables depend on the largest position make them of whole sequences, and give
    the part that is under way. These are modules without parameters that take `position_ids`; each is tried."""
    config = getattr(model, "config", None)
    farthest = 4 * int(getattr(config, "max_position_embeddings", 0) or FEW)
    kinds = [None, *sorted(set(getattr(config, "layer_types", None) or ()))]
    for module in model.modules():
        takes_positions = "position_ids" in inspect.signature(module.forward).parameters
        if (
            takes_positions
            and next(module.parameters(), None) is None
            and _depends_on_largest_position(module, farthest, kinds)
        ):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: _whole(under_way(), args, kwargs), with_kwargs=True
            )
            module.register_forward_hook(lambda _, __, output: _part(under_way(), output))


def _depends_on_largest_position(module: nn.Module, farthest: int, kinds: list[str | None]) -> bool:
    """Whether what a module makes of the first positions changes when the position `farthest` is added."""
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    near = torch.arange(FEW, device=device)[None]
    far = torch.cat([near, near[:, :1] + farthest], 1)
    for kind in kinds:
        more = {} if kind is None else {"layer_type": kind}
        # A module that cannot be called like this, as it needs other arguments, is taken to be independent.
        with suppress(Exception), torch.no_grad():
            made = [
                pytree.tree_leaves(copy.deepcopy(module)(torch.zeros(1, 1, 1, device=device), position_ids=ids, **more))
                for ids in (near, far)
            ]
            if any(not torch.equal(one[:, :FEW], other[:, :FEW]) for one, other in zip(*made, strict=True)):
                return True
    return False


def _whole(part: SequencePart | None, args: Any, kwargs: Any) -> Any:
    if part is None or part.positions is None:
        return None
    taken = [part.positions if _are_own(part, argument) else argument for argument in args]
    return tuple(taken), {
        name: part.positions if _are_own(part, argument) else argument for name, argument in kwargs.items()
    }


def _are_own(part: SequencePart, given: Any) -> bool:
    """Whether these are a part's own position ids."""
    if not isinstance(given, torch.Tensor):
        return False
    return given.dim() == 2 and not given.is_floating_point() and given.shape[1] == part.cut.tokens


def _part(part: SequencePart | None, output: Any) -> Any:
    if part is None or part.positions is None:
        return None
    leaves, structure = pytree.tree_flatten(output)
    # A copy of a model has the hooks of the model besides its own: the second finds a part.
    whole = [isinstance(leaf, torch.Tensor) and leaf.shape[1] == part.cut.length for leaf in leaves]
    parts = [part.cut.take(leaf, 1) if is_whole else leaf for leaf, is_whole in zip(leaves, whole, strict=True)]
    return pytree.tree_unflatten(parts, structure)

"""What the operations of a forward do besides computing: draw random numbers, communicate, look at the whole batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from penstock.modeling.collectives import refuse_operation


class Seen:
    """What was seen of the operations of one trace.

    Attributes:
        where: the unit under way, empty between units.
        draws: whether one draws from torch's random numbers, or may have done so where that could not be seen.
        batchwise: of operations whose backward depends on the whole batch, what says so, and where.
    """

    def __init__(self) -> None:
        self.where = ""
        self.draws = False
        self.batchwise: set[str] = set()

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note an operation. Raises `OwnCollective` if it communicates with other processes."""
        traits = _traits(func)
        if not traits:
            return
        refuse_operation(func, self.where)
        self.draws = self.draws or draws(func, args, kwargs)
        if "scale_grad_by_freq" in traits and _given(func, "scale_grad_by_freq", args, kwargs):
            where = f"the unit {self.where}" if self.where else "the model's code between units"
            self.batchwise.add(f"{func._schema.name} with scale_grad_by_freq=True in {where}")


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: of those that may, attention does not if it drops nothing."""
    traits = _traits(func)
    return "draws" in traits and ("dropout_p" not in traits or bool(_given(func, "dropout_p", args, kwargs)))


@cache
def _traits(func: Any) -> frozenset[str]:
    """What there is to look at in an operation; nothing in nearly all."""
    found = {each.name for each in func._schema.arguments} & {"dropout_p", "scale_grad_by_freq"}
    if torch.Tag.nondeterministic_seeded in func.tags:
        found.add("draws")
    if func.namespace != "aten":
        found.add("foreign")
    return frozenset(found)


def _given(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The argument `name` of an operation's call."""
    place = next(place for place, each in enumerate(func._schema.arguments) if each.name == name)
    return args[place] if place < len(args) else kwargs.get(name, func._schema.arguments[place].default_value)

"""Collectives of the user's own in a forward or a criterion.

Only the ranks of one stage run it, so that these would wait for ranks that never come. Where a forward is followed,
torch's operators show them. Where it runs, what shows them is the question whether this rank is in the group, which
torch.distributed asks itself before it communicates.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
# What asks it and does not communicate.
_QUESTIONS = frozenset({"get_rank", "get_world_size", "get_backend", "get_backend_config", "_set_pg_timeout"})

# The groups that Penstock has made: over these its own code communicates inside a forward, too.
own_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class OwnCollective(RuntimeError):
    """The user's code communicates in the middle of a step. `call` is what it calls, `where` the unit that does so,
    empty for the code between units."""

    def __init__(self, call: str, where: str = "") -> None:
        self.call = call
        what = f"the unit {where}" if where else "the model's code between its units"
        super().__init__(
            f"{what} calls torch.distributed ({call}) in its forward. Only the ranks of one stage run it, so the "
            "others would never answer: leave the call out, or train this model without pipelines"
        )


class CriterionCollective(OwnCollective):
    """The criterion does so."""

    def __init__(self, call: str) -> None:
        super().__init__(call)
        self.args = (
            f"the criterion calls torch.distributed ({call}), but only the ranks of the last stage run it, so the "
            "others would never answer: leave the call out, and exchange what it needs before the step",
        )


def refuse_operation(func: Any, where: str) -> None:
    """Raise `OwnCollective` if an operator of torch's dispatcher exchanges something with other processes."""
    if func.namespace in _NAMESPACES and dist.is_initialized() and distributed_c10d._get_default_group().size() > 1:
        raise OwnCollective(func._schema.name.partition("::")[2], where)


class RefusedCollectives:
    """Inside, collectives of this thread raise `OwnCollective`, unless they are over one of `own_groups`. `where()`
    names the unit under way. One serves all forwards, one after the other."""

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where

    def __enter__(self) -> None:
        self._original, self._thread = distributed_c10d._rank_not_in_group, threading.get_ident()
        distributed_c10d._rank_not_in_group = self._asked

    def __exit__(self, *error: object) -> None:
        distributed_c10d._rank_not_in_group = self._original

    def _asked(self, group: dist.ProcessGroup | None) -> bool:
        caller = sys._getframe(1).f_code.co_name
        allowed = threading.get_ident() != self._thread or (group is not None and group in own_groups)
        if not allowed and caller not in _QUESTIONS:
            raise OwnCollective(caller, self._where())
        return self._original(group)

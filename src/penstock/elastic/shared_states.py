"""What a process that joins a run is given beside the model's values: the states of registered objects."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from penstock.elastic.moving import from_live_ranks
from penstock.elastic.protocol import Decision
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.comm.plain import from_plain, to_plain
from penstock.runtime.engine import Engine
from penstock.runtime.formation import Values


class SharedStates:
    """The optimizer of a run, and objects whose states a process that joins is given.

    Attributes:
        objects: by name; see `register`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.objects: dict[str, Any] = {}
        # On a joiner, the states of objects that are not registered yet.
        self._received: dict[str, Any] = {}

    def register(self, name: str, one: Any) -> None:
        """Have `one.state_dict()` of a member given to `one.load_state_dict()` of each that joins."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(one, method, None)):
                raise TypeError(f"register({name!r}, ...): a {type(one).__name__} has no {method}()")
        if name in self.objects:
            raise ValueError(f"register({name!r}, ...): something is registered under this name already")
        self.objects[name] = one
        if name in self._received:
            one.load_state_dict(self._received.pop(name))

    def values(self, now: Decision) -> Values:
        """What fills in what a member of a generation holds newly, and gives those who join these states."""
        return from_live_ranks(self.optimizer, also=lambda engine: self._share(engine, now))

    def _share(self, engine: Engine, now: Decision) -> None:
        if not now.joining or now.is_first:
            return
        groups = self.optimizer.param_groups
        first = next(rank for rank, member in enumerate(now.members) if member not in now.joining)
        content: Any = None
        if dist.get_rank() == first:
            states = {name: one.state_dict() for name, one in self.objects.items()}
            settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            content = to_plain((states, settings, engine.loss_scale))
        ranks = Ranks(engine.groups.world_control, engine.board.guard)
        content = ranks.exchange(content, "sharing the states of a run")[first]
        if now.members[dist.get_rank()] not in now.joining:
            return
        self._received, settings, engine.loss_scale = from_plain(content)
        if len(settings) != len(groups):
            raise ValueError(
                f"the optimizer has {len(groups)} parameter groups, but that of the run has {len(settings)}"
            )
        for group, values in zip(groups, settings, strict=True):
            group.update(values)
        for name in self._received.keys() & self.objects.keys():
            self.objects[name].load_state_dict(self._received.pop(name))

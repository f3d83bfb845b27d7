"""Values that move between ranks when a pipeline is formed anew: weights, buffers, an optimizer's state.

A process that joins a run is given the states of registered objects besides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from penstock.elastic.protocol import Generation
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.comm.exchange import Ranks, from_plain, to_plain
from penstock.runtime.comm.gloo import contact, wait_for_transfer
from penstock.runtime.engine import Engine
from penstock.runtime.migration import FillValues, Migration


class _HoldingsReport(NamedTuple):
    """What a rank reports: what it needs, and whether with the optimizer's state; and what it has with that. Of tensors
    in a state the others are told their specs, of anything else the value."""

    tensor_parallel_rank: int
    needs: dict[str, bool]
    has: dict[str, dict[str, Any]]


def from_live_ranks(optimizer: Optimizer | None = None, *, also: Callable[[Engine], None] | None = None) -> FillValues:
    """What fills in newly held values from ranks that have them, point to point, spread over all that do.

    The function it returns raises RuntimeError, on every rank, if nobody has a value that somebody needs. `optimizer`:
    of the model's parameters, or what wraps one. Its state moves along; parameters that it does not know join its first
    group, and the state of those that are held no longer is dropped, once every rank has what it needs."""

    def fill(engine: Engine, taken: Mapping[str, torch.Tensor], migration: Migration) -> None:
        inner = getattr(optimizer, "optim", optimizer)
        _exchange(engine, taken, migration, {} if inner is None else inner.state)
        if also is not None:
            also(engine)
        dist.all_reduce(torch.zeros(1), group=engine.context.groups.world_control)
        if inner is not None:
            _fit(inner, engine)

    return fill


def from_elsewhere(optimizer: Optimizer) -> FillValues:
    """Leaves newly held values to what is loaded afterwards, and makes the optimizer that of what is held."""

    def fill(engine: Engine, taken: Mapping[str, torch.Tensor], migration: Migration) -> None:
        _fit(getattr(optimizer, "optim", optimizer), engine)

    return fill


def hand_over(engine: Engine, optimizer: Optimizer, leaving: bool, migration: Migration) -> None:
    """Give the values that only ranks which leave have to ranks that stay, which add them to their `migration`. All
    ranks of the engine call this."""
    context, group = engine.context, engine.context.groups.world_control
    here, index = engine.values_here(), context.place.tensor_parallel_rank
    state: Any = optimizer.state
    with engine.board.guard("handing over what leaves", context.everyone):
        leaves = torch.tensor([int(leaving)])
        dist.all_reduce(leaves, group=group)
        if not leaves.item() or leaves.item() == context.layout.world_size:
            return
        has = {
            name: (TensorSpec.of(tensor), _described(state.get(engine.known.get(name), {})))
            for name, tensor in here.items()
            if name not in migration.elsewhere
        }
        every = _exchange_values(engine, (leaving, index, has))
        turn, transfers = 0, _Transfers(group, engine.board.check)
        for name in dict.fromkeys(name for _, _, theirs in every for name in theirs):
            for shard in range(context.layout.tensor_parallel_size):
                holders = [rank for rank, (_, i, theirs) in enumerate(every) if i == shard and name in theirs]
                staying = [rank for rank, (is_leaving, i, _) in enumerate(every) if i == shard and not is_leaving]
                if not staying or not holders or any(rank in staying for rank in holders):
                    continue
                source, to = holders[0], staying[turn % len(staying)]
                turn += 1
                if context.rank == source:
                    transfers.send(here[name], state.get(engine.known.get(name), {}), to)
                elif context.rank == to:
                    spec, described = every[source][2][name]
                    tensor = spec.empty(engine.device)
                    arrived = partial(migration.arrived, name, tensor, True)
                    transfers.receive(tensor, engine.known.get(name), state, described, source, arrived)
        transfers.finish()
        dist.all_reduce(leaves, group=group)


def _fit(optimizer: Optimizer, engine: Engine) -> None:
    """Make an optimizer's groups those of what is held, and its state that of what is held and owned."""
    owned = {weight.parameter for weight in engine.held if engine.rank in weight.keepers}
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.param_groups[0]["params"] += [weight.parameter for weight in engine.held if weight.parameter not in known]
    for parameter in list(optimizer.state):
        if parameter not in owned:
            del optimizer.state[parameter]


def _exchange(engine: Engine, taken: Mapping[str, torch.Tensor], migration: Migration, state: Any) -> None:
    context, group = engine.context, engine.context.groups.world_control
    had, elsewhere = migration.had, migration.elsewhere
    parameters, here = engine.known, engine.values_here()
    owned = {weight.name for weight in engine.held} - engine.owned_elsewhere()
    # What this rank owns newly comes from former owners, also where it is here: they alone may have the newest weight.
    needs = {name: name in owned for name in here if name in taken or (name in owned and name in elsewhere)}
    has = {name: _described(state.get(parameters.get(name), {})) for name in had if name not in elsewhere}
    mine = context.place.tensor_parallel_rank, needs, has
    reports = [_HoldingsReport(*told) for told in _exchange_values(engine, mine)]
    turn, transfers = 0, _Transfers(group, engine.board.check)
    for name in dict.fromkeys(name for report in reports for name in report.needs):
        for to, needing in enumerate(reports):
            if name not in needing.needs:
                continue
            sources = [
                rank for rank, report in enumerate(reports)
                if name in report.has and report.tensor_parallel_rank == needing.tensor_parallel_rank
            ]  # fmt: skip
            if not sources:
                raise RuntimeError(f"no rank has the values of {name}: load them from a checkpoint")
            source = sources[turn % len(sources)]
            turn += 1
            with_state = needing.needs[name]
            if context.rank == source:
                transfers.send(had[name], state.get(parameters.get(name), {}) if with_state else {}, to)
            elif context.rank == to:
                described = reports[source].has[name] if with_state else {}
                arrived = partial(migration.arrived, name, here[name], with_state)
                transfers.receive(here[name], parameters.get(name), state, described, source, arrived)
    transfers.finish()


def _exchange_values(engine: Engine, mine: Any) -> list[Any]:
    ranks = Ranks(engine.context.groups.world_control, engine.board.guard)
    return [from_plain(told) for told in ranks.exchange(to_plain(mine), "telling who has which values")]


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: TensorSpec.of(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _nothing() -> None:
    pass


class _Transfers:
    """Tensors on their way between ranks, several at a time.

    All ranks begin theirs in one order, and each waits for its oldest first. So the oldest of all can always end: both
    its ranks have begun it. `check` ends a wait by what it raises.
    """

    MOST = 16

    def __init__(self, group: dist.ProcessGroup, check: Callable[[], object]) -> None:
        self._group, self._check = group, check
        # The transfer, its message, the tensor that this is for, and what follows.
        self._under_way: deque[tuple[dist.Work, torch.Tensor, torch.Tensor, Callable[[], object]]] = deque()
        self._num_begun: Counter[tuple[bool, int]] = Counter()

    def send(self, tensor: torch.Tensor, state: Mapping[str, Any], to: int) -> None:
        """Send a tensor, and those of a parameter's state."""
        for value in (tensor, *state.values()):
            if isinstance(value, torch.Tensor):
                message = value.detach().contiguous().cpu()
                self._begin(True, to, message, message, _nothing)

    def receive(
        self,
        tensor: torch.Tensor,
        parameter: torch.nn.Parameter | None,
        state: Any,
        described: Mapping[str, Any],
        source: int,
        arrived: Callable[[], object],
    ) -> None:
        """Receive a tensor, and a parameter's state, which an optimizer keeps beside it or on the CPU (a step number).
        `arrived`: called once all of it is here. Until then the state is not in `state` either: a rank may be lost."""
        values = {
            key: value.empty(torch.device("cpu") if value.shape == () else tensor.device)
            if isinstance(value, TensorSpec)
            else value
            for key, value in described.items()
        }

        def complete() -> None:
            if described and parameter is not None:
                state[parameter] = values
            arrived()

        coming = [tensor.detach(), *(value for value in values.values() if isinstance(value, torch.Tensor))]
        for value in coming:
            here = value.device.type == "cpu" and value.is_contiguous()
            message = value if here else torch.empty(value.shape, dtype=value.dtype)
            self._begin(False, source, message, value, complete if value is coming[-1] else _nothing)

    def _begin(
        self, sends: bool, peer: int, message: torch.Tensor, value: torch.Tensor, ended: Callable[[], object]
    ) -> None:
        contact(self._group, peer)
        begin: Any = dist.isend if sends else dist.irecv
        work = begin(message, peer, group=self._group, tag=self._num_begun[sends, peer])
        self._num_begun[sends, peer] += 1
        self._under_way.append((work, message, value, ended))
        if len(self._under_way) > self.MOST:
            self._end_oldest()

    def _end_oldest(self) -> None:
        work, message, value, ended = self._under_way.popleft()
        wait_for_transfer(work, message.nbytes, self._check)
        if message is not value:
            value.copy_(message)
        ended()

    def finish(self) -> None:
        """Wait for all of them."""
        while self._under_way:
            self._end_oldest()


class SharedStates:
    """The optimizer of a run, and objects whose states a process that joins is given."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.objects: dict[str, Any] = {}
        # On a joiner, the states of objects that are not registered yet.
        self._received: dict[str, Any] = {}

    def register(self, name: str, value: Any) -> None:
        """Have `value.state_dict()` of a member given to `value.load_state_dict()` of each that joins."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise TypeError(
                    f"register({name!r}, ...): a {type(value).__name__} has no {method}()"
                    ". Register what has state_dict() and load_state_dict()"
                )
        if name in self.objects:
            raise ValueError(
                f"register({name!r}, ...): something is registered under this name already. Take another name"
            )
        self.objects[name] = value
        if name in self._received:
            value.load_state_dict(self._received.pop(name))

    def values(self, now: Generation) -> FillValues:
        """What fills in what a member of a generation holds newly, and gives those who join these states."""
        return from_live_ranks(self.optimizer, also=lambda engine: self._share(engine, now))

    def _share(self, engine: Engine, now: Generation) -> None:
        if not now.joining or now.is_first:
            return
        groups = self.optimizer.param_groups
        first = next(rank for rank, member in enumerate(now.members) if member not in now.joining)
        content: Any = None
        if dist.get_rank() == first:
            states = {name: value.state_dict() for name, value in self.objects.items()}
            settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            content = to_plain((states, settings, engine.loss_scale))
        ranks = Ranks(engine.context.groups.world_control, engine.board.guard)
        content = ranks.exchange(content, "sharing the states of a run")[first]
        if now.members[dist.get_rank()] not in now.joining:
            return
        self._received, settings, engine.loss_scale = from_plain(content)
        if len(settings) != len(groups):
            raise ValueError(
                f"the optimizer has {len(groups)} parameter groups, but that of the run has {len(settings)}"
                ": make it with the same groups in every process"
            )
        for group, values in zip(groups, settings, strict=True):
            group.update(values)
        for name in self._received.keys() & self.objects.keys():
            self.objects[name].load_state_dict(self._received.pop(name))

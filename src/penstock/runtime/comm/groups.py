"""The process groups of a layout, all made at once and in one order on every rank.

A group first used after a rank has died can hang, so none is made later.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist

from penstock.layout.layout import Layout, PipelineLayout
from penstock.modeling.collectives import own_groups
from penstock.runtime.boundary.p2p import Message
from penstock.runtime.comm import gloo
from penstock.runtime.comm.devices import default_timeout, transport
from penstock.runtime.threads import start_thread


class Groups:
    """Process groups this rank belongs to.

    `pipeline` and `world` carry tensors of the device; `pipeline_control` and `world_control` are gloo groups for
    objects and barriers (on a CPU they are the same groups). `reduction[ranks]` sums gradients over `ranks`.
    `tensor_parallel` joins the ranks that share this rank's stages (None if there is only this one), `context_parallel`
    those that compute the other parts of its sequences; `model_parallel` and `model_parallel_control` are all ranks of
    the pipeline, `batch_control` those of all pipelines that take the same batch.
    `closed`: whether all were closed, and not because of a failure.

    `timeout` is how long a transfer may take; by default as in torch's default group. `check` is called before each
    group is made: what it raises ends the construction, as ranks that have given up must make no groups in the world
    that comes next. `broadcasts`: whether the groups of `reduction` broadcast, too.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: torch.device,
        reduction: Iterable[tuple[int, ...]],
        timeout: datetime.timedelta | None = None,
        check: Callable[[], None] = lambda: None,
        broadcasts: bool = False,
    ):
        self._check = check
        self._broadcast = ("pipeline", "reduction") if broadcasts else ("pipeline",)
        self._rank = rank
        self._device = device
        self._timeout = timeout
        self.closed = False
        self._mine: list[dist.ProcessGroup] = []
        self._aborted = False
        self._made: dict[tuple[str, str, tuple[int, ...]], dist.ProcessGroup] = {}
        # The ranks of each gloo group that this one will talk to.
        self._peers: defaultdict[dist.ProcessGroup, set[int]] = defaultdict(set)
        place = layout.place_of(rank)
        self.world, self.world_control = self._both(tuple(range(layout.world_size)), "world")
        self.tensor_parallel: dist.ProcessGroup | None = None
        size = layout.tensor_parallel_size
        for index, pipeline in enumerate(layout.pipelines):
            both = self._both(pipeline.ranks(), "pipeline")
            if index == place.pipeline:
                self.model_parallel, self.model_parallel_control = both
            for tensor_parallel_rank in range(size):
                both = self._both(pipeline.ranks(tensor_parallel_rank), "pipeline")
                messages = self._of_messages(pipeline, tensor_parallel_rank, both[1])
                if (index, tensor_parallel_rank) == (place.pipeline, place.tensor_parallel_rank):
                    self.pipeline, self.pipeline_control = both
                    # Over each boundary, and whether they go forward; and by the pipeline rank that results are for.
                    self._p2p, self._results = messages
            for first in pipeline.ranks(0) if size > 1 else ():
                together = self._new(tuple(range(first, first + size)), "tensor parallel")
                if first <= rank < first + size:
                    self.tensor_parallel = together
        self.context_parallel: dist.ProcessGroup | None = None
        self.batch_control = self.model_parallel_control
        for replica in range(layout.num_replicas) if layout.context_parallel_size > 1 else ():
            every = [pipeline.ranks() for pipeline in layout.of_replica(replica)]
            of_batch = self._new(tuple(chain(*every)), "batch", control=True)
            if any(rank in ranks for ranks in every):
                self.batch_control = of_batch
            for ranks in zip(*every, strict=True):
                together = self._new(ranks, "context parallel")
                if rank in ranks:
                    self.context_parallel = together
        last = [
            tuple(pipeline.global_rank(pipeline.num_stages - 1, t) for pipeline in layout.pipelines)
            for t in range(size)
        ]
        self.last_stages: dist.ProcessGroup | None = None
        for ranks in last if len(layout.pipelines) > 1 else ():
            group = self._new(ranks, "last stages", control=True)
            if rank in ranks:
                self.last_stages = group
        self.reduction = {ranks: self._new(ranks, "reduction") for ranks in sorted(set(reduction))}
        key = f"penstock/groups/{dist.distributed_c10d._world.group_count}"
        if self._peers and layout.world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            gloo.await_ranks(store, key, rank, layout.world_size, check, timeout)
        for made, peers in self._peers.items():
            check()
            gloo.connect(made, {dist.get_group_rank(made, peer) for peer in peers})
        self._peers.clear()

    def p2p_group(self, boundary: int, kind: Message) -> dist.ProcessGroup:
        """The group that carries messages of `kind` over `boundary`, or to that pipeline rank. Headers are read by the
        host, as is which gradients there are, so they go from CPU to CPU."""
        on_cpu = self.pipeline is self.pipeline_control
        if kind in (Message.HEADER, Message.RESULT_HEADER) or (kind is Message.PRESENCE and not on_cpu):
            return self.pipeline_control
        return self._results[boundary] if kind is Message.RESULT else self._p2p[boundary, kind.goes_forward]

    def warm_up(self) -> None:
        """Make the communicators of all collectives on an accelerator now, in one order on all ranks: one made lazily
        in the middle of a step can deadlock. Those of activations and gradients: `P2PChannels.warm_up`."""
        p2p = set(self._p2p.values())
        for (backend, _, ranks), group in self._made.items():
            if backend != "gloo" and self._rank in ranks and group not in p2p:
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)

    def abort(self) -> None:
        """End everything under way in this rank's groups. Any thread may call it, and `destroy` then comes later."""
        self._aborted = True
        abort_groups(list(self._mine))

    def fault(self) -> tuple[str, list[int]] | None:
        """What NCCL has noted of a transfer, whose kernel waits on, and the other ranks of its group; on any thread."""
        for group in self._mine if self._device.type != "cpu" else ():
            with contextlib.suppress(Exception):  # destroyed meanwhile
                error = group._get_backend(self._device).get_error()  # NCCL's has it
                if error.name == "TIMEOUT":  # whoever it waits for may itself wait for another
                    return f"rank {self._rank} had a transfer between devices that did not end in time", []
                if error.name != "SUCCESS":
                    others = [rank for rank in dist.get_process_group_ranks(group) if rank != self._rank]
                    return "had a transfer between devices that broke", others
        return None

    def destroy(self) -> None:
        """Close this rank's groups, so that ranks which wait on it wake with an error."""
        groups, self._mine, self.closed = self._mine, [], not self._aborted
        self._made.clear()
        self._p2p.clear()
        self._results.clear()
        self.reduction = {}
        for name in (
            "world", "world_control", "pipeline", "pipeline_control", "last_stages", "tensor_parallel",
            "context_parallel", "model_parallel", "model_parallel_control", "batch_control",
        ):  # fmt: skip
            setattr(self, name, None)
        destroy_groups(groups, self._aborted)

    def _both(self, ranks: tuple[int, ...], purpose: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """For tensors of the device, and for objects."""
        return self._new(ranks, purpose), self._new(ranks, purpose, control=True)

    def _of_messages(
        self, pipeline: PipelineLayout, tensor_parallel_rank: int, of_hosts: dist.ProcessGroup
    ) -> tuple[dict[tuple[int, bool], dist.ProcessGroup], dict[int, dist.ProcessGroup]]:
        """The groups that carry messages between the ranks of a pipeline, and its results; `of_hosts`: for objects."""
        ranks = pipeline.ranks(tensor_parallel_rank)
        holders = [pipeline.global_rank(stage, tensor_parallel_rank) for stage in range(pipeline.num_stages)]
        p2p, results = {}, {}
        for boundary, sides in enumerate(pairwise(holders)):
            for forward in (True, False) if sides[0] != sides[1] else ():
                p2p[boundary, forward] = self._one_way(ranks, sides, forward, f"boundary {boundary}")
                self._will_talk(of_hosts, sides)
        for number, other in enumerate(ranks):
            if other != holders[-1]:
                results[number] = self._one_way(ranks, (other, holders[-1]), False, "results")
                self._will_talk(of_hosts, (other, holders[-1]))
        return p2p, results

    def _one_way(
        self, ranks: tuple[int, ...], sides: tuple[int, int], forward: bool, purpose: str
    ) -> dist.ProcessGroup:
        """The group that carries messages one way between two `sides`, of a pipeline's `ranks`; the other way has
        another. NCCL has no tags: each boundary has groups of its own, of the two ranks that hold its sides, and
        results, which one rank sends, have one. On gloo, which tells boundaries apart by tag, the directions share a
        lock: while one thread sends, the thread that receives spins on it, for milliseconds if cores are few. A gloo
        group has a thread that wakes a hundred times a second, so all boundaries share, and the way forward has no
        group of its own: it uses the one that has these ranks for collectives and headers."""
        way = "forward" if forward else "back"
        if self._device.type != "cpu":
            return self._new(ranks if purpose == "results" else tuple(sorted(sides)), f"{purpose} {way}")
        group = self._new(ranks, way, apart=not forward)
        self._will_talk(group, sides)
        return group

    def _will_talk(self, group: dist.ProcessGroup, sides: tuple[int, int]) -> None:
        """Two ranks are to be connected in a gloo group."""
        if self._rank in sides:
            self._peers[group] |= {*sides} - {self._rank}

    def _new(
        self, ranks: tuple[int, ...], purpose: str, control: bool = False, apart: bool = False
    ) -> dist.ProcessGroup:
        """A new group. Every rank of the world calls this with the same arguments in the same order; those outside only
        count it, as torch names groups by their number."""
        device = torch.device("cpu") if control else self._device
        backend = transport(device)
        # One gloo group can serve several purposes of the same ranks, unless a separate one is wanted.
        key = (backend, purpose if apart or backend != "gloo" else "", ranks)
        if key not in self._made:
            self._made[key] = self._of(ranks, backend, self._timeout or default_timeout(device))
        made = self._made[key]
        if backend == "gloo" and self._rank in ranks:
            near = gloo.in_trees if purpose in self._broadcast else gloo.beside
            self._peers[made] |= {ranks[number] for number in near(ranks.index(self._rank), len(ranks))}
        return made

    def _of(self, ranks: tuple[int, ...], backend: str, timeout: datetime.timedelta | None) -> Any:
        self._check()
        if self._rank not in ranks:
            dist.distributed_c10d._world.group_count += 1
            return dist.GroupMember.NON_GROUP_MEMBER
        with _unbound(), gloo.lazily() if backend == "gloo" else zero(UNHANDLED):
            made = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        self._mine.append(made)
        own_groups.add(made)
        if backend == "gloo":
            gloo.note_new(made)
        return made


@contextlib.contextmanager
def _unbound() -> Iterator[None]:
    """Around the making of a group: where torch's default group is bound to a device, it does not become a part of
    that, in which all ranks of the world would have to take part."""
    world: Any = dist.group.WORLD
    before, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = before


# For the first NCCL group of a process: otherwise it hears of the errors of others, and holds up the process's end.
NO_DUMPS = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
# For those whose errors `Groups.fault` finds: otherwise torch ends the process a minute later, as torchrun asks it to.
UNHANDLED = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", *NO_DUMPS)


@contextlib.contextmanager
def zero(names: Sequence[str]) -> Iterator[None]:
    """These variables of the environment are "0" inside."""
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, "0"))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


# -- ending groups: at once after a failure, in order otherwise ------------------------------------------------------

# How long closing the groups may hold up the error that made it necessary.
CLOSING_SECONDS = 5.0


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """End everything under way in `groups`, so that whoever waits in them wakes with an error, on this rank too.

    Any thread may call this, whatever the host does. The groups can only be destroyed afterwards.
    """
    on_device = []
    for group in groups:
        for device in _devices_of(group):
            if is_gloo(group, device):
                gloo.abort(group)
            else:
                on_device.append((group, device))
    # An abort of NCCL frees memory, for which it waits for kernels of other communicators too: all at once.
    _all_at_once(_abort_last, on_device)


def _abort_last(on_device: list[tuple[dist.ProcessGroup, torch.device]]) -> None:
    group, device = on_device.pop()
    with contextlib.suppress(Exception):
        group._get_backend(device).abort()


def _all_at_once(end_last: Callable[..., None], groups: list[Any], *arguments: Any) -> None:
    """Call `end_last(groups, *arguments)` for each of `groups`; what takes longer goes on in the background."""
    threads = [start_thread(end_last, groups, *arguments, name="penstock-closing") for _ in range(len(groups))]
    deadline = time.monotonic() + CLOSING_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    try:
        return list(group._device_types)
    except Exception:  # destroyed already
        return []


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo carries a group's tensors on `device`."""
    with contextlib.suppress(Exception):
        return group._get_backend(device).name() == "gloo"
    return False


def destroy_groups(groups: list[dist.ProcessGroup], aborted: bool = False) -> None:
    """Destroy `groups`, which this empties: a group closes only when nobody refers to it."""
    # That waits for what is under way in it, maybe on a rank that waits for another group to close: all at once, and
    # without end only in the background.
    _all_at_once(_destroy_last, groups, aborted)
    if aborted:  # what is dead may still be referred to in cycles; otherwise nobody waits for its end
        gc.collect()


def _destroy_last(groups: list[dist.ProcessGroup], aborted: bool) -> None:
    """Destroy one group. It is taken off the list here, because it closes only when nobody refers to it."""
    group = groups.pop()
    if aborted and not all(is_gloo(group, device) for device in _devices_of(group)):
        # To destroy it would wait for kernels that never end.
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)

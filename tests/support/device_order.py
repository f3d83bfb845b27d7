"""When do messages between devices end? A model of the hosts and the devices of a job, in plain Python.

Each rank's host runs a list of events and enqueues work on its device, which runs it by CUDA's and NCCL's rules:

- The compute stream runs in order. Each communicator has one stream per rank, also in order. A transfer or collective
  starts when the compute stream has done what was enqueued before it.
- A transfer ends when both sides have started, a collective when all members have. Waiting for one holds up the compute
  stream, not the host.
- Messages from host to host (gloo's) are at hand once sent; waiting for one holds up the host.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Do(Enum):
    SEND = "send"
    RECEIVE = "receive"
    COLLECTIVE = "collective"
    WAIT = "wait"  # for the event with this rank's number `of`
    COMPUTE = "compute"


@dataclass(frozen=True)
class Event:
    """What a host does.

    Attributes:
        group: the process group of a transfer or collective.
        on_host: whether that is one between hosts.
        members: of the group.
        peer: the other rank of a transfer.
        what: must be the same on all sides.
        of: for a wait, the position of what is waited for in the rank's events.
    """

    do: Do
    group: str = ""
    on_host: bool = False
    members: tuple[int, ...] = ()
    peer: int = -1
    what: Any = None
    of: int = -1


@dataclass(frozen=True)
class Rules:
    """
    Attributes:
        eager: a group has one communicator, as under `init_process_group(device_id=...)`; otherwise a pair of ranks has
            one of its own for transfers.
        one_connection: CUDA_DEVICE_MAX_CONNECTIONS=1, all streams of a device are fed from one queue: nothing starts
            before what was enqueued earlier.
        buffered: a send ends by itself, as small ones do.
        waits: whether the host waits for its whole device after the event at a position of a rank.
    """

    eager: bool = False
    one_connection: bool = False
    buffered: bool = False
    waits: Callable[[int, int], bool] = lambda rank, position: False


class OrderError(AssertionError):
    """The step does not end, or two sides of a transfer disagree."""


class _Work:
    """Something on a device: `stream` is None for the compute stream."""

    __slots__ = ("after", "done", "event", "key", "position", "started", "stream", "target")

    def __init__(self, event: Event, position: int, stream: Any, after: int, target: _Work | None):
        self.event, self.position, self.stream, self.after, self.target = event, position, stream, after, target
        self.started = self.done = False
        self.key: Any = None


class _Rank:
    def __init__(self, events: Sequence[Event]):
        self.events = events
        self.position = 0
        self.works: dict[int, _Work] = {}
        self.streams: dict[Any, deque[_Work]] = defaultdict(deque)
        self.num_enqueued = self.num_computed = 0  # on the compute stream
        self.unstarted: deque[_Work] = deque()
        self.num_open = 0


def run(ranks: Sequence[Sequence[Event]], rules: Rules = Rules()) -> None:
    """Run all ranks' events to their end.

    Raises:
        OrderError: they do not end, or a transfer's sides are unlike.
    """
    state = [_Rank(events) for events in ranks]
    # What has started at each end, by communicator, in order: keys are equal on all sides.
    counts: dict[Any, int] = defaultdict(int)
    begun: dict[Any, dict[int, _Work]] = defaultdict(dict)
    on_hosts: dict[Any, dict[int, Any]] = defaultdict(dict)

    def communicator(rank: int, event: Event) -> Any:
        if rules.eager or event.do is Do.COLLECTIVE:
            return event.group
        return event.group, *sorted((rank, event.peer))

    def key_of(rank: int, event: Event, stream: Any) -> Any:
        """The n-th of a kind on one communicator meets the n-th of the other side."""
        if event.do is Do.COLLECTIVE:
            ends: tuple[int, ...] = ()
        else:
            ends = (rank, event.peer) if event.do is Do.SEND else (event.peer, rank)
        if event.on_host and event.do is not Do.COLLECTIVE:
            ends = (*ends, event.what)  # tags
        counts[rank, stream, ends] += 1
        return stream, ends, counts[rank, stream, ends]

    def host(rank: int) -> bool:
        own, moved = state[rank], False
        while own.position < len(own.events):
            position = own.position
            if position and rules.waits(rank, position - 1) and own.num_open:
                break
            event = own.events[position]
            target = own.events[event.of] if event.do is Do.WAIT else event
            if event.do is Do.WAIT and target.on_host:
                key = host_keys[rank, event.of]
                others = 2 if target.do is not Do.COLLECTIVE else len(target.members)
                if len(on_hosts[key]) < others:
                    break
            elif event.on_host:
                key = host_keys[rank, position] = key_of(rank, event, event.group)
                on_hosts[key][rank] = event.what
            else:
                if event.do in (Do.WAIT, Do.COMPUTE):
                    work = _Work(event, position, None, own.num_enqueued, own.works.get(event.of))
                    own.num_enqueued += 1
                else:
                    stream = communicator(rank, event)
                    work = _Work(event, position, stream, own.num_enqueued, None)
                    work.key = key_of(rank, event, stream)
                    own.works[position] = work
                own.streams[work.stream].append(work)
                own.unstarted.append(work)
                own.num_open += 1
            own.position += 1
            moved = True
        return moved

    def finish(rank: int, work: _Work) -> None:
        own = state[rank]
        assert own.streams[work.stream][0] is work
        own.streams[work.stream].popleft()
        work.done = True
        own.num_open -= 1
        if work.stream is None:
            own.num_computed += 1

    def device(rank: int) -> bool:
        own, moved = state[rank], False
        going = True
        while going:
            going = False
            for stream in [stream for stream, works in own.streams.items() if works]:
                work = own.streams[stream][0]
                if not work.started:
                    if rules.one_connection and own.unstarted[0] is not work:
                        continue
                    if own.num_computed < work.after:
                        continue
                    if work.target is not None and not work.target.done:
                        continue
                    work.started = going = True
                    own.unstarted.remove(work)
                    if stream is None:
                        finish(rank, work)
                        continue
                    begun[work.key][rank] = work
                    whats = {str(end.event.what) for end in begun[work.key].values()}
                    if len(whats) > 1:
                        raise OrderError(f"{work.key}: {whats}")
                ends = begun[work.key] if stream is not None else {}
                wanted = len(work.event.members) if work.event.do is Do.COLLECTIVE else 2
                if (rules.buffered and work.event.do is Do.SEND) or len(ends) == wanted:
                    finish(rank, work)
                    going = True
            moved |= going
        return moved

    host_keys: dict[tuple[int, int], Any] = {}
    while any(host(rank) | device(rank) for rank in range(len(state))):
        pass
    stuck = []
    for rank, own in enumerate(state):
        heads = [work for works in own.streams.values() for work in list(works)[:1]]
        if own.position < len(own.events) or heads:
            at = own.events[own.position] if own.position < len(own.events) else None
            stuck.append(f"rank {rank} host at {at}; device at {[(w.position, w.event) for w in heads]}")
    if stuck:
        raise OrderError("does not end:\n" + "\n".join(stuck))


def hanging_points(ranks: Sequence[Sequence[Event]], rank: int) -> list[int]:
    """After which of `rank`'s events a wait of its host for its whole device would never end."""

    def hangs(at: int) -> bool:
        try:
            run(ranks, Rules(waits=lambda who, position: who == rank and position == at))
        except OrderError:
            return True
        return False

    return [at for at in range(len(ranks[rank]) - 1) if hangs(at)]


EVERYWHERE = Rules(waits=lambda rank, position: True)
RULES = {
    "as it is": Rules(),
    "eager": Rules(eager=True),
    "eager, buffered": Rules(eager=True, buffered=True),
    "buffered": Rules(buffered=True),
    "one connection": Rules(one_connection=True),
    "one connection, buffered": Rules(one_connection=True, buffered=True),
    "one connection, eager": Rules(one_connection=True, eager=True),
    "waits everywhere": EVERYWHERE,
    "waits everywhere, buffered": Rules(waits=EVERYWHERE.waits, buffered=True),
    "waits everywhere, eager": Rules(waits=EVERYWHERE.waits, eager=True),
}

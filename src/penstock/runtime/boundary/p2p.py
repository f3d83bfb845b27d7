"""Messages between the ranks of one pipeline: asynchronous, tagged, received into buffers posted ahead.

A channel is one kind of message over one boundary, and a rank's end of it either sends or receives. Its messages arrive
in the order they were sent. On gloo a payload moves only once its receive is posted, so receives are posted far ahead,
and each channel has its own tags. NCCL has no tags, and posting a receive starts a kernel that runs until the message
is there: losses and gradients share a group, in the one order in which both sides come to them, and receives are posted
where the program says (see `penstock.schedule.communication`). Headers are for hosts, so they go over gloo.

Where the receiver knows how many tensors a message has, but not their shapes, a header goes before it, with a row for
each: before the first microbatch of a new signature, and the first message of a new kind in generation.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum
from functools import partial
from operator import attrgetter

import torch
import torch.distributed as dist

from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.comm.gloo import WATCHED_FROM_BYTES, Waitable, wait_for_transfer
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.report import label


class Message(IntEnum):
    """What a message carries. Headers and activations go forward, to the next stage. Losses, gradients and presence
    flags, which say which gradients there are, go back. Results go from the rank of the last stage straight to each of
    the others."""

    HEADER = 0
    ACTIVATION = 1
    PRESENCE = 2
    LOSS = 3
    GRADIENT = 4
    RESULT_HEADER = 5
    RESULT = 6

    @property
    def goes_forward(self) -> bool:
        return self in (Message.HEADER, Message.ACTIVATION)


NAMES = ("headers", "activations", "presence of gradients", "losses", "gradients", "headers of results", "results")
# Each tensor of a message has its own tag, so a message of n tensors takes n tags in a row. Only activations and
# gradients can be more than this. One of up to ten times as many runs into the tags of the ten kinds after it, where
# the order of `Message` begins anew with the next boundary. No receive is confused, because each of these kinds differs
# from it in one of these:
# - the group that it goes by (`Groups.p2p_group`);
# - the ranks that it goes between, or the way that it goes between them;
# - the time: results are of a generation, which does not run beside a step.
TAGS_PER_CHANNEL = 64
# How many receives of a channel gloo may have posted ahead of their use. One hides the latency, the second the jitter.
# More would only hold memory, and posting tells the sender, which disturbs it while it computes. So only small ones are
# posted further ahead.
RECEIVES_AHEAD = 2
# Once a channel has more than twice so many sends that were not waited for, it waits for all but the newest so many.
SENDS_AHEAD = 8


# For `map`, which with this makes no call of Python.
_num_bytes = attrgetter("nbytes")
_Transfer = Callable[[list[torch.Tensor], int, int], dist.Work]


def _as_carried(transfer: _Transfer, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
    return transfer(list(map(carried, tensors)), peer, tag)


class _MessageWork:
    """The works of a message of several tensors, or of none, as one."""

    def __init__(self, transfer: _Transfer, tensors: Iterable[torch.Tensor], peer: int, tag: int):
        self._works: list[dist.Work] = []
        for number, tensor in enumerate(tensors):
            self._works.append(transfer([tensor], peer, tag + number))

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _LargeWork:
    """The work of a large message: whoever waits for it hears of failures, see `wait_for_transfer`."""

    def __init__(self, work: Waitable, tensors: Iterable[torch.Tensor], check: Callable[[], object]):
        self._work, self._num_bytes, self._check = work, sum(map(_num_bytes, tensors)), check

    def wait(self) -> None:
        wait_for_transfer(self._work, self._num_bytes, self._check)


class P2PChannel:
    """This rank's end of one kind of message over the boundary between the stages `boundary` and `boundary + 1`.
    `posted` are the receives that were posted and not waited for yet, each with its buffers."""

    def __init__(self, channels: P2PChannels, boundary: int, kind: Message, group: dist.ProcessGroup, peer: int):
        self._channels = channels
        of_result = kind in (Message.RESULT_HEADER, Message.RESULT)
        where = f"for pipeline rank {boundary}" if of_result else f"between stages {boundary} and {boundary + 1}"
        self.name = f"{NAMES[kind]} {where}"
        send: _Transfer = group.send
        recv: _Transfer = group.recv
        if channels.converts:
            send, recv = partial(_as_carried, send), partial(_as_carried, recv)
        # Nearly every message is one tensor, and that needs no `_MessageWork`.
        self._send, self._send_each = send, partial(_MessageWork, send)
        self._recv, self._recv_each = recv, partial(_MessageWork, recv)
        self._peer = peer
        self._peer_in_group = dist.get_group_rank(group, peer)
        # From so many bytes on a wait is watched; not on an accelerator, where a stream waits and not this thread.
        self._large = math.inf if channels.converts else WATCHED_FROM_BYTES
        self._tag = (boundary * len(Message) + kind) * TAGS_PER_CHANNEL
        self.posted: deque[tuple[list[torch.Tensor], Waitable]] = deque()
        self._in_flight: deque[tuple[list[torch.Tensor], Waitable]] = deque()

    def post_receive(self, buffers: list[torch.Tensor]) -> None:
        work: Waitable
        peer, tag = self._peer_in_group, self._tag
        try:
            work = self._recv(buffers, peer, tag) if len(buffers) == 1 else self._recv_each(buffers, peer, tag)
        except RuntimeError as error:
            raise self._lost("posting a receive of", error) from None
        if sum(map(_num_bytes, buffers)) >= self._large:
            work = _LargeWork(work, buffers, self._channels.board.check)
        self.posted.append((buffers, work))

    def receive(self) -> list[torch.Tensor]:
        """Wait for the oldest posted receive. On an accelerator only the stream waits."""
        buffers, work = self.posted.popleft()
        channels = self._channels
        start = time.perf_counter()
        try:
            if channels.labels:
                with label(f"receive {self.name}"):
                    work.wait()
            else:
                work.wait()
        except RuntimeError as error:
            del work
            raise self._lost("receiving", error) from None
        end = time.perf_counter()
        channels.seconds_waited += end - start
        if channels.on_wait is not None:
            channels.on_wait(start, end)
        return buffers

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send `tensors` as the next message, and release older ones if many are under way (see `SENDS_AHEAD`)."""
        work: Waitable
        sent, peer, tag = list(map(torch.Tensor.contiguous, tensors)), self._peer_in_group, self._tag
        try:
            if self._channels.labels:
                with label(f"send {self.name}"):
                    work = self._send_each(sent, peer, tag)
            else:
                work = self._send(sent, peer, tag) if len(sent) == 1 else self._send_each(sent, peer, tag)
        except RuntimeError as error:
            raise self._lost("sending", error) from None
        if sum(map(_num_bytes, sent)) >= self._large:
            work = _LargeWork(work, sent, self._channels.board.check)
        self._in_flight.append((sent, work))
        del work
        # Many at a time, which takes less than one by one.
        if len(self._in_flight) > 2 * self._channels.sends_ahead:
            self.release(self._channels.sends_ahead)

    def release(self, keep: int = 0) -> None:
        """Wait for sends that must have arrived, all but the newest `keep`, and let go of their tensors."""
        in_flight = self._in_flight
        while len(in_flight) > keep:
            tensors, work = in_flight.popleft()
            try:
                work.wait()
            except RuntimeError as error:
                del work
                raise self._lost("sending", error) from None
            del tensors  # not before they have left

    def clear(self) -> None:
        """Forget everything under way, so that nothing keeps a dead group's connections open."""
        self.posted.clear()
        self._in_flight.clear()
        del self._send, self._send_each, self._recv, self._recv_each

    def _lost(self, doing: str, error: RuntimeError) -> Exception:
        """Make the error of a transfer that failed. The caller must hold no work and no method of the group: these keep
        connections open on which neighbours wait."""
        return self._channels.board.lost_connection(f"{doing} {self.name}", [self._peer], error)


class P2PChannels:
    """The channels of one rank.

    Args:
        group_for: gives the process group of a boundary and a kind of message.
        peer_of: gives the global rank that holds a stage.

    Attributes:
        sends_ahead: see `SENDS_AHEAD`; no fewer than the schedule under way needs.
        converts: whether tensors of types that NCCL has not are to travel as bytes. gloo sends any as it is.
        receives_ahead: see `RECEIVES_AHEAD`. On an accelerator none, as a posted receive holds up whatever waits for
            the device: there the program says where each is posted (see `penstock.schedule.communication`).
        seconds_waited: how long this rank has waited for receives, in all.
        on_wait: called with the beginning and the end of each of these waits, if set.
        labels: whether messages get names in torch's profiler.
    """

    def __init__(
        self,
        group_for: Callable[[int, Message], dist.ProcessGroup],
        peer_of: Callable[[int], int],
        device: torch.device,
        board: FailureBoard,
    ):
        self._group_for = group_for
        self._peer_of = peer_of
        self._device = device
        self._channels: dict[tuple[int, Message], P2PChannel] = {}
        self.board = board
        self.sends_ahead = SENDS_AHEAD
        self.receives_ahead = RECEIVES_AHEAD if device.type == "cpu" else 0
        self.converts = device.type != "cpu"
        self.seconds_waited = 0.0
        self.on_wait: Callable[[float, float], None] | None = None
        self.labels = False

    def channel(self, boundary: int, kind: Message, downstream: bool, peer: int | None = None) -> P2PChannel:
        """The channel of `kind` over `boundary`; `downstream` if this rank holds the stage after it. Results cross no
        boundary: in its place stands the pipeline rank that they are for, and `peer` is the global rank at the other
        end."""
        channel = self._channels.get((boundary, kind))
        if channel is None:
            if peer is None:
                peer = self._peer_of(boundary if downstream else boundary + 1)
            group = self._group_for(boundary, kind)
            channel = self._channels[boundary, kind] = P2PChannel(self, boundary, kind, group, peer)
        return channel

    def warm_up(self, boundaries: Iterable[int], stages: Collection[int]) -> None:
        """Send one number over each of `boundaries` between stages of different ranks, forward and back again, in one
        order on all ranks. Every rank of the pipeline calls this, with its own stages."""
        for boundary in boundaries:
            if boundary not in stages and boundary + 1 not in stages:
                continue
            downstream = boundary + 1 in stages
            forward, back = (
                self.channel(boundary, kind, downstream) for kind in (Message.ACTIVATION, Message.GRADIENT)
            )
            if downstream:
                forward.post_receive([torch.zeros(1, device=self._device)])
                back.send(forward.receive())
            else:
                forward.send([torch.zeros(1, device=self._device)])
                back.post_receive([torch.zeros(1, device=self._device)])
                back.receive()
        self.flush()

    def flush(self, keep: int = 0) -> None:
        """Wait until every send has left, all but the newest `keep` of each channel."""
        for channel in self._channels.values():
            channel.release(keep)

    def clear(self) -> None:
        for channel in self._channels.values():
            channel.clear()
        self._channels.clear()


# What both gloo and NCCL can carry. Tensors of the other types travel as bytes.
CARRIED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
DTYPES = (
    *CARRIED,
    *(torch.int16, torch.bool, torch.complex64, torch.complex128, torch.complex32),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)
MAX_DIMENSIONS = 8
# dtype, gradient flag, number of dimensions, dimensions
HEADER_WIDTH = 3 + MAX_DIMENSIONS


def encode_header(specs: Sequence[TensorSpec]) -> torch.Tensor:
    """One int64 row for each tensor, preceded by a row that holds their number. On the CPU, as hosts read it."""
    rows = [[len(specs)] + [0] * (HEADER_WIDTH - 1)]
    for spec in specs:
        if len(spec.shape) > MAX_DIMENSIONS:
            raise ValueError(
                f"a value that crosses a boundary has {len(spec.shape)} dimensions, but {MAX_DIMENSIONS} at most can "
                "be sent: reshape it in the model, or choose stages so that it stays inside one"
            )
        if spec.dtype not in DTYPES:
            raise ValueError(
                f"a value that crosses a boundary is of type {spec.dtype}, which cannot be sent: convert it in the "
                "model, or choose stages so that it stays inside one"
            )
        padding = [0] * (MAX_DIMENSIONS - len(spec.shape))
        rows.append([DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape, *padding])
    return torch.tensor(rows, dtype=torch.int64)


def decode_header(header: torch.Tensor) -> tuple[TensorSpec, ...]:
    """The inverse of `encode_header`."""
    count, *rows = header.tolist()
    return tuple(TensorSpec(tuple(row[3 : 3 + row[2]]), DTYPES[row[0]], bool(row[1])) for row in rows[: count[0]])


def header_buffer(num_tensors: int) -> torch.Tensor:
    return torch.zeros(1 + num_tensors, HEADER_WIDTH, dtype=torch.int64)


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, which is contiguous, or a view of its memory as bytes, which every backend carries."""
    return tensor if tensor.dtype in CARRIED else tensor.resolve_conj().reshape(-1).view(torch.uint8)

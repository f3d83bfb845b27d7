"""Series of messages, for generation: one rank gives tensors, others take them in the same order, but not at once.

Between asking for a message and taking it, forwards of other groups may go by, and its receive is posted meanwhile. The
first message of a new kind is preceded by a header. Which messages are follows from those before it, so both sides
remember the same, however far ahead one of them is.

There is a series over each boundary, and one with the results of forwards, which go from the rank of the last stage
straight to the pipeline's other ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.boundary.boundaries import refuse_elsewhere
from penstock.runtime.boundary.p2p import (
    TAGS_PER_CHANNEL,
    Message,
    P2PChannel,
    P2PChannels,
    decode_header,
    encode_header,
    header_buffer,
)
from penstock.runtime.context import RankContext

Specs = Sequence[TensorSpec]
# How many kinds of messages are remembered. Both sides see the same ones, so both forget at the same time.
MAX_REMEMBERED = 4096


@dataclass(eq=False, slots=True)
class ExpectedMessage:
    """A message whose receive was requested. `key`, `family`: its kind; see `Series`. `buffers`: what it is received
    into, once its receives are posted."""

    count: int
    key: Hashable | None
    family: Hashable | None
    specs: Specs | None
    buffers: list[torch.Tensor] | None = None


class Series:
    """One rank's end of a series of messages.

    The key of a message is its kind: messages of one kind have the same shapes and types. A family is what kinds have
    in common that differ in the length of a cache alone: once two of them had equal shapes, no header announces the
    others. A message without a key always has a header, unless both sides know its specs.

    Args:
        headers, channels: to each rank that takes, or to the one that gives.
        check: called with the tensors of a new kind before they are sent; raises if they cannot be.
    """

    def __init__(
        self,
        headers: Sequence[P2PChannel],
        channels: Sequence[P2PChannel],
        device: torch.device,
        check: Callable[[Sequence[torch.Tensor]], Any] | None = None,
    ) -> None:
        self._headers, self._channels, self._device, self._check = headers, channels, device, check
        self._known: dict[Hashable, Specs] = {}
        # The first kind of each family with what it consists of, and whether another has the same; None: one differs.
        self._families: dict[Hashable, tuple[Hashable, Specs, bool | None]] = {}
        self._expected: deque[ExpectedMessage] = deque()
        # How many of the expected are posted: the first ones.
        self._num_posted = 0

    @property
    def needed(self) -> bool:
        """Whether any other rank takes part."""
        return bool(self._channels)

    def give(
        self,
        tensors: Sequence[torch.Tensor],
        key: Hashable | None = None,
        family: Hashable | None = None,
        specs: Specs | None = None,
    ) -> None:
        """Send the next message."""
        if specs is None:
            shapes, known = [TensorSpec.shape_of(tensor) for tensor in tensors], self._specs_of(key, family)
            if known is None:
                if self._check is not None:
                    self._check(tensors)
                self._learn(shapes, key, family)
                for channel in self._headers:
                    channel.send([encode_header(shapes)])
            elif shapes != list(known):
                raise RuntimeError(
                    f"the next message of {self._channels[0].name} has {shapes}, but for inputs of these shapes it had "
                    f"{list(known)} before: they follow from more than these shapes, which generation cannot tell the "
                    "other ranks. Put what computes such a value and what uses it into one stage with `stages`"
                )
        for channel in self._channels:
            for start in range(0, len(tensors), TAGS_PER_CHANNEL):
                channel.send(tensors[start : start + TAGS_PER_CHANNEL])

    def expect(
        self, count: int, key: Hashable | None = None, family: Hashable | None = None, specs: Specs | None = None
    ) -> ExpectedMessage:
        """Request the next message, of `count` tensors, with the arguments that its sender gives."""
        expected = ExpectedMessage(count, key, family, specs)
        self._expected.append(expected)
        self._post()
        return expected

    def take(self, expected: ExpectedMessage) -> list[torch.Tensor]:
        """The tensors of the oldest message that was not taken yet. An accelerator's host waits for a header only."""
        if self._expected[0] is not expected:
            raise RuntimeError("messages were taken in another order than their receives were posted in")
        (channel,) = self._channels
        while expected.buffers is None:
            (header,) = self._headers
            first = self._expected[self._num_posted]
            first.specs = decode_header(header.receive()[0])
            self._learn(first.specs, first.key, first.family)
            self._post()
        self._expected.popleft()
        self._num_posted -= 1
        for _ in range(0, expected.count, TAGS_PER_CHANNEL):
            channel.receive()
        return expected.buffers

    def drain(self) -> None:
        """Receive requested messages that will not be taken."""
        while self._expected:
            self.take(self._expected[0])

    def clear(self) -> None:
        """Forget what is on its way."""
        self._expected.clear()
        self._num_posted = 0

    def _post(self) -> None:
        """Post the receives of messages whose shapes are known, in order; of the first other, that of its header."""
        while self._num_posted < len(self._expected):
            expected = self._expected[self._num_posted]
            if expected.specs is None:
                expected.specs = self._specs_of(expected.key, expected.family)
            if expected.specs is None:
                (header,) = self._headers
                if not header.posted:
                    header.post_receive([header_buffer(expected.count)])
                return
            expected.buffers = [spec.empty(self._device) for spec in expected.specs]
            for start in range(0, len(expected.buffers), TAGS_PER_CHANNEL):
                self._channels[0].post_receive(expected.buffers[start : start + TAGS_PER_CHANNEL])
            self._num_posted += 1

    def _specs_of(self, key: Hashable | None, family: Hashable | None) -> Specs | None:
        """The tensors in a message of this kind, if the earlier ones tell."""
        if key is None:
            return None
        known = self._known.get(key)
        if known is None and family is not None and family in self._families:
            _, specs, same = self._families[family]
            known = specs if same else None
        return known

    def _learn(self, specs: Specs, key: Hashable | None, family: Hashable | None) -> None:
        if key is None:
            return
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
            self._families.clear()
        self._known[key] = specs
        if family is not None:
            first, of_first, same = self._families.setdefault(family, (key, specs, False))
            if first != key and same is not None:
                # None where a length has changed the shapes, because it may do so again.
                self._families[family] = first, of_first, True if list(of_first) == list(specs) else None


def series_over(channels: P2PChannels, boundary: int, downstream: bool, device: torch.device) -> Series:
    """The series of activations over a boundary; `downstream` if this rank holds the stage after it, and takes."""
    headers, activations = (
        channels.channel(boundary, kind, downstream) for kind in (Message.HEADER, Message.ACTIVATION)
    )
    return Series([headers], [activations], device, lambda tensors: refuse_elsewhere(tensors, device, boundary))


def series_of_results(channels: P2PChannels, context: RankContext) -> Series:
    """The series of results of forwards. The rank of the last stage gives them."""
    gives = context.holds_output
    ranks = context.pipeline.ranks(context.place.tensor_parallel_rank)
    peers = [(number, rank) for number, rank in enumerate(ranks) if rank != context.output_rank]
    if not gives:
        peers = [(number, context.output_rank) for number, rank in peers if rank == context.rank]
    headers, results = (
        [channels.channel(number, kind, gives, peer) for number, peer in peers]
        for kind in (Message.RESULT_HEADER, Message.RESULT)
    )
    return Series(headers, results, context.device)

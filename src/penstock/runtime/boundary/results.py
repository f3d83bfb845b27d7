"""Results of forwards: from the rank of the last stage straight to the pipeline's other ranks, one message each.

They are taken in the order in which they were offered, but not at once: between the two, forwards of other groups may
go by. The first result of a new kind is preceded by a header; both sides remember it once it was taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import torch

from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.boundary.p2p import TAGS_PER_CHANNEL, Message, P2PChannel, P2PChannels
from penstock.runtime.boundary.tensors import decode_header, encode_header, header_buffer
from penstock.runtime.context import RankContext

# Kinds of results that are remembered. All ranks see the same ones, so all forget at the same time.
MAX_REMEMBERED = 4096


class Expected:
    """A result that was offered, or is on its way.

    Attributes:
        key: its kind, None if that is not to be remembered.
        specs: what it consists of, as far as it is known.
    """

    __slots__ = ("count", "key", "posted", "specs", "tensors")

    def __init__(self, key: Hashable | None, specs: Sequence[TensorSpec] | None, count: int) -> None:
        self.key, self.specs, self.count = key, specs, count
        self.posted = False
        self.tensors: Sequence[torch.Tensor] = ()


class Results:
    """One rank's end of the results of its pipeline.

    Attributes:
        gives: whether this rank holds the last stage.
    """

    def __init__(self, channels: P2PChannels, context: RankContext) -> None:
        self.gives = context.holds_output
        self._device = context.device
        ranks = context.pipeline.ranks(context.place.tensor_parallel_rank)
        takers = [(number, rank) for number, rank in enumerate(ranks) if rank != context.output_rank]
        if not self.gives:
            takers = [(number, context.output_rank) for number, rank in takers if rank == context.rank]
        self._headers, self._channels = (
            [channels.channel(number, kind, self.gives, peer) for number, peer in takers]
            for kind in (Message.RESULT_HEADER, Message.RESULT)
        )
        self._known: dict[Hashable, Sequence[TensorSpec]] = {}
        # On a rank that takes: what was not taken yet, in order.
        self._expected: deque[Expected] = deque()

    @property
    def needed(self) -> bool:
        """Whether any other rank takes part."""
        return bool(self._channels)

    def offer(
        self, tensors: Sequence[torch.Tensor], key: Hashable | None = None, specs: Sequence[TensorSpec] | None = None
    ) -> Expected:
        """A result is there, or on its way: the rank that gives sends its `tensors`.

        Args:
            tensors: on the other ranks placeholders, which tell how many there are.
            key: its kind: results of one kind have the same shapes and types.
            specs: what it consists of, if every rank knows.

        Returns:
            What every rank gives to `take` later, in the same order.
        """
        known = specs if specs is not None or key is None else self._known.get(key)
        expected = Expected(key if specs is None else None, known, len(tensors))
        if not self.gives:
            self._expected.append(expected)
            self._post()
            return expected
        expected.tensors = tensors = [tensor.contiguous() for tensor in tensors]
        if known is None:
            expected.specs = [TensorSpec.shape_of(tensor) for tensor in tensors]
            for channel in self._headers:
                channel.send([encode_header(expected.specs)])
        for channel in self._channels:
            for start in range(0, len(tensors), TAGS_PER_CHANNEL):
                channel.send(tensors[start : start + TAGS_PER_CHANNEL])
        return expected

    def take(self, expected: Expected) -> Sequence[torch.Tensor]:
        """The tensors of the oldest result that was not taken yet. On an accelerator only the stream waits."""
        if not self.gives:
            if self._expected[0] is not expected:
                raise RuntimeError("results of forwards were taken in another order than they were offered")
            if not expected.posted:
                expected.specs = decode_header(self._only(self._headers).receive()[0])
                self._post()
            self._expected.popleft()
            expected.tensors = [
                tensor
                for _ in range(0, expected.count, TAGS_PER_CHANNEL)
                for tensor in self._only(self._channels).receive()
            ]
        if expected.key is not None and expected.specs is not None and expected.key not in self._known:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[expected.key] = expected.specs
        return expected.tensors

    def drain(self) -> None:
        """Receive what was sent and will not be taken."""
        while self._expected:
            self.take(self._expected[0])

    def clear(self) -> None:
        """Forget what is on its way."""
        self._expected.clear()

    def _post(self) -> None:
        """Post the receives of results whose shapes are known, in order; of the first other one, that of its header."""
        for expected in self._expected:
            if expected.posted:
                continue
            if expected.specs is None:
                if not self._only(self._headers).posted:
                    self._only(self._headers).post_receive([header_buffer(expected.count)])
                return
            buffers = [spec.empty(self._device) for spec in expected.specs]
            for start in range(0, len(buffers), TAGS_PER_CHANNEL):
                self._only(self._channels).post_receive(buffers[start : start + TAGS_PER_CHANNEL])
            expected.posted = True

    @staticmethod
    def _only(channels: Sequence[P2PChannel]) -> P2PChannel:
        (channel,) = channels
        return channel

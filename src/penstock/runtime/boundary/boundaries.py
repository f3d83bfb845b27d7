"""The boundaries between the stages of a pipeline, as one rank sees them: what stages send each other.

Shapes, types and gradient flags of what crosses follow from the microbatch's own input shapes, from autocast and from
which parameters are trainable in the stages before. A header goes before the first microbatch with a new combination.
Both sides remember it: later microbatches need no message about shapes, and their receives can be posted ahead. The
receive of activations, gradients or a loss is posted when `post` is called, at the latest when its message is taken.
With gloo it is posted earlier, as far ahead as there is room; see `P2PChannels.receives_ahead`.

A value may get no gradient at all (a `detach`, a branch that nothing uses), and the previous stage must know of it:

- Why: weights that only feed such a value have no gradient then. Zeros are something else: an optimizer with weight
  decay would apply them.
- What is sent: the message of gradients has zeros in the place of one that is missing, so that its receive may be
  posted ahead. Beside it goes a message of flags, which gradients there are, from host to host. No host waits for its
  device: the host of the next stage knows the flags when it has enqueued its backward.
- When: with the first backward of a step, and with further ones until every value has had a gradient in that step. That
  is one small message in most steps.
- Why it may stop then: the weights that zeros reach have a gradient by then, to which zeros add nothing. A warning says
  so if gradients end elsewhere in each microbatch, as then there may be weights that have none.
"""

from __future__ import annotations

import operator
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial

import torch

from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.boundary.p2p import Message, P2PChannel, P2PChannels, decode_header, encode_header, header_buffer
from penstock.runtime.report import profiling
from penstock.schedule.actions import Kind
from penstock.schedule.communication import ActionOrLoss, carries_loss

# For each stage, its microbatches in forward and in backward order.
Orders = Mapping[int, tuple[Sequence[int], Sequence[int]]]
# The values that cross a boundary in a microbatch, by whatever names them: equal ones are of one kind.
Crossing = tuple[Hashable, ...]
LOSS_DTYPE = torch.float64
# Receives of small messages are posted ahead until they have so many bytes (see `P2PChannels.receives_ahead`).
BYTES_AHEAD = 1 << 20
# Signatures that are remembered. All ranks of a pipeline see the same ones, so all forget at the same time.
MAX_SIGNATURES = 4096
_gradient = operator.attrgetter("grad")
_is_there = partial(operator.is_not, None)
# A tuple that is equal to the tensor's `TensorSpec`, made without a call of Python.
_spec_of = operator.attrgetter(*TensorSpec._fields)


class Boundaries:
    """The boundaries around the stages of one rank: `to_previous[stage]`, and `to_next[stage]` unless it is the last.

    `after_top` is the boundary after the last stage of this rank, over which it is sent losses; None on the rank that
    has the pipeline's last stage.
    """

    def __init__(self, channels: P2PChannels, stage_to_rank: Sequence[int], pipeline_rank: int, device: torch.device):
        self.channels = channels
        self._signatures = _Signatures()
        self.to_previous: dict[int, BoundaryToPrevious | LocalBoundary] = {}
        self.to_next: dict[int, BoundaryToNext | LocalBoundary] = {}
        self.after_top: BoundaryToNext | None = None
        # The channels to the ranks that learn a loss from this one.
        self.losses_to: list[P2PChannel] = []
        last = len(stage_to_rank) - 1
        stages = [stage for stage, holder in enumerate(stage_to_rank) if holder == pipeline_rank]
        for stage in stages:
            if stage == 0:
                self.to_previous[stage] = NoPreviousStage()
            elif stage - 1 not in stages:
                with_loss = carries_loss(stage - 1, stage_to_rank)
                before = BoundaryToPrevious(channels, stage - 1, True, with_loss, self._signatures, device)
                self.to_previous[stage] = before
                if before.losses is not None:
                    self.losses_to.append(before.losses)
            if stage + 1 in stages:
                self.to_next[stage] = self.to_previous[stage + 1] = LocalBoundary()
            elif stage < last:
                with_loss = carries_loss(stage, stage_to_rank)
                self.to_next[stage] = BoundaryToNext(channels, stage, False, with_loss, self._signatures, device)
        after_top = self.to_next.get(stages[-1])
        if isinstance(after_top, BoundaryToNext):
            self.after_top = after_top

    def prepare(
        self,
        orders: Orders,
        signatures: Iterable[Hashable],
        crossing: Sequence[Sequence[Crossing]],
        states: Sequence[Hashable],
    ) -> None:
        """Make ready for the messages of a step or an evaluation.

        Args:
            orders: for each stage of this rank, the microbatches in forward and in backward order.
            signatures: one for each microbatch; equal ones have equal shapes at every boundary.
            crossing: for each boundary of the pipeline, which values of each microbatch cross it.
            states: for each stage of the pipeline, what decides types and gradient flags of what it sends besides the
                inputs: autocast, and which parameters are trainable up to there.
        """
        self.channels.labels = profiling()
        self._signatures.prepare(signatures)
        for stage, (forward, backward) in orders.items():
            if stage:
                self.to_previous[stage].prepare(forward, crossing[stage - 1], states[stage - 1])
            if stage in self.to_next:
                self.to_next[stage].prepare(backward, crossing[stage], states[stage])

    def post(self, users: Iterable[ActionOrLoss]) -> None:
        """Post the receives of the messages that `users` will use."""
        for user in users:
            if user.kind not in (Kind.F, Kind.B):
                assert self.after_top is not None
                self.after_top.post_loss()
                continue
            boundary = self.to_previous[user.stage] if user.kind == Kind.F else self.to_next[user.stage]
            assert not isinstance(boundary, LocalBoundary)
            boundary.post(user.microbatch)


class LocalBoundary:
    """A boundary between two stages of this rank, whose values are handed over in memory. For the stage before it, it
    has those methods of `BoundaryToNext` that a step calls, and for the other those of `BoundaryToPrevious`. Nothing is
    posted here, and the loss is known."""

    def __init__(self) -> None:
        self._activations: dict[int, Sequence[torch.Tensor]] = {}
        self._gradients: dict[int, Sequence[torch.Tensor | None]] = {}
        # Microbatches for which gradients are due.
        self._differentiable: set[int] = set()

    def prepare(self, order: Sequence[int], crossing: Sequence[Crossing], state: Hashable) -> None:
        self._activations.clear()
        self._gradients.clear()
        self._differentiable.clear()

    def send_forward(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        self._activations[microbatch] = tensors
        if any(tensor.requires_grad for tensor in tensors):
            self._differentiable.add(microbatch)

    def recv_forward(self, microbatch: int) -> list[torch.Tensor]:
        tensors = self._activations.pop(microbatch)
        return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]

    def send_backward(self, microbatch: int, leaves: Sequence[torch.Tensor]) -> None:
        self._gradients[microbatch] = list(map(_gradient, leaves))

    def recv_backward(self, microbatch: int) -> Sequence[torch.Tensor | None]:
        if microbatch not in self._differentiable:
            return []
        self._differentiable.remove(microbatch)
        return self._gradients.pop(microbatch)


class NoPreviousStage(LocalBoundary):
    """Before the first stage, which has no values whose gradients it could send."""

    def recv_forward(self, microbatch: int) -> list[torch.Tensor]:
        return []


class _RemoteBoundary:
    """A boundary between the stages `boundary` and `boundary + 1`, one of which this rank holds, and another rank the
    other.

    Args:
        downstream: whether this rank holds the stage after the boundary.
        with_loss: whether `losses` come back over it, as the rank before it has not seen them.
    """

    def __init__(
        self,
        channels: P2PChannels,
        boundary: int,
        downstream: bool,
        with_loss: bool,
        signatures: _Signatures,
        device: torch.device,
    ):
        # By microbatch.
        self._crossing: Sequence[Crossing] = ()
        self._boundary = boundary
        self._signatures = signatures
        self._device = device
        self._receives_ahead = channels.receives_ahead
        self._headers = channels.channel(boundary, Message.HEADER, downstream)
        self._activations = channels.channel(boundary, Message.ACTIVATION, downstream)
        self._gradients = channels.channel(boundary, Message.GRADIENT, downstream)
        self._presence_flags = channels.channel(boundary, Message.PRESENCE, downstream)
        self.losses = channels.channel(boundary, Message.LOSS, downstream) if with_loss else None
        self._make_loss_buffer = _maker((), LOSS_DTYPE, device)
        # By signature, in this step's state of the stages before.
        self._specs: dict[int, _CrossingSpecs] = {}
        # Microbatches whose receives are not posted yet, the next one last.
        self._unposted: list[int] = []
        # For each kind of values that may have gradients, which of them have had one in this step.
        self._had_gradient: dict[tuple[Crossing, int], list[bool]] = {}
        # The kinds of which all have had one: few, and looked through in less time than their values' hashes take.
        self._complete_kinds: list[tuple[Crossing, int]] = []

    def prepare(self, order: Sequence[int], crossing: Sequence[Crossing], state: Hashable) -> None:
        """Make ready for a step: `crossing` has what crosses for each microbatch; this side receives in `order`."""
        self._crossing = crossing
        self._unposted = [microbatch for microbatch in reversed(order) if crossing[microbatch]]
        self._had_gradient, self._complete_kinds = {}, []
        self._specs = self._signatures.learned.setdefault((self._boundary, state), {})

    def has_all_gradients(self, microbatch: int, count: int) -> bool:
        """Whether each of the `count` values of a microbatch that may have a gradient has had one in this step, in any
        microbatch: then no flags are sent, and `recv_backward` gives one for each. Both sides know the same."""
        return not count or (self._crossing[microbatch], count) in self._complete_kinds

    def _note_presence(self, microbatch: int, flags: Sequence[bool]) -> None:
        """Remember which of a microbatch's values have had a gradient."""
        kind = self._crossing[microbatch], len(flags)
        had = self._had_gradient[kind] = list(map(operator.or_, self._had_gradient.get(kind, flags), flags))
        if all(had):
            self._complete_kinds.append(kind)

    def _learn(self, specs: Iterable[TensorSpec], signature: int) -> _CrossingSpecs:
        """What crosses for inputs of a signature that is new, remembered."""
        learned = self._specs[signature] = _CrossingSpecs(specs, self._device, self._receives_ahead)
        return learned


class BoundaryToPrevious(_RemoteBoundary):
    """The boundary before a stage of this rank: activations come over it, gradients and losses go."""

    # Of the activations whose receives are posted.
    _expected: deque[_CrossingSpecs]

    def prepare(self, order: Sequence[int], crossing: Sequence[Crossing], state: Hashable) -> None:
        super().prepare(order, crossing, state)
        self._expected = deque()
        self._post_ahead()

    def recv_forward(self, microbatch: int) -> list[torch.Tensor]:
        """The values that cross into the stage, as leaves that require a gradient where one will travel back."""
        if not self._crossing[microbatch]:
            return []
        if not self._activations.posted:
            self.post(microbatch)
        tensors = self._activations.receive()
        specs = self._expected.popleft()
        if self._unposted:
            self._post_ahead()
        for place in specs.differentiable:
            tensors[place].requires_grad_(True)
        return tensors

    def send_backward(self, microbatch: int, leaves: Sequence[torch.Tensor]) -> None:
        """Send the gradients of `leaves`, the values the stage received that require one, in order."""
        gradients = list(map(_gradient, leaves))
        flags = list(map(_is_there, gradients))
        complete = self.has_all_gradients(microbatch, len(leaves))
        if not complete:
            self._presence_flags.send([torch.tensor(flags, dtype=torch.int64)])
            self._note_presence(microbatch, flags)
        if not all(flags):
            if complete:
                self._warn_of_zeros()
            pairs = zip(leaves, gradients, strict=True)
            gradients = [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in pairs]
        self._gradients.send(gradients)

    def _warn_of_zeros(self) -> None:
        warnings.warn(
            f"a value between stages {self._boundary} and {self._boundary + 1} had a gradient in a microbatch of this "
            "step and has none in a later one, where zeros stand for it. If gradients end elsewhere in each "
            "microbatch, weights of earlier stages may get zeros where the unsplit model has None, and an optimizer "
            "with weight decay then changes them",
            stacklevel=2,
        )

    def post(self, microbatch: int) -> None:
        """Post the receive of a microbatch's activations, the next that cross, if any do; if their shapes are new, wait
        for their header first."""
        if not self._crossing[microbatch]:
            return
        due = self._unposted.pop()
        assert due == microbatch
        signature = self._signatures.numbers[microbatch]
        specs = self._specs.get(signature)
        if specs is None:
            if not self._headers.posted:
                self._post_header(microbatch)
            specs = self._learn(decode_header(self._headers.receive()[0]), signature)
        self._activations.post_receive(specs.buffers())
        self._expected.append(specs)

    def _post_ahead(self) -> None:
        """Post receives as far as shapes are known and there is room; for a new shape, that of the header."""
        if not self._receives_ahead:
            return
        unposted, numbers, channel = self._unposted, self._signatures.numbers, self._activations
        while unposted:
            specs = self._specs.get(numbers[unposted[-1]])
            if specs is None:
                if not channel.posted and not self._headers.posted:
                    self._post_header(unposted[-1])
                return
            if len(channel.posted) >= specs.ahead:
                return
            unposted.pop()
            channel.post_receive(specs.buffers())
            self._expected.append(specs)

    def _post_header(self, microbatch: int) -> None:
        self._headers.post_receive([header_buffer(len(self._crossing[microbatch]))])


class BoundaryToNext(_RemoteBoundary):
    """The boundary after a stage of this rank: activations go over it, gradients and losses come."""

    # What was sent and not answered, by microbatch.
    _sent: dict[int, _CrossingSpecs]
    # How many losses there are whose receives are not posted yet.
    _losses_unposted: int

    def prepare(self, order: Sequence[int], crossing: Sequence[Crossing], state: Hashable) -> None:
        super().prepare(order, crossing, state)
        self._sent = {}
        self._losses_unposted = 0 if self.losses is None else len(order)
        self._post_ahead()

    def send_forward(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send the values that cross out of the stage."""
        if not self._crossing[microbatch]:
            return
        signature = self._signatures.numbers[microbatch]
        specs = self._specs.get(signature)
        if specs is None:
            refuse_elsewhere(tensors, self._device, self._boundary)
            specs = self._learn(map(TensorSpec.of, tensors), signature)
            self._headers.send([encode_header(specs.tensors)])
        elif not specs.fit(tensors):
            raise RuntimeError(
                f"the tensors between stages {self._boundary} and {self._boundary + 1} are "
                f"{list(map(TensorSpec.of, tensors))}, but for inputs of these shapes they were {specs.tensors} "
                "before: they follow from more than these shapes, which the trace of the model did not show. Put what "
                "computes such a value and what uses it into one stage with `stages`"
            )
        self._activations.send(list(map(torch.Tensor.detach, tensors)))
        self._sent[microbatch] = specs
        if self._unposted:
            self._post_ahead()

    def recv_loss(self) -> torch.Tensor:
        """The value of the next microbatch's loss. Shape (), float64."""
        assert self.losses is not None
        if not self.losses.posted:
            self.post_loss()
        return self.losses.receive()[0]

    def recv_backward(self, microbatch: int) -> Sequence[torch.Tensor | None]:
        """Gradients of the values sent that require one, in order; None where there is none."""
        if not self._crossing[microbatch]:
            return []
        if not self._gradients.posted:
            self.post(microbatch)
        count = len(self._sent.pop(microbatch).differentiable)
        flags_come = not self.has_all_gradients(microbatch, count)
        if flags_come and not self._presence_flags.posted:  # before the wait for the gradients, which are sent later
            self._post_flags(count)
        gradients: Sequence[torch.Tensor | None] = self._gradients.receive()
        if flags_come:
            flags = list(map(bool, self._presence_flags.receive()[0].tolist()))
            self._note_presence(microbatch, flags)
            gradients = [gradient if flag else None for gradient, flag in zip(gradients, flags, strict=True)]
        # The gradient has arrived, so the activation it belongs to has been sent.
        self._activations.release(keep=len(self._sent))
        if self._unposted:
            self._post_ahead()
        return gradients

    def post(self, microbatch: int) -> None:
        """Post the receive of a microbatch's gradients, the next that cross, if any do; its activations were sent, or
        are of known shapes."""
        if not self._crossing[microbatch]:
            return
        due = self._unposted.pop()
        assert due == microbatch
        specs = self._specs_of(microbatch)
        assert specs is not None
        self._gradients.post_receive(specs.gradient_buffers())

    def _post_flags(self, count: int) -> None:
        self._presence_flags.post_receive([torch.empty(count, dtype=torch.int64)])

    def post_loss(self) -> None:
        assert self.losses is not None
        self._losses_unposted -= 1
        self.losses.post_receive([self._make_loss_buffer()])

    def _specs_of(self, microbatch: int) -> _CrossingSpecs | None:
        return self._sent.get(microbatch) or self._specs.get(self._signatures.numbers[microbatch])

    def _post_ahead(self) -> None:
        """Post receives as far as shapes are known and there is room."""
        unposted, channel = self._unposted, self._gradients
        while unposted:
            specs = self._specs_of(unposted[-1])
            if specs is None or len(channel.posted) >= specs.gradients_ahead:
                return
            if self._losses_unposted >= len(unposted):  # a microbatch's loss comes before its gradients
                self.post_loss()
            # A step's first gradients come with flags, whose receive takes longer to post once sends are under way.
            if specs.differentiable and not self._had_gradient and not self._presence_flags.posted:
                self._post_flags(len(specs.differentiable))
            unposted.pop()
            channel.post_receive(specs.gradient_buffers())


class _CrossingSpecs:
    """What is known of the tensors that cross a boundary for inputs of one signature, and of the gradients that come
    back: how many messages of either may be posted ahead, and buffers to receive them."""

    def __init__(self, specs: Iterable[TensorSpec], device: torch.device, receives_ahead: int):
        self.tensors = list(specs)
        # The places of those that require a gradient.
        self.differentiable = [place for place, spec in enumerate(self.tensors) if spec.requires_grad]
        gradients = [self.tensors[place] for place in self.differentiable]
        self.ahead = _messages_ahead(self.tensors, receives_ahead)
        self.gradients_ahead = _messages_ahead(gradients, receives_ahead)
        self._makers = [_maker(spec.shape, spec.dtype, device) for spec in self.tensors]
        self._gradient_makers = [_maker(spec.shape, spec.dtype, device) for spec in gradients]

    def buffers(self) -> list[torch.Tensor]:
        return list(map(operator.call, self._makers))

    def gradient_buffers(self) -> list[torch.Tensor]:
        return list(map(operator.call, self._gradient_makers))

    def fit(self, tensors: Iterable[torch.Tensor]) -> bool:
        return list(map(_spec_of, tensors)) == self.tensors


class _Signatures:
    """The input signatures of a step's microbatches, as small numbers: `numbers` has one for each microbatch. What was
    `learned` of each is by boundary, and by the state of the stages before."""

    def __init__(self) -> None:
        self._number_of: dict[Hashable, int] = {}
        self.learned: dict[Hashable, dict[int, _CrossingSpecs]] = {}
        self.numbers: list[int] = []

    def prepare(self, signatures: Iterable[Hashable]) -> None:
        if len(self._number_of) >= MAX_SIGNATURES:
            self._number_of.clear()
            self.learned.clear()
        self.numbers = []
        previous, number = None, -1
        for signature in signatures:
            if signature is not previous:
                previous, number = signature, self._number_of.setdefault(signature, len(self._number_of))
            self.numbers.append(number)


def _maker(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """Makes empty tensors, in less time than `torch.empty`."""
    like = torch.empty((), dtype=dtype, device=device).expand(shape)
    return partial(torch.empty_like, like, memory_format=torch.contiguous_format)


def _messages_ahead(specs: Iterable[TensorSpec], least: int) -> int:
    return max(least, BYTES_AHEAD // max(1, sum(spec.num_bytes for spec in specs))) if least else 0


def refuse_elsewhere(tensors: Iterable[torch.Tensor], device: torch.device, boundary: int) -> None:
    """Raise if one of `tensors`, which are to cross `boundary`, is not on `device`."""
    for number, tensor in enumerate(tensors):
        if tensor.device.type != device.type:
            raise RuntimeError(
                f"value {number} that goes from stage {boundary} to stage {boundary + 1}, a {tensor.dtype} tensor of "
                f"shape {tuple(tensor.shape)}, is on {tensor.device}, but stages compute and exchange values on "
                f"{device}: move it there in the model's code, or make it anew on each stage from the inputs"
            )

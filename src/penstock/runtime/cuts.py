"""The cuts between the stages of a pipeline, as one rank sees them: what crosses them, with shapes learned once.

The shapes, dtypes and gradient flags at a cut follow from the microbatch's own input shapes, from autocast and from
which parameters are trainable upstream. The first microbatch with a new combination is preceded by a header; both
sides remember it, so that later receives are posted ahead with no message about shapes.

A receive is posted when `post` is called, at the latest when its message is taken. With gloo the cuts also post by
themselves, as far ahead as there is room; see `Channel.receives_ahead`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from .channel import Channel, Kind
from .crossing import Crossing, StepSignatures, refuse_elsewhere
from .transfer import TensorSpec, decode_header, encode_header, header_buffer

LOSS_DTYPE = torch.float64


class PipelineEnd:
    """Below the first stage: nothing comes, and what is given goes nowhere. Has the methods of `CutBelow`."""

    def begin(self, order: Sequence[int], num_values: int) -> None:
        pass

    def open(self, state: int) -> None:
        pass

    def take_notice(self, length: int) -> list[int] | None:
        return None

    def take_activations(self, microbatch: int) -> list[torch.Tensor]:
        return []

    def give_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> None:
        pass

    def give_loss(self, loss: torch.Tensor) -> None:
        pass


class LocalCut:
    """A cut between two stages of this rank, whose values are handed over in memory.

    Has the methods of `CutAbove` for the stage beneath it and those of `CutBelow` for the other. Neither needs notices,
    and both know the losses.
    """

    def __init__(self) -> None:
        self._activations: dict[int, Sequence[torch.Tensor]] = {}
        self._gradients: dict[int, Sequence[torch.Tensor]] = {}
        # Microbatches for which gradients are due.
        self._differentiable: set[int] = set()

    def begin(self, order: Sequence[int], num_values: int) -> None:
        self._activations.clear()
        self._gradients.clear()
        self._differentiable.clear()

    def open(self, state: int) -> None:
        pass

    def take_notice(self, length: int) -> list[int] | None:
        return None

    def give_notice(self, notice: Sequence[int]) -> None:
        pass

    def give_activations(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        self._activations[microbatch] = tensors
        if any(tensor.requires_grad for tensor in tensors):
            self._differentiable.add(microbatch)

    def take_activations(self, microbatch: int) -> list[torch.Tensor]:
        tensors = self._activations.pop(microbatch)
        return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]

    def give_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> None:
        self._gradients[microbatch] = gradients

    def take_gradients(self, microbatch: int) -> Sequence[torch.Tensor]:
        if microbatch not in self._differentiable:
            return []
        self._differentiable.remove(microbatch)
        return self._gradients.pop(microbatch)

    def give_loss(self, loss: torch.Tensor) -> None:
        pass

    def stand_ins(self, microbatch: int) -> list[torch.Tensor]:
        return []


class RemoteCut:
    """A cut between a stage of this rank and one of another rank.

    Args:
        cut: it lies between stage `cut` and stage `cut + 1`.
        upper: whether this rank holds the stage above it.
        carries_loss: whether losses come down over it, as the rank beneath has not seen them.
    """

    def __init__(
        self,
        channel: Channel,
        cut: int,
        upper: bool,
        carries_loss: bool,
        signatures: StepSignatures,
        device: torch.device,
    ):
        self._cut = cut
        self._signatures = signatures
        self._device = device
        self._receives_ahead = channel.receives_ahead
        self._notices = channel.line(cut, Kind.STEP, upper)
        self._headers = channel.line(cut, Kind.HEADER, upper)
        self._activations = channel.line(cut, Kind.ACTIVATION, upper)
        self._gradients = channel.line(cut, Kind.GRADIENT, upper)
        self._losses = channel.line(cut, Kind.LOSS, upper) if carries_loss else None
        self._learned: dict[int, dict[int, Crossing]] = {}
        # What crosses, by signature, in this step's state of the stages beneath.
        self._known: dict[int, Crossing] = {}
        self._num_values = 0
        # Microbatches whose receives are not posted yet, the next one last.
        self._unposted: list[int] = []

    def begin(self, order: Sequence[int], num_values: int) -> None:
        """Start a step: `num_values` tensors will cross for each microbatch; this side takes in `order`."""
        self._num_values = num_values
        self._unposted = list(reversed(order))

    def open(self, state: int) -> None:
        """`state` is that of all stages beneath the cut (see `Notice`). Post receives as far as shapes are known."""
        self._known = self._learned.setdefault(state, {})
        self._post_ahead()

    def post(self) -> None:
        """Post the receive for the next microbatch."""
        raise NotImplementedError

    def _post_ahead(self) -> None:
        """Post receives for the next microbatches whose shapes are known, as far as there is room."""
        raise NotImplementedError

    def _crossing(self, specs: Iterable[TensorSpec], signature: int) -> Crossing:
        """What crosses for inputs of a signature that is new, remembered."""
        crossing = Crossing(specs, self._device, self._receives_ahead)
        if len(crossing.specs) == self._num_values:
            self._known[signature] = crossing
        return crossing


class CutBelow(RemoteCut):
    """The cut below a stage of this rank, with another rank's stage beneath it."""

    # Of the activations whose receives are posted.
    _expected: deque[Crossing]

    def begin(self, order: Sequence[int], num_values: int) -> None:
        super().begin(order, num_values)
        self._expected = deque()

    def take_notice(self, length: int) -> list[int]:
        """The notice from the stage below: integers that both sides compare."""
        self._notices.post_receive([torch.zeros(length, dtype=torch.int64)])
        return self._notices.receive()[0].tolist()

    def take_activations(self, microbatch: int) -> list[torch.Tensor]:
        """The values that cross into the stage, as leaves that require a gradient where one will travel back."""
        if not self._activations.posted:
            self.post()
        tensors = self._activations.receive()
        crossing = self._expected.popleft()
        if self._unposted:
            self._post_ahead()
        for tensor, spec in zip(tensors, crossing.specs, strict=True):
            if spec.requires_grad:
                tensor.requires_grad_(True)
        return tensors

    def give_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of the values the stage received that require one, in order."""
        self._gradients.send(gradients)

    def give_loss(self, loss: torch.Tensor) -> None:
        """Pass a loss's value down, if the rank there does not know it yet."""
        if self._losses is not None:
            self._losses.send([loss])

    def post(self) -> None:
        """Post the receive of the next activations; if their shapes are new, wait for their header first."""
        signature = self._signatures.numbers[self._unposted.pop()]
        crossing = self._known.get(signature)
        if crossing is None:
            self._headers.post_receive([header_buffer(self._num_values)])
            crossing = self._crossing(decode_header(self._headers.receive()[0]), signature)
        self._activations.post_receive(crossing.buffers())
        self._expected.append(crossing)

    def _post_ahead(self) -> None:
        unposted, numbers, line = self._unposted, self._signatures.numbers, self._activations
        while unposted:
            crossing = self._known.get(numbers[unposted[-1]])
            if crossing is None or len(line.posted) >= crossing.ahead:
                return
            self.post()


class CutAbove(RemoteCut):
    """The cut above a stage of this rank, with another rank's stage on top of it."""

    # What was sent and not answered, by microbatch.
    _sent: dict[int, Crossing]
    # Losses whose receives are not posted yet.
    _losses_unposted: int

    def begin(self, order: Sequence[int], num_values: int) -> None:
        super().begin(order, num_values)
        self._sent = {}
        self._losses_unposted = 0 if self._losses is None else len(order)

    def give_notice(self, notice: Sequence[int]) -> None:
        """Pass the notice on. `notice[-1]` is the state of all stages up to this one."""
        self._notices.send([torch.tensor(notice, dtype=torch.int64)])

    def give_activations(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send the values that cross out of the stage. None at all, where some are due, says that the step was left."""
        signature = self._signatures.numbers[microbatch]
        crossing = self._known.get(signature)
        if crossing is None:
            refuse_elsewhere(tensors, self._device, self._cut)
            crossing = self._crossing(map(TensorSpec.of, tensors), signature)
            self._headers.send([encode_header(crossing.specs)])
        elif not crossing.fits(tensors):
            raise RuntimeError(
                f"the tensors between stages {self._cut} and {self._cut + 1} are "
                f"{list(map(TensorSpec.of, tensors))}, but for inputs of these shapes they were {crossing.specs} "
                "before; a shape that depends on the inputs' values cannot cross a cut"
            )
        self._activations.send(list(map(torch.Tensor.detach, tensors)))
        self._sent[microbatch] = crossing
        if self._unposted:
            self._post_ahead()

    def take_loss(self) -> torch.Tensor:
        """The value of the next microbatch's loss. Shape (), float64."""
        assert self._losses is not None
        if not self._losses.posted:
            self.post_loss()
        return self._losses.receive()[0]

    def take_gradients(self, microbatch: int) -> list[torch.Tensor]:
        """Gradients of the values sent that require one, in order."""
        if not self._gradients.posted:
            self.post()
        gradients = self._gradients.receive()
        del self._sent[microbatch]
        # The gradient is here, so the activation it answers has left.
        self._activations.release(keep=len(self._sent))
        if self._unposted:
            self._post_ahead()
        return gradients

    def stand_ins(self, microbatch: int) -> list[torch.Tensor]:
        """Zeros for the values that cross out of the stage; none where their shapes were never learned."""
        crossing = self._known.get(self._signatures.numbers[microbatch])
        specs = () if crossing is None else crossing.specs
        return [spec.zeros(self._device).requires_grad_(spec.requires_grad) for spec in specs]

    def post(self) -> None:
        """Post the receive of the next gradients, whose activations were sent, or of known shapes."""
        crossing = self._crossing_of(self._unposted.pop())
        assert crossing is not None
        self._gradients.post_receive(crossing.gradient_buffers())

    def post_loss(self) -> None:
        """Post the receive of the next loss."""
        assert self._losses is not None
        self._losses_unposted -= 1
        self._losses.post_receive([torch.empty((), dtype=LOSS_DTYPE, device=self._device)])

    def _crossing_of(self, microbatch: int) -> Crossing | None:
        return self._sent.get(microbatch) or self._known.get(self._signatures.numbers[microbatch])

    def _post_ahead(self) -> None:
        unposted, line = self._unposted, self._gradients
        while unposted:
            crossing = self._crossing_of(unposted[-1])
            if crossing is None or len(line.posted) >= crossing.gradients_ahead:
                return
            if self._losses_unposted >= len(unposted):
                self.post_loss()
            self.post()

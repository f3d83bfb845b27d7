"""What crosses a cut: tensors whose shapes, types and gradient flags follow from a microbatch's inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from operator import attrgetter, call

import torch

from .transfer import TensorSpec

# Where messages are posted ahead at all (see `Channel.receives_ahead`), small ones are posted this far.
BYTES_AHEAD = 1 << 20
# A tuple that is equal to the tensor's `TensorSpec`, made without a call of Python.
_spec_of = attrgetter(*TensorSpec._fields)


class Crossing:
    """What crosses a cut for inputs of one signature, how much of it may be posted ahead, and what comes back."""

    __slots__ = ("_buffers", "_gradient_buffers", "ahead", "gradients_ahead", "specs")

    def __init__(self, specs: Iterable[TensorSpec], device: torch.device, receives_ahead: int):
        self.specs = list(specs)
        gradients = [spec for spec in self.specs if spec.requires_grad]
        self.ahead = _messages_ahead(self.specs, receives_ahead)
        self.gradients_ahead = _messages_ahead(gradients, receives_ahead)
        self._buffers = [_maker(spec, device) for spec in self.specs]
        self._gradient_buffers = [_maker(spec, device) for spec in gradients]

    def buffers(self) -> list[torch.Tensor]:
        """To receive it into."""
        return list(map(call, self._buffers))

    def gradient_buffers(self) -> list[torch.Tensor]:
        """To receive what comes back into."""
        return list(map(call, self._gradient_buffers))

    def fits(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether `tensors` are what this describes."""
        return list(map(_spec_of, tensors)) == self.specs


def _maker(spec: TensorSpec, device: torch.device) -> Callable[[], torch.Tensor]:
    return partial(torch.empty, spec.shape, dtype=spec.dtype, device=device)


def _messages_ahead(specs: Iterable[TensorSpec], least: int) -> int:
    return max(least, BYTES_AHEAD // max(1, sum(spec.num_bytes for spec in specs))) if least else 0


def refuse_elsewhere(tensors: Iterable[torch.Tensor], device: torch.device, cut: int) -> None:
    """Raise if one of `tensors`, which are to cross `cut`, is not on `device`."""
    for number, tensor in enumerate(tensors):
        if tensor.device.type != device.type:
            raise RuntimeError(
                f"value {number} that goes from stage {cut} to stage {cut + 1}, a {tensor.dtype} tensor of shape "
                f"{tuple(tensor.shape)}, is on {tensor.device}, but stages compute and exchange values on {device}: "
                "move it there in the model's code, or make it anew on each stage from the inputs"
            )


class StepSignatures:
    """The input signatures of a step's microbatches, as small numbers; equal ones have equal shapes at every cut.

    `numbers` has one for each microbatch.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self.numbers: list[int] = []

    def begin(self, signatures: Iterable[Hashable]) -> None:
        self.numbers = []
        previous, number = None, -1
        for signature in signatures:
            if signature is not previous:
                previous, number = signature, self._known.setdefault(signature, len(self._known))
            self.numbers.append(number)

"""What the stages of one pipeline tell each other in a step: activations and losses' gradients, with shapes learned
once.

The shapes, dtypes and gradient flags at a cut follow from the microbatch's own input shapes, from autocast and from
which parameters are trainable upstream. The first microbatch with a new combination is preceded by a header; both
sides remember it, so that later receives are posted ahead with no message about shapes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from .channel import Channel, Kind, Line
from .transfer import TensorSpec, decode_header, encode_header, header_buffer

# Messages of a line that may be posted before the one being waited for is used. One hides the latency, the second the
# jitter; more would only hold memory, so only small ones are posted further ahead: posting tells the sender, which
# disturbs it while it computes.
RECEIVES_AHEAD = 2
BYTES_AHEAD = 1 << 20
LOSS_DTYPE = torch.float64


@dataclass
class StageTraffic:
    """One stage's messages in a step: which microbatches it takes in which order, and how far it has come."""

    forward_order: list[int]
    backward_order: list[int]
    activations_posted: int = 0
    gradients_posted: int = 0
    state: int = 0
    expected: dict[int, tuple[TensorSpec, ...]] = field(default_factory=dict)
    sent: dict[int, tuple[TensorSpec, ...]] = field(default_factory=dict)


class Exchange:
    """The messages of one rank of a pipeline. Values between two stages of one rank are handed over in memory."""

    def __init__(self, channel: Channel, stage_to_rank: Sequence[int], device: torch.device):
        self._channel = channel
        self._stage_to_rank = stage_to_rank
        self._num_stages = len(stage_to_rank)
        self._num_ranks = max(stage_to_rank) + 1
        self._device = device
        self._specs: dict[tuple[int, int, Hashable], tuple[TensorSpec, ...]] = {}
        self._handed_over: dict[tuple[Line, int], Sequence[torch.Tensor]] = {}
        self._traffic: dict[int, StageTraffic] = {}
        self._signatures: Sequence[Hashable] = ()
        self._num_values: Sequence[int] = ()

    def begin(
        self, orders: dict[int, tuple[list[int], list[int]]], signatures: Sequence[Hashable], num_values: Sequence[int]
    ) -> None:
        """Start a step.

        `orders`: for each local stage, the microbatches in forward and in backward order; `signatures`: one for each
        microbatch; `num_values`: how many tensors cross each cut.
        """
        self._traffic = {stage: StageTraffic(*order) for stage, order in orders.items()}
        self._signatures = signatures
        self._num_values = num_values
        self._handed_over.clear()

    # -- the notice that opens a step ------------------------------------------------------------------------------

    def take_notice(self, stage: int, length: int) -> list[int] | None:
        """The notice from the stage below: integers that both sides compare. None on the first stage."""
        if stage == 0 or self._is_local(stage - 1):
            return None
        line = Line(stage - 1, Kind.STEP)
        self._channel.post_receive(line, [torch.zeros(length, dtype=torch.int64)])
        return self._channel.receive(line)[0].tolist()

    def give_notice(self, stage: int, notice: Sequence[int]) -> None:
        """Pass the notice on, and remember `notice[-1]`, the state of all stages up to this one."""
        self._traffic[stage].state = notice[-1]
        if stage + 1 < self._num_stages and not self._is_local(stage):
            message = torch.tensor(notice, dtype=torch.int64)
            self._channel.send(Line(stage, Kind.STEP), [message])
            self.post_gradients(stage)

    # -- activations -----------------------------------------------------------------------------------------------

    def take_activations(self, stage: int, microbatch: int, upstream_state: int) -> list[torch.Tensor]:
        """The values that cross into `stage`, as leaves that require a gradient where one will travel back."""
        if stage == 0:
            return []
        cut, traffic = stage - 1, self._traffic[stage]
        line = Line(cut, Kind.ACTIVATION)
        if self._is_local(cut):
            tensors = list(self._handed_over.pop((line, microbatch)))
            flags = [tensor.requires_grad for tensor in tensors]
            tensors = [tensor.detach() for tensor in tensors]
        else:
            if not self._channel.num_posted(line):
                self._post_activation(cut, traffic, upstream_state, learn=True)
            tensors = self._channel.receive(line)
            flags = [spec.requires_grad for spec in traffic.expected.pop(microbatch)]
            self.post_activations(stage, upstream_state)
        for tensor, flag in zip(tensors, flags, strict=True):
            if flag:
                tensor.requires_grad_(True)
        return tensors

    def post_activations(self, stage: int, upstream_state: int) -> None:
        """Post receives for the next microbatches of `stage`, as far as their shapes are known."""
        cut, traffic = stage - 1, self._traffic[stage]
        if cut < 0 or self._is_local(cut):
            return
        while self._post_activation(cut, traffic, upstream_state, learn=False):
            pass

    def give_activations(self, stage: int, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send the values that cross out of `stage`. None at all, where some are due, says that the step was left."""
        traffic = self._traffic[stage]
        line = Line(stage, Kind.ACTIVATION)
        specs = traffic.sent[microbatch] = tuple(TensorSpec.of(tensor) for tensor in tensors)
        if self._is_local(stage):
            self._handed_over[(line, microbatch)] = tensors
            return
        key = (stage, traffic.state, self._signatures[microbatch])
        known = self._specs.get(key)
        if known is None:
            if len(specs) == self._num_values[stage]:
                self._specs[key] = specs
            self._channel.send(Line(stage, Kind.HEADER), [encode_header(specs, self._device)])
        elif known != specs:
            raise RuntimeError(
                f"the tensors between stages {stage} and {stage + 1} are {specs}, but for inputs of these shapes they "
                f"were {known} before; a shape that depends on the inputs' values cannot cross a cut"
            )
        self._channel.send(line, [tensor.detach().contiguous() for tensor in tensors])

    def _post_activation(self, cut: int, traffic: StageTraffic, state: int, learn: bool) -> bool:
        """Post the next activation receive over `cut`. With `learn`, wait for its header when its shapes are new."""
        if traffic.activations_posted == len(traffic.forward_order):
            return False
        microbatch = traffic.forward_order[traffic.activations_posted]
        key = (cut, state, self._signatures[microbatch])
        specs = self._specs.get(key)
        if specs is None:
            if not learn:
                return False
            line = Line(cut, Kind.HEADER)
            self._channel.post_receive(line, [header_buffer(self._num_values[cut], self._device)])
            specs = decode_header(self._channel.receive(line)[0])
            if len(specs) == self._num_values[cut]:
                self._specs[key] = specs
        line = Line(cut, Kind.ACTIVATION)
        if not self._has_room(line, specs):
            return False
        traffic.expected[microbatch] = specs
        self._channel.post_receive(line, [spec.empty(self._device) for spec in specs])
        traffic.activations_posted += 1
        return True

    # -- losses and gradients --------------------------------------------------------------------------------------

    def post_gradients(self, stage: int) -> None:
        """Post receives for the next losses and gradients of `stage`, as far as their shapes are known."""
        if stage == self._num_stages - 1 or self._is_local(stage):
            return
        traffic = self._traffic[stage]
        gradients, losses = Line(stage, Kind.GRADIENT), Line(stage, Kind.LOSS)
        while traffic.gradients_posted < len(traffic.backward_order):
            microbatch = traffic.backward_order[traffic.gradients_posted]
            sent = traffic.sent.get(microbatch)
            if sent is None:
                sent = self._specs.get((stage, traffic.state, self._signatures[microbatch]))
            if sent is None:
                return
            specs = [spec for spec in sent if spec.requires_grad]
            if not self._has_room(gradients, specs):
                return
            if self._carries_loss(stage):
                self._channel.post_receive(losses, [torch.empty((), dtype=LOSS_DTYPE, device=self._device)])
            self._channel.post_receive(gradients, [spec.empty(self._device) for spec in specs])
            traffic.gradients_posted += 1

    def _has_room(self, line: Line, specs: Sequence[TensorSpec]) -> bool:
        """Whether one more message like `specs` may be posted ahead on `line`."""
        posted = self._channel.num_posted(line)
        return posted < RECEIVES_AHEAD or (posted + 1) * sum(spec.num_bytes for spec in specs) <= BYTES_AHEAD

    def take_loss(self, stage: int) -> torch.Tensor:
        """The value of the next microbatch's loss, from the stage above. Shape (), float64."""
        self.post_gradients(stage)
        return self._channel.receive(Line(stage, Kind.LOSS))[0]

    def give_loss(self, stage: int, loss: torch.Tensor) -> None:
        """Pass a loss's value to the stage below, if its rank does not know it yet."""
        if stage > 0 and self._carries_loss(stage - 1) and not self._is_local(stage - 1):
            self._channel.send(Line(stage - 1, Kind.LOSS), [loss])

    def take_gradients(self, stage: int, microbatch: int) -> list[torch.Tensor]:
        """Gradients of the values `stage` sent that require one, in order."""
        line = Line(stage, Kind.GRADIENT)
        if self._is_local(stage):
            if not any(spec.requires_grad for spec in self._traffic[stage].sent.pop(microbatch)):
                return []
            return list(self._handed_over.pop((line, microbatch)))
        self.post_gradients(stage)
        gradients = self._channel.receive(line)
        del self._traffic[stage].sent[microbatch]
        # The gradient is here, so the activation it answers has left.
        self._channel.release(Line(stage, Kind.ACTIVATION), keep=len(self._traffic[stage].sent))
        self.post_gradients(stage)
        return gradients

    def give_gradients(self, stage: int, microbatch: int, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of the values `stage` received that require one, in order."""
        line = Line(stage - 1, Kind.GRADIENT)
        if self._is_local(stage - 1):
            self._handed_over[(line, microbatch)] = gradients
        else:
            self._channel.send(line, [gradient.contiguous() for gradient in gradients])

    # -- leaving a step early --------------------------------------------------------------------------------------

    def stand_ins(self, stage: int, microbatch: int) -> list[torch.Tensor]:
        """Zeros for the values that cross out of `stage`; none where their shapes were never learned."""
        specs = self._specs.get((stage, self._traffic[stage].state, self._signatures[microbatch]), ())
        return [spec.zeros(self._device).requires_grad_(spec.requires_grad) for spec in specs]

    def _is_local(self, cut: int) -> bool:
        return self._stage_to_rank[cut] == self._stage_to_rank[cut + 1]

    def _carries_loss(self, cut: int) -> bool:
        """Losses travel over the last cuts only, until every rank has seen them."""
        return cut >= self._num_stages - self._num_ranks

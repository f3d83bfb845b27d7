"""What the stages of one rank tell those of the others in a step: activations, losses, gradients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from penstock.schedule.actions import Kind
from penstock.schedule.communication import Step, carries_loss

from .channel import Channel
from .crossing import StepSignatures
from .cuts import CutAbove, CutBelow, LocalCut, PipelineEnd, RemoteCut
from .program import Orders


class Exchange:
    """The cuts around the stages of one rank of a pipeline: `below[stage]`, and `above[stage]` unless it is the last.

    `top` is the one above the rank's highest stage, over which losses come; None on the rank of the last stage.
    """

    def __init__(self, channel: Channel, stage_to_rank: Sequence[int], rank: int, device: torch.device):
        self._signatures = StepSignatures()
        self.below: dict[int, CutBelow | LocalCut | PipelineEnd] = {}
        self.above: dict[int, CutAbove | LocalCut] = {}
        self.top: CutAbove | None = None
        last, num_ranks = len(stage_to_rank) - 1, max(stage_to_rank) + 1
        stages = [stage for stage, holder in enumerate(stage_to_rank) if holder == rank]

        def remote(cut: int) -> dict[str, Any]:
            with_losses = carries_loss(cut, last + 1, num_ranks)
            return {"cut": cut, "carries_loss": with_losses, "signatures": self._signatures, "device": device}

        for stage in stages:
            if stage == 0:
                self.below[stage] = PipelineEnd()
            elif stage - 1 not in stages:
                self.below[stage] = CutBelow(channel, upper=True, **remote(stage - 1))
            if stage + 1 in stages:
                self.above[stage] = self.below[stage + 1] = LocalCut()
            elif stage < last:
                self.above[stage] = CutAbove(channel, upper=False, **remote(stage))
        above = self.above.get(stages[-1])
        if isinstance(above, CutAbove):
            self.top = above

    def begin(self, orders: Orders, signatures: Iterable[Hashable], num_values: Sequence[int]) -> None:
        """Start a step.

        `orders`: for each stage, the microbatches in forward and in backward order; `signatures`: one for each
        microbatch; `num_values`: how many tensors cross each cut.
        """
        self._signatures.begin(signatures)
        for stage, (forward, backward) in orders.items():
            self.below[stage].begin(forward, num_values[stage - 1] if stage else 0)
            if stage in self.above:
                self.above[stage].begin(backward, num_values[stage])

    def post(self, user: Step) -> None:
        """Post the receive of the message that `user` will use."""
        if user.kind not in (Kind.F, Kind.B):
            assert self.top is not None
            self.top.post_loss()
            return
        cut = self.below[user.stage] if user.kind == Kind.F else self.above[user.stage]
        assert isinstance(cut, RemoteCut)
        cut.post()

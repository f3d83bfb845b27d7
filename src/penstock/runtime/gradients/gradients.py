"""Everything about one rank's gradients: who else holds the parameters, sums, deferral, scale and norm."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.context import RankContext
from penstock.runtime.gradients.norm import GradientNorm
from penstock.runtime.gradients.ownership import HeldParameter
from penstock.runtime.gradients.precision import multiply_gradients
from penstock.runtime.gradients.reduction import GradientReducer
from penstock.runtime.gradients.weight_gradients import WeightGradientQueues


class Gradients:
    def __init__(self, held: Sequence[HeldParameter], context: RankContext):
        self.parameters = [one.parameter for one in held]
        self.queues = WeightGradientQueues()
        self.reducer = GradientReducer(held, context, self.queues.awaits)
        self.norm = GradientNorm(held, context)

    def begin(self, loss_scale: float) -> None:
        self.reducer.begin()
        # An interrupt in an earlier step may have left some.
        self.queues.clear()
        # Gradients left from an earlier step must have the scale of those that are added to them.
        multiply_gradients(self.parameters, loss_scale)

    def clear(self) -> None:
        """Forget what is under way."""
        self.reducer.clear()
        self.queues.clear()

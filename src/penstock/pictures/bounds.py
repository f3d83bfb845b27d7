"""How fast a step could be at best, whatever the order of its actions."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.pictures.simulate import Costs, StageCosts


def lower_bound(
    stage_to_rank: Sequence[int], num_microbatches: int, costs: Costs, *, splits_backward: bool = True
) -> float:
    """Seconds below which no schedule of this problem ends, with any memory and any order.

    The largest of: the way of one microbatch up and down the stages; for each rank, the way to its first stage, all
    its work, and what must follow its last action; for each link, the same of its messages. For equal stages, one per
    rank, and microbatches enough it is m t + (p - 1) F, or (m + p - 1) t where the backward is not split: ZB-H2 (if
    B <= 2 min(F, W) and m >= 2p - 1) and 1F1B reach these.

    Args:
        stage_to_rank: the rank that holds each stage.
        num_microbatches: microbatches per step.
        costs: of actions and messages.
        splits_backward: whether weight gradients may be put off.

    Raises:
        ValueError: costs that do not fit the number of stages.
    """
    problem = _Problem(stage_to_rank, costs.per_stage(len(stage_to_rank)), splits_backward)
    one_microbatch = problem.rest_from_forward[0]
    ranks = (problem.rank_bound(rank, num_microbatches) for rank in set(stage_to_rank))
    links = (problem.link_bound(link, num_microbatches) for link in problem.links())
    return max(one_microbatch, *ranks, *links)


class _Problem:
    """Shortest times along the chain of stages, in seconds."""

    def __init__(self, stage_to_rank: Sequence[int], costs: StageCosts, splits_backward: bool) -> None:
        self.stage_to_rank = stage_to_rank
        self.costs = costs
        self.splits_backward = splits_backward
        self.num_stages = len(stage_to_rank)
        self.last = self.num_stages - 1
        weight = costs.weight
        self.backward = [b if splits_backward else b + w for b, w in zip(costs.backward, weight, strict=True)]
        # What must follow the end of a B: its own W, and the B below.
        self.rest_after_backward = [weight[0] if splits_backward else 0.0]
        for stage in range(1, self.num_stages):
            below = self._hop(stage - 1) + self.backward[stage - 1] + self.rest_after_backward[-1]
            self.rest_after_backward.append(max(weight[stage], below) if splits_backward else below)
        # The time from the start of an F to the end of the step.
        self.rest_from_forward = [0.0] * self.num_stages
        rest = self.backward[self.last] + self.rest_after_backward[self.last]
        for stage in range(self.last, -1, -1):
            rest += costs.forward[stage] + (self._hop(stage) if stage < self.last else 0.0)
            self.rest_from_forward[stage] = rest
        # The earliest start of an F, and end of a B.
        self.earliest_forward = [0.0]
        for stage in range(self.last):
            self.earliest_forward.append(self.earliest_forward[-1] + costs.forward[stage] + self._hop(stage))
        self.earliest_gradient = [0.0] * self.num_stages
        earliest = self.earliest_forward[self.last] + costs.forward[self.last]
        for stage in range(self.last, -1, -1):
            earliest += self.backward[stage] + (self._hop(stage) if stage < self.last else 0.0)
            self.earliest_gradient[stage] = earliest

    def _is_link(self, boundary: int) -> bool:
        return self.stage_to_rank[boundary] != self.stage_to_rank[boundary + 1]

    def _hop(self, boundary: int) -> float:
        return self.costs.occupancy[boundary] + self.costs.latency[boundary] if self._is_link(boundary) else 0.0

    def rank_bound(self, rank: int, num_microbatches: int) -> float:
        stages = [stage for stage in range(self.num_stages) if self.stage_to_rank[stage] == rank]
        work = sum(self.costs.forward[s] + self.costs.backward[s] + self.costs.weight[s] for s in stages)
        # A rank that splits its backward may end with a W, which nothing waits for.
        after = 0.0 if self.splits_backward else self.rest_after_backward[stages[0]]
        return self.earliest_forward[stages[0]] + num_microbatches * work + after

    def links(self) -> set[tuple[int, int]]:
        pairs = {
            (self.stage_to_rank[boundary], self.stage_to_rank[boundary + 1])
            for boundary in range(self.last)
            if self._is_link(boundary)
        }
        return pairs | {(target, source) for source, target in pairs}

    def link_bound(self, link: tuple[int, int], num_microbatches: int) -> float:
        occupied = 0.0
        before, after = [], []
        for boundary in range(self.last):
            lower, upper = self.stage_to_rank[boundary], self.stage_to_rank[boundary + 1]
            if link == (lower, upper):
                occupied += self.costs.occupancy[boundary]
                before.append(self.earliest_forward[boundary] + self.costs.forward[boundary])
                after.append(self.costs.latency[boundary] + self.rest_from_forward[boundary + 1])
            if link == (upper, lower):
                occupied += self.costs.occupancy[boundary]
                before.append(self.earliest_gradient[boundary + 1])
                after.append(
                    self.costs.latency[boundary] + self.backward[boundary] + self.rest_after_backward[boundary]
                )
        return min(before) + num_microbatches * occupied + min(after)

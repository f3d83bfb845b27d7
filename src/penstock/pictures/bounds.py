"""How fast a step could be at best, whatever the order of its actions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from penstock.pictures.simulate import Costs


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
    num_stages = len(stage_to_rank)
    given = costs.per_stage(num_stages)
    backward, weight = given.backward, given.weight
    if not splits_backward:
        backward, weight = tuple(b + w for b, w in zip(backward, weight, strict=True)), (0.0,) * num_stages
    # The actions of one microbatch, F up the stages and B down: their stages and seconds, and between each and the next
    # the link, the seconds for which a message keeps it, and the latency.
    stages = [*range(num_stages), *reversed(range(num_stages))]
    seconds = [*given.forward, *reversed(backward)]
    hops: list[tuple[tuple[int, int], float, float]] = []
    for source, target in pairwise(stages):
        link, boundary = (stage_to_rank[source], stage_to_rank[target]), min(source, target)
        goes = link[0] != link[1]
        hops.append((link, given.occupancy[boundary], given.latency[boundary]) if goes else (link, 0.0, 0.0))
    # The earliest start of each action, and what must follow its end: the W of its own, and the action after it.
    starts = list(accumulate((own + hop[1] + hop[2] for own, hop in zip(seconds, hops, strict=False)), initial=0.0))
    rests = [weight[0]]
    for place in reversed(range(len(hops))):
        own_weight = weight[stages[place]] if place >= num_stages else 0.0
        rests.insert(0, max(own_weight, hops[place][1] + hops[place][2] + seconds[place + 1] + rests[0]))
    bounds = [seconds[0] + rests[0]]
    for rank in set(stage_to_rank):
        own = [stage for stage in range(num_stages) if stage_to_rank[stage] == rank]
        work = sum(given.forward[stage] + backward[stage] + weight[stage] for stage in own)
        # A rank that splits its backward may end with a W, which nothing waits for.
        after = 0.0 if splits_backward else rests[-1 - own[0]]
        bounds.append(starts[own[0]] + num_microbatches * work + after)
    for link in {hop[0] for hop in hops if hop[0][0] != hop[0][1]}:
        places = [place for place, hop in enumerate(hops) if hop[0] == link]
        before = min(starts[place] + seconds[place] for place in places)
        after = min(hops[place][2] + seconds[place + 1] + rests[place + 1] for place in places)
        bounds.append(before + num_microbatches * sum(hops[place][1] for place in places) + after)
    return max(bounds)

"""Schedules whose chain goes down the ranks and back up, so that each rank holds stage r and stage 2p - 1 - r.

They are built as in Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362): lay out one
microbatch (a building block), repeat it at a fixed interval, and squeeze. The block decides the memory: what a rank
holds for the length of a block, it holds (length / interval) times at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import product

from penstock.schedule.actions import Action, Kind, Schedule

# Time of F, B and W for one stage is one unit each (their ratio in the paper), and a rank runs them for two stages.
INTERVAL = 6


@dataclass(frozen=True)
class Hops:
    """Time from one rank to the next on each of a microbatch's four passes over the ranks, in units of one action."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int


def zb_v(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """No bubble but the entry if F = B = W: m * 6 + (p - 1) units; at most p microbatches live, as in 1F1B.

    Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, the section on ZB-V). A rank that would wait
    in the warm-up takes further microbatches instead, which costs nothing at unit times and leaves slack where F, B
    and W differ or messages are late: 1 to 3 % of the step.
    """
    live_limit = 2 * num_ranks
    # One pair stays free, so that the way up of a microbatch is never kept from starting by later ones.
    return _v_schedule("zb-v", num_ranks, num_microbatches, Hops(3, 3, 3, 3), live_limit, early_limit=live_limit - 1)


def v_half(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """At most (p + 2) // 2 microbatches live, half of 1F1B's; at most half of its bubble: 3 (p - 1) units if F = B = W.

    V-Half of "Pipeline Parallelism with Controllable Memory".
    """
    live_limit = 2 * ((num_ranks + 2) // 2)
    return _v_schedule("v-half", num_ranks, num_microbatches, Hops(2, 1, 2, 1), live_limit, early_limit=0)


def _v_schedule(
    name: str, num_ranks: int, num_microbatches: int, hops: Hops, live_limit: int, early_limit: int
) -> Schedule:
    """The block with `hops`, repeated and squeezed. Limits count (stage, microbatch) pairs: two are a microbatch."""
    num_stages = 2 * num_ranks
    orders = []
    for rank, block in enumerate(_building_block(num_ranks, hops)):
        stage_of_pass = (rank, num_stages - 1 - rank, num_stages - 1 - rank, rank)
        timed = [
            (time + INTERVAL * microbatch, Action(kind, stage, microbatch))
            for kind, stage, time in zip((Kind.F, Kind.F, Kind.B, Kind.B), stage_of_pass, block, strict=True)
            for microbatch in range(num_microbatches)
        ]
        orders.append([action for _, action in sorted(timed, key=lambda pair: pair[0])])
    stage_to_rank = tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
    actions = _squeeze(orders, num_stages, live_limit, early_limit)
    return Schedule(name, num_stages, num_microbatches, stage_to_rank, actions, True)


def _building_block(num_ranks: int, hops: Hops) -> list[tuple[int, int, int, int]]:
    """Per rank, when one microbatch is there on its four passes: F down, F up, B down, B up.

    The turns at either end take the shortest times with which no rank ever has two actions at once when the block is
    repeated at the interval. Of equally short ones, those with the longest turn from F to B: that slack keeps the
    steady state from stalling where F, B and W differ.
    """
    last = num_ranks - 1
    for turns in sorted(product(range(1, INTERVAL + 1), repeat=3), key=lambda turns: (sum(turns), -turns[1])):
        forward_up = hops.forward_down * last + turns[0]
        backward_down = forward_up + hops.forward_up * last + turns[1]
        backward_up = backward_down + hops.backward_down * last + turns[2]
        block = [
            (
                hops.forward_down * rank,
                forward_up + hops.forward_up * (last - rank),
                backward_down + hops.backward_down * rank,
                backward_up + hops.backward_up * (last - rank),
            )
            for rank in range(num_ranks)
        ]
        if all(len({time % INTERVAL for time in times}) == len(times) for times in block):
            return block
    raise ValueError(f"{hops} collide on {num_ranks} ranks whatever the turns")


def _squeeze(
    orders: list[list[Action]], num_stages: int, live_limit: int, early_limit: int
) -> tuple[tuple[Action, ...], ...]:
    """Run each rank's F and B in order, one action per unit of time, as early as they can.

    An F waits while the rank holds `live_limit` (stage, microbatch) pairs that have no W yet. A rank that would wait
    takes its next F on the way down out of turn if it holds fewer than `early_limit`, and else a W that was put off:
    the latest, whose tensors are still in the caches.
    """
    to_do = [deque(order) for order in orders]
    on_the_way_down = [
        deque(action for action in order if action.kind is Kind.F and action.stage == rank)
        for rank, order in enumerate(orders)
    ]
    deferred: list[list[Action]] = [[] for _ in orders]
    live = [0] * len(orders)
    # Actions whose input is at hand. A rank's own order has F before B, so the input from the neighbour decides.
    ready = set(on_the_way_down[0])

    def choose(rank: int) -> Action | None:
        if to_do[rank]:
            head = to_do[rank][0]
            if head in ready and (head.kind is Kind.B or live[rank] < live_limit):
                return head
        if on_the_way_down[rank] and on_the_way_down[rank][0] in ready and live[rank] < early_limit:
            return on_the_way_down[rank][0]
        return deferred[rank][-1] if deferred[rank] else None

    def execute(rank: int, action: Action) -> None:
        if action.kind is Kind.W:
            deferred[rank].pop()
            live[rank] -= 1
            return
        to_do[rank].remove(action)  # at or near the head
        if action.kind is Kind.F:
            live[rank] += 1
            if action.stage == rank:
                on_the_way_down[rank].popleft()
        else:
            deferred[rank].append(Action(Kind.W, action.stage, action.microbatch))
        user = action.feeds(num_stages)
        if user is not None:
            ready.add(user)
        elif action.kind is Kind.F:
            ready.add(Action(Kind.B, action.stage, action.microbatch))

    result: list[list[Action]] = [[] for _ in orders]
    while any(to_do) or any(deferred):
        chosen = [(rank, choose(rank)) for rank in range(len(orders))]
        in_this_unit = [(rank, action) for rank, action in chosen if action is not None]
        if not in_this_unit:
            raise ValueError(f"{live_limit} live pairs of stage and microbatch per rank are too few for this order")
        for rank, action in in_this_unit:
            execute(rank, action)
            result[rank].append(action)
    return tuple(tuple(actions) for actions in result)

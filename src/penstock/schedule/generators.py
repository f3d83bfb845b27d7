"""Generators of the papers' schedules. Each emits compute only; `registry.build` is the one way in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, product

from penstock.schedule.actions import Action, Kind, Schedule

# Stages that the interleaved schedule has on each rank unless told otherwise.
INTERLEAVED_STAGES = 2


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, section 2.3, figure 2c).

    Backwards run in the order of the forwards, as in every schedule here: the caller sees microbatches 0, 1, 2, ...
    """
    return _one_stage_each("gpipe", num_microbatches, [num_microbatches] * num_ranks)


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm up with p - r - 1 forwards, then alternate (PipeDream-Flush; Narayanan et al. 2021, SC21, section 2.2.1)."""
    return _one_stage_each("1f1b", num_microbatches, range(num_ranks)[::-1])


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B whose weight gradients are put off to fill the cool-down (Qi et al. 2024, "Zero Bubble Pipeline
    Parallelism", section 2.1, ZB-H1), at no more than p live microbatches on any stage.

    With at least p microbatches the step takes m t + (p - 1) max(F, B, F + B - W), where t = F + B + W; no order with
    p live microbatches does better when W = B, since stage 0 has its first gradient after p F + (p - 1) B.
    """
    return _one_stage_each("zb-h1", num_microbatches, range(num_ranks)[::-1], range(num_ranks))


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 with twice the warm-up and twice as many weight gradients put off, at no more than 2p - 1 live microbatches
    on any stage (section 2.2 of the same paper, ZB-H2).

    With at least 2p - 1 microbatches the step takes m t + (p - 1) max(F, B - F, F + B - 2 W). That is (p - 1) F, the
    time to the last stage's first input, unless B is more than twice as long as F or W: with one stage per rank no
    order does better. With fewer microbatches it is ZB-H1.
    """
    reserve = 2 if num_microbatches >= 2 * num_ranks - 1 else 1
    late = [reserve * rank for rank in range(num_ranks)]
    return _one_stage_each("zb-h2", num_microbatches, late[::-1], late)


def _one_stage_each(
    name: str, num_microbatches: int, warm_ups: Sequence[int], num_late: Sequence[int] | None = None
) -> Schedule:
    """1F1B in which each stage warms up with so many forwards, and puts off so many weight gradients; with None its
    backwards are whole.

    With one W put off, 4 microbatches and no warm-up the papers' row is `F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3`: always
    the W of an earlier microbatch. Here it is `F0 B0 F1 B1 W1 F2 B2 W2 F3 B3 W3 W0`: those of the first microbatches
    stay for the end, the others follow their B at once. That takes the same time, and finds their tensors in the
    caches."""
    actions = []
    for stage, warm_up in enumerate(warm_ups):
        forwards, backwards, weights = (
            [Action(kind, stage, microbatch) for microbatch in range(num_microbatches)] for kind in Kind
        )
        late = num_microbatches if num_late is None else num_late[stage]
        row = []
        for action in _alternate(iter(forwards), iter(backwards), warm_up):
            row.append(action)
            if action.kind is Kind.B and action.microbatch >= late:
                row.append(weights[action.microbatch])
        actions.append((*row, *(() if num_late is None else weights[:late])))
    ranks = tuple(range(len(warm_ups)))
    return Schedule(name, len(ranks), num_microbatches, ranks, tuple(actions), splits_backward=num_late is not None)


def interleaved_one_forward_one_backward(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = INTERLEAVED_STAGES
) -> Schedule:
    """1F1B with v stages per rank, which divides the bubble by v (Narayanan et al. 2021, SC21, section 2.2.2).

    Stage s is on rank s % p. Microbatches go through the ranks in groups, one group through all the stages of a rank
    before the next. The paper wants groups of exactly p and hence a multiple of p microbatches; groups of p to 2p - 1,
    as equal as can be, keep the bubble at (p - 1) t / v for every number of microbatches from p on.
    """
    groups = _groups(num_ranks, num_microbatches)
    num_stages = num_ranks * stages_per_rank
    actions = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        forwards = (Action(Kind.F, stage, mb) for group in groups for stage in stages for mb in group)
        backwards = (Action(Kind.B, stage, mb) for group in groups for stage in reversed(stages) for mb in group)
        # To the first F of the rank's top stage, and one more pair of actions for every rank between here and the end.
        warm_up = (stages_per_rank - 1) * len(groups[0]) + 2 * (num_ranks - rank - 1)
        actions.append(tuple(_alternate(forwards, backwards, warm_up)))
    stage_to_rank = tuple(stage % num_ranks for stage in range(num_stages))
    return Schedule(
        "interleaved-1f1b", num_stages, num_microbatches, stage_to_rank, tuple(actions), splits_backward=False
    )


def largest_group(num_ranks: int, num_microbatches: int) -> int:
    """How many microbatches of the interleaved schedule go through a rank's stages together."""
    return len(_groups(num_ranks, num_microbatches)[0])


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """The microbatches in groups of at least `num_ranks`, the larger ones first; one group if there are too few."""
    num_groups = max(1, num_microbatches // num_ranks)
    size, num_larger = divmod(num_microbatches, num_groups)
    ends = list(accumulate(size + (group < num_larger) for group in range(num_groups)))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _alternate(forwards: Iterator[Action], backwards: Iterator[Action], warm_up: int) -> Iterator[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    yield from islice(forwards, warm_up)
    for backward in backwards:
        if (forward := next(forwards, None)) is not None:
            yield forward
        yield backward


# -- V-shaped ----------------------------------------------------------------------------------------------------------

# Schedules whose chain goes down the ranks and back up, so that each rank holds stage r and stage 2p - 1 - r. They are
# built as in Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362): lay out one microbatch
# (a building block), repeat it at a fixed interval, and squeeze. The block decides the memory: what a rank holds for
# the length of a block, it holds (length / interval) times at once.

# Time of F, B and W for one stage is one unit each (their ratio in the paper), and a rank runs them for two stages.
INTERVAL = 6


@dataclass(frozen=True)
class Hops:
    """Time from one rank to the next on each of a microbatch's four passes over the ranks, in units of one action."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """No bubble but the entry if F = B = W: m * 6 + (p - 1) units; at most p microbatches live, as in 1F1B.

    Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, the section on ZB-V). A rank that would wait
    in the warm-up takes further microbatches instead. At unit times that changes nothing; where F, B and W differ, or
    messages are late, the step is 1 to 3 % shorter.
    """
    live_limit = 2 * num_ranks
    # One pair stays free, so that the way up of a microbatch is never kept from starting by later ones.
    return _v_schedule("zb-v", num_ranks, num_microbatches, Hops(3, 3, 3, 3), live_limit, early_limit=live_limit - 1)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """At most (p + 2) // 2 microbatches live, where 1F1B has p; at most half its bubble: 3 (p - 1) units if F = B = W.

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
        above = num_stages - 1 - rank
        passes = sorted(zip(block, ((Kind.F, rank), (Kind.F, above), (Kind.B, above), (Kind.B, rank)), strict=True))
        # In every interval each pass has one microbatch, later passes an earlier one.
        first, *_ = passes[0]
        phases = sorted(((time - first) % INTERVAL, (time - first) // INTERVAL, what) for time, what in passes)
        latest = max(delay for _, delay, _ in phases)
        orders.append(
            [
                Action(*what, interval - delay)
                for interval in range(num_microbatches + latest)
                for _, delay, what in phases
                if 0 <= interval - delay < num_microbatches
            ]
        )
    stage_to_rank = tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
    actions = _squeeze(orders, num_stages, live_limit, early_limit)
    return Schedule(name, num_stages, num_microbatches, stage_to_rank, actions, splits_backward=True)


@lru_cache(maxsize=256)
def _building_block(num_ranks: int, hops: Hops) -> tuple[tuple[int, int, int, int], ...]:
    """Per rank, when one microbatch is there on its four passes: F down, F up, B down, B up. The turns at either end
    take the shortest times with which no rank ever has two actions at once when the block is repeated at the interval.
    Of equally short ones, those with the longest turn from F to B: that slack keeps the steady state from stalling
    where F, B and W differ."""
    last = num_ranks - 1
    for turns in sorted(product(range(1, INTERVAL + 1), repeat=3), key=lambda turns: (sum(turns), -turns[1])):
        forward_up = hops.forward_down * last + turns[0]
        backward_down = forward_up + hops.forward_up * last + turns[1]
        backward_up = backward_down + hops.backward_down * last + turns[2]

        def passes(
            rank: int, ups: tuple[int, int, int] = (forward_up, backward_down, backward_up)
        ) -> tuple[int, int, int, int]:
            return (
                hops.forward_down * rank,
                ups[0] + hops.forward_up * (last - rank),
                ups[1] + hops.backward_down * rank,
                ups[2] + hops.backward_up * (last - rank),
            )

        # Times repeat after so many ranks.
        if all(len({time % INTERVAL for time in passes(rank)}) == 4 for rank in range(min(num_ranks, INTERVAL))):
            return tuple(passes(rank) for rank in range(num_ranks))
    raise ValueError(f"{hops} collide on {num_ranks} ranks whatever the turns")


def _squeeze(
    orders: list[list[Action]], num_stages: int, live_limit: int, early_limit: int
) -> tuple[tuple[Action, ...], ...]:
    """Run each rank's F and B in order, one action per unit of time, as early as they can. An F waits while the rank
    holds `live_limit` (stage, microbatch) pairs that have no W yet. A rank that would wait takes its next F on the way
    down out of turn if it holds fewer than `early_limit`, and else a W that was put off: the latest, whose tensors are
    still in the caches."""
    last = num_stages - 1
    forward, weight = Kind.F, Kind.W
    num_microbatches = sum(action[0] is forward and action[1] == 0 for action in orders[0])
    # How many microbatches have come to an F and a B of each stage, and how many F have run. Each stage takes them in
    # order, so an action has its input if its microbatch is below the number. A rank's own order has F before B, so
    # the input from the neighbour decides.
    come_forward, come_backward = [0] * num_stages, [0] * num_stages
    come_forward[0] = num_microbatches
    forwards = [0] * num_stages
    waiting = [[*order[::-1]] for order in orders]  # the next one last
    deferred: list[list[Action]] = [[] for _ in orders]
    live = [0] * len(orders)
    result: list[list[Action]] = [[] for _ in orders]
    unfinished = list(range(len(orders)))
    while unfinished:
        chosen = []
        for rank in unfinished:
            order = waiting[rank]
            if order:
                kind, stage, microbatch = action = order[-1]
                if kind is forward:
                    if microbatch < come_forward[stage] and live[rank] < live_limit:
                        chosen.append((rank, action))
                        continue
                elif microbatch < come_backward[stage]:
                    chosen.append((rank, action))
                    continue
            # Out of turn: the F on the way down are those of stage `rank`.
            if forwards[rank] < come_forward[rank] and live[rank] < early_limit:
                chosen.append((rank, Action(forward, rank, forwards[rank])))
            elif deferred[rank]:
                chosen.append((rank, deferred[rank][-1]))
        if not chosen:
            raise ValueError(f"{live_limit} live pairs of stage and microbatch per rank are too few for this order")
        for rank, action in chosen:
            kind, stage, microbatch = action
            result[rank].append(action)
            order = waiting[rank]
            if kind is weight:
                deferred[rank].pop()
                live[rank] -= 1
                if not order and not deferred[rank]:
                    unfinished.remove(rank)
                continue
            place = len(order) - 1
            while order[place] != action:  # at or near the end
                place -= 1
            del order[place]
            if kind is forward:
                live[rank] += 1
                forwards[stage] += 1
                if stage == last:
                    come_backward[last] += 1
                else:
                    come_forward[stage + 1] += 1
            else:
                deferred[rank].append(Action(weight, stage, microbatch))
                if stage:
                    come_backward[stage - 1] += 1
    return tuple(tuple(actions) for actions in result)

"""The named schedules. Each generator emits compute only; `build` is the one way in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from typing import Any

from penstock.schedule.actions import Action, Kind, Schedule
from penstock.schedule.v_schedules import v_half, zb_v

# What `initialize` and the plugin settle by the model, see `settle`; where no model is at hand it is 1F1B.
AUTO = "auto"


def settle(name: Any, deferring_pays: bool) -> Any:
    """The schedule to run where a user asked for `name`, or for one written out.

    ZB-H1 has the messages of 1F1B, forwards and backwards in the same order, and holds no more microbatches than its
    first rank. It is faster where weight gradients are worth putting off.
    """
    return ("zb-h1" if deferring_pays else "1f1b") if name == AUTO else name


def share_of_1f1b(num_ranks: int, num_microbatches: int) -> float:
    """The time of a step under ZB-H1 over that under 1F1B if F = B = W; see `zb_h1`."""
    return (num_microbatches + (num_ranks - 1) / 3) / (num_microbatches + num_ranks - 1)


def build(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The schedule called `name` for one pipeline.

    Args:
        name: one of `schedule_names()`, or "auto".
        num_ranks: pipeline ranks, at least 1.
        num_microbatches: microbatches per step, at least 1, be it below `num_ranks` or not a multiple of it.
        stages_per_rank: stages that each rank holds. ``None`` takes the schedule's own: 2 for ``interleaved-1f1b``,
            ``zb-v`` and ``v-half``, 1 for the others. Only ``interleaved-1f1b`` accepts another number.

    Raises:
        ValueError: an unknown name, or a number that the schedule cannot have.
    """
    if name not in _GENERATORS:
        raise _unknown(name)
    if num_ranks < 1:
        raise ValueError(f"a pipeline has at least 1 rank, but num_ranks is {num_ranks}")
    if num_microbatches < 1:
        raise ValueError(f"a step has at least 1 microbatch, but num_microbatches is {num_microbatches}")
    generate, own_stages_per_rank, any_stages_per_rank = _GENERATORS[name]
    if stages_per_rank is None:
        stages_per_rank = own_stages_per_rank
    if stages_per_rank < 1 or (stages_per_rank != own_stages_per_rank and not any_stages_per_rank):
        wanted = "at least 1" if any_stages_per_rank else str(own_stages_per_rank)
        raise ValueError(f"schedule {name!r} has {wanted} stages per rank, but stages_per_rank is {stages_per_rank}")
    return generate(num_ranks, num_microbatches, *([stages_per_rank] if any_stages_per_rank else []))


def _unknown(name: str) -> ValueError:
    return ValueError(f"unknown schedule {name!r}: known are {', '.join(schedule_names())}")


def schedule_names() -> tuple[str, ...]:
    """The schedules that there are. `build` accepts "auto", too."""
    return tuple(name for name in _GENERATORS if name != AUTO)


def default_stages_per_rank(name: str) -> int:
    """Stages that each rank holds under `name` unless told otherwise. Raises ValueError for an unknown name."""
    if name not in _GENERATORS:
        raise _unknown(name)
    return _GENERATORS[name][1]


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, section 2.3, figure 2c).

    Backwards run in the order of the forwards, as every schedule here: the caller sees microbatches 0, 1, 2, ...
    """
    microbatches = range(num_microbatches)
    actions = tuple(
        tuple(Action(kind, stage, microbatch) for kind in (Kind.F, Kind.B) for microbatch in microbatches)
        for stage in range(num_ranks)
    )
    return Schedule("gpipe", num_ranks, num_microbatches, tuple(range(num_ranks)), actions, False)


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm up with p - r - 1 forwards, then alternate (PipeDream-Flush; Narayanan et al. 2021, SC21, section 2.2.1)."""
    actions = []
    for stage in range(num_ranks):
        forwards = (Action(Kind.F, stage, microbatch) for microbatch in range(num_microbatches))
        backwards = (Action(Kind.B, stage, microbatch) for microbatch in range(num_microbatches))
        actions.append(tuple(_alternate(forwards, backwards, warm_up=num_ranks - stage - 1)))
    return Schedule("1f1b", num_ranks, num_microbatches, tuple(range(num_ranks)), tuple(actions), False)


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B whose weight gradients are put off to fill the cool-down (Qi et al. 2024, "Zero Bubble Pipeline
    Parallelism", section 2.1, ZB-H1), at no more than p live microbatches on any stage.

    With at least p microbatches the step takes m t + (p - 1) max(F, B, F + B - W), where t = F + B + W; no order with
    p live microbatches does better when W = B, since stage 0 has its first gradient after p F + (p - 1) B.
    """
    return _zero_bubble("zb-h1", num_ranks, num_microbatches, reserve=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 with twice the warm-up and twice as many weight gradients put off, at no more than 2p - 1 live microbatches
    on any stage (section 2.2 of the same paper, ZB-H2).

    With at least 2p - 1 microbatches the step takes m t + (p - 1) max(F, B - F, F + B - 2 W). That is (p - 1) F, the
    time to the last stage's first input, unless B is more than twice as long as F or W: with one stage per rank no
    order does better. With fewer microbatches it is ZB-H1.
    """
    reserve = 2 if num_microbatches >= 2 * num_ranks - 1 else 1
    return _zero_bubble("zb-h2", num_ranks, num_microbatches, reserve)


def _zero_bubble(name: str, num_ranks: int, num_microbatches: int, reserve: int) -> Schedule:
    """1F1B in which stage r warms up with `reserve` * (p - r - 1) forwards and puts off `reserve` * r weight gradients.

    The papers' stage runs W for the microbatch that is so many behind the one of its last B. Here it keeps those of its
    first microbatches for the end and runs the others right after their B, which takes the same time and finds their
    tensors in the caches.
    """
    actions = []
    for stage in range(num_ranks):
        forwards = (Action(Kind.F, stage, microbatch) for microbatch in range(num_microbatches))
        backwards = (Action(Kind.B, stage, microbatch) for microbatch in range(num_microbatches))
        num_late = min(reserve * stage, num_microbatches)
        row = []
        for action in _alternate(forwards, backwards, warm_up=reserve * (num_ranks - stage - 1)):
            row.append(action)
            if action.kind is Kind.B and action.microbatch >= num_late:
                row.append(Action(Kind.W, stage, action.microbatch))
        row.extend(Action(Kind.W, stage, microbatch) for microbatch in range(num_late))
        actions.append(tuple(row))
    return Schedule(name, num_ranks, num_microbatches, tuple(range(num_ranks)), tuple(actions), True)


def interleaved_one_forward_one_backward(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
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
    return Schedule("interleaved-1f1b", num_stages, num_microbatches, stage_to_rank, tuple(actions), False)


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


# name: (generator, its own stages per rank, whether it takes another number as a third argument)
_GENERATORS: dict[str, tuple[Callable[..., Schedule], int, bool]] = {
    "gpipe": (gpipe, 1, False),
    AUTO: (one_forward_one_backward, 1, False),
    "1f1b": (one_forward_one_backward, 1, False),
    "zb-h1": (zb_h1, 1, False),
    "zb-h2": (zb_h2, 1, False),
    "interleaved-1f1b": (interleaved_one_forward_one_backward, 2, True),
    "zb-v": (zb_v, 2, False),
    "v-half": (v_half, 2, False),
}

"""Every step ends on accelerators, whatever waits for the device: the executor's own calls under a model of streams."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.layout.layout import Layout
from penstock.runtime.boundary.boundaries import refuse_elsewhere
from penstock.runtime.boundary.p2p import Message, P2PChannels
from penstock.schedule import (
    Action,
    Kind,
    Schedule,
    build,
    default_stages_per_rank,
    parse_schedule,
    schedule_names,
    validate,
)
from penstock.schedule.communication import POSTED_AHEAD, LossKnown, insert_communication, posts_of
from tests.support.device_order import EVERYWHERE, RULES, Do, Event, OrderError, Rules, hanging_points, run
from tests.support.recorded_steps import RecordedRank, one_pipeline, recorded

UNITS = ["u0", "u1", "u2", "u3"]
# Several shapes in one step: some are met for the first time in its middle.
SHAPES = [0, 0, 1, 0, 1, 2, 2, 0]
# No value crosses for some microbatches, and two for others.
NUMBERS = [0, 4, 3, 0, 3, 3, 4, 0]


def phases(ranks: Sequence[RecordedRank]) -> dict[str, list[list[Event]]]:
    """What all ranks do when they start, train, evaluate and generate."""
    counts = {rank.schedule.num_microbatches for rank in ranks}
    shapes, numbers = ([kinds[i % len(kinds)] for i in range(max(counts))] for kinds in (SHAPES, NUMBERS))
    steps: dict[str, Callable[[RecordedRank], list[Event]]] = {
        "warm-up": RecordedRank.warm_up,
        "first step": RecordedRank.train,
        "second step": RecordedRank.train,
        "step with other shapes": lambda rank: rank.train(shapes[: rank.schedule.num_microbatches]),
        "step with other numbers of values": lambda rank: rank.train(numbers[: rank.schedule.num_microbatches]),
        "evaluation with other numbers of values": lambda rank: rank.evaluate(
            numbers[: rank.schedule.num_microbatches]
        ),
        "first evaluation": RecordedRank.evaluate,
        "second evaluation": RecordedRank.evaluate,
        "generation": lambda rank: rank.generate(2),
    }
    return {name: [step(rank) for rank in ranks] for name, step in steps.items()}


def check(layout: Layout, schedules: Sequence[Schedule], rules: dict[str, Rules] = RULES, **options: object) -> None:
    ranks = recorded(layout, schedules, **options)
    for phase, events in phases(ranks).items():
        assert any(event.do is Do.SEND for row in events for event in row) or layout.world_size == 1, phase
        for name, rule in rules.items():
            try:
                run(events, rule)
            except OrderError as error:
                raise AssertionError(f"{phase}, {name}: {error}") from error


def some_schedule(seed: int, num_ranks: int, num_microbatches: int) -> Schedule:
    """A schedule of one stage per rank whose actions come in any order that is possible."""
    chooser = random.Random(seed)
    splits = bool(seed % 2)
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    left = {
        (rank, kind): [Action(kind, rank, microbatch) for microbatch in range(num_microbatches)]
        for rank in range(num_ranks)
        for kind in (Kind.F, Kind.B, *([Kind.W] if splits else []))
    }
    while any(left.values()):
        ready = [
            (rank, kind)
            for (rank, kind), actions in left.items()
            if actions and all(needed in done for needed in actions[0].prerequisites(num_ranks))
        ]
        rank, kind = chooser.choice(ready)
        rows[rank].append(left[rank, kind].pop(0))
        done.add(rows[rank][-1])
    schedule = replace(
        build("1f1b", num_ranks, num_microbatches), name=f"seed {seed}", actions=tuple(map(tuple, rows)),
        splits_backward=splits,
    )  # fmt: skip
    validate(schedule)
    return schedule


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", schedule_names())
def test_every_step_of_a_named_schedule_ends(name: str, num_ranks: int) -> None:
    schedule = build(name, num_ranks, 2 * num_ranks)
    check(one_pipeline(schedule), [schedule])


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(3, 2), (5, 8)])
def test_also_with_few_microbatches_and_many_ranks(name: str, num_ranks: int, num_microbatches: int) -> None:
    schedule = build(name, num_ranks, num_microbatches)
    rules = {name: RULES[name] for name in ("waits everywhere", "one connection", "eager")}
    check(one_pipeline(schedule), [schedule], rules)


@pytest.mark.parametrize("seed", range(12))
def test_a_schedule_of_ones_own_ends_too(seed: int) -> None:
    schedule = some_schedule(seed, 2 + seed % 3, 5)
    check(one_pipeline(schedule), [schedule], {"waits everywhere": EVERYWHERE, "eager": RULES["eager"]})


def test_a_schedule_in_which_one_rank_runs_far_ahead_ends() -> None:
    schedule = parse_schedule(["0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3", "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"])
    check(one_pipeline(schedule), [schedule])


@pytest.mark.parametrize("ranks", [(0, 0, 1, 1), (0, 1, 1), (0, 2, 1, 2), (1, 0, 1, 2, 0)])
def test_every_rank_learns_each_loss_wherever_its_stages_are(ranks: tuple[int, ...]) -> None:
    """One microbatch after the other. In the third placement, one rank tells both others."""
    forward, backward = list(enumerate(ranks)), list(enumerate(ranks))[::-1]
    rows = [
        [
            f"{stage}{kind}{m}"
            for m in range(3)
            for kind, way in (("F", forward), ("B", backward))
            for stage, at in way
            if at == rank
        ]
        for rank in range(max(ranks) + 1)
    ]
    schedule = parse_schedule(rows)
    check(one_pipeline(schedule), [schedule])
    check(one_pipeline(schedule), [schedule], {"eager": RULES["eager"]}, gpu=False)
    for rank in recorded(one_pipeline(schedule), [schedule]):
        events = rank.train()
        known = sum(event.do is Do.RECEIVE and event.what[1] == "torch.float64" for event in events)
        assert known == (0 if ranks[-1] == rank.place.pipeline_rank else 3)


@pytest.mark.parametrize("name", schedule_names())
def test_no_wait_for_the_device_at_any_single_point_hangs(name: str) -> None:
    schedule = build(name, 2, 4)
    ranks = recorded(one_pipeline(schedule), [schedule])
    for events in ([rank.train() for rank in ranks] for _ in range(2)):
        assert [hanging_points(events, rank) for rank in range(2)] == [[], []]


@pytest.mark.parametrize("tied", [(), ("u0", "u3")], ids=["", "tied"])
@pytest.mark.parametrize(
    ("stages", "names"),
    [
        ([[1, 3], [2, 2]], ["1f1b", "gpipe"]),
        ([[4], [2, 2], [1, 2, 1]], ["1f1b", "zb-h1", "1f1b"]),
        ([[1, 1, 1, 1], [3, 1]], ["zb-v", "zb-h2"]),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], ["interleaved-1f1b", "1f1b"]),
        ([[2, 1, 1]], ["zb-h1"]),
    ],
)
def test_unlike_pipelines_sum_their_gradients_and_end(
    stages: list[list[int]], names: list[str], tied: tuple[str, ...]
) -> None:
    """Buckets, tied weights and totals included; the pipelines have unlike numbers of microbatches."""
    schedules, units = [], []
    for number, (sizes, name) in enumerate(zip(stages, names, strict=True)):
        num_ranks = len(sizes) // default_stages_per_rank(name)
        schedules.append(build(name, num_ranks, 4 + 3 * number))
        ends = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
        units.append([UNITS[a:b] for a, b in itertools.pairwise(ends)])
    layout = Layout.place(units, [schedule.stage_to_rank for schedule in schedules])
    check(layout, schedules, tied=tied)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
def test_a_step_that_all_ranks_leave_ends(name: str, called: bool) -> None:
    schedule = build(name, 3, 6)
    ranks = recorded(one_pipeline(schedule), [schedule])
    for rank in ranks:
        rank.train()  # learns the shapes
    whole = [rank.train() for rank in ranks]
    left = [rank.train(left_at=1, called=called) for rank in ranks]
    run(left, EVERYWHERE)
    for one, other in zip(whole, left, strict=True):
        assert sum(event.do is Do.SEND for event in one) == sum(event.do is Do.SEND for event in other)


@pytest.mark.parametrize("name", schedule_names())
def test_on_gloo_every_step_ends_with_receives_posted_far_ahead(name: str) -> None:
    schedule = build(name, 3, 6)
    ranks = recorded(one_pipeline(schedule), [schedule], gpu=False)
    for events in phases(ranks).values():
        run(events)
    second = ranks[0].train()
    order = [event.do for event in second if event.do in (Do.RECEIVE, Do.COMPUTE)]
    # The first stage's first forward needs nobody, and the ranks come together meanwhile.
    assert order.index(Do.RECEIVE) <= 1, "the first gradients' receives are posted before the second forward"


def test_a_group_of_an_accelerator_line_joins_two_ranks_and_one_direction() -> None:
    schedule = build("zb-v", 3, 6)
    ranks = recorded(one_pipeline(schedule), [schedule])
    directions: dict[str, set[tuple[int, int]]] = {}
    for rank, events in enumerate([rank.train() for rank in ranks]):
        for event in events:
            if event.do is Do.SEND and not event.on_host:
                assert len(event.members) == 2
                directions.setdefault(event.group, set()).add((rank, event.peer))
    assert len(directions) == 2 * 4, "one for each boundary between ranks and direction"
    assert all(len(ways) == 1 for ways in directions.values())


def test_only_tensors_of_the_step_are_transferred_between_accelerators() -> None:
    """Headers go from host to host."""
    schedule = build("1f1b", 2, 2)
    for events in [rank.train() for rank in recorded(one_pipeline(schedule), [schedule])]:
        kinds = {(event.on_host, event.what[1]) for event in events if event.do in (Do.SEND, Do.RECEIVE)}
        assert kinds == {(True, "torch.int64"), (False, "torch.float32"), (False, "torch.float64")}


@pytest.mark.parametrize("name", schedule_names())
def test_receives_are_posted_ahead_but_not_more_than_needed(name: str) -> None:
    schedule = build(name, 4, 16)
    leads: list[int] = []
    for rank, row in enumerate(schedule.actions):
        _, posts = posts_of(schedule, rank)
        use = {action: position for position, action in enumerate(row)}
        held: dict[tuple[Kind, int], int] = {}
        for position, (action, post) in enumerate(zip(row, posts, strict=True)):
            for user in (*post.before, *post.inside):
                if isinstance(user, Action):
                    leads.append(use[user] - position)
                    held[user.kind, user.stage] = held.get((user.kind, user.stage), 0) + 1
            assert max(held.values(), default=0) <= POSTED_AHEAD
            if (action.kind, action.stage) in held:
                held[action.kind, action.stage] -= 1
    num_messages = (
        2 * 16 * sum(not schedule.is_local(boundary, boundary + 1) for boundary in range(schedule.num_stages - 1))
    )
    assert len(leads) == num_messages
    # Neighbours in 1F1B's steady state wait for each other: only one of them can post before it computes.
    assert sum(lead > 0 for lead in leads) / num_messages >= (0.4 if name == "1f1b" else 0.5)


def test_a_loss_comes_before_the_backward_that_it_is_for() -> None:
    schedule = build("1f1b", 3, 2)
    rows = [[str(operation) for operation in row] for row in insert_communication(schedule, losses=True)]
    assert rows[0].index("0RECV_L0") < rows[0].index("0L0") < rows[0].index("0B0")
    assert rows[2].index("2F0") < rows[2].index("2L0") < rows[2].index("2SEND_L0") < rows[2].index("2B0")
    assert str(LossKnown(1, 0)) in rows[1]


def test_types_that_nccl_has_not_travel_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Tensor] = []

    class Group:
        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
            moved.extend(tensors)

        recv = send

    monkeypatch.setattr(torch.distributed, "get_group_rank", lambda group, peer: 0)
    group: Any = Group()
    board: Any = None
    channels = P2PChannels(lambda boundary, kind: group, lambda stage: 1, torch.device("cuda"), board)
    channel = channels.channel(0, Message.ACTIVATION, downstream=True)
    odd = [torch.tensor(3, dtype=torch.int16), torch.tensor([1 + 2j]), torch.tensor([True, False])]
    for tensors in (odd[:1], odd):
        channel.send(tensors)
        buffers = [torch.empty_like(tensor) for tensor in tensors]
        channel.post_receive(buffers)
        half = len(moved) // 2
        for sent, received in zip(moved[:half], moved[half:], strict=True):
            assert sent.dtype is received.dtype is torch.uint8
            received.copy_(sent)
        assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(tensors, buffers, strict=True))
        moved.clear()


def test_a_tensor_elsewhere_is_refused_by_name() -> None:
    values = [torch.empty(2, device="meta"), torch.zeros(3, dtype=torch.int64)]
    with pytest.raises(RuntimeError, match=r"value 1 that goes from stage 4 to stage 5, a torch.int64 .* is on cpu"):
        refuse_elsewhere(values, torch.device("meta"), 4)


def test_the_model_sees_orders_that_hang() -> None:
    """Two ranks that each post a receive, and send to each other afterwards."""

    def transfer(do: Do, peer: int, way: str) -> Event:
        return Event(do, way, members=(0, 1), peer=peer, what="tensor")

    def rank(peer: int, out: str, back: str) -> list[Event]:
        post, send = transfer(Do.RECEIVE, peer, back), transfer(Do.SEND, peer, out)
        return [post, Event(Do.COMPUTE), send, Event(Do.WAIT, of=0)]

    both = [rank(1, "down", "up"), rank(0, "up", "down")]
    run(both)
    run(both, RULES["one connection"])
    with pytest.raises(OrderError, match="rank 0"):
        run(both, EVERYWHERE)
    assert hanging_points(both, 0) == []
    # On one communicator for both directions, each rank's receive is in front of its send.
    with pytest.raises(OrderError):
        run([[replace(event, group="one") if event.group else event for event in row] for row in both])

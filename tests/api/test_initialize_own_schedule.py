"""A schedule that the user wrote runs like a named one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock import PipelineTemplate
from penstock.config.configuration import Configuration, ConfigurationError
from penstock.layout.pipelines import schedule_maker
from penstock.planning.cluster import Cluster, DeviceClass
from penstock.planning.fit import Recipe, ways
from penstock.planning.plan import Job
from penstock.planning.planner import make_plans
from penstock.planning.profile import Profile, UnitCost
from penstock.runtime.boundary import boundaries
from penstock.runtime.comm.settings import SettingsMismatch
from penstock.schedule import (
    Schedule,
    ScheduleError,
    build,
    live_microbatches,
    parse_schedule,
    register_schedule,
    schedule_names,
)
from penstock.schedule.registry import SCHEDULES
from penstock.schedule.text import format_schedule, own_or_named
from tests.cli.test_cli import rows, run
from tests.support.families import FAMILIES, batch
from tests.support.planning_cases import best_simulated_by_brute_force
from tests.support.pool import Pool
from tests.support.training import assert_steps_equal, train_family, unsplit_step


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=16, n_layer=3, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config)


def train_with(schedule: str | list[str], num_microbatches: int, told: bool = True) -> tuple[float, float]:
    """The loss of a step and of an evaluation of another size, which the schedule was not written for."""
    ids = torch.randint(0, 61, (2 * num_microbatches, 8), generator=torch.Generator().manual_seed(1))
    section = {"pipeline_parallel_size": 2, "schedule": schedule}
    if told:
        section["num_microbatches"] = num_microbatches
    model = penstock.initialize(tiny(), {"model_parallelism": section})
    loss = 0.0
    for out in model(input_ids=ids, labels=ids):
        out.loss.backward()
        loss += out.loss.item()
    with torch.no_grad():
        return loss, model(input_ids=ids[:1], labels=ids[:1]).loss.item()


def test_rows_and_a_csv_file_train_like_the_named_schedule(pool: Pool, tmp_path: Path) -> None:
    text = format_schedule(build("zb-h1", 2, 4))
    path = tmp_path / "mine.csv"
    path.write_text(text)
    ids = torch.randint(0, 61, (8, 8), generator=torch.Generator().manual_seed(1))
    model = tiny()
    expected = (model(input_ids=ids, labels=ids).loss.item(), model(input_ids=ids[:1], labels=ids[:1]).loss.item())
    for schedule, told in ((str(path), False), (text.splitlines(), False), (text.splitlines(), True)):
        for losses in pool.run(2, train_with, schedule=schedule, num_microbatches=4, told=told, timeout=60):
            assert losses == pytest.approx(expected, rel=1e-5)


def far_ahead(num_microbatches: int, lead: int) -> list[str]:
    """Rank 0 sends `lead` activations before it gives the gradient that rank 1 wants before it takes the second."""
    forwards = [f"0F{i}" for i in range(num_microbatches)]
    turns = [f"3F{i},3B{i},0B{i - 1}" if i else "3F0,3B0" for i in range(num_microbatches)]
    rest = chain.from_iterable(zip_longest(turns, forwards[lead:]))
    return [
        ",".join([*forwards[:lead], *filter(None, rest), f"0B{num_microbatches - 1}"]),
        ",".join(f"1F{i},2F{i},2B{i},1B{i}" for i in range(num_microbatches)),
    ]


def train_with_large_messages(schedule: list[str], num_microbatches: int) -> tuple[float, float]:
    """`train_with`, where receives are posted no further ahead than those of large tensors are."""
    with mock.patch.object(boundaries, "BYTES_AHEAD", 1):
        return train_with(schedule, num_microbatches)


# The second has so many microbatches that sends are waited for within the step.
@pytest.mark.parametrize(("num_microbatches", "lead"), [(24, 24), (40, 14)])
def test_a_schedule_may_send_far_ahead(pool: Pool, num_microbatches: int, lead: int) -> None:
    ids = torch.randint(0, 61, (2 * num_microbatches, 8), generator=torch.Generator().manual_seed(1))
    expected = tiny()(input_ids=ids, labels=ids).loss.item()
    rows = far_ahead(num_microbatches, lead)
    arguments = {"schedule": rows, "num_microbatches": num_microbatches}
    for loss, _ in pool.run(2, train_with_large_messages, **arguments, timeout=60):
        assert loss == pytest.approx(expected, rel=1e-5)


# Two stages on the first rank, one on the second.
UNEVEN = (",".join(f"0F{m},1F{m},1B{m},0B{m}" for m in range(4)), ",".join(f"2F{m},2B{m}" for m in range(4)))


@pytest.mark.parametrize(
    "rows",
    [
        UNEVEN,
        (",".join(f"0F{m},0B{m}" for m in range(4)), ",".join(f"1F{m},2F{m},2B{m},1B{m}" for m in range(4))),
        (
            ",".join(f"0F{m},1F{m},1B{m},0B{m}" for m in range(4)),
            ",".join(f"2F{m},3F{m},3B{m},2B{m}" for m in range(4)),
        ),
    ],
    ids=["0 0 1", "0 1 1", "0 0 1 1"],
)
def test_a_rank_may_have_stages_that_follow_one_another(pool: Pool, rows: tuple[str, ...]) -> None:
    inputs, settings = batch("causal", 8), {"n_layer": 4}
    expected = unsplit_step(FAMILIES["gpt2"].build(**settings), (inputs, 1.0))
    options = {"schedule": list(rows), "num_microbatches": 4}
    steps = pool.run(2, train_family, "gpt2", 2, [inputs], settings, **options)
    assert_steps_equal([step for (step,) in steps], expected)


def test_a_schedule_of_other_size_is_refused_before_training(pool: Pool) -> None:
    rows = format_schedule(build("1f1b", 2, 4)).splitlines()
    for error in pool.run(2, train_with, schedule=rows, num_microbatches=3, timeout=60, outcomes=True):
        assert isinstance(error, ValueError) and "not written for 3 microbatches" in str(error)


def test_a_broken_schedule_is_refused_with_what_blocks_it() -> None:
    with pytest.raises(ScheduleError):
        own_or_named(["0F0,0B0", "1B0,1F0"], 2)
    with pytest.raises(ScheduleError, match="written for 2 ranks"):
        own_or_named(["0F0,0B0", "1F0,1B0"], 3)


# -- under a name ------------------------------------------------------------------------------------------------------

NAME = "one-at-a-time"


def one_at_a_time(num_ranks: int, num_microbatches: int) -> Schedule:
    """No microbatch begins before the one before it has ended."""
    if num_ranks < 2:
        raise ValueError("one rank is asked for, but makers serve two or more")
    rows = [[f"{rank}{kind}{m}" for m in range(num_microbatches) for kind in "FB"] for rank in range(num_ranks)]
    return parse_schedule(rows)


@pytest.fixture
def registered() -> Iterator[None]:
    with mock.patch.dict(SCHEDULES):
        register_schedule(NAME, one_at_a_time)
        yield


def another_for_six(num_ranks: int, num_microbatches: int) -> Schedule:
    return build("gpipe", 2, 6) if num_microbatches == 6 else one_at_a_time(num_ranks, num_microbatches)


def train_under_a_name(
    num_microbatches: int, another: Callable[[int, int], Schedule] | None = None
) -> tuple[float, float]:
    """With `another` maker on rank 1."""
    with mock.patch.dict(SCHEDULES):
        register_schedule(NAME, another if another is not None and os.environ["RANK"] == "1" else one_at_a_time)
        return train_with(NAME, num_microbatches)


def test_a_registered_schedule_trains_and_evaluates(pool: Pool) -> None:
    ids = torch.randint(0, 61, (8, 8), generator=torch.Generator().manual_seed(1))
    model = tiny()
    expected = (model(input_ids=ids, labels=ids).loss.item(), model(input_ids=ids[:1], labels=ids[:1]).loss.item())
    for losses in pool.run(2, train_under_a_name, 4, timeout=60):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_ranks_that_registered_different_schedules_are_told_so(pool: Pool) -> None:
    """At once where they differ for few microbatches, else before the first step of so many begins."""
    with pytest.raises(ValueError, match=r"schedule.*one-at-a-time \[[0-9a-f]{8}\]"):
        pool.run(2, train_under_a_name, 4, partial(build, "gpipe"), timeout=60)
    for error in pool.run(2, train_under_a_name, 6, another_for_six, timeout=60, outcomes=True):
        assert isinstance(error, SettingsMismatch)
        assert re.search("run different schedules: rank 0 has [0-9a-f]{8}, rank 1 has [0-9a-f]{8}", str(error))


def test_a_registered_schedule_is_planned_with_and_fits(registered: None) -> None:
    """It holds one microbatch, where the others hold two: the only one for little memory."""
    units = tuple(UnitCost(f"unit{index}", 1.0, 1.0, 1.0, weights=1, kept=4) for index in range(4))
    profile, cluster = Profile("model", units), Cluster((DeviceClass("small", 2, memory=12.0),))
    (plan, *_) = make_plans(Job(profile, cluster, 2), 1)
    assert plan.schedule_names == NAME
    best = best_simulated_by_brute_force(profile, cluster, 2, 1, (*schedule_names(),))
    assert plan.seconds == best == 2 * 4 * 3.0  # nothing overlaps
    recipes = [(Recipe("float32", torch.float32), None, profile)]
    fits = {name: [way.plan is not None for way in ways(iter(recipes), cluster, 2, name)] for name in ("1f1b", NAME)}
    assert fits == {"1f1b": [False, True], NAME: [True, True]}  # with activations recomputed there are few to hold


def test_a_registered_schedule_that_holds_little_is_planned_exactly_on_unlike_devices(registered: None) -> None:
    """The large jobs' search has 1F1B's formula, by which another split is the best: 114 seconds."""
    costs = (1.0, 1.0, 5.0, 1.0)
    units = tuple(UnitCost(f"unit{n}", cost, cost, cost, weights=1, kept=4) for n, cost in enumerate(costs))
    devices = DeviceClass("fast", 2, memory=12.0), DeviceClass("slow", 1, speed=0.4, memory=18.0)
    profile, cluster = Profile("model", units), Cluster(devices)
    (plan, *_) = make_plans(Job(profile, cluster, 4, schedules=(NAME,)), 1)
    assert plan.seconds == pytest.approx(best_simulated_by_brute_force(profile, cluster, 4, 1, (NAME,))) == 96.0


def test_a_registered_schedule_is_simulated_drawn_and_named(registered: None, tmp_path: Path) -> None:
    simulated = run("simulate", NAME, "1f1b", "-p", 2, "-m", 3)
    assert [float(rows(simulated)[name][0]) for name in (NAME, "1f1b")] == [3 * 6, (3 + 2 - 1) * 3]
    assert rows(simulated)[NAME][-1] == "1 each"
    assert run("draw", NAME, "-o", tmp_path / "mine.svg").exit_code == 0
    assert NAME in (tmp_path / "mine.svg").read_text()
    with pytest.raises(ConfigurationError, match=f"one of .*{NAME}"):
        Configuration.from_any({"model_parallelism": {"pipeline_parallel_size": 2, "schedule": "other"}})
    templates = [PipelineTemplate("tiny", [["a"], ["b"]])]
    assert schedule_maker(templates[0], NAME)(3).name == NAME
    assert [live_microbatches(NAME, 4, rank, 9) for rank in range(4)] == [1] * 4


@dataclass
class Maker:
    """A callable that has no hash."""

    name: str

    def __call__(self, num_ranks: int, num_microbatches: int) -> Schedule:
        return one_at_a_time(num_ranks, num_microbatches)


def train_on_one_rank(size: int | str) -> float:
    with mock.patch.dict(SCHEDULES):
        register_schedule("of an object", Maker("mine"))
        config = {"pipeline_parallel_size": size, "schedule": "of an object", "num_microbatches": 2}
        model = penstock.initialize(tiny(), config)
        ids = torch.randint(0, 61, (4, 8), generator=torch.Generator().manual_seed(1))
        for output in model(input_ids=ids, labels=ids):
            output.loss.backward()
        return model.pipeline.last_step.global_loss


def test_on_one_rank_a_registered_schedule_is_1f1b(registered: None, pool: Pool) -> None:
    assert build(NAME, 1, 3).actions == build("1f1b", 1, 3).actions
    assert live_microbatches(NAME, 1, 0, 9) == 1
    ids = torch.randint(0, 61, (4, 8), generator=torch.Generator().manual_seed(1))
    expected = float(tiny()(input_ids=ids, labels=ids).loss)
    for size in (1, "auto"):
        assert pool.run(1, train_on_one_rank, size)[0] == pytest.approx(expected, rel=1e-6)


def uneven_on_three(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage on each rank; on three ranks the first has the fourth stage, too."""
    if num_ranks != 3:
        return one_at_a_time(num_ranks, num_microbatches)
    chain = [
        [f"{stage}F{m}" for stage in range(4)] + [f"{stage}B{m}" for stage in reversed(range(4))]
        for m in range(num_microbatches)
    ]
    of_rank = [[action for each in chain for action in each if int(action[0]) % 3 == rank] for rank in range(3)]
    return parse_schedule(of_rank)


def test_a_registered_schedule_has_as_many_stages_on_each_rank(registered: None) -> None:
    register_schedule("uneven on three", uneven_on_three)
    assert build("uneven on three", 2, 4).num_stages == 2
    with pytest.raises(ScheduleError, match="must put the same number of stages on each rank"):
        build("uneven on three", 3, 4)
    register_schedule("of two", lambda p, m, stages_per_rank=2: build("interleaved-1f1b", p, m, stages_per_rank))
    template = PipelineTemplate("tiny", [["a"], ["b"]])
    for made in (build("of two", 1, 4), build("of two", 1, 4, 2), schedule_maker(template, "of two")(4)):
        assert (made.stage_to_rank, made.actions) == ((0, 0), build("interleaved-1f1b", 1, 4).actions)


def test_a_schedule_that_is_registered_must_be_able_to_run(registered: None) -> None:
    stuck = Schedule("", 2, 4, (0, 1), one_at_a_time(2, 4).actions[::-1], False)
    for name, make, words in (
        (NAME, one_at_a_time, "a name must be new"),
        ("mine.csv", one_at_a_time, "not end in .csv"),
        ("stuck", lambda p, m: stuck, "'stuck' on 2 ranks with 4 microbatches: rank 0"),
        (
            "fixed",
            lambda p, m: one_at_a_time(3, m),
            "asked for 2 ranks and 4 microbatches, but its maker gave one for 3",
        ),
        ("uneven", lambda p, m: parse_schedule(UNEVEN), "'uneven' must put the same number of stages on each rank"),
    ):
        before = schedule_names()
        with pytest.raises(ValueError, match=words):
            register_schedule(name, make)
        assert schedule_names() == before


def multiples_only(num_ranks: int, num_microbatches: int) -> Schedule:
    if num_microbatches % num_ranks:
        raise ValueError("only for multiples")
    return one_at_a_time(num_ranks, num_microbatches)


def backwards_from_three(num_ranks: int, num_microbatches: int) -> Schedule:
    made = one_at_a_time(num_ranks, num_microbatches)
    if num_microbatches < 3:
        return made
    rows = [[f"{num_ranks - 1 - rank}{kind}{m}" for m in range(num_microbatches) for kind in "FB"] for rank in range(2)]
    return parse_schedule(rows)


def test_a_registered_maker_serves_any_numbers_with_the_same_ranks_for_its_stages() -> None:
    """Evaluations, the planner, and ranks that are left after a loss ask for others than those of a step."""
    with mock.patch.dict(SCHEDULES):
        for make, words in (
            (
                multiples_only,
                "on 2 ranks with 1 microbatches: its maker, which must serve any numbers, .*only for mult",
            ),
            (backwards_from_three, r"stages are on ranks \(1, 0\), but with 1 microbatch on \(0, 1\)"),
        ):
            with pytest.raises(ScheduleError, match=words):
                register_schedule("some", make)
        register_schedule("most", lambda p, m: multiples_only(p, m) if m == 3 else one_at_a_time(p, m))
        with pytest.raises(ScheduleError, match=r"'most' on 2 ranks with 3 microbatches: .*only for multiples"):
            build("most", 2, 3)


def in_loops(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    if stages_per_rank == 4:
        return in_loops(num_ranks, num_microbatches)
    made = build("interleaved-1f1b", num_ranks, num_microbatches, stages_per_rank)
    return replace(made, actions=made.actions[::-1]) if stages_per_rank == 5 else made


def test_a_registered_schedule_for_any_number_of_stages_is_checked_for_each() -> None:
    with mock.patch.dict(SCHEDULES):
        register_schedule("loops", in_loops)
        assert (build("loops", 2, 4).num_stages, build("loops", 2, 4, 3).num_stages) == (4, 6)
        assert build("loops", 2, 4, 3).name == "loops"
        with pytest.raises(ScheduleError, match="has 4 stages per rank, but its maker gave one with 2 for 2 ranks"):
            build("loops", 2, 4, 4)
        with pytest.raises(ScheduleError, match="'loops' on 2 ranks with 4 microbatches: rank 0 is missing"):
            build("loops", 2, 4, 5)

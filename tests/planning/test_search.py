"""The planner's search, against brute force over all layouts."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
from other_systems import RULES

from penstock.planning.candidates import LayoutSearch
from penstock.planning.cluster import Cluster, DeviceClass, Link, parse_devices, parse_nodes
from penstock.planning.memory import HeldBytes, memory_of_ranks, parse_bytes, readable
from penstock.planning.plan import Job, place
from penstock.planning.planner import Infeasible, equal_pipelines, make_plans, with_equal_pipelines
from penstock.planning.profile import Profile, UnitCost, held_by_stages
from penstock.planning.search import Chain, find_splits, layouts
from penstock.runtime.comm.devices import USABLE
from penstock.schedule import build
from penstock.schedule.registry import planned_schedules
from tests.support.planning_cases import (
    best_as_a_whole_by_brute_force,
    best_by_brute_force,
    best_simulated_by_brute_force,
    linked_encoder_decoder,
    random_case,
)

GB = 1e9


def gpt(num_blocks: int = 12, head: float = 1.0) -> Profile:
    """Blocks of 10 ms for each of F, B and W, 0.4 GB of state and 0.1 GB for each microbatch."""
    rest = {"crossing": 1e7, "weights": GB / 10, "gradients": GB / 10, "optimizer": GB / 5, "kept": GB / 10}
    blocks = [UnitCost(f"h.{index}", 0.01, 0.01, 0.01, **rest) for index in range(num_blocks)]
    ends = [
        UnitCost("wte", 0.001, 0.0, 0.001, crossing=1e7, weights=2e8, gradients=2e8, optimizer=4e8, kept=1e6),
        UnitCost("head", *[0.01 * head] * 3, weights=2e8, gradients=2e8, optimizer=4e8, kept=1e8),
    ]
    return Profile("gpt", (ends[0], *blocks, ends[1]))


def cluster(devices: str, memory: str | None = None, speed: str | None = None, **rest: object) -> Cluster:
    return Cluster(parse_devices(devices, memory, speed), **rest)  # type: ignore[arg-type]  # of the tests below


def test_the_search_finds_the_optimum_of_all_layouts() -> None:
    for seed in range(30):
        profile, devices, microbatches, copies = random_case(seed, most_devices=6, most_units=9)
        templates = find_splits(Chain(profile.parts, devices, microbatches))
        found = [seconds for seconds, _ in layouts(templates, devices.counts, microbatches, copies)]
        assert found == sorted(found, reverse=True)
        best = best_by_brute_force(profile, devices, microbatches, copies)
        if best is None:
            assert not found, seed
        else:
            assert found[-1] == pytest.approx(best, rel=1e-6), seed


@pytest.mark.parametrize(
    ("schedule", "size", "costs", "speed", "memory"),
    [
        ("zb-v", 4.0, (5.0, 2.0, 1.0, 1.0, 2.0), 0.3, (14.0, 14.0)),
        ("v-half", 6.0, (3.0, 1.0, 1.0, 3.0, 3.0), 0.5, (18.0, 25.0)),
        ("v-half", 6.0, (1.0, 3.0, 2.0, 1.0), 0.5, (14.0, 19.6)),
    ],
)
def test_a_rank_with_both_ends_of_a_model_holds_a_tied_weight_once(
    schedule: str, size: float, costs: tuple[float, ...], speed: float, memory: tuple[float, float]
) -> None:
    """Counted twice it leaves another split, or none."""
    rest = {"weights": 1.0, "gradients": 1.0, "kept": 1.0}
    units = [UnitCost(f"unit{number}", cost, cost, cost, **rest) for number, cost in enumerate(costs)]
    for end in (0, -1):
        units[end] = replace(units[end], weights=size, gradients=size, sizes=(size,), tied=(("weight", size, size),))
    profile = Profile("tied", tuple(units))
    devices = Cluster((DeviceClass("a", 1, memory=memory[0]), DeviceClass("b", 1, speed=speed, memory=memory[1])))
    (plan, *_) = make_plans(Job(profile, devices, 4, schedules=(schedule,)), 1)
    assert plan.seconds == pytest.approx(best_simulated_by_brute_force(profile, devices, 4, 1, (schedule,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "most_devices", "most_units", "schedules"),
    [(range(30), 5, 7, ("1f1b",)), (range(1000, 1003), 7, 10, ("1f1b",)), (range(10), 4, 6, planned_schedules())],
    ids=["small", "larger", "all schedules"],
)
def test_a_small_job_has_the_shortest_simulated_step_of_all_layouts(
    seeds: range, most_devices: int, most_units: int, schedules: tuple[str, ...]
) -> None:
    for seed in seeds:
        profile, devices, microbatches, copies = random_case(seed, most_devices, most_units)
        best = best_simulated_by_brute_force(profile, devices, microbatches, copies, schedules)
        found = plan_of(Job(profile, devices, microbatches, copies, schedules=schedules))
        assert found == (best if best is None else pytest.approx(best, rel=1e-9)), seed


@pytest.mark.parametrize("seed", range(8, 12))
def test_the_best_plan_alone_is_the_best_of_all_layouts_with_links_and_reduction(seed: int) -> None:
    job = linked_encoder_decoder(seed)
    assert plan_of(job) == pytest.approx(best_as_a_whole_by_brute_force(job), rel=1e-9)


def plan_of(job: Job) -> float | None:
    """The step of the best plan."""
    with contextlib.suppress(Infeasible):
        return make_plans(job, 1)[0].seconds
    return None


def test_a_plan_covers_the_model_fits_its_devices_and_has_all_microbatches() -> None:
    feasible = 0
    for seed in range(8):
        profile, devices, microbatches, copies = random_case(seed)
        job = Job(profile, devices, microbatches, copies)
        try:
            plans = make_plans(job)
        except Infeasible:
            continue
        feasible += 1
        assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
        for plan in plans:
            assert len(plan.pipelines) >= copies
            assert sum(pipeline.schedule.num_microbatches for pipeline in plan.pipelines) == microbatches
            assert len(set(plan.devices)) == len(plan.devices)
            for pipeline in plan.pipelines:
                assert [unit for stage in pipeline.stages for unit in stage] == list(profile.units)
            for device, memory in zip(plan.devices, plan.memory, strict=True):
                assert memory.total <= devices.classes[devices.class_of_device[device]].memory
    assert feasible >= 4


def test_large_clusters_are_solved_by_a_linear_program_to_within_a_few_percent() -> None:
    """1,000 devices with so many microbatches that the bubble is small: at best all compute all the time."""
    devices = cluster("a:300,b:700", "a=40GB,b=9GB", "a=1,b=0.4")
    profile = gpt(30)
    templates = find_splits(Chain(profile.parts, devices, 80_000))
    *_, (seconds, splits) = layouts(templates, devices.counts, 80_000, 1)
    work = 80_000 * sum(unit.seconds for unit in profile.units)
    assert work / (300 + 0.4 * 700) <= seconds <= 1.02 * work / (300 + 0.4 * 700)
    used = [sum(split.classes.count(kind) for split in splits) for kind in (0, 1)]
    assert used[0] <= 300 and used[1] <= 700


def test_what_must_stay_together_is_one_part() -> None:
    units = [UnitCost(name, 1, 1, 1) for name in ("wte", "wpe", "h.0", "h.1", "ln_f", "head")]
    parts = Profile("gpt", tuple(units)).parts
    assert [[unit.name for unit in part] for part in parts] == [["wte", "wpe"], ["h.0"], ["h.1"], ["ln_f", "head"]]


def test_five_equal_devices_with_little_memory_make_unlike_pipelines() -> None:
    best = make_plans(Job(gpt(), cluster("5", "7GB"), 16, schedules=("1f1b",)))[0]
    assert sorted(len(pipeline.devices) for pipeline in best.pipelines) in ([2, 3], [5])
    assert len(best.devices) == 5


def test_stages_whose_memory_is_short_recompute_and_the_others_do_not() -> None:
    """Never slower than recomputing on all stages or on none, and possible where one of these is."""
    mixed = fits_now = 0
    for limit in (2.2, 2.6, 3.0, 3.4, 4.0, 5.0):
        job = Job(gpt(), cluster("4", f"{limit}GB"), 8, schedules=("1f1b", "zb-h1"))
        steps = {}
        for how in (False, True, "stages"):
            with contextlib.suppress(Infeasible):
                steps[how] = make_plans(replace(job, checkpointing=how), 1)[0]
        if not steps:
            continue
        best = steps["stages"]
        assert all(best.seconds <= other.seconds * (1 + 1e-9) for other in steps.values())
        assert best.fullest[1].total <= limit * GB
        mixed += any(best.recomputing) and not all(best.recomputing)
        assert any(best.recomputing) == (False not in steps or steps[False].seconds > best.seconds)
        fits_now += True in steps and False not in steps
    assert mixed and fits_now


def test_what_waits_for_its_weight_gradients_may_hold_less_than_what_waits_for_its_backward() -> None:
    """Under ZB-H1 the last rank has one microbatch between F and B, and one between B and W."""
    rest = {"weights": 1.0, "deferred": 1.0}
    units = [UnitCost("first", 1.0, 1.0, 1.0, kept=9.0, **rest), UnitCost("last", 1.0, 1.0, 1.0, kept=18.0, **rest)]
    profile, devices = Profile("model", tuple(units)), Cluster((DeviceClass("device", 2, memory=25.0),))
    (plan, *_) = make_plans(Job(profile, devices, 2, schedules=("zb-h1",)), 1)
    assert plan.seconds == pytest.approx(best_simulated_by_brute_force(profile, devices, 2, 1, ("zb-h1",)))
    assert len(plan.pipelines) == 1 and len(plan.devices) == 2


def test_a_stage_that_is_short_only_with_all_microbatches_is_recomputed_too() -> None:
    """GPipe holds all of any number: more than the planner simulates of the schedules that hold as many as ranks."""
    units = [UnitCost(f"h.{index}", 1.0, 1.0, 1.0, crossing=1.0, weights=10.0, kept=5.0) for index in range(4)]
    profile, sizes = Profile("deep", tuple(units)), (3, 1)
    held = held_by_stages([units[:3], units[3:]])
    with_eight, with_sixteen = (memory_of_ranks(build("gpipe", 2, count), held)[0].total for count in (8, 16))
    devices = Cluster((DeviceClass("small", 2, memory=(with_eight + with_sixteen) / 2),))
    search = LayoutSearch(Job(profile, devices, 16, schedules=("gpipe",), checkpointing="stages"))
    first, second = search.pipeline_of((0, 0), sizes, "gpipe").units
    assert first[0].kept < units[0].kept and second[0].kept == units[3].kept


def test_copies_stand_on_nodes_of_their_own() -> None:
    devices = cluster("8", "8GB", node_sizes=(4, 4), between=Link(1e-4, 1e9), inside=Link(1e-5, 1e10))
    for plan in make_plans(Job(gpt(), devices, 32, copies=2)):
        nodes = [{devices.node_of_device[device] for device in pipeline.devices} for pipeline in plan.pipelines]
        assert any(not first & second for first in nodes for second in nodes)
    assert place(devices, [(0,) * 3, (0,) * 5], copies=2) is None  # five do not fit on one node


def test_what_is_larger_stays_inside_the_nodes() -> None:
    """Activations where there is nothing to reduce; else the gradients of the weights, over a single pipeline."""
    devices = cluster("4", "12GB", node_sizes=(2, 2), between=Link(0.0, 1e8), inside=Link(0.0, 1e12))
    frozen = replace(gpt(), units=tuple(replace(unit, gradients=0.0) for unit in gpt().units))
    for pipeline in make_plans(Job(frozen, devices, 16))[0].pipelines:
        assert len({devices.node_of_device[device] for device in pipeline.devices}) == 1
    assert len(make_plans(Job(gpt(), devices, 16))[0].pipelines) == 1


@pytest.mark.parametrize(
    ("devices", "arguments", "message"),
    [
        (("t:4", "0.5GB"), {}, r"wte alone needs 801 MB on every device of class t, which has 500 MB \(301 MB short\)"),
        (("4", "1.5GB"), {}, r"all devices together have 6 GB: 1.7 GB short"),
        (("2", "6GB"), {"copies": 2}, r"a pipeline needs at least 2 of these devices, so 2 copies need 4, .* 2 short"),
        (("9", "40GB"), {"copies": 9}, r"9 copies need as many pipelines, .* global batch has 8"),
        (("3", "2.6GB"), {"schedules": ("1f1b",)}, r"it would with 1\.\d+ times the memory on each device \(\d.* GB i"),
    ],
)
def test_what_is_short_is_named(devices: tuple[str, ...], arguments: dict[str, object], message: str) -> None:
    with pytest.raises(Infeasible, match=message):
        make_plans(Job(gpt(), cluster(*devices), 8, **arguments))  # type: ignore[arg-type]  # of the cases above


def test_memory_is_followed_action_by_action() -> None:
    """1F1B on two ranks holds two microbatches on the first and one on the second; one at a time is worked on."""
    stages = [
        HeldBytes(weights=1, gradients=2, optimizer=3, kept=10, working=5),
        HeldBytes(weights=4, gradients=5, optimizer=6, kept=20, working=7),
    ]
    first, second = memory_of_ranks(build("1f1b", 2, 8), stages)
    assert (first.weights, first.gradients, first.optimizer, first.activations) == (1, 2, 3, 25)
    assert second.total == 4 + 5 + 6 + 20 + 7


def test_devices_and_nodes_as_text() -> None:
    a100, t4 = parse_devices("a100:4,t4:3", "t4=15GB")
    assert (a100.count, a100.speed, a100.memory) == (4, 1.0, 36e9)
    assert (t4.count, t4.memory) == (3, 15e9) and t4.speed == pytest.approx(65 / 312)
    assert parse_devices("7", "24GB") == (DeviceClass("device", 7, 1.0, 24e9),)
    cards = parse_devices("v100:1,v100-pcie:1,NVIDIA_V100_PCIE:1,Tesla-T4:1,t4:1,a100-pcie:1")
    assert [kind.name for kind in cards if kind.has_bfloat16] == ["a100-pcie"]
    home, unknown = parse_devices("RTX-4060-Ti:1,mine:2", "mine=20GB", "mine=0.5")
    assert (home.speed, home.memory) == (1.0, USABLE * 8e9) and (unknown.speed, unknown.memory) == (0.5, 20e9)
    with_profile = [parse_devices("a100:1,t4:1", measured_on=card) for card in ("Tesla T4", "NVIDIA A100-PCIE-40GB")]
    assert [[kind.speed for kind in kinds] for kinds in with_profile] == [[312 / 65, 1.0], [1.0, 65 / 312]]
    (a100,) = parse_devices("a100:2", measured_on="Some Card")  # a single class has the profile's device
    assert a100.speed == 1.0
    assert parse_nodes("2x4,8") == (4, 4, 8)
    assert [parse_bytes(text) for text in ("24GB", "1.5 GiB", "8e9")] == [24e9, 1.5 * 2**30, 8e9]
    assert readable(24e9) == "24 GB"


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_devices, "a100", "written like 7 or a100:4,t4:3"),
        (parse_devices, "mine:2,other:3", "how fast is mine.*--speed mine=0.5"),
        *(
            (lambda text, card=card: parse_devices(text, measured_on=card), "a100:2,t4:2", f"measured on {card}, whose")
            for card in ("cpu", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40")
        ),
        (lambda text: parse_devices("t4:2", text), "v100=3GB", "given for 'v100', but the devices are t4"),
        (parse_nodes, "2x", "written like 2x4"),
        (parse_bytes, "24 apples", "written like 24GB"),
        (lambda text: Cluster(parse_devices("7"), parse_nodes(text)), "2x4", r"nodes have 4 \+ 4 devices, .* are 7"),
    ],
)
def test_mistakes_in_text_are_named(parse, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_a_profile_is_the_same_after_writing_and_reading(tmp_path) -> None:
    profile = replace(gpt(), measured=True, about={"device": "cpu"}, inside=Link(1e-5, math.inf))
    assert Profile.read(profile.write(tmp_path / "profile.json")) == profile
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="is no profile that `penstock profile` wrote"):
        Profile.read(tmp_path / "other.json")


@pytest.mark.parametrize(("devices", "speed"), [("12", None), ("a:6,b:6", "a=1,b=0.4")])
def test_a_large_job_under_a_lean_schedule_alone_has_a_plan(devices: str, speed: str | None) -> None:
    """Also where memory is not short; and where nothing fits, the error tells with how much it would."""
    job = Job(gpt(24), cluster(devices, "40GB", speed), 48, schedules=("v-half",))
    equal = equal_pipelines(job, "v-half")
    assert equal is not None and make_plans(job, 1)[0].seconds <= equal.seconds * (1 + 1e-9)
    with pytest.raises(Infeasible, match=r"no split of 26 parts over 12 devices fits; it would with \d"):
        make_plans(replace(job, cluster=cluster(devices, "1.2GB", speed)), 1)


@pytest.mark.parametrize("schedule", planned_schedules())
def test_no_equal_pipelines_are_faster_than_the_plan_of_a_large_job(schedule: str) -> None:
    """Also where the reduction of gradients takes as long as some microbatches; and no plan is found twice."""
    for bandwidth, num_microbatches in ((3e9, 12), (1e10, 16)):
        job = Job(gpt(), cluster("12", inside=Link(1e-5, bandwidth)), num_microbatches, schedules=(schedule,))
        plans, equal = with_equal_pipelines(make_plans(job), job)
        of_depths = [equal_pipelines(job, schedule, depth) for depth in range(1, 13)]
        assert equal is not None and plans[0].seconds <= min(one.seconds for one in of_depths if one is not None)
        assert {plan.schedule_names for plan in plans if len(plan.pipelines) < 12} <= {schedule}
        shown = [sorted((one.schedule.num_microbatches, one.stage_names) for one in plan.pipelines) for plan in plans]
        assert all(shown.count(one) == 1 for one in shown)


@pytest.mark.parametrize("rule", RULES)
def test_no_other_rule_is_predicted_to_be_faster(rule: str) -> None:
    for devices in ("a:5", "a:3,b:2", "a:2,b:4"):
        for memory in ("40GB", "7GB"):
            speed = "a=1,b=0.5" if "b" in devices else None
            job = Job(gpt(head=4.0), cluster(devices, memory, speed), 16, schedules=("1f1b",))
            theirs = RULES[rule](job, "1f1b")
            assert theirs is None or make_plans(job, 1)[0].seconds <= theirs.seconds * (1 + 1e-9)

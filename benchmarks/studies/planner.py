"""The planner: against brute force, at scale, beside other rules, and measured: `python benchmarks/studies/planner.py`.

Each part has a result file in benchmarks/results. Only `measured` (emulated devices) and `memory` start processes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import RESULTS, Comparison
from other_systems import RULES

sys.path.insert(0, str(Path(__file__).parents[2]))
from penstock.planning.cluster import Cluster, DeviceClass, Link
from penstock.planning.plan import Job, Plan
from penstock.planning.planner import Infeasible, make_plans
from penstock.planning.profile import Profile, UnitCost
from penstock.planning.search import Chain, find_splits, layouts
from tests.support.planning_cases import best_by_brute_force, best_simulated_by_brute_force, random_case

GB = 1e9


def oracle(which: str) -> None:
    """The planner's best step beside that of brute force over all layouts: by formula, and simulated.

    `which` is a range of seeds such as 0-249; what was found for others before stays in the result file.
    """
    first, _, last = which.partition("-")
    runs = _runs_before("planner_oracle")
    for seed in range(int(first), int(last or first) + 1):
        profile, cluster, microbatches, copies = random_case(seed)
        marks = [time.process_time()]

        def passed(marks: list[float] = marks) -> float:
            marks.append(time.process_time())
            return marks[-1] - marks[-2]

        templates = find_splits(Chain(profile.parts, cluster, microbatches))
        by_formula = [found for found, _ in layouts(templates, cluster.counts, microbatches, copies)]
        passed()
        formula = best_by_brute_force(profile, cluster, microbatches, copies)
        passed()
        plan = _planned(Job(profile, cluster, microbatches, copies, schedules=("1f1b",)))
        of_planner = passed()
        simulated = best_simulated_by_brute_force(profile, cluster, microbatches, copies)
        runs[str(seed)] = {
            "formula": [by_formula[-1] if by_formula else None, formula],
            "simulated": [plan.seconds if plan else None, simulated],
            "seconds": [of_planner, passed()],
        }
    config = {"devices": "1-7 of 1-2 classes", "units": "2-10", "schedule": "1f1b", "seeds": len(runs)}
    title = "The planner against brute force over all layouts"
    columns = ("judged by", "cases", "feasible", "same optimum", "both infeasible", "different")
    table = Comparison("planner_oracle", title, columns, config, runs)
    for judge in ("formula", "simulated"):
        pairs = [run[judge] for run in runs.values()]
        feasible = [pair for pair in pairs if None not in pair]
        equal = sum(math.isclose(*pair, rel_tol=1e-6) for pair in feasible)
        neither = pairs.count([None, None])
        figures = [len(pairs), len(feasible), equal, neither, len(pairs) - equal - neither]
        table.add({"formula": "the formula", "simulated": "the simulated step"}[judge], [str(one) for one in figures])
    ours, theirs = (sum(run["seconds"][side] for run in runs.values()) for side in (0, 1))
    table.write(
        "Every case has random costs, memory, speeds, microbatches and copies; seeds 0, 1, 2, ... The formula is that "
        f"of the search's first steps. Simulated plans took {ours:.1f} s in all, brute force {theirs:.0f} s."
    )


def _runs_before(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["runs"] if path.exists() else {}


def language_model(blocks: int, kept: float = 0.1) -> Profile:
    """Blocks of 10 ms for each of F, B and W, 0.4 GB of state and `kept` GB per microbatch; a head worth two."""
    body = [
        UnitCost(
            f"h.{i}", 0.01, 0.01, 0.01, 8e6, 8e6, weights=GB / 10, gradients=GB / 10, optimizer=GB / 5, kept=kept * GB
        )
        for i in range(blocks)
    ]
    embedding = UnitCost(
        "wte", 0.001, 0.001, 0.0, 1e6, 8e6, weights=GB / 5, gradients=GB / 5, optimizer=2 * GB / 5, kept=1e6
    )
    head = UnitCost(
        "head", 0.02, 0.02, 0.02, 0.3 * GB, weights=GB / 5, gradients=GB / 5, optimizer=2 * GB / 5, kept=0.3 * GB,
        working=GB / 10,
    )  # fmt: skip
    return Profile(f"language model of {blocks} blocks", (embedding, *body, head))


LINKS = {"inside": Link(1e-5, 1e11), "between": Link(3e-5, 1e10)}
ONE, FOUR = (("device", 1.0),), (("a", 1.0), ("b", 0.7), ("c", 0.5), ("d", 0.3))


def cluster_of(size: int, kinds: tuple[tuple[str, float], ...], memory: float, **links: Link) -> Cluster:
    count = size // len(kinds)
    classes = tuple(DeviceClass(name, count, speed, memory * GB * speed**0.5) for name, speed in kinds)
    return Cluster(classes, (8,) * (size // 8) if size % 8 == 0 else (), **links)


def scale(rounds: int) -> None:
    """Processor seconds of planning for 128 units."""
    rows = [
        (size, kinds, memory, microbatches)
        for size, kinds, microbatches in ((8, ONE, 64), (64, ONE, 256), (64, FOUR[:2], 256), (1000, FOUR, 4000))
        for memory in (80.0, 16.0)
    ]
    columns = ("devices", "memory GB", "microbatches", "best plan s", "five plans s", "step s", "bubble", "pipelines")
    table = Comparison(
        "planner_scale", "Planning for 128 units: processor seconds", columns, {"rounds": rounds, "units": 128}, {}
    )
    for size, kinds, memory, microbatches in rows:
        job = Job(language_model(126), cluster_of(size, kinds, memory, **LINKS), microbatches)
        seconds: dict[int, list[float]] = {1: [], 5: []}
        for _ in range(rounds):
            for most, times in seconds.items():
                start = time.process_time()
                plan = make_plans(job, most)[0]
                times.append(time.process_time() - start)
        medians = {most: statistics.median(times) for most, times in seconds.items()}
        depths = sorted({len(pipeline.devices) for pipeline in plan.pipelines})
        shape = f"{len(plan.pipelines)} of {', '.join(map(str, depths))}"
        name = f"{size} of {len(kinds)} class{'es' if len(kinds) > 1 else ''}"
        cells = [f"{memory:g}", str(microbatches), *(f"{medians[most]:.2f}" for most in (1, 5))]
        table.add(
            name, [*cells, f"{plan.seconds:.2f}", f"{plan.bubble:.0%}", shape], memory=memory, best=medians[1],
            five=medians[5],
        )  # fmt: skip
        print(name, cells)
    table.write("`memory` is the fastest class's; slower classes have less. The machine was shared.")


def baselines(cases: int) -> None:
    """Predicted steps of the planner beside those of other systems' rules, on the same costs and links."""
    ours: dict[str, Callable[[Job, str], Plan | None]] = {
        "the planner, 1f1b only": lambda job, _: _planned(replace(job, schedules=("1f1b",))),
        "the planner": lambda job, _: _planned(job),
    }
    ratios: dict[str, list[float]] = {name: [] for name in (*RULES, *ours)}
    unplanned = dict.fromkeys(ratios, 0)
    feasible = 0
    for job in _jobs(cases):
        plans = {name: rule(job, "1f1b") for name, rule in (*RULES.items(), *ours.items())}
        reference = plans["the planner, 1f1b only"]
        feasible += plans["the planner"] is not None
        for name, plan in plans.items():
            if plan is None:
                unplanned[name] += plans["the planner"] is not None
            elif reference is not None:
                ratios[name].append(plan.seconds / reference.seconds)
    columns = (
        "rule",
        "median",
        "best for the rule",
        "worst for the rule",
        "faster than the planner",
        "found no layout",
    )
    table = Comparison(
        "planner_baselines", "Predicted step over the planner's with 1f1b", columns,
        {"cases": cases, "feasible": feasible}, {},
    )  # fmt: skip
    for name, of_ours in ratios.items():
        faster = sum(ratio < 1 - 1e-9 for ratio in of_ours)
        cells = [f"{figure:.2f}" for figure in (statistics.median(of_ours), min(of_ours), max(of_ours))]
        table.add(name, [*cells, str(faster), str(unplanned[name])], ratios=of_ours)
    table.write(f"Of {feasible} cases with a layout. All rules use 1f1b, but the last row.")


MEASURED = (
    # classes (devices, speed, memory in blocks), microbatches
    (((2, 1.0, 9.0),), 8),
    (((3, 1.0, 99.0),), 9),
    (((2, 1.0, 99.0), (1, 0.5, 99.0)), 10),
    (((1, 1.0, 12.0), (2, 0.5, 5.0)), 10),
    (((4, 1.0, 6.0),), 12),
    (((2, 1.0, 7.0), (2, 0.5, 7.0)), 12),
    (((2, 1.0, 8.0), (1, 0.7, 8.0), (1, 0.4, 8.0)), 12),
    (((3, 1.0, 6.0), (2, 0.6, 6.0)), 12),
    (((3, 1.0, 5.0), (3, 0.5, 5.0)), 16),
    (((4, 1.0, 4.0), (4, 0.5, 4.0)), 16),
)
# So long that two cores keep up with eight processes.
BLOCKS, BLOCK_SECONDS = 12, 0.03
CLOSE = 0.03


def measured(steps: int, cases: str) -> None:
    """Predicted beside measured steps on emulated devices of unlike speeds: the planner's choice and alternatives.

    `cases` is a range such as 0-4; what was measured of other cases before stays in the result file.
    """
    from processes import run_ranks

    first, _, last = cases.partition("-")
    runs = _runs_before("planner_measured")
    for number in range(int(first), int(last or first) + 1):
        kinds, microbatches = MEASURED[number]
        classes = tuple(DeviceClass(name, *kind) for name, kind in zip("abc", kinds, strict=False))
        units = tuple(UnitCost(f"blocks.{index}", *[BLOCK_SECONDS] * 3, weights=1.0) for index in range(BLOCKS))
        job = Job(Profile("blocks", units), Cluster(classes), microbatches)
        chosen, *others = make_plans(job, 6)
        rules = [rule(job, name) for rule in RULES.values() for name in ("1f1b", "zb-h1")]
        layouts: dict[str, Plan] = {}
        for plan in (chosen, *others[:1], *(plan for plan in rules if plan is not None)):
            if len(plan.devices) == len(chosen.devices):
                layouts.setdefault(_words(plan), plan)
        arguments = {
            "kind": "layouts", "num_blocks": BLOCKS, "steps": steps, "warmup": 1,
            "layouts": [_emulated(plan) for plan in layouts.values()],
            **dict.fromkeys(("forward", "backward", "weight"), BLOCK_SECONDS),
        }  # fmt: skip
        found = run_ranks("emulated.py", len(chosen.devices), arguments)
        runs[str(number)] = {
            "devices": " + ".join(f"{count} x {speed:g}" for count, speed, _ in kinds),
            "layouts": [
                {"words": words, "predicted": plan.seconds, "measured": statistics.median(found[str(index)])}
                for index, (words, plan) in enumerate(layouts.items())
            ],
        }
        print(json.dumps(runs[str(number)]), flush=True)
    columns = ("devices: schedule, units of each stage, microbatches", "predicted s", "measured s", "ratio")
    config = {"blocks": BLOCKS, "seconds of a block's F, B and W": BLOCK_SECONDS, "steps": steps, "machine": "alone"}
    title = "Predicted and measured steps on emulated devices"
    table = Comparison("planner_measured", title, columns, config, dict(sorted(runs.items())))
    errors, behind = [], []
    for run in table.runs.values():
        for index, one in enumerate(run["layouts"]):
            ratio = one["measured"] / one["predicted"]
            errors.append(abs(ratio - 1))
            name = f"{run['devices']}: {one['words']}" + (" (chosen)" if not index else "")
            table.add(name, [f"{one['predicted']:.3f}", f"{one['measured']:.3f}", f"{ratio:.3f}"], **one)
        behind.append(run["layouts"][0]["measured"] / min(one["measured"] for one in run["layouts"]) - 1)
    table.write(
        f"{sum(error <= 0.05 for error in errors)} of {len(errors)} predictions within 5 %, the worst "
        f"{max(errors):.1%} off. The chosen layout is the fastest measured one or within 3 % of it in "
        f"{sum(one <= CLOSE for one in behind)} of {len(behind)} cases, at worst {max(behind):.1%} behind. "
        "Alternatives: the planner's second plan, and the baselines' under 1f1b and zb-h1."
    )


def _words(plan: Plan) -> str:
    stages = "; ".join(
        f"{[len(stage) for stage in pipeline.stages]} x{pipeline.schedule.num_microbatches}"
        for pipeline in plan.pipelines
    )
    return f"{plan.schedule_names}, {stages}"


def _emulated(plan: Plan) -> dict[str, Any]:
    """What `emulated.unlike_pipelines` is given."""
    cluster = plan.job.cluster
    speeds = [cluster.classes[cluster.class_of_device[device]].speed for device in plan.devices]
    return {
        "schedule": plan.schedule_names,
        "stages": [[len(stage) for stage in pipeline.stages] for pipeline in plan.pipelines],
        "num_microbatches": [pipeline.schedule.num_microbatches for pipeline in plan.pipelines],
        "speeds": {str(rank): speed for rank, speed in enumerate(speeds)},
    }


def memory() -> None:
    """The most that the tensors of each rank take in a step, beside what was predicted from a profile."""
    from penstock.planning.memory import memory_of_ranks, readable
    from penstock.planning.profile import held_by_stages
    from penstock.planning.profiling import profile_model
    from penstock.schedule import build
    from tests.planning import test_memory as test
    from tests.support.pool import Pool

    profile = profile_model(test.build_model(), test.BATCH, test.LENGTH, device="cpu", optimizer_states=0)
    pool = Pool()
    columns = ("ranks, schedule, checkpointing", "rank", "measured", "predicted", "ratio", "ratio without weights")
    config = {"blocks": 6, "width": 128, "length": test.LENGTH, "microbatch": test.BATCH, "count": test.MICROBATCHES}
    table = Comparison("planner_memory", "Predicted and measured peak memory of a rank", columns, config, {})
    ratios = []
    for num_ranks in (2, 3):
        ranks = pool.run(num_ranks, test.peaks_of_steps, num_ranks, timeout=200)
        cases = [case for case in test.CASES if case[0] == num_ranks]
        for number, (_, schedule, checkpointing) in enumerate(cases):
            units = {unit.name: unit.checkpointed() if checkpointing else unit for unit in profile.units}
            stages = held_by_stages([[units[name] for name in stage] for stage in ranks[0][number][2]])
            estimates = memory_of_ranks(build(schedule, num_ranks, test.MICROBATCHES), stages)
            for rank, estimate in enumerate(estimates):
                state, peak, _ = ranks[rank][number]
                pair = estimate.total / (state + peak), estimate.activations / peak
                ratios += pair
                name = f"{num_ranks}, {schedule}, {'on' if checkpointing else 'off'}"
                cells = [str(rank), readable(state + peak), readable(estimate.total), *(f"{one:.3f}" for one in pair)]
                table.add(name, cells)
                table.runs[f"{name}, {rank}"] = [state + peak, estimate.total, peak, estimate.activations]
    pool.close()
    table.write(
        f"Of {len(ratios)} ratios the least is {min(ratios):.3f}, the greatest {max(ratios):.3f}. Weights are those "
        "with their gradients; there is no optimizer. A weight tied to another on the same rank is predicted twice."
    )


def _jobs(cases: int) -> Iterator[Job]:
    for seed in range(cases):
        draw = random.Random(seed)
        kinds = tuple((name, draw.choice([0.2, 0.35, 0.5, 0.7, 1.0])) for name in "ab"[: draw.choice([1, 2])])
        counts = [draw.randint(1, 6) for _ in kinds]
        classes = tuple(
            DeviceClass(name, count, speed, draw.choice([6, 10, 16, 40]) * GB)
            for (name, speed), count in zip(kinds, counts, strict=True)
        )
        profile = language_model(draw.choice([12, 24]), draw.choice([0.05, 0.2]))
        yield Job(profile, Cluster(classes, **LINKS), draw.choice([8, 16, 32]))


def _planned(job: Job) -> Plan | None:
    try:
        return make_plans(job, 1)[0]
    except Infeasible:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["oracle", "scale", "baselines"])
    parser.add_argument("--cases", type=int, default=200, help="of baselines")
    parser.add_argument("--which", help="cases of oracle or measured: 3, or 0-4 (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for part in options.parts:
        {
            "oracle": lambda: oracle(options.which or "0-999"),
            "scale": lambda: scale(options.rounds),
            "baselines": lambda: baselines(options.cases),
            "memory": memory,
            "measured": lambda: measured(options.rounds, options.which or f"0-{len(MEASURED) - 1}"),
        }[part]()


if __name__ == "__main__":
    main()

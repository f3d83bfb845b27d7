"""How close pipelines come to their schedules' ideal, beside their peers.

Seven parts, each with a result file in benchmarks/results: real compute on two cores, the same beside each
schedule's own bound, memory against the number of
microbatches, emulated devices, a tiny model that shows the cost of the machinery itself, that of the executor alone,
and how well the simulator predicts real compute.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from measure import SHAPE, Comparison, interleave, median_of, medians_of, ratio_of, spread_of
from processes import run_ranks, side_by_side

from penstock.schedule import Costs, build, schedule_names, simulate

CONTESTANTS: dict[str, tuple[dict[str, Any], int, int]] = {
    # name: arguments, processes, threads of each
    "one process, one thread": ({"kind": "one process"}, 1, 1),
    "one process, two threads": ({"kind": "one process"}, 1, 2),
    "two processes apart": ({"kind": "apart"}, 2, 1),
    "DDP": ({"kind": "ddp"}, 2, 1),
    "FSDP2": ({"kind": "fsdp"}, 2, 1),
    "torch Schedule1F1B": ({"kind": "torch", "schedule": "Schedule1F1B"}, 2, 1),
    "torch ScheduleInterleaved1F1B": ({"kind": "torch", "schedule": "ScheduleInterleaved1F1B"}, 2, 1),
    "torch ScheduleInterleavedZeroBubble": ({"kind": "torch", "schedule": "ScheduleInterleavedZeroBubble"}, 2, 1),
    "DeepSpeed PipelineModule": ({"kind": "deepspeed"}, 2, 1),
    "penstock gpipe": ({"kind": "penstock", "schedule": "gpipe"}, 2, 1),
    "penstock 1f1b": ({"kind": "penstock", "schedule": "1f1b"}, 2, 1),
    "penstock zb-h1": ({"kind": "penstock", "schedule": "zb-h1"}, 2, 1),
    "penstock zb-h2": ({"kind": "penstock", "schedule": "zb-h2"}, 2, 1),
    "penstock zb-v": ({"kind": "penstock", "schedule": "zb-v"}, 2, 1),
    "penstock by default": ({"kind": "penstock", "schedule": "auto"}, 2, 1),
}


def real_compute(rounds: int, steps: int, contestants: Collection[str], file: str, starts: int) -> None:
    """Two stages on two cores, one thread each, eight microbatches of 2 x 128 tokens.

    One process with one thread and torch's 1F1B, which the others are compared with, always take part.
    """
    compared = {"one process, one thread", "torch Schedule1F1B", *contestants}
    common = {**SHAPE, "num_microbatches": 8, "micro_batch_size": 2, "warmup": 2}
    results = side_by_side(
        {
            name: ("contestants.py", processes, {**common, **arguments}, threads)
            for name, (arguments, processes, threads) in CONTESTANTS.items()
            if name in compared
        },
        rounds,
        steps,
        starts=starts,
    )
    to_torch_1f1b = {name: ratio_of(results["torch Schedule1F1B"], runs, "seconds") for name, runs in results.items()}
    ran = [name for name in results if name.startswith("torch") and not math.isnan(to_torch_1f1b[name])]
    best_torch = max(ran, key=to_torch_1f1b.__getitem__, default="torch Schedule1F1B")
    columns = (
        "",
        "seconds a step",
        "min - max",
        "efficiency",
        "speed to torch's 1F1B",
        "to torch's best",
        "CPU",
        "loss",
    )
    title = "Two stages on two cores: one step of a 12-block GPT-2"
    config = {**common, "steps": steps, "rounds": rounds, "starts": starts}
    table = Comparison(file, title, columns, config, results)
    for name, runs in results.items():
        seconds, processes = median_of(runs, "seconds"), CONTESTANTS[name][1]
        if math.isnan(seconds):
            table.add_missing(name)
            continue
        figures = {
            "seconds": seconds,
            # Throughput over that of two cores which each run the unsplit model at full speed.
            "efficiency": ratio_of(results["one process, one thread"], runs, "seconds") / 2,
            "speed_to_torch_1f1b": to_torch_1f1b[name],
            "speed_to_torch_best": ratio_of(results[best_torch], runs, "seconds"),
            # Processor time of all ranks over that of the unsplit model.
            "processor_time": processes * ratio_of(runs, results["one process, one thread"], "cpu"),
        }
        measured, *ratios = (f"{figure:.3f}" for figure in figures.values())
        table.add(name, [measured, spread_of(runs, "seconds"), *ratios, f"{median_of(runs, 'loss'):.5f}"], **figures)
    table.write()
    draw(table.figures, file)


# Of these the noise is told: the same thing twice.
AGAIN = ("two processes apart", "penstock 1f1b")
BOUNDED = ("1f1b", "zb-h1", "zb-h2", "zb-v", "auto")


def bounds(rounds: int, steps: int, starts: int) -> None:
    """Real compute beside what it could be: two processes apart, which exchange nothing (the ceiling), and for each
    schedule its own bound, simulated with its recorded action times and free of any cost of its own. What a step takes
    more than the ceiling is told in milliseconds: its schedule's bubble, processor time beyond the unsplit layers', and
    the rest, which is waiting."""
    common = {**SHAPE, "num_microbatches": 8, "micro_batch_size": 2, "warmup": 2}
    own = {f"penstock {'by default' if name == 'auto' else name}": bound_of(name, common) for name in BOUNDED}
    peers = ("one process, one thread", "DDP", "torch Schedule1F1B", "torch ScheduleInterleaved1F1B")
    chosen = {name: CONTESTANTS[name] for name in (*peers, "two processes apart", *own)}
    chosen |= {f"{name}, again": CONTESTANTS[name] for name in AGAIN}
    results = side_by_side(
        {
            name: ("contestants.py", processes, {**common, **arguments}, threads)
            for name, (arguments, processes, threads) in chosen.items()
        },
        rounds,
        steps,
        starts=starts,
    )
    apart = results["two processes apart"]
    columns = ("", "ms a step", "of the ceiling", "bound", "of its bound", "bubble ms", "more CPU ms", "rest ms")
    config = {**common, "steps": steps, "rounds": rounds, "starts": starts}
    table = Comparison("bounds", "Two stages on two cores beside their bounds", columns, config, results)
    ceiling = median_of(apart, "seconds") * 1e3
    for name, runs in results.items():
        milliseconds = median_of(runs, "seconds") * 1e3
        if math.isnan(milliseconds):
            table.add_missing(name)
            continue
        figures = {"ms": milliseconds, "of_ceiling": ratio_of(apart, runs, "seconds")}
        cells = [f"{milliseconds:.0f}", f"{figures['of_ceiling']:.3f}", *[""] * 5]
        bound = own.get(name.removesuffix(", again"))
        if bound is not None:
            bubble = ceiling * (1 / bound - 1)
            cpu = (median_of(runs, "cpu") - median_of(apart, "cpu")) * 1e3
            left = {"bubble": bubble, "cpu": cpu, "rest": milliseconds - ceiling - bubble - cpu}
            figures |= {"bound": bound, "of_bound": figures["of_ceiling"] / bound, **left}
            cells[2:] = [f"{bound:.3f}", f"{figures['of_bound']:.3f}", *(f"{each:.0f}" for each in left.values())]
        table.add(name, cells, **figures)
    table.write("What is named twice tells the noise. CPU: of a rank, in the median over both.")


def bound_of(schedule: str, common: dict[str, Any]) -> float:
    """The best that a schedule can reach of the ceiling, with the action times of one recorded step."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        arguments = {**common, "steps": 1, "kind": "penstock", "schedule": schedule, "trace": str(trace)}
        chosen = run_ranks("contestants.py", 2, arguments)["schedule"][0]
        plan = build(chosen, 2, common["num_microbatches"])
        found = simulate(plan, costs_of(trace, plan.num_stages))
    return sum(found.busy) / (len(found.busy) * found.makespan)


def memory() -> None:
    """Peak resident memory per rank for few and many microbatches."""
    runs: dict[str, dict] = {}
    columns = ("", "peak MiB, rank 0", "rank 1")
    table = Comparison("memory", "Peak resident memory per rank", columns, SHAPE, runs)
    for name in ("torch Schedule1F1B", "penstock 1f1b", "penstock zb-h1"):
        for count in (8, 32):
            arguments = {**SHAPE, "num_microbatches": count, "micro_batch_size": 2, "steps": 1, "warmup": 1}
            label = f"{name}, {count} microbatches"
            runs[label] = run_ranks("contestants.py", 2, {**arguments, **CONTESTANTS[name][0]})
            peaks = runs[label]["peak_mib"]
            table.add(label, [f"{peak:.0f}" for peak in peaks], peak_mib=peaks)
    table.write()


def emulated(
    rounds: int, steps: int, seconds: float, sizes: list[tuple[int, int]], schedules: list[str], file: str
) -> None:
    """Sleeping stages, as (ranks, microbatches): measured time of a step over the simulated ideal of its schedule."""
    costs = {"forward": seconds, "backward": seconds, "weight": seconds}
    contestants, ideals = {}, {}
    for ranks, count in sizes:
        for schedule in schedules:
            name = f"penstock {schedule} {ranks}x{count}"
            arguments = {**costs, "num_microbatches": count, "steps": steps, "warmup": 1}
            contestants[name] = partial(
                run_ranks, "emulated.py", ranks, {**arguments, "kind": "penstock", "schedule": schedule}
            )
            ideals[name] = ideal(schedule, ranks, count, seconds)
        name = f"torch Schedule1F1B {ranks}x{count}"
        contestants[name] = partial(
            run_ranks, "emulated.py", ranks, {**arguments, "kind": "torch", "schedule": "Schedule1F1B"}
        )
        ideals[name] = ideal("1f1b", ranks, count, seconds)
    results = interleave(contestants, rounds)
    columns = ("schedule, ranks x microbatches", "ideal s", "measured s", "measured / ideal")
    title = "Emulated devices: how close a step comes to its schedule's ideal"
    table = Comparison(file, title, columns, {**costs, "steps": steps, "rounds": rounds}, results)
    for name, runs in results.items():
        measured = median_of(runs, "seconds")
        if math.isnan(measured):
            table.add_missing(name)
            continue
        figures = {"ideal": ideals[name], "measured": measured, "ratio": measured / ideals[name]}
        table.add(name, [f"{figure:.3f}" for figure in figures.values()], **figures)
    table.write()


def ideal(schedule: str, num_ranks: int, num_microbatches: int, seconds: float) -> float:
    """The simulated time of a step: F, B and W of `seconds` each on every rank, free communication."""
    plan = build(schedule, num_ranks, num_microbatches)
    share = seconds * num_ranks / plan.num_stages
    return simulate(plan, Costs(forward=share, backward=share, weight=share)).makespan


def tiny(rounds: int, steps: int) -> None:
    """Two blocks that do next to nothing: the cost of the machinery, in microseconds per microbatch."""
    common = {"forward": 0.0, "backward": 0.0, "weight": 0.0, "num_microbatches": 32, "warmup": 5}
    contestants = {
        "a plain loop, one process": ({"kind": "plain", "num_blocks": 2}, 1),
        "penstock, one stage, one process": ({"kind": "penstock", "schedule": "1f1b", "num_blocks": 2}, 1),
        "1F1B by hand, two stages": ({"kind": "by hand"}, 2),
        "1F1B by hand, with each loss on both ranks": ({"kind": "by hand", "losses": True}, 2),
        "torch ScheduleGPipe, two stages": ({"kind": "torch", "schedule": "ScheduleGPipe"}, 2),
        "torch Schedule1F1B, two stages": ({"kind": "torch", "schedule": "Schedule1F1B"}, 2),
        "penstock gpipe, two stages": ({"kind": "penstock", "schedule": "gpipe"}, 2),
        "penstock 1f1b, two stages": ({"kind": "penstock", "schedule": "1f1b"}, 2),
        "penstock zb-h1, two stages": ({"kind": "penstock", "schedule": "zb-h1"}, 2),
    }
    results = side_by_side(
        {
            name: ("emulated.py", processes, {**common, **arguments}, 1)
            for name, (arguments, processes) in contestants.items()
        },
        rounds,
        steps,
    )
    columns = ("", "microseconds per microbatch", "of torch's 1F1B")
    title = "A tiny model: the cost of the machinery"
    table = Comparison("tiny", title, columns, {**common, "steps": steps, "rounds": rounds}, medians_of(results))
    cost = {name: median_of(runs, "seconds") / common["num_microbatches"] * 1e6 for name, runs in results.items()}
    for name, microseconds in cost.items():
        ratio = ratio_of(results[name], results["torch Schedule1F1B, two stages"], "seconds")
        table.add(name, [f"{microseconds:.0f}", f"{ratio:.3f}"], microseconds=microseconds, of_torch_1f1b=ratio)
    # One stage does the same computation as the plain loop, in a forward and a backward action per microbatch.
    extra = (cost["penstock, one stage, one process"] - cost["a plain loop, one process"]) / 2
    table.write(f"One stage adds {extra:.0f} microseconds per action to the plain loop over the same microbatches.")


def executor(rounds: int, steps: int) -> None:
    """The executor alone, on one rank whose messages cost nothing: microseconds of Python per action."""
    places = [("1f1b", 1, 0), *(("1f1b", 4, rank) for rank in (0, 1, 3)), ("zb-h1", 4, 1), ("zb-v", 4, 1)]
    common = {"num_microbatches": 32, "warmup": 20, "kind": "compared"}
    results = side_by_side(
        {
            f"{schedule}, rank {rank} of {size}": (
                "free_transport.py", 1, {**common, "schedule": schedule, "num_ranks": size, "rank": rank}, 1
            )
            for schedule, size, rank in places
        },
        rounds,
        steps,
    )  # fmt: skip
    columns = ("schedule", "actions a step", "torch's calls alone", "with the executor", "Python per action")
    title = "The executor alone: microseconds per action"
    table = Comparison("executor", title, columns, {**common, "steps": steps, "rounds": rounds}, medians_of(results))
    for (name, runs), (schedule, size, rank) in zip(results.items(), places, strict=True):
        count = len(build(schedule, size, common["num_microbatches"]).actions[rank])
        # Of the steps, which come in pairs.
        extra = [a - b for run in runs for a, b in zip(run["executor"], run["by_hand"], strict=True)]
        seconds = (median_of(runs, "by_hand"), median_of(runs, "executor"), statistics.median(extra))
        by_hand, whole, python = (value / count * 1e6 for value in seconds)
        cells = [f"{figure:.1f}" for figure in (by_hand, whole, python)]
        table.add(name, [str(count), *cells], by_hand=by_hand, executor=whole, python=python)
    table.write()


def prediction(rounds: int, steps: int) -> None:
    """Two stages of real compute: steps simulated with action times from a recorded run, beside measured ones."""
    common = {**SHAPE, "num_microbatches": 8, "micro_batch_size": 2, "steps": steps, "warmup": 2, "kind": "penstock"}
    schedules = ("gpipe", "1f1b", "zb-h1")
    contestants = {name: partial(run_ranks, "contestants.py", 2, {**common, "schedule": name}) for name in schedules}
    recorded: list[Costs] = []

    def record() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            result = run_ranks("contestants.py", 2, {**common, "schedule": "zb-h1", "trace": str(trace)})
            recorded.append(costs_of(trace))
        return result

    results = interleave({"recording": record, **contestants}, rounds)
    columns = ("schedule", "predicted s", "measured s", "measured / predicted")
    title = "Predicted and measured steps on real compute"
    table = Comparison("prediction", title, columns, {**common, "rounds": rounds}, results)
    for name in schedules:
        predicted = statistics.median(simulate(build(name, 2, 8), costs).makespan for costs in recorded)
        measured = median_of(results[name], "seconds")
        figures = {"predicted": predicted, "measured": measured, "ratio": measured / predicted}
        table.add(name, [f"{figure:.3f}" for figure in figures.values()], **figures)
    table.write()


def costs_of(trace: Path, num_stages: int = 2) -> Costs:
    """Median seconds of F, B and W on each stage in a recorded step."""
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") in ("F", "B", "W"):
            durations[event["cat"], event["args"]["stage"]].append(event["dur"] * 1e-6)
    forward, backward, weight = (
        [statistics.median(durations[kind, stage] or [0.0]) for stage in range(num_stages)] for kind in "FBW"
    )
    return Costs(forward=forward, backward=backward, weight=weight)


def draw(figures: dict[str, dict[str, float]], file: str) -> None:
    """Bars of efficiency, written to an SVG of that name in the results."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from measure import RESULTS

    names = sorted(figures, key=lambda name: figures[name]["efficiency"])
    plot, axes = plt.subplots(figsize=(8, 4))
    colours = ["#24855b" if name.startswith("penstock") else "#9aa5ae" for name in names]
    bars = axes.barh(names, [figures[name]["efficiency"] for name in names], color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(8 / 9, linestyle=":", color="black", linewidth=1)
    axes.set_xlabel("throughput / (2 x one process with one thread); dotted: 1F1B's ideal, 8/9")
    plot.tight_layout()
    plot.savefig(RESULTS / f"{file}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--starts", type=int, default=1, help="how often the processes of `real` are started, each for all rounds"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.03, help="of an emulated F, B and W each")
    parser.add_argument("--sizes", default="2x8,3x8,4x8,4x32,8x8,8x32", help="emulated ranks x microbatches")
    parser.add_argument("--label", default="", help="what the result files of `real` and `emulated` are called besides")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="real ones")
    parser.add_argument(
        "--schedules", nargs="+", choices=schedule_names(), default=list(schedule_names()), help="emulated ones"
    )
    options = parser.parse_args()
    for part in options.parts or PARTS:
        PARTS[part](options)


def sizes_of(text: str) -> list[tuple[int, int]]:
    """(ranks, microbatches) from `2x8,4x32`."""
    pairs = [size.split("x") for size in text.split(",")]
    return [(int(ranks), int(count)) for ranks, count in pairs]


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "real": lambda options: real_compute(
        options.rounds, options.steps, options.contestants, f"real_compute{options.label}", options.starts
    ),
    "bounds": lambda options: bounds(options.rounds, options.steps, options.starts),
    "memory": lambda options: memory(),
    "emulated": lambda options: emulated(
        1, options.steps, options.seconds, sizes_of(options.sizes), options.schedules, f"emulated{options.label}"
    ),
    "tiny": lambda options: tiny(options.rounds, 10 * options.steps),
    "executor": lambda options: executor(options.rounds, 50 * options.steps),
    "prediction": lambda options: prediction(options.rounds, options.steps),
}


if __name__ == "__main__":
    main()

"""How close pipelines come to their schedules' ideal, beside their peers: `python benchmarks/pipeline_efficiency.py`.

Five parts, each with a result file in benchmarks/results: real compute on two cores, memory against the number of
microbatches, emulated devices, a tiny model that shows the cost of the machinery itself, and how well the simulator
predicts real compute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measure import interleave, median_of, run_ranks, spread_of, write_results

from penstock.schedule import Costs, build, schedule_names, simulate

SHAPE = {"vocabulary": 512, "layers": 12, "width": 384, "heads": 6, "length": 128}
CONTESTANTS: dict[str, tuple[dict[str, Any], int, int]] = {
    # name: arguments, processes, threads of each
    "one process, one thread": ({"kind": "one process"}, 1, 1),
    "one process, two threads": ({"kind": "one process"}, 1, 2),
    "DDP": ({"kind": "ddp"}, 2, 1),
    "FSDP2": ({"kind": "fsdp"}, 2, 1),
    "torch Schedule1F1B": ({"kind": "torch", "schedule": "Schedule1F1B"}, 2, 1),
    "torch ScheduleInterleaved1F1B": ({"kind": "torch", "schedule": "ScheduleInterleaved1F1B"}, 2, 1),
    "torch ScheduleInterleavedZeroBubble": ({"kind": "torch", "schedule": "ScheduleInterleavedZeroBubble"}, 2, 1),
    "DeepSpeed PipelineModule": ({"kind": "deepspeed"}, 2, 1),
    "penstock gpipe": ({"kind": "penstock", "schedule": "gpipe"}, 2, 1),
    "penstock 1f1b": ({"kind": "penstock", "schedule": "1f1b"}, 2, 1),
    "penstock zb-h1": ({"kind": "penstock", "schedule": "zb-h1"}, 2, 1),
    "penstock zb-v": ({"kind": "penstock", "schedule": "zb-v"}, 2, 1),
}


def real_compute(rounds: int, steps: int) -> None:
    """Two stages on two cores, one thread each, eight microbatches of 2 x 128 tokens."""
    common = {**SHAPE, "num_microbatches": 8, "micro_batch_size": 2, "steps": steps, "warmup": 2}
    results = interleave(
        {
            name: partial(run_ranks, "contestants.py", processes, {**common, **arguments}, threads)
            for name, (arguments, processes, threads) in CONTESTANTS.items()
        },
        rounds,
    )
    alone = median_of(results["one process, one thread"], "seconds") or float("nan")
    torch_1f1b = median_of(results["torch Schedule1F1B"], "seconds") or float("nan")
    best_torch = min(
        (median_of(runs, "seconds") or float("inf")) for name, runs in results.items() if name.startswith("torch")
    )
    rows = [
        "| | seconds a step | min - max | efficiency | speed to torch's 1F1B | to torch's best | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    figures = {}
    for name, runs in results.items():
        seconds, spread = median_of(runs, "seconds"), spread_of(runs, "seconds")
        if seconds is None or spread is None:
            rows.append(f"| {name} | did not run | | | | | |")
            continue
        # Throughput over that of two cores which each run the unsplit model at full speed.
        efficiency = alone / (2 * seconds)
        loss = median_of(runs, "loss")
        figures[name] = {
            "seconds": seconds,
            "efficiency": efficiency,
            "speed_to_torch_1f1b": torch_1f1b / seconds,
            "speed_to_torch_best": best_torch / seconds,
        }
        rows.append(
            f"| {name} | {seconds:.3f} | {spread[0]:.3f} - {spread[1]:.3f} | {efficiency:.3f} | "
            f"{torch_1f1b / seconds:.3f} | {best_torch / seconds:.3f} | {loss:.5f} |"
        )
    content = {
        "title": "Two stages on two cores: one step of a 12-block GPT-2",
        "config": {**common, "rounds": rounds},
        "figures": figures,
        "runs": results,
    }
    write_results("real_compute", content, "\n".join(rows))
    draw(figures)


def memory() -> None:
    """Peak resident memory per rank for few and many microbatches."""
    rows = ["| | microbatches | peak MiB, rank 0 | rank 1 |", "|---|---|---|---|"]
    runs = {}
    for name in ("torch Schedule1F1B", "penstock 1f1b", "penstock zb-h1"):
        for count in (8, 32):
            arguments = {**SHAPE, "num_microbatches": count, "micro_batch_size": 2, "steps": 1, "warmup": 1}
            runs[f"{name}, {count}"] = result = run_ranks("contestants.py", 2, {**arguments, **CONTESTANTS[name][0]})
            rows.append(f"| {name} | {count} | {result['peak_mib'][0]:.0f} | {result['peak_mib'][1]:.0f} |")
    content = {"title": "Peak resident memory per rank", "config": SHAPE, "runs": runs}
    write_results("memory", content, "\n".join(rows))


def emulated(rounds: int, steps: int, seconds: float, sizes: list[tuple[int, int]], schedules: list[str]) -> None:
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
    rows = ["| schedule | ranks x microbatches | ideal s | measured s | measured / ideal |", "|---|---|---|---|---|"]
    figures = {}
    for name, runs in results.items():
        measured = median_of(runs, "seconds")
        kind, _, size = name.rpartition(" ")
        if measured is None:
            rows.append(f"| {kind} | {size} | {ideals[name]:.3f} | did not run | |")
            continue
        figures[name] = {"ideal": ideals[name], "measured": measured, "ratio": measured / ideals[name]}
        rows.append(f"| {kind} | {size} | {ideals[name]:.3f} | {measured:.3f} | {measured / ideals[name]:.3f} |")
    content = {
        "title": "Emulated devices: how close a step comes to its schedule's ideal",
        "config": {**costs, "steps": steps, "rounds": rounds},
        "figures": figures,
        "runs": results,
    }
    write_results("emulated", content, "\n".join(rows))


def ideal(schedule: str, num_ranks: int, num_microbatches: int, seconds: float) -> float:
    """The simulated time of a step: F, B and W of `seconds` each on every rank, free communication."""
    plan = build(schedule, num_ranks, num_microbatches)
    share = seconds * num_ranks / plan.num_stages
    return simulate(plan, Costs(forward=share, backward=share, weight=share)).makespan


def tiny(rounds: int, steps: int) -> None:
    """Two blocks that do next to nothing: the cost of the machinery, in microseconds per microbatch."""
    common = {"forward": 0.0, "backward": 0.0, "weight": 0.0, "num_microbatches": 32, "steps": steps, "warmup": 5}
    contestants = {
        "a plain loop, one process": ({"kind": "plain", "num_blocks": 2}, 1),
        "penstock, one stage, one process": ({"kind": "penstock", "schedule": "1f1b", "num_blocks": 2}, 1),
        "torch Schedule1F1B, two stages": ({"kind": "torch", "schedule": "Schedule1F1B"}, 2),
        "penstock 1f1b, two stages": ({"kind": "penstock", "schedule": "1f1b"}, 2),
        "penstock zb-h1, two stages": ({"kind": "penstock", "schedule": "zb-h1"}, 2),
    }
    results = interleave(
        {
            name: partial(run_ranks, "emulated.py", processes, {**common, **arguments})
            for name, (arguments, processes) in contestants.items()
        },
        rounds,
    )
    rows = ["| | microseconds per microbatch |", "|---|---|"]
    figures = {}
    for name, runs in results.items():
        figures[name] = (median_of(runs, "seconds") or float("nan")) / common["num_microbatches"] * 1e6
        rows.append(f"| {name} | {figures[name]:.0f} |")
    # One stage does the same computation as the plain loop, in a forward and a backward action per microbatch.
    extra = (figures["penstock, one stage, one process"] - figures["a plain loop, one process"]) / 2
    figures["added per action"] = extra
    rows.append(f"\nOne stage adds {extra:.0f} microseconds per action to the plain loop over the same microbatches.")
    content = {
        "title": "A tiny model: the cost of the machinery",
        "config": {**common, "rounds": rounds},
        "figures": figures,
        "runs": results,
    }
    write_results("tiny", content, "\n".join(rows))


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
    rows = ["| schedule | predicted s | measured s | measured / predicted |", "|---|---|---|---|"]
    figures = {}
    for name in schedules:
        predicted = statistics.median(simulate(build(name, 2, 8), costs).makespan for costs in recorded)
        measured = median_of(results[name], "seconds") or float("nan")
        figures[name] = {"predicted": predicted, "measured": measured, "ratio": measured / predicted}
        rows.append(f"| {name} | {predicted:.3f} | {measured:.3f} | {measured / predicted:.3f} |")
    content = {
        "title": "Predicted and measured steps on real compute",
        "config": {**common, "rounds": rounds},
        "figures": figures,
        "runs": results,
    }
    write_results("prediction", content, "\n".join(rows))


def costs_of(trace: Path) -> Costs:
    """Median seconds of F, B and W on each stage in a recorded step."""
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") in ("F", "B", "W"):
            durations[event["cat"], event["args"]["stage"]].append(event["dur"] * 1e-6)
    forward, backward, weight = ([statistics.median(durations[kind, stage]) for stage in (0, 1)] for kind in "FBW")
    return Costs(forward=forward, backward=backward, weight=weight)


def draw(figures: dict[str, dict[str, float]]) -> None:
    """Bars of efficiency, written to results/real_compute.svg."""
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
    plot.savefig(RESULTS / "real_compute.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.03, help="of an emulated F, B and W each")
    parser.add_argument("--sizes", default="2x8,3x8,4x8,4x32,8x8,8x32", help="emulated ranks x microbatches")
    parser.add_argument("--schedules", nargs="+", default=list(schedule_names()), help="emulated ones")
    options = parser.parse_args()
    for part in options.parts or PARTS:
        PARTS[part](options)


def sizes_of(text: str) -> list[tuple[int, int]]:
    """(ranks, microbatches) from `2x8,4x32`."""
    pairs = [size.split("x") for size in text.split(",")]
    return [(int(ranks), int(count)) for ranks, count in pairs]


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "real": lambda options: real_compute(options.rounds, options.steps),
    "memory": lambda options: memory(),
    "emulated": lambda options: emulated(1, options.steps, options.seconds, sizes_of(options.sizes), options.schedules),
    "tiny": lambda options: tiny(options.rounds, 10 * options.steps),
    "prediction": lambda options: prediction(options.rounds, options.steps),
}


if __name__ == "__main__":
    main()

"""What pipelines that are not alike gain, and what their reduction costs: `python benchmarks/studies/heterogeneous.py`.

Two parts. Emulated devices: three and seven equal devices as unlike pipelines, beside the best homogeneous use of them,
each with the time that the simulator predicts. Reduction: with one-stage pipelines only, a step beside that of
torch's DistributedDataParallel, on real compute.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial

from measure import SHAPE, Comparison, interleave, median_of, spread_of
from processes import run_ranks

from penstock.planning import split_microbatches
from penstock.schedule import Costs, build, simulate

BLOCKS = 12
# devices: the pipelines to compare, each as its stages' numbers of blocks
LAYOUTS: dict[int, dict[str, list[list[int]]]] = {
    3: {
        "[1, 2]": [[12], [6, 6]],
        "[3]": [[4, 4, 4]],
        "[2] and an idle device": [[6, 6]],
    },
    7: {
        "[3, 4]": [[4, 4, 4], [3, 3, 3, 3]],
        "[2, 2, 3]": [[6, 6], [6, 6], [4, 4, 4]],
        "[7]": [[2, 2, 2, 2, 2, 1, 1]],
    },
}
TOTAL = {3: 24, 7: 24}  # microbatches of the global batch


def pipeline_seconds(schedule: str, sizes: Sequence[int], block: float, count: int) -> float:
    """The simulated step of a pipeline whose blocks take `block` seconds for each of F, B and W."""
    per_stage = [size * block for size in sizes]
    costs = Costs(forward=per_stage, backward=per_stage, weight=per_stage)
    return simulate(build(schedule, len(sizes), count), costs).makespan


def emulated(rounds: int, steps: int, block: float) -> None:
    """Iteration time of each layout, on devices whose compute is sleep."""
    contestants, plans = {}, {}
    for devices, layouts in LAYOUTS.items():
        for schedule in ("1f1b", "zb-h1"):
            for label, stages in layouts.items():
                times = [partial(pipeline_seconds, schedule, sizes, block) for sizes in stages]
                counts = split_microbatches(times, TOTAL[devices])
                ideal = max(time(count) for time, count in zip(times, counts, strict=True))
                name = f"{devices} devices, {schedule}, {label}"
                plans[name] = counts, ideal
                arguments = {
                    "kind": "heterogeneous",
                    "schedule": schedule,
                    "stages": stages,
                    "num_blocks": BLOCKS,
                    "num_microbatches": counts,
                    "forward": block,
                    "backward": block,
                    "weight": block,
                    "steps": steps,
                    "warmup": 1,
                }
                contestants[name] = partial(run_ranks, "emulated.py", sum(map(len, stages)), arguments)
    results = interleave(contestants, rounds)
    columns = ("layout", "microbatches", "ideal s", "measured s", "measured / ideal", "speed")
    config = {"blocks": BLOCKS, "seconds of a block's F, B and W": block, "steps": steps, "rounds": rounds}
    table = Comparison("heterogeneous", "Unlike pipelines on emulated devices", columns, config, results)
    for name, runs in results.items():
        counts, ideal = plans[name]
        measured = median_of(runs, "seconds")
        if math.isnan(measured):
            table.add_missing(name)
            continue
        devices, schedule, _ = name.split(", ", 2)
        single = f"{devices}, {schedule}, [{devices.split()[0]}]"
        speed = median_of(results[single], "seconds") / measured
        times = [f"{figure:.3f}" for figure in (ideal, measured, measured / ideal)]
        figures = {"microbatches": counts, "ideal": ideal, "measured": measured, "speed": speed}
        table.add(name, [", ".join(map(str, counts)), *times, f"{speed:.2f}"], **figures)
    table.write("Speed is relative to one pipeline over all devices with the same schedule.")


def reduction(rounds: int, steps: int) -> None:
    """Two one-stage pipelines against DistributedDataParallel: the same model, tokens and microbatches."""
    common = {**SHAPE, "num_microbatches": 8, "micro_batch_size": 2, "steps": steps, "warmup": 1}
    contestants = {
        "DistributedDataParallel": {"kind": "ddp"},
        "two one-stage pipelines": {"kind": "one-stage pipelines", "schedule": "1f1b"},
    }
    results = interleave(
        {
            name: partial(run_ranks, "contestants.py", 2, {**common, **arguments})
            for name, arguments in contestants.items()
        },
        rounds,
    )
    ddp = median_of(results["DistributedDataParallel"], "seconds")
    columns = ("", "seconds a step", "min - max", "of DDP's time", "hidden reduction")
    title = "Gradient reduction between one-stage pipelines, beside DDP"
    table = Comparison("reduction", title, columns, {**common, "rounds": rounds}, results)
    for name, runs in results.items():
        seconds, hidden = median_of(runs, "seconds"), median_of(runs, "hidden")
        if math.isnan(seconds):
            table.add_missing(name)
            continue
        share = "" if math.isnan(hidden) else f"{hidden:.0%}"
        cells = [f"{seconds:.3f}", spread_of(runs, "seconds"), f"{seconds / ddp:.3f}", share]
        table.add(name, cells, seconds=seconds, of_ddp=seconds / ddp)
    table.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["emulated", "reduction"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.02, help="of an emulated block's F, B and W each")
    options = parser.parse_args()
    if "emulated" in options.parts:
        emulated(options.rounds, options.steps, options.seconds)
    if "reduction" in options.parts:
        reduction(options.rounds, options.steps)


if __name__ == "__main__":
    main()

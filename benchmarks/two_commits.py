"""Two commits side by side, so that a change of the engine does not cost speed unseen.

    git worktree add /tmp/before 54b3a3e
    python benchmarks/two_commits.py /tmp/before --rounds 10

Real compute, a tiny model and the executor alone, each with the same arguments from both checkouts. Their processes
live side by side and take turns; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from measure import SHAPE, Comparison, interleave, median_of, medians_of, ratio_of
from processes import Contestant

HERE = Path(__file__).resolve().parents[1]
REAL = {**SHAPE, "num_microbatches": 8, "micro_batch_size": 2, "warmup": 2, "kind": "penstock"}
TINY = {"forward": 0.0, "backward": 0.0, "weight": 0.0, "num_microbatches": 32, "warmup": 5, "kind": "penstock"}
EXECUTOR = {"num_microbatches": 32, "warmup": 20, "kind": "compared"}
# name: script, processes, arguments, steps of a turn, the figure that is compared
CASES: dict[str, tuple[str, int, dict[str, Any], int, str]] = {
    "real compute, 1f1b": ("contestants.py", 2, {**REAL, "schedule": "1f1b"}, 1, "seconds"),
    "real compute, zb-h1": ("contestants.py", 2, {**REAL, "schedule": "zb-h1"}, 1, "seconds"),
    "tiny model, one stage": ("emulated.py", 1, {**TINY, "schedule": "1f1b", "num_blocks": 2}, 30, "seconds"),
    "tiny model, 1f1b": ("emulated.py", 2, {**TINY, "schedule": "1f1b"}, 30, "seconds"),
    "tiny model, zb-h1": ("emulated.py", 2, {**TINY, "schedule": "zb-h1"}, 30, "seconds"),
    **{
        f"executor, {schedule}, rank {rank} of {size}": (
            "free_transport.py", 1, {**EXECUTOR, "schedule": schedule, "num_ranks": size, "rank": rank}, 50, "executor"
        )
        for schedule, size, rank in (("1f1b", 1, 0), ("1f1b", 4, 1), ("zb-h1", 4, 1), ("zb-v", 4, 1))
    },
}  # fmt: skip


def commit_of(checkout: Path) -> str:
    return subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the checkout of the other commit")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    checkouts = {"before": options.before, "after": HERE}
    with contextlib.ExitStack() as stack:
        turns = {
            f"{name}, {when}": partial(
                stack.enter_context(Contestant(script, processes, arguments, checkout=checkout)).run, steps
            )
            for name, (script, processes, arguments, steps, _) in CASES.items()
            for when, checkout in checkouts.items()
        }
        results = interleave(turns, options.rounds)
    commits = {when: commit_of(checkout) for when, checkout in checkouts.items()}
    columns = ("", "before, ms a microbatch", "after", "after / before")
    table = Comparison(
        "two_commits", f"{commits['before']} and {commits['after']} side by side", columns,
        {**commits, "rounds": options.rounds}, medians_of(results),
    )  # fmt: skip
    for name, (_, _, arguments, _, key) in CASES.items():
        before, after = (results[f"{name}, {when}"] for when in checkouts)
        milliseconds = [median_of(runs, key) / arguments["num_microbatches"] * 1e3 for runs in (before, after)]
        ratio = ratio_of(after, before, key)
        table.add(name, [*(f"{figure:.3f}" for figure in milliseconds), f"{ratio:.3f}"], ratio=ratio)
    table.write(
        "`executor` is a step of one rank over a transport that does nothing, torch's own calls included. The tiny "
        "model is each checkout's own: since 54b3a3e its output has more fields and its forward more branches."
    )


if __name__ == "__main__":
    main()

"""Two commits side by side, so that a change of the engine does not cost speed unseen.

    git worktree add /tmp/before d513f18
    python benchmarks/studies/two_commits.py /tmp/before real --rounds 7
    python benchmarks/studies/two_commits.py /tmp/before tiny executor --rounds 15

Parts: real compute, a tiny model, the executor alone, generation with evaluation, and checkpoints; each with the same
arguments from both checkouts. Their processes live side by side and take turns; a ratio is the median over rounds. The
parts that were measured before, of the same two commits, stay in the result file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from measure import RESULTS, SHAPE, Comparison, interleave, median_of, medians_of, ratio_of
from processes import Contestant

HERE = Path(__file__).resolve().parents[2]
# Of older commits, without what this script asks of them: the one beside it, with the library of either.
OURS = str(HERE / "benchmarks" / "studies" / "contestants.py")
REAL = {**SHAPE, "num_microbatches": 8, "micro_batch_size": 2, "warmup": 2, "kind": "penstock"}
TINY = {"forward": 0.0, "backward": 0.0, "weight": 0.0, "num_microbatches": 32, "warmup": 5, "kind": "penstock"}
EXECUTOR = {"num_microbatches": 32, "warmup": 20, "kind": "compared"}
WIDE = {"vocabulary": 512, "layers": 12, "width": 768, "prompt": 32, "batch_size": 32, "warmup": 1}
DECODING = {**WIDE, "kind": "decoding", "new_tokens": 16, "peers": False, "warmup": 0}
# part: name: script, processes, arguments, steps of a turn, the figure that is compared
PARTS: dict[str, dict[str, tuple[str, int, dict[str, Any], int, str]]] = {
    "real": {
        f"real compute, {schedule}": ("contestants.py", 2, {**REAL, "schedule": schedule}, 1, "seconds")
        for schedule in ("1f1b", "zb-h1")
    },
    "tiny": {
        "tiny model, one stage": ("emulated.py", 1, {**TINY, "schedule": "1f1b", "num_blocks": 2}, 30, "seconds"),
        "tiny model, 1f1b": ("emulated.py", 2, {**TINY, "schedule": "1f1b"}, 30, "seconds"),
        "tiny model, zb-h1": ("emulated.py", 2, {**TINY, "schedule": "zb-h1"}, 30, "seconds"),
    },
    "executor": {
        f"executor, {schedule}, rank {rank} of {size}": (
            "free_transport.py", 1, {**EXECUTOR, "schedule": schedule, "num_ranks": size, "rank": rank}, 50, "executor"
        )
        for schedule, size, rank in (("1f1b", 1, 0), ("1f1b", 4, 1), ("zb-h1", 4, 1), ("zb-v", 4, 1))
    },
    "generation": {
        "generation, two groups": ("generation.py", 2, DECODING, 1, "two stages, two groups: whole"),
        "evaluation": (
            "generation.py", 2, {**WIDE, "kind": "evaluated on stages", "num_microbatches": 8}, 1, "seconds"
        ),
    },
    "checkpoints": {"checkpoint, saved and loaded": (OURS, 2, {**REAL, "kind": "checkpoint"}, 1, "seconds")},
}  # fmt: skip


def commit_of(checkout: Path) -> str:
    return subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the checkout of the other commit")
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    cases = {name: case for part in options.parts or PARTS for name, case in PARTS[part].items()}
    checkouts = {"before": options.before, "after": HERE}
    with contextlib.ExitStack() as stack:
        turns = {
            f"{name}, {when}": partial(
                stack.enter_context(Contestant(script, processes, arguments, checkout=checkout)).run, steps
            )
            for name, (script, processes, arguments, steps, _) in cases.items()
            for when, checkout in checkouts.items()
        }
        results = medians_of(interleave(turns, options.rounds))
    commits = {when: commit_of(checkout) for when, checkout in checkouts.items()}
    path = RESULTS / "two_commits.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    kept = known if known.get("config") == commits else {"figures": {}, "runs": {}}
    figures: dict[str, dict[str, Any]] = kept["figures"]
    for name, (_, _, arguments, _, key) in cases.items():
        before, after = (results[f"{name}, {when}"] for when in checkouts)
        count = arguments.get("num_microbatches", 1)
        milliseconds = [median_of(runs, key) / count * 1e3 for runs in (before, after)]
        figures[name] = {
            "ms": milliseconds, "ratio": ratio_of(after, before, key), "rounds": sum(key in run for run in after)
        }  # fmt: skip
    columns = ("", "before, ms a microbatch", "after", "after / before", "rounds")
    title = f"{commits['before']} and {commits['after']} side by side"
    table = Comparison("two_commits", title, columns, commits, {**kept["runs"], **results})
    for name, found in figures.items():
        cells = [*(f"{each:.3f}" for each in found["ms"]), f"{found['ratio']:.3f}", str(found["rounds"])]
        table.add(name, cells, **found)
    table.write(
        "`executor` is a step of one rank over a transport that does nothing, torch's own calls included. The tiny "
        "model is each checkout's own: since 54b3a3e its output has more fields and its forward more branches. "
        "Generation: a batch of 32, 16 new tokens. A checkpoint: of two ranks, with Adam's state."
    )


if __name__ == "__main__":
    main()

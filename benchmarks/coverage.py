"""Which classes of transformers are exact over pipeline stages: tries every class of its tasks.

    python benchmarks/coverage.py run                        # all tasks; goes on where it was stopped
    python benchmarks/coverage.py run --task causal-lm --only Llama

Each class gets a tiny model (`tiny_models.py`), nine samples with uneven padding in four microbatches, double
precision, no dropout; the ranks compare the loss, all gradients, the output of an evaluation and greedy tokens with
the same model unsplit (`examine_model.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

RESULTS = HERE / "results" / "coverage.jsonl"
PAGE = HERE.parent / "docs" / "models.md"
SECONDS = 90.0
FEATURES = ("train", "evaluate", "generate")
Record = dict[str, Any]


def run(tasks: Iterable[str], only: str, num_stages: int, tensor_parallel_size: int, results: Path, again: str) -> None:
    """Examine the classes that have no result yet, appending one line for each.

    `again`: "all", also those that have one, or "failing", those whose result is not good, or "".
    """
    from examine_model import examine
    from tiny_models import classes_of

    from pool import Pool

    known = {
        (r["task"], r["class"], r["stages"], r["tensor_parallel"])
        for r in read(results)
        if not again or (again == "failing" and is_good(r))
    }
    results.parent.mkdir(exist_ok=True)
    pool = Pool()
    try:
        for task in tasks:
            for name in classes_of(task):
                key = (task, name, num_stages, tensor_parallel_size)
                if key in known or not re.search(only, name):
                    continue
                start = time.perf_counter()
                try:
                    outcomes = pool.run(
                        num_stages * tensor_parallel_size,
                        examine,
                        name,
                        task,
                        num_stages,
                        tensor_parallel_size,
                        timeout=SECONDS,
                        outcomes=True,
                    )
                    found = worst(outcomes)
                except Exception as error:
                    found = {"train": f"hang: {type(error).__name__}: {error}"[:300]}
                record = {
                    "task": task, "class": name, "stages": num_stages, "tensor_parallel": tensor_parallel_size,
                    **found, "seconds": round(time.perf_counter() - start, 1),
                }  # fmt: skip
                with results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(
                    f"{task:24} {name:48} "
                    + "; ".join(f"{k} {record[k]}" for k in ("unsplit", *FEATURES) if k in record)
                )
    finally:
        pool.close()


def worst(outcomes: Iterable[Any]) -> dict[str, str]:
    """Of what the ranks say, the worst for each feature."""
    order = ("unsplit", "exact", "warned", "refused", "wrong", "crash", "hang")
    found: dict[str, str] = {}
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            outcome = {"train": f"hang: {type(outcome).__name__}: {str(outcome)[:200]}"}
        for feature, said in outcome.items():
            known = found.get(feature)
            if known is None or feature == "unsplit" or order.index(kind_of(said)) > order.index(kind_of(known)):
                found[feature] = said
    return found


def is_good(record: Record) -> bool:
    """Whether a class runs unsplit, and does on stages what it does there."""
    kinds = {kind_of(record[feature]) for feature in FEATURES if feature in record}
    return "train" in record and kinds <= {"exact", "warned", "unsplit"}


def kind_of(said: str) -> str:
    return said.partition(":")[0]


def read(results: Path) -> list[Record]:
    """The newest record of each class, task and layout."""
    newest: dict[tuple[Any, ...], Record] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        record = json.loads(line)
        newest[record["task"], record["class"], record["stages"], record["tensor_parallel"]] = record
    return list(newest.values())


def summary(records: Iterable[Record]) -> dict[str, Counter[str]]:
    """For each task, how many classes had which outcome in training; `unsplit` does not run unsplit."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        outcome = kind_of(record.get("train", "unsplit"))
        counts.setdefault(record["task"], Counter())[outcome] += 1
    return counts


def main() -> None:
    from tiny_models import TASKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="examine classes")
    runs.add_argument("--task", action="append", choices=list(TASKS), help="default: all")
    runs.add_argument("--only", default="", help="a regular expression that a class's name must contain")
    runs.add_argument("--stages", type=int, default=2)
    runs.add_argument("--tensor-parallel", type=int, default=1)
    runs.add_argument(
        "--again", choices=("all", "failing"), default="", help="also classes that have a result, or a bad one"
    )
    for command in (runs, commands.add_parser("count", help="print how many classes had which outcome")):
        command.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.command == "run":
        run(
            options.task or TASKS, options.only, options.stages, options.tensor_parallel, options.results, options.again
        )
    for task, counts in summary(read(options.results)).items():
        print(f"{task:26}", dict(counts))


if __name__ == "__main__":
    main()

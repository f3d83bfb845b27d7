"""Which classes of transformers are exact over pipeline stages: tries every class of its tasks.

    python benchmarks/studies/coverage.py run                        # all tasks; goes on where it was stopped
    python benchmarks/studies/coverage.py run --task causal-lm --only Llama
    python benchmarks/studies/coverage.py run --again failing        # after a change: those whose result was bad
    python benchmarks/studies/coverage.py sample --number 60         # and some that were good, into a file of their own
    python benchmarks/studies/coverage.py run --results new.jsonl    # with a newer transformers
    python benchmarks/studies/coverage.py compare new.jsonl          # and what it changed
    python benchmarks/studies/coverage.py write                      # benchmarks/results/models.md from what was run

Each class gets a tiny model (`tiny_models.py`), nine samples with uneven padding in four microbatches, double
precision, no dropout; the ranks compare the loss, all gradients, the output of an evaluation and greedy tokens with
the same model unsplit (`examine_model.py`, which calls what `penstock verify` runs).
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

RESULTS = HERE.parent / "results" / "coverage.jsonl"
SHARDED = HERE.parent / "results" / "coverage_tensor_parallel.jsonl"
SAMPLE = HERE.parent / "results" / "coverage_sample.jsonl"
PAGE = HERE.parent / "results" / "models.md"
SECONDS = 90.0
FEATURES = ("train", "evaluate", "generate")
Record = dict[str, Any]
Key = tuple[str, str, int, int]


def run(
    tasks: Iterable[str],
    only: str,
    num_stages: int,
    tensor_parallel_size: int,
    results: Path,
    again: str,
    seconds: float = SECONDS,
) -> None:
    """Examine the classes that have no result yet, appending one line for each.

    `again`: "all", also those that have one, or "failing", those whose result is not good, or "".
    """
    from examine_model import DIFFUSION
    from tiny_diffusion import MODELS
    from tiny_models import classes_of

    known = {
        (r["task"], r["class"], r["stages"], r["tensor_parallel"])
        for r in read(results)
        if not again or (again == "failing" and is_good(r))
    }
    classes = {task: list(MODELS) if task == DIFFUSION else classes_of(task) for task in tasks}
    keys = ((task, name, num_stages, tensor_parallel_size) for task in tasks for name in classes[task])
    examine_all([key for key in keys if key not in known and re.search(only, key[1])], results, seconds)


def sample(number: int, seed: int, results: Path, found: Path, seconds: float = SECONDS) -> None:
    """Examine again some of the classes whose result was good, those of them that are not in `found` yet."""
    good = [r for r in read(results) if is_good(r) and r["tensor_parallel"] == 1]
    chosen = random.Random(seed).sample(sorted(map(key_of, good)), min(number, len(good)))
    known = set(map(key_of, read(found)))
    examine_all([key for key in chosen if key not in known], found, seconds)


def examine_all(keys: Iterable[Key], results: Path, seconds: float) -> None:
    """Examine classes, appending one line for each."""
    from examine_model import examine

    from tests.support.pool import Pool

    results.parent.mkdir(exist_ok=True)
    pool = Pool()
    try:
        for task, name, num_stages, tensor_parallel_size in keys:
            start = time.perf_counter()
            try:
                outcomes = pool.run(
                    num_stages * tensor_parallel_size,
                    examine,
                    name,
                    task,
                    num_stages,
                    tensor_parallel_size,
                    timeout=seconds,
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
            said = "; ".join(f"{k} {record[k]}" for k in ("unsplit", *FEATURES) if k in record)
            print(f"{task:24} {name:48} {said}", flush=True)
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


def key_of(record: Record) -> Key:
    return record["task"], record["class"], record["stages"], record["tensor_parallel"]


def kind_of(said: str) -> str:
    return said.partition(":")[0]


def read(results: Path) -> list[Record]:
    """The newest record of each class, task and layout."""
    newest: dict[Key, Record] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        record = json.loads(line)
        newest[key_of(record)] = record
    return list(newest.values())


def summary(records: Iterable[Record]) -> dict[str, Counter[str]]:
    """For each task, how many classes had which outcome in training; `unsplit` does not run unsplit."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        outcome = kind_of(record.get("train", "unsplit"))
        counts.setdefault(record["task"], Counter())[outcome] += 1
    return counts


def changes(before: Iterable[Record], after: Iterable[Record]) -> list[str]:
    """Where the outcome of a class is of another kind than before, a line for each; new classes too if they are bad."""
    old = {key_of(record): record for record in before}
    lines = []
    for record in after:
        known, where = old.get(key_of(record)), f"{record['task']} {record['class']}"
        if known is None and not is_good(record):
            lines.append(f"{where}: new, {record.get('unsplit') or reason_of(record)}")
        for feature in ("unsplit", *FEATURES) if known is not None else ():
            was, now = known.get(feature, ""), record.get(feature, "")
            if kind_of(was) != kind_of(now) and not (feature == "unsplit" and was and now):
                lines.append(f"{where}: {feature} was {was or 'not tried'}, is {now or 'not tried'}")
    return lines


# ---------------------------------------------------------------- the page

INTRODUCTION = """# Models

Does it work with your model? Search this page for its class. It lists the classes of transformers' tasks that were
tried with transformers {transformers} and torch {torch} on {date}. `benchmarks/studies/coverage.py` makes the page. For
a model of your own, or for another version, run [`penstock verify`](../../docs/verify.md).

Each class was built tiny and without dropout, in double precision if its code allows it (otherwise in single). It was
trained for a step on two stages: nine samples with uneven padding, in four microbatches. The loss, every gradient, all
fields of an evaluation's output, and four greedy tokens of models that generate were compared with the same model
unsplit.

- *Exact*: equal within 1e-8 of the largest entry (2e-4 in single precision).
- *Exact against accumulation*: exact against the unsplit model that accumulates over the same microbatches. A warning
  says why the whole batch at once would differ; see [exactness](../../docs/exactness.md#losses-that-are-no-mean).
- *Refused*: an error says why, on every rank, before anything is sent.
- *Refused in part*: training is exact, but evaluation or generation is refused.
- *Other*: anything else; the table of the task says what came out. Do not rely on these classes.
- *Not tried*: no tiny configuration and batch were found with which the class runs by itself. This says nothing about
  the class. The reason is given for each.

{passes}

The columns *generate* and *tensor-parallel* say how many of the tried classes are exact with `generate`, and with
`tensor_parallel_size` 2. Classes that are exact with tensor parallelism are in *italics*. Most others have no
tensor-parallel plan, or were not tried with it.
"""
OF_DIFFUSERS = (
    "Classes of diffusers {}, trained on the squared distance of what they return first from a constant. They were in "
    "evaluation mode, so that labels are not dropped at random. See [diffusion models](../../docs/diffusion.md)."
)
COLUMNS = ("exact", "exact against accumulation", "refused in part", "refused", "other", "not tried")


MILLIONS = 24  # of parameters; see `tiny_models.MOST_PARAMETERS`
# Why a class was not tried, by what its error says; the first that fits.
CAUSES = {
    r"(ImportError|ModuleNotFoundError)": "it needs a package that was not installed",
    r"smallest configuration": f"no configuration of less than {MILLIONS} million parameters was found",
    r"Config|Class validation|layer types|intermediate_size|context_size|full_attention|Padding_idx":
        "its configuration does not take the small sizes that others take",
    r"no attribute 'loss'|NoneType' object has no attribute 'sum'": "it computes no loss",
    r"get_image_features|pixel_values|image_embeds": "it takes images in a form of its own",
    r"": "no batch was found that it runs on",
}  # fmt: skip


def cause_of(record: Record) -> str:
    """Why a class was not tried."""
    return next(cause for pattern, cause in CAUSES.items() if re.search(pattern, record.get("unsplit", "")))


def said_of_sample(found: Path, now: Iterable[Record]) -> str:
    """How a sample of good records came out when it was run again, or nothing if none was; `now` are the newest."""
    again, good = read(found), {key_of(record) for record in now if is_good(record)}
    if not again:
        return ""
    bad = [f"{r['class']}{', repaired since' if key_of(r) in good else ''}" for r in again if not is_good(r)]
    but = f", all but {' and '.join(bad)}" if bad else ""
    return f"Of {len(again)} good ones, drawn at random and run again, {len(again) - len(bad)} were good again{but}. "


def write(results: Path, with_tensor_parallelism: Path, page: Path, again: Path = SAMPLE) -> None:
    """Write the page from what was run."""
    from importlib.metadata import version

    records = [r for r in read(results) if r["tensor_parallel"] == 1]
    sharded = read(with_tensor_parallelism)
    both = {(r["task"], r["class"]) for r in sharded if "train" in r and is_good(r)}
    tasks = list(dict.fromkeys(r["task"] for r in records))
    lines = [
        INTRODUCTION.format(
            transformers=version("transformers"),
            torch=version("torch").partition("+")[0],
            date=datetime.date.today().isoformat(),
            passes=textwrap.fill(
                "The classes were not all run again after every later change. "
                f"{said_of_sample(again, records)}The test suite runs some of them.",
                120,
            ),
        ),
        "| task | " + " | ".join(COLUMNS) + " | generate | tensor-parallel |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    groups = {task: grouped([r for r in records if r["task"] == task]) for task in tasks}
    rows: list[tuple[int, ...]] = []
    for task in tasks:
        generated = [kind_of(r["generate"]) for r in records if r["task"] == task and "generate" in r]
        tried = {r["class"] for r in sharded if r["task"] == task and "train" in r}
        rows.append(
            (
                *(len(groups[task][column]) for column in COLUMNS),
                *(generated.count("exact"), len(generated) - generated.count("unsplit")),
                *(sum((task, name) in both for name in tried), len(tried)),
            )
        )
    for name, row in zip([*tasks, "**all**"], [*rows, tuple(map(sum, zip(*rows, strict=True)))], strict=True):
        *counts, generate_exact, generate_tried, sharded_exact, sharded_tried = row
        of = [f"{good} of {number}" if number else "" for good, number in
              ((generate_exact, generate_tried), (sharded_exact, sharded_tried))]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join([*map(str, counts), *of]) + " |")
    for task in tasks:
        lines += ["", f"## {task[0].upper()}{task[1:]}", ""]
        if task == "diffusion":
            lines += [*textwrap.wrap(OF_DIFFUSERS.format(version("diffusers")), 120), ""]
        found = groups[task]
        marked = [f"*{r['class']}*" if (task, r["class"]) in both else r["class"] for r in found["exact"]]
        lines += textwrap.wrap(f"Exact: {', '.join(marked) or 'none'}.", 120, break_on_hyphens=False)
        others = [(r["class"], column, reason_of(r)) for column in COLUMNS[1:-1] for r in found[column]]
        if others:
            lines += ["", "| class | | |", "|---|---|---|"]
            lines += [f"| {name} | {column} | {reason} |" for name, column, reason in others]
        for cause in CAUSES.values():
            names = [r["class"] for r in found["not tried"] if cause_of(r) == cause]
            if names:
                text = f"Not tried, as {cause}: {', '.join(names)}."
                lines += ["", *textwrap.wrap(text, 120, break_on_hyphens=False)]
    page.write_text("\n".join(lines) + "\n")


def grouped(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records by what a reader is told of them, by the worst of training, evaluation and generation."""
    found: dict[str, list[Record]] = {name: [] for name in COLUMNS}
    for record in sorted(records, key=lambda record: str(record["class"]).lower()):
        kinds = {kind_of(record[feature]) for feature in FEATURES if feature in record} - {"unsplit"}
        if "train" not in record:
            name = "not tried"
        elif kinds == {"exact"}:
            name = "exact"
        elif kinds <= {"exact", "warned"}:
            name = "exact against accumulation"
        elif kind_of(record["train"]) == "refused":
            name = "refused"
        elif kinds <= {"exact", "warned", "refused"}:
            name = "refused in part"
        else:
            name = "other"
        found[name].append(record)
    return found


def reason_of(record: Record) -> str:
    """What of a record is not exact."""
    parts = []
    for feature in FEATURES:
        said = record.get(feature, "exact")
        kind, _, why = said.partition(": ")
        if kind in ("exact", "unsplit"):
            continue
        if kind == "hang":
            why = f"no answer within the time ({record['seconds']:.0f} s on a busy machine)"
        if kind == "warned":
            kind, why = "", why.replace(f"the loss of {record['class']}", "the loss")
        elif feature == "train" and kind == "refused":
            kind = ""
        what = {"train": "training", "evaluate": "evaluation", "generate": "generate"}[feature]
        parts.append(f"{what}{': ' if kind or why else ''}{kind}{', ' if kind and why else ''}{why}")
    text = "; ".join(parts).replace("|", "/").replace("`", "").replace("<", "(").replace(">", ")").replace("*", "N")
    return textwrap.shorten(text, 300, placeholder=" ...")


def main() -> None:
    from tiny_models import TASKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="examine classes")
    runs.add_argument("--task", action="append", choices=[*TASKS, "diffusion"], help="default: all but diffusion")
    runs.add_argument("--only", default="", help="a regular expression that a class's name must contain")
    runs.add_argument("--stages", type=int, default=2)
    runs.add_argument("--tensor-parallel", type=int, default=1)
    runs.add_argument(
        "--again", choices=("all", "failing"), default="", help="also classes that have a result, or a bad one"
    )
    samples = commands.add_parser("sample", help="examine again some classes whose result was good")
    samples.add_argument("--number", type=int, default=60)
    samples.add_argument("--seed", type=int, default=0)
    samples.add_argument("--output", type=Path, default=SAMPLE)
    for command in (runs, samples):
        command.add_argument("--seconds", type=float, default=SECONDS, help="that a class may take")
    writes = commands.add_parser("write", help="write benchmarks/results/models.md")
    writes.add_argument("--with-tensor-parallelism", type=Path, default=SHARDED)
    compares = commands.add_parser("compare", help="print the classes whose outcome is another in a second file")
    compares.add_argument("second", type=Path)
    counts = commands.add_parser("count", help="print how many classes had which outcome")
    for command in (runs, samples, writes, compares, counts):
        command.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.command == "run":
        run(
            options.task or TASKS,
            options.only,
            options.stages,
            options.tensor_parallel,
            options.results,
            options.again,
            options.seconds,
        )
    if options.command == "sample":
        sample(options.number, options.seed, options.results, options.output, options.seconds)
    if options.command == "compare":
        print("\n".join(changes(read(options.results), read(options.second))) or "no class has another outcome")
        return
    if options.command == "write":
        write(options.results, options.with_tensor_parallelism, PAGE)
    for task, outcomes in summary(read(options.results)).items():
        print(f"{task:26}", dict(outcomes))


if __name__ == "__main__":
    main()

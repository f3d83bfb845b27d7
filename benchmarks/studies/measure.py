"""Running contestants side by side: one thread for each process, runs interleaved, medians reported."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))
from kinds.result_files import environment, write_json

RESULTS = Path(__file__).parents[1] / "results"

# A GPT-2 of 12 blocks, whose vocabulary is small enough for two stages to balance.
SHAPE = {"vocabulary": 512, "layers": 12, "width": 384, "heads": 6, "length": 128}

# glibc gives large blocks back to the system as they are freed, and every page of them is made anew at its next use:
# 7 to 11 % of a step's processor time on the machine of the result files, and much of its jitter. Here nobody does.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_ARENA_MAX": "1",  # what threads have of their own is given back whatever the above says
}


def interleave(
    contestants: Mapping[str, Callable[[], dict]],
    rounds: int,
    say: Callable[[str], None] = print,
    seconds: float = math.inf,
    seed: int = 0,
) -> dict[str, list[dict]]:
    """Run every contestant once a round, in an order shuffled anew each round; all results by name.

    Args:
        seconds: no round begins that would, as the longest before it, end later than so long after now.
        seed: of the orders.
    """
    results: dict[str, list[dict]] = {name: [] for name in contestants}
    shuffle = random.Random(seed)
    began, longest = time.monotonic(), 0.0
    for number in range(rounds):
        start = time.monotonic()
        if number and start + longest - began > seconds:
            break
        names = list(contestants)
        shuffle.shuffle(names)
        for name in names:
            try:
                results[name].append(contestants[name]())
            except RuntimeError as error:
                results[name].append({"error": str(error)[-400:]})
            say(f"round {number + 1}/{rounds} {name}: {_short(results[name][-1])}")
        longest = max(longest, time.monotonic() - start)
    return results


def median_of(results: Sequence[dict], key: str) -> float:
    """The median over runs of a figure; NaN if no run has it. A figure may be a list of samples."""
    samples: list[float] = []
    for result in results:
        value = result.get(key)
        if value is not None:
            samples.extend(value if isinstance(value, list) else [value])
    return statistics.median(samples) if samples else math.nan


def medians_of(results: Mapping[str, Sequence[dict]]) -> dict[str, list[dict]]:
    """The results with one figure, its median, for each turn of many steps."""
    return {
        name: [{key: median_of([run], key) if isinstance(run[key], list) else run[key] for key in run} for run in runs]
        for name, runs in results.items()
    }


def ratio_of(numerators: Sequence[dict], denominators: Sequence[dict], key: str) -> float:
    """The median over rounds of the ratio of two contestants' figures in the same round, which drift has in common."""
    pairs = zip(numerators, denominators, strict=True)
    ratios = [median_of([upper], key) / median_of([lower], key) for upper, lower in pairs]
    return statistics.median([ratio for ratio in ratios if not math.isnan(ratio)] or [math.nan])


def spread_of(results: Sequence[dict], key: str) -> str:
    """Smallest and largest sample, for a table."""
    samples = [x for result in results for x in result.get(key, [])]
    return f"{min(samples):.3f} - {max(samples):.3f}"


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown, as lines."""
    head, *lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return [head, "|---" * len(columns) + "|", *lines]


def write_result(path: Path, title: str, how: str, lines: Sequence[str], content: Mapping[str, Any]) -> None:
    """Write `<path>.md`, which is `lines` under a title and what made it, and `<path>.json`, which is `content` and all
    of what made it; and print the lines."""
    facts = environment()
    write_json({"environment": facts, **content}, path.with_suffix(".json"))
    made = [f"{package} {number}" for package, number in facts["versions"].items() if number]
    about = f"{facts['date']}; {', '.join(made)}; Python {facts['python']}; {facts['cores']} cores; {how}."
    path.with_suffix(".md").write_text("\n".join([f"# {title}", "", about, "", *lines]) + "\n")
    print("\n".join(lines))


class Comparison:
    """A table of contestants, and what it was made from, to be written as `results/<name>.json` and `.md`."""

    def __init__(self, name: str, title: str, columns: Sequence[str], config: Mapping[str, Any], runs: Mapping):
        self.figures: dict[str, dict[str, Any]] = {}
        self._name = name
        self._title = title
        self._config = config
        self.runs = runs
        self._columns = columns
        self._rows: list[list[str]] = []

    def add(self, name: str, cells: Sequence[str], **figures: Any) -> None:
        """A row, and the figures behind it."""
        self.figures[name] = figures
        self._rows.append([name, *cells])

    def add_missing(self, name: str) -> None:
        """A row for a contestant that did not run."""
        self._rows.append([name, "did not run", *[""] * (len(self._columns) - 2)])

    def write(self, note: str = "", how: str = "medians of interleaved runs") -> None:
        """Write both files, with date, versions and configuration, and print the table."""
        content = {
            "title": self._title,
            "config": self._config,
            "allocator": ALLOCATOR,
            "figures": self.figures,
            "runs": self.runs,
        }
        lines = [*table_of(self._columns, self._rows), *(["", note] if note else [])]
        lines += ["", f"Configuration: `{json.dumps(self._config)}`"]
        write_result(RESULTS / self._name, self._title, how, lines, content)


def _short(result: dict) -> str:
    """What a run found, in one line: of samples their median, other things as they are."""

    def shown(value: Any) -> str:
        if isinstance(value, list) and value and all(isinstance(sample, (int, float)) for sample in value):
            return f"{statistics.median(value):.4g}"
        return str(value)

    return ", ".join(f"{key}={shown(value)}" for key, value in result.items())[:160]

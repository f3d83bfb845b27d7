"""Quantised bases with adapters over stages, beside the same script of the unsplit model: the whole product.

    python benchmarks/studies/quantized.py                  # everything, about fifteen minutes on two cores
    python benchmarks/studies/quantized.py --only int8      # these kinds anew, the others from the last result

Each case is a step (losses, the adapters' gradients), an evaluation, greedy tokens, the adapters saved and merged into
the base, and both again: see `tests/support/quantised.py`, which the tests use, too. Tiny models on CPU processes over
gloo.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure import RESULTS, table_of, write_result

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.pool import Pool
from tests.support.quantised import KINDS, PLACES, ROUNDING, SCHEDULES, compared, families_and_ways

COLUMNS = ("loss", "gradients", "evaluation", "merged", "others")
PACKAGES = ("bitsandbytes", "optimum-quanto", "torchao", "peft")
NOTE = f"""\
`whole` is `initialize()` of a model that transformers quantised, `in stages` is `from_pretrained` with
`quantization_config` and `adapt`, `saved` the same from a checkpoint that was saved quantised. Each row is nine
layouts: {", ".join(SCHEDULES)}, on two stages, three, and two replicas of two. Numbers are the largest differences
from the unsplit quantised model, over ranks and layouts: of losses and of evaluations, also with the adapters merged
into the base, beside the loss; of gradients beside the largest entry of any. `others` counts greedy tokens, names of
gradients and numbers of parameters that are not those of the unsplit model. The libraries compute in float32,
bitsandbytes' 8 bits in evaluation on a CPU in float16. A case counts as equal below {ROUNDING:g} with no others."""


def run(kind: str) -> dict[str, dict[str, Any]]:
    """The differences of each case of a kind, by way, family and layout."""
    cases, pool = {}, Pool()
    with tempfile.TemporaryDirectory() as folder:
        for family, way in itertools.product(*families_and_ways(kind)):
            begin = time.monotonic()
            for ranks, stages in PLACES:
                found = compared(pool, family, kind, way, ranks, stages, SCHEDULES, Path(folder))
                for schedule, differences in zip(SCHEDULES, found, strict=True):
                    cases[f"{way}, {family}, {ranks // stages} x {stages}, {schedule}"] = differences
            print(f"{kind}, {way}, {family}: {time.monotonic() - begin:.0f} s", flush=True)
    pool.close()
    return cases


def is_equal(case: dict[str, float]) -> bool:
    return not case["others"] and max(case.values()) <= ROUNDING


def rows_of(kinds: dict[str, dict[str, dict[str, float]]]) -> list[list[str]]:
    rows = []
    for kind, cases in kinds.items():
        for start in dict.fromkeys(", ".join(name.split(", ")[:2]) for name in cases):
            these = [case for name, case in cases.items() if name.startswith(f"{start}, ")]
            most = [f"{max(case[column] for case in these):.1e}" for column in COLUMNS[:-1]]
            equal = f"{sum(map(is_equal, these))} of {len(these)}"
            rows.append([kind, *start.split(", "), *most, f"{sum(case['others'] for case in these):g}", equal])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=KINDS, help="these kinds anew")
    parser.add_argument("--output", type=Path, default=RESULTS / "quantized")
    options = parser.parse_args()
    before = options.output.with_suffix(".json")
    kinds = json.loads(before.read_text())["kinds"] if options.only and before.exists() else {}
    for kind in options.only or KINDS:
        kinds[kind] = run(kind)
    kinds = {kind: kinds[kind] for kind in KINDS if kind in kinds}
    every = [case for cases in kinds.values() for case in cases.values()]
    lines = [f"{sum(map(is_equal, every))} of {len(every)} cases are equal.", "", *NOTE.splitlines(), ""]
    lines += table_of(["kind", "way", "family", *COLUMNS, "equal"], rows_of(kinds))
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    how = f"{versions}; tiny models of 4 blocks of width 64, batches of 4 rows in microbatches of 1; gloo"
    write_result(options.output, "Quantised bases over stages", how, lines, {"kinds": kinds})


if __name__ == "__main__":
    main()

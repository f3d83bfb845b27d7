"""What a rank asks for, holds and is told, by the number of ranks: counts, not seconds, and the law of each.

    python benchmarks/studies/growth.py                     # forks of 2 to 64 ranks; 64 of them take some 10 GB
    python benchmarks/studies/growth.py --worlds 2 4 8 --output /tmp/here
    MALLOC_ARENA_MAX=1 python benchmarks/studies/growth.py --crowd 128  # only: forms, trains, loses one rank

A GPT-2 of four blocks in pipelines of two stages, on gloo. A law is the exponent of the number of ranks that fits the
counts from 8 ranks on. Of 1,024 ranks one runs, over torch's fake backend, which connects nobody: its groups are made
and its connections counted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measure import table_of, write_result

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support import ended
from tests.support.ended import End
from tests.support.growth_ranks import form_and_step, groups_of_one, lines_of_a_wait, lose_one, run_counted

FROM = 8
ONE_OF, STAGES = 1024, 8
MESSAGES = ("allreduce", "allgather", "broadcast", "send", "recv")


def values(ends: Sequence[End], kind: str = "nothing") -> list[Any]:
    wrong = [end for end in ends if end.kind not in ("nothing", kind)]
    if wrong:
        raise RuntimeError(f"a rank ended otherwise: {wrong[0]}")
    return [end.value for end in ends if end.kind == "nothing"]


def count(world: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The counts of a world, by what they are of, and what was said of ranks that were lost."""
    ends, asked = run_counted(world, form_and_step)
    ranks = values(ends)

    def most(part: str, *names: str) -> float:
        return max(sum(rank[part][name] for name in names) for rank in ranks)

    found = {
        "store: operations of a rank, mean": asked["operations"] / world,
        **{f"of these {name}'s": asked[f"operations of {name}"] / world for name in ("gloo", "Penstock", "torch")},
        "store: bytes of a rank, mean": asked["bytes"] / world,
        **{f"of these bytes {name}'s": asked[f"bytes of {name}"] / world for name in ("gloo", "Penstock", "torch")},
        "store: connections that its host was asked for": asked["connections"],
        "store: connections of its host, at rest": asked["held"],
        "open files of a rank, most": most("held", "descriptors"),
        "threads of a rank, most": most("held", "threads"),
        "groups that a rank makes": most("forming", "new_group"),
        "bytes gathered or summed in forming": most("forming", *(f"bytes of {name}" for name in MESSAGES[:3])),
        "messages and sums of a step": most("step", *MESSAGES),
        "Python calls that compare in a step": most("step", "python calls"),
    }
    ends, _ = run_counted(world, lines_of_a_wait, world - 1, 2.0, partial(time.sleep, 8.0))
    found["lines of a wait, all ranks"] = sum(values(ends))
    losses = [lose(world, how) for how in ("kill", "stop")]
    found |= {f"lines of a loss ({lost['how']}), all ranks": lost["lines"] for lost in losses}
    return found, losses


def lose(world: int, how: str) -> dict[str, Any]:
    """How many of the others name a rank that is killed or stopped, within how many seconds, by how many lines."""
    victim = world // 2
    ends, _ = run_counted(world, lose_one, victim, how)
    told = values(ends, "killed" if how == "kill" else "stands still")
    words = f"rank {victim} was lost" if how == "kill" else f"rank {victim} does not answer"
    return {
        "ranks": world,
        "how": how,
        "named by": sum(words in each["text"] for each in told),
        "told otherwise": [each["text"] for each in told if words not in each["text"]],
        "others": len(told),
        "seconds": round(max(each["seconds"] for each in told), 2),
        "lines": sum(each["lines"] for each in told),
    }


def law(counts: Mapping[int, float]) -> float:
    """The exponent of the number of ranks, by least squares over the logarithms."""
    points = [(math.log(world), math.log(max(1, number))) for world, number in counts.items() if world >= FROM]
    if len(points) < 2:
        return math.nan
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def report(path: Path, content: Mapping[str, Any]) -> None:
    """Write the tables of what was counted until now."""
    counts = {int(world): found for world, found in content["counts"].items()}
    lines = [__doc__.splitlines()[0], ""]
    if counts:
        rows = [
            [
                name,
                *(f"{counts[world][name]:,.0f}" for world in counts),
                f"{law({w: counts[w][name] for w in counts}):.2f}",
            ]
            for name in next(iter(counts.values()))
        ]
        lines += table_of(["count", *(f"{world} ranks" for world in counts), "law"], rows)
    rows = [
        [device, str(one["new_group"]), str(one["connections"]), str(one["descriptors"]), str(one["threads"])]
        for device, one in content["one"].items()
    ]
    lines += ["", f"One rank of {ONE_OF:,} (the last of a pipeline of {STAGES} stages), by its groups alone:", ""]
    lines += table_of(["device", "groups", "gloo connections", "open files", "threads"], rows)
    rows = [[str(each[name]) for name in ("ranks", "how", "named by", "seconds")] for each in content["lost"]]
    lines += ["", "A rank is killed, or stands still (SIGSTOP), in the fourth step; the others name it:", ""]
    lines += table_of(["ranks", "how", "named by", "seconds until the last one"], rows)
    write_result(path, "What grows with the number of ranks", "counts on a machine in use", lines, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--crowd", type=int, help="only a loss among so many ranks, added to the result")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "growth")
    options = parser.parse_args()
    path: Path = options.output.with_suffix(".json")
    content: dict[str, Any] = {"counts": {}, "one": {}, "lost": []}
    if path.exists():
        content |= {name: json.loads(path.read_text())[name] for name in content}
    content["one"] = {
        device: dict(groups_of_one(ONE_OF, STAGES, STAGES - 1, name))
        for device, name in (("CPU, gloo", "cpu"), ("accelerator, NCCL counted by fake groups", "cuda:0"))
    }
    if options.crowd:
        ended.ENDING = 90.0  # so many take long to end, once they have said what they know
        losses = [lose(options.crowd, "kill")]
        content["lost"] = [one for one in content["lost"] if one["ranks"] != options.crowd] + losses
    for world in () if options.crowd else options.worlds:
        content["counts"][str(world)], losses = count(world)
        content["lost"] = [one for one in content["lost"] if one["ranks"] != world] + losses
        report(options.output, content)
    report(options.output, content)


if __name__ == "__main__":
    main()

"""Random processes of elastic runs are killed, and new ones join: what became of the runs, and what it took.

    export PYTHONPATH=src:tests
    python benchmarks/elastic.py                       # 200 kills: the table of docs/elastic.md
    python benchmarks/elastic.py --kills 20 --seed 3 --output /tmp/here

Each run begins with 4 to 8 processes on this machine (CPU, gloo, a GPT-2 of 4 blocks and width 32 in double precision,
with dropout, clipping, AdamW and a scheduler). At random moments a random process is killed, sometimes two at once,
until two are left; sometimes a new one comes. Half of the runs save a checkpoint every third step. Then every loss is
compared with those of a run that nothing happened to, and the samples are counted.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import elastic_runs
from penstock.bench.result_files import environment, write_json

STEPS = 60
EXACT = 1e-9
# Seconds between two kills, and how often two are killed at once or a new process comes.
PAUSE = (0.2, 2.0)
TWO_AT_ONCE, JOINS = 0.15, 0.3
# How many of the runs save checkpoints.
SAVING = 0.5
NO_COPY = "the run cannot go on: no device that is left has"
PHASES = ("detect", "agree", "plan", "form", "move", "redo")


def trial(draw: random.Random, expected: dict[int, float], timeout: float = 180.0) -> dict[str, Any]:
    """One run: its outcome, and a record of each kill."""
    with tempfile.TemporaryDirectory() as folder:
        number = draw.randint(4, 8)
        saves = {"CHECKPOINTS": str(Path(folder) / "checkpoints")} if draw.random() < SAVING else {}
        run = elastic_runs.Run(Path(folder), STEPS, number, DEPTHS=draw.choice(["1,2,3", "2,3,4", "1,2"]), **saves)
        alive = [run.start() for _ in range(number)]
        run.begin(timeout)
        kills: list[dict[str, Any]] = []
        while len(alive) > 2 and not any(member.status is not None for member in alive):
            time.sleep(draw.uniform(*PAUSE))
            if draw.random() < JOINS:
                run.start()
            for _ in range(2 if draw.random() < TWO_AT_ONCE and len(alive) > 3 else 1):
                victim = alive.pop(draw.randrange(len(alive)))
                if victim.status is None:
                    victim.process.send_signal(signal.SIGKILL)
                    kills.append({"at": time.time(), "process": victim.process.pid})
        hung = False
        try:
            run.wait(timeout, but=run.members[number:])
            late = [m for m in run.members[number:] if not any("begins" in note for note in m.read())]
            for member in late:  # it came when the run was over, and waits for others to begin a new one
                member.process.send_signal(signal.SIGKILL)
            run.wait(timeout)
        except AssertionError as error:
            hung = True
            print(error, flush=True)
        return judge(run, kills, expected, hung)


def judge(run: elastic_runs.Run, kills: list[dict[str, Any]], expected: dict[int, float], hung: bool) -> dict[str, Any]:
    """What became of a run, and what each kill took."""
    numbers = {m.process.pid: note["member"] for m in run.members for note in m.notes if "member" in note}
    ended = [member for member in run.members if member.status == 0 and member.losses]
    largest = max((abs(expected[s] - loss) for m in run.members for s, loss in m.losses.items()), default=0.0)
    complaint = ""
    try:
        elastic_runs.assert_whole_epochs(run.samples(), STEPS)
    except (AssertionError, KeyError) as error:
        complaint = f"samples: {error!r}"
    failed = [m for m in run.members if m.status not in (0, -9) and m.losses]
    went_back = any(change["restored"] for member in ended for change in member.end.get("changes", []))
    if hung:
        outcome = "hung"
    elif ended and not failed and not complaint and largest <= EXACT:
        outcome = "went back to a checkpoint and on, exact" if went_back else "went on, exact"
    elif (
        not ended and failed and all("the run cannot go on: no device that is left has" in m.printed() for m in failed)
    ):
        outcome = "ended with the error: no copy of a part was left"
    else:
        outcome = "wrong"
        print(largest, complaint, [m.status for m in run.members], run.printed()[-8000:], flush=True)
    changes = [change for member in ended for change in member.end.get("changes", [])]
    for kill in kills:
        mine = [c for c in changes if numbers.get(kill["process"]) in c["lost"]]
        kill["seconds"] = max((c["at"] + sum(c["seconds"].values()) - kill["at"] for c in mine), default=None)
        kill["phases"] = {p: max(c["seconds"].get(p, 0.0) for c in mine) for p in PHASES} if mine else {}
    joined = {member for change in changes for member in change["joined"]}
    return {"outcome": outcome, "kills": kills, "joined": len(joined), "largest": largest, "members": len(run.members)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after so many minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    draw, began, trials = random.Random(arguments.seed), time.monotonic(), []
    expected = elastic_runs.undisturbed(STEPS)
    num_kills = 0
    while num_kills < arguments.kills and time.monotonic() - began < 60 * arguments.minutes:
        trials.append(trial(draw, expected))
        num_kills += len(trials[-1]["kills"])
        print(num_kills, {k: v for k, v in trials[-1].items() if k != "kills"}, flush=True)
        write(arguments.output, trials)


def write(folder: Path, trials: list[dict[str, Any]]) -> None:
    """The record and the table."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json({**environment(), "trials": trials}, folder / "elastic.json")
    kills = [kill for one in trials for kill in one["kills"]]
    timed = [kill for kill in kills if kill["seconds"] is not None]
    outcomes = Counter(one["outcome"] for one in trials)
    lines = [
        "# Elastic runs, random processes killed",
        "",
        "Written by `benchmarks/elastic.py`; what made it is in `elastic.json`.",
        "",
        f"{len(trials)} runs, {len(kills)} kills, {sum(one['joined'] for one in trials)} processes joined. Largest "
        f"difference of a loss from the undisturbed run's: {max(one['largest'] for one in trials):.1e}.",
        "",
        "| outcome of a run | runs |",
        "|---|---|",
        *(f"| {name} | {outcomes[name]} |" for name in sorted({*outcomes, "hung", "wrong"})),
        "",
    ]
    if timed:
        totals = sorted(kill["seconds"] for kill in timed)
        lines += [
            "| seconds | median | worst |",
            "|---|---|---|",
            f"| from the kill to where it was | {statistics.median(totals):.2f} | {totals[-1]:.2f} |",
        ]
        for phase in PHASES:
            each = [kill["phases"][phase] for kill in timed]
            lines.append(f"| {phase} | {statistics.median(each):.2f} | {max(each):.2f} |")
        lines += ["", f"Kills that a run's own end hid are not timed: {len(kills) - len(timed)} of {len(kills)}."]
    (folder / "elastic.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

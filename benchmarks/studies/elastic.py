"""Random processes of elastic runs are killed, and new ones join: what became of the runs, and what it took.

    export PYTHONPATH=src:.
    python benchmarks/studies/elastic.py                       # 200 kills: the table of docs/elastic.md
    python benchmarks/studies/elastic.py --kills 20 --seed 3 --output /tmp/here
    python benchmarks/studies/elastic.py --soak --minutes 10   # long runs, with a new process for each that is killed
    python benchmarks/studies/elastic.py --kills 60 --owners 2 # with sharded_optimizer=2, over three pipelines or more

Each run begins with 4 to 8 processes on this machine (CPU, gloo, a GPT-2 of 4 blocks and width 32 in double precision,
with dropout, clipping, AdamW and a scheduler). At random moments a random process is killed, sometimes two at once,
until two are left; sometimes a new one comes. Half of the runs save a checkpoint every third step. Then every loss is
compared with those of a run that nothing happened to, and the samples are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure import table_of, write_result

from tests.support import elastic_runs

STEPS = 60
EXACT = 1e-9
# Seconds between two kills, and how often two are killed at once or a new process comes.
PAUSE = (0.2, 2.0)
TWO_AT_ONCE, JOINS = 0.15, 0.3
# Of a long run, which always saves checkpoints: its steps, and seconds between two kills.
SOAK_STEPS, SOAK_PAUSE = 600, (1.0, 5.0)
# How many of the runs save checkpoints.
SAVING = 0.5
NO_COPY = "the run cannot go on: no device that is left has"
PHASES = ("detect", "agree", "plan", "form", "move", "redo")


def trial(
    draw: random.Random, expected: dict[int, float], timeout: float = 180.0, **environment: str
) -> dict[str, Any]:
    """One run: its outcome, and a record of each kill."""
    with _started(draw, STEPS, draw.randint(4, 8), timeout, **environment) as run:
        number, kills = len(run.members), list[dict[str, Any]]()
        alive = list(run.members)
        while len(alive) > 2 and not any(member.status is not None for member in alive):
            time.sleep(draw.uniform(*PAUSE))
            if draw.random() < JOINS:
                run.start()
            for _ in range(2 if draw.random() < TWO_AT_ONCE and len(alive) > 3 else 1):
                _kill(alive.pop(draw.randrange(len(alive))), kills)
        return _ended(run, run.members[:number], kills, expected, timeout)


def soak(draw: random.Random, expected: dict[int, float], timeout: float = 600.0, **environment: str) -> dict[str, Any]:
    """One long run: of 4 to 6 processes one is killed every few seconds, and a new one comes for it."""
    with _started(draw, len(expected), 5, timeout, saving=1.0, **environment) as run:
        kills: list[dict[str, Any]] = []
        # Until one that trained has ended by itself. Those that came after that would begin another run.
        while not any(_has_trained(m) for m in run.members if m.status not in (None, -signal.SIGKILL)):
            time.sleep(draw.uniform(*SOAK_PAUSE))
            living = [m for m in run.members if m.status is None]
            training = [m for m in living if _has_trained(m)]
            if len(training) > 3:
                _kill(draw.choice(training), kills)
            if len(living) < 6:
                run.start()
        return _ended(run, [m for m in run.members if m.losses], kills, expected, timeout)


def _has_trained(member: elastic_runs.Member) -> bool:
    return any("done" in note for note in member.read())


@contextlib.contextmanager
def _started(
    draw: random.Random, steps: int, number: int, timeout: float, saving: float = SAVING, **environment: str
) -> Iterator[elastic_runs.Run]:
    with tempfile.TemporaryDirectory() as folder:
        if draw.random() < saving:
            environment["CHECKPOINTS"] = str(Path(folder) / "checkpoints")
        depths = draw.choice(["1,2,3", "2,3,4", "1,2"])
        run = elastic_runs.Run(Path(folder), steps, number, **{"DEPTHS": depths, **environment})
        for _ in range(number):
            run.start()
        run.begin(timeout)
        yield run


def _kill(victim: elastic_runs.Member, kills: list[dict[str, Any]]) -> None:
    if victim.status is None:
        victim.process.send_signal(signal.SIGKILL)
        kills.append({"at": time.time(), "process": victim.process.pid})


def _ended(
    run: elastic_runs.Run,
    first: Sequence[elastic_runs.Member],
    kills: list[dict[str, Any]],
    expected: dict[int, float],
    timeout: float,
) -> dict[str, Any]:
    """Wait for the end of those that trained `first`, and of all others that came to train, and judge the run."""
    hung = False
    try:
        run.wait(timeout, but=[member for member in run.members if member not in first])
        late = [m for m in run.members if m not in first and not any("begins" in note for note in m.read())]
        for member in late:  # it came when the run was over, and waits for others to begin a new one
            member.process.send_signal(signal.SIGKILL)
        run.wait(timeout)
    except AssertionError:
        hung = True
    return judge(run, kills, expected, hung)


def judge(run: elastic_runs.Run, kills: list[dict[str, Any]], expected: dict[int, float], hung: bool) -> dict[str, Any]:
    """What became of a run, and what each kill took."""
    numbers = {m.process.pid: note["member"] for m in run.members for note in m.notes if "member" in note}
    ended = [member for member in run.members if member.status == 0 and member.losses]
    largest = max((abs(expected[s] - loss) for m in run.members for s, loss in m.losses.items()), default=0.0)
    complaint = ""
    try:
        elastic_runs.assert_whole_epochs(run.samples(), run.steps)
    except (AssertionError, KeyError) as error:
        complaint = f"samples: {error!r}"
    failed = [m for m in run.members if m.status not in (0, -9) and m.losses]
    # From all that made a step afterwards, though they may have been killed later.
    changes = [note["change"] for member in run.members for note in member.notes if "change" in note]
    went_back = any(change["restored"] for change in changes)
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
    if outcome in ("hung", "wrong"):
        print(largest, complaint, run.printed(), flush=True)
    for kill in kills:
        mine = [c for c in changes if numbers.get(kill["process"]) in c["lost"]]
        kill["seconds"] = max((c["at"] + sum(c["seconds"].values()) - kill["at"] for c in mine), default=None)
        kill["phases"] = {p: max(c["seconds"].get(p, 0.0) for c in mine) for p in PHASES} if mine else {}
    joined = sum(bool(member.losses) for member in run.members[run.num_start :])
    return {"outcome": outcome, "kills": kills, "joined": joined, "largest": largest, "members": len(run.members)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after so many minutes")
    parser.add_argument("--soak", action="store_true", help="long runs, with a new process for each that is killed")
    parser.add_argument("--owners", type=int, help="of each weight: with a sharded optimizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results")
    arguments = parser.parse_args()
    draw, began, trials = random.Random(arguments.seed), time.monotonic(), []
    expected = elastic_runs.undisturbed(SOAK_STEPS if arguments.soak else STEPS)
    name, num_kills, environment = "elastic_soak" if arguments.soak else "elastic", 0, dict[str, str]()
    if arguments.owners is not None:
        name += f"_{arguments.owners}_owners"
        plugin = json.dumps({"sharded_optimizer": arguments.owners})
        environment = {"PLUGIN": plugin, "COPIES": str(arguments.owners + 1), "DEPTHS": "1,2"}
    while num_kills < arguments.kills and time.monotonic() - began < 60 * arguments.minutes:
        trials.append((soak if arguments.soak else trial)(draw, expected, **environment))
        num_kills += len(trials[-1]["kills"])
        print(num_kills, {k: v for k, v in trials[-1].items() if k != "kills"}, flush=True)
        write(arguments.output, name, trials)


def write(folder: Path, name: str, trials: list[dict[str, Any]]) -> None:
    """The record and the table."""
    folder.mkdir(parents=True, exist_ok=True)
    kills = [kill for one in trials for kill in one["kills"]]
    timed = [kill for kill in kills if kill["seconds"] is not None]
    outcomes = Counter(one["outcome"] for one in trials)
    lines = [
        f"{len(trials)} runs, {len(kills)} kills, {sum(one['joined'] for one in trials)} processes joined. Largest "
        f"difference of a loss from the undisturbed run's: {max(one['largest'] for one in trials):.1e}.",
        "",
        *table_of(
            ["outcome of a run", "runs"],
            [[name, str(outcomes[name])] for name in sorted({*outcomes, "hung", "wrong"})],
        ),
        "",
    ]
    if timed:
        seconds = {"from the kill to where it was": [kill["seconds"] for kill in timed]}
        seconds |= {phase: [kill["phases"][phase] for kill in timed] for phase in PHASES}
        rows = [[what, f"{statistics.median(each):.2f}", f"{max(each):.2f}"] for what, each in seconds.items()]
        lines += table_of(["seconds", "median", "worst"], rows)
        lines += ["", f"Not timed, as the run's end or the next kill hid them: {len(kills) - len(timed)} kills."]
    how = "written by `benchmarks/studies/elastic.py`"
    write_result(folder / name, "Elastic runs, random processes killed", how, lines, {"trials": trials})


if __name__ == "__main__":
    main()

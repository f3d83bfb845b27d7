"""Runs of several processes that come and go: started, told when to end, and what each of them saw."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from penstock import PipelineTemplate
from tests.support import zygote
from tests.support.elastic_script import GLOBAL_BATCH, NUM_SAMPLES
from tests.support.families import FAMILIES
from tests.support.forked import Process

SCRIPT = Path(__file__).with_name("elastic_script.py")


@dataclass
class Member:
    """A process of a run, and what it noted."""

    process: Process
    log: Path
    folder: Path
    notes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def read(self) -> list[dict[str, Any]]:
        path = self.folder / f"{self.process.pid}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        # The last line of one that was killed may be half written.
        self.notes = [json.loads(line) for line in lines if line.endswith("}")]
        return self.notes

    @property
    def losses(self) -> dict[int, float]:
        return {note["done"]: note["loss"] for note in self.notes if "done" in note}

    @property
    def rates(self) -> dict[int, float]:
        return {note["done"]: note["rate"] for note in self.notes if "done" in note}

    @property
    def scales(self) -> dict[int, float]:
        return {note["done"]: note["scale"] for note in self.notes if "done" in note}

    @property
    def end(self) -> dict[str, Any]:
        return next((note for note in self.notes if "changes" in note), {})

    def printed(self) -> str:
        return self.log.read_text(errors="replace")


@cache
def balanced_stages(family: str, settings: str, depth: int) -> Sequence[Sequence[str]]:
    """Found once, in place of by each process."""
    return PipelineTemplate.balanced(FAMILIES[family].build(**json.loads(settings)), depth).modules_per_stage


class Run:
    """Processes of one run on this machine.

    Of `environment`, FAMILY and MODEL say what they train, and DEPTHS the templates that they have.
    """

    script = SCRIPT

    def __init__(self, folder: Path, steps: int, start: int, store: str | None = None, **environment: str) -> None:
        self.folder, self.steps, self.num_start = folder, steps, start
        self.store = folder.joinpath("store").as_uri() if store is None else store
        self.environment = environment
        self.members: list[Member] = []

    def start(self, *orders: str) -> Member:
        """One more process; `orders` are what it does to itself, see elastic_script.py."""
        number = len(self.members)
        log = self.folder / f"{number}.log"
        arguments = [str(self.script), self.store, str(self.folder), str(self.steps), str(self.num_start), *orders]
        family, settings = self.environment.get("FAMILY", "gpt2"), self.environment.get("MODEL", "{}")
        depths = map(int, self.environment.get("DEPTHS", "1,2,3").split(","))
        templates = json.dumps([balanced_stages(family, settings, depth) for depth in depths])
        environment = {**zygote.environment(), "TEMPLATES": templates, **self.environment}
        with log.open("wb") as output, open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), output.fileno(), output.fileno()]
            member = Member(zygote.fork(number, arguments, files, environment, str(self.folder)), log, self.folder)
        self.members.append(member)
        return member

    def begin(self, timeout: float = 120.0) -> None:
        """Until the processes that were started have made a step, or one has ended."""
        deadline = time.monotonic() + timeout
        while not all(any("done" in note for note in member.read()) for member in self.members):
            if time.monotonic() > deadline or any(member.status is not None for member in self.members):
                return
            time.sleep(0.02)

    def wait(self, timeout: float = 120.0, but: Sequence[Member] = ()) -> None:
        """Until all processes have ended. One that has not is shown, and killed."""
        deadline = time.monotonic() + timeout
        waited = [member for member in self.members if member not in but]
        while any(member.status is None for member in waited) and time.monotonic() < deadline:
            time.sleep(0.02)
        late = [member for member in waited if member.status is None]
        for member in late:
            member.process.send_signal(signal.SIGABRT)  # it shows where its threads are
        time.sleep(0.5 if late else 0.0)
        for member in self.members:
            if member.status is None and member not in but:
                member.process.send_signal(signal.SIGKILL)
            member.read()
        shown = "\n".join(f"--- {self.members.index(m)}\n{m.printed()[-6000:]}" for m in self.members)
        assert not late, f"processes {[self.members.index(m) for m in late]} did not end:\n{shown}"

    def printed(self) -> str:
        return "\n".join(f"--- {number}: {m.status}\n{m.printed()}" for number, m in enumerate(self.members))

    def samples(self) -> dict[int, Counter[int]]:
        """The samples of each step, from the generation that made it: each pipeline's once."""
        seen: dict[int, dict[int, dict[int, set[tuple[int, ...]]]]] = {}
        for member in self.members:
            for note in member.notes:
                if "samples" in note:
                    by_pipeline = seen.setdefault(note["step"], {}).setdefault(note["generation"], {})
                    by_pipeline.setdefault(note["pipeline"], set()).add(tuple(note["samples"]))
        return {
            step: Counter(s for ranks in generations[max(generations)].values() for batch in ranks for s in batch)
            for step, generations in seen.items()
        }


@contextlib.contextmanager
def served_store(folder: Path) -> Iterator[tuple[str, int]]:
    """The address of what `penstock store` serves, and its process."""
    log = folder / "store.log"
    with log.open("wb") as output, open(os.devnull, "rb") as nothing:
        files = [nothing.fileno(), output.fileno(), output.fileno()]
        arguments = ["-m", "penstock", "store", "--port", "0", "--host", "127.0.0.1"]
        process = zygote.fork(0, arguments, files, zygote.environment(), str(folder))
    try:
        deadline = time.monotonic() + 60
        while (found := re.search(r"tcp://\S+", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield found[0], process.pid
    finally:
        process.send_signal(signal.SIGKILL)


def undisturbed(steps: int, **environment: str) -> dict[int, float]:
    """The losses of a run of one process that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), steps, 1, store="", **(environment | {"DEPTHS": "1"}))
        member = run.start()
        run.wait(max(120.0, 0.5 * steps))
        path = Path(folder) / "undisturbed.jsonl"
        assert member.status == 0, member.printed()
        notes = [json.loads(line) for line in path.read_text().splitlines()]
        return {note["done"]: note["loss"] for note in notes if "done" in note}


def assert_whole_epochs(samples: dict[int, Counter[int]], steps: int) -> None:
    """Every sample was trained on once in each epoch."""
    per_epoch = NUM_SAMPLES // GLOBAL_BATCH
    for first in range(0, steps - per_epoch + 1, per_epoch):
        together: Counter[int] = sum((samples[step] for step in range(first, first + per_epoch)), Counter())
        assert together == Counter(range(NUM_SAMPLES)), f"epoch from step {first}"

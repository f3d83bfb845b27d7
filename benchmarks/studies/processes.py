"""Contestants in processes of their own: started, suspended while others run, asked for turns of steps."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from measure import ALLOCATOR, interleave

HERE = Path(__file__).parent
# Figures that each rank has of its own: memory, processor seconds of a step, page faults of a turn.
OF_RANKS = ("peak_mib", "cpu", "faults")


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Contestant:
    """`world_size` processes of a script in this folder, which build something and then time turns of steps of it.

    They start at the first turn and are suspended between turns, so that many can wait side by side while one has the
    machine to itself. A script calls `turns.serve`. Use it as a context manager, or `close` it. Script and library may
    be those of another `checkout`.
    """

    def __init__(
        self,
        script: str,
        world_size: int,
        arguments: Mapping[str, Any],
        threads: int = 1,
        timeout: float = 600,
        checkout: Path = HERE.parents[1],
        environment: Mapping[str, str] = ALLOCATOR,
    ):
        self._script = script
        self._world_size = world_size
        self._arguments = arguments
        self._threads = threads
        self._timeout = timeout
        self._checkout = checkout.resolve()
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen] = []
        self._failure: str | None = None

    def run(self, steps: int) -> dict[str, Any]:
        """The answer of the last rank to a turn of `steps` steps, which knows every figure: a pipeline's loss is made
        there. Its figures `OF_RANKS` are of each rank.

        Raises:
            RuntimeError: a process failed, now or in an earlier turn, or took longer than the timeout.
        """
        if self._failure is None and not self._processes:
            self._start()
        if self._failure is None:
            self._signal(signal.SIGCONT)
            answers = [self._ask(process, steps) for process in self._processes]
            if None not in answers:
                self._signal(signal.SIGSTOP)
                of_ranks = {name: [answer[name] for answer in answers] for name in OF_RANKS if name in answers[0]}
                return {**answers[-1], **of_ranks}
            self._failure = self._give_up()
        raise RuntimeError(f"{self._script} {dict(self._arguments)} failed:\n{self._failure}")

    def close(self) -> None:
        """End the processes, at the latest after some seconds: what ends slowly is not what is measured."""
        self._signal(signal.SIGCONT)
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # of one that is gone
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._processes = []
        self._folder.cleanup()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        port = free_port()
        for rank in range(self._world_size):
            environment = {
                **os.environ,
                **self._environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(self._threads),
                "PYTHONWARNINGS": "ignore",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(self._checkout / "src"), os.getenv("PYTHONPATH")])),
            }
            folders = [self._checkout / folder for folder in ("benchmarks/studies", "benchmarks")]  # of older commits
            script = next(folder for folder in folders if folder.is_dir()) / self._script
            command = [sys.executable, str(script), json.dumps(self._arguments)]
            with self._log(rank).open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                    )
                )

    def _ask(self, process: subprocess.Popen, steps: int) -> dict[str, Any] | None:
        """Send the turn to all processes (with the first), and read the answer of `process`; None if there is none."""
        if process is self._processes[0]:
            for each in self._processes:
                with contextlib.suppress(BrokenPipeError):
                    each.stdin.write(f"{steps}\n")
                    each.stdin.flush()
        if not select.select([process.stdout], [], [], self._timeout)[0]:
            return None
        line = process.stdout.readline()
        return json.loads(line) if line else None

    def _give_up(self) -> str:
        """Kill all processes; return the ends of what they said."""
        # One that failed ends others, whose messages are not the cause: each has a moment for its own.
        time.sleep(2)
        for process in self._processes:
            process.kill()
        return "\n---\n".join(self._log(rank).read_text()[-1500:] for rank in range(self._world_size))

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"


def run_ranks(
    script: str, world_size: int, arguments: Mapping[str, Any], threads: int = 1, timeout: float = 600
) -> dict[str, Any]:
    """One turn of `arguments["steps"]` steps of a contestant that starts for it and ends after it."""
    with Contestant(script, world_size, arguments, threads, timeout) as contestant:
        return contestant.run(arguments["steps"])


def side_by_side(
    contestants: Mapping[str, tuple[str, int, Mapping[str, Any], int]],
    rounds: int,
    steps: int,
    seconds: float = math.inf,
    starts: int = 1,
) -> dict[str, list[dict]]:
    """Turns of `steps` steps of all contestants (script, processes, arguments, threads), in turn, `rounds` times, or as
    often as there is time for in so many `seconds`.

    All live side by side, so that a machine whose speed drifts is as fast for one as for another. Where its memory lies
    makes a process slower or faster by some per cent for its whole life, so all are started anew after every `rounds`,
    so many times in all.
    """
    results: dict[str, list[dict]] = {name: [] for name in contestants}
    for number in range(starts):
        with contextlib.ExitStack() as stack:
            turns = {
                name: partial(stack.enter_context(Contestant(*description)).run, steps)
                for name, description in contestants.items()
            }
            for name, found in interleave(turns, rounds, seconds=seconds, seed=number).items():
                results[name] += found
    return results

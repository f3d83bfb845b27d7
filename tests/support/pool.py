"""Worker processes that live for the whole test session, so that a test on several ranks does not pay their start-up.

``Pool.run(world_size, function, ...)`` runs a module-level function on ``world_size`` processes that are set up as
``torchrun`` would: the same environment variables and a store that lives outside the ranks (here: in the parent).
Workers are forks (zygote.py), so a lost one is replaced in milliseconds. Their side is pool_worker.py.
"""

import itertools
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests.support import zygote
from tests.support.forked import Process, kill_group
from tests.support.launch import agent_store

MAX_WORKERS = 8
START_TIMEOUT = 120.0  # of a fork on a busy machine
GROUP_TIMEOUT = 30.0  # of one attempt to form the group of a call, on a busy machine
GROUP_ATTEMPTS = 3
FORMED, GO = b"formed", b"go"


class WorkerDied(RuntimeError):
    """A worker process ended (killed, crashed, exited) before it returned its result."""


class WorkerTimeout(RuntimeError):
    """A worker process did not return its result in time. Its stacks at that moment are in the message."""


@dataclass(frozen=True)
class Task:
    """What the parent sends: a function by name, its arguments, and the environment of its rank."""

    module: str
    function: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    environment: dict[str, str]
    path: tuple[str, ...]
    initialize: bool
    timeout: float


@dataclass
class Worker:
    """One process of the pool as the parent sees it."""

    process: Process
    connection: Connection
    log: Path
    log_start: int = 0
    ready: bool = False

    def printed(self) -> str:
        """What the worker printed since the current task began (its last 6000 characters)."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")[-6000:]

    def stop(self) -> None:
        if self.process.poll() is None:  # else its number may be another's by now
            kill_group(self.process.pid)
            self.process.wait()
        self.connection.close()


class Pool:
    """Up to ``MAX_WORKERS`` processes, started when first needed and replaced when a test loses them."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-pool-")
        self._numbers = itertools.count()

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        outcomes: bool = False,
        init: bool = True,
        environment: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on ``world_size`` ranks and return its results in order of rank.

        The function must stand at the top level of an importable module; arguments and results must be picklable
        (tensors are). Every rank starts with the same random seed, one thread, and default global settings of torch.

        Args:
            timeout: seconds for the whole call; ranks that are still running are then stopped and replaced.
            outcomes: return exceptions in the list instead of raising the first that arrived.
            init: initialise ``torch.distributed`` (gloo) before the call. With False the function does it itself;
                the environment is that of ``torchrun``.
            environment: further environment variables for this call.

        Raises:
            the exception of the rank that failed first, with the tracebacks of all failed ranks as notes;
            WorkerDied, WorkerTimeout: see there.
        """
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"the pool has 1 to {MAX_WORKERS} workers, not {world_size}")
        for _ in range(GROUP_ATTEMPTS):
            workers = self._first(world_size)
            # The store lives here, as it lives in torchrun's agent: no race for a port, and it outlives any rank.
            store = agent_store(timeout)
            for rank, worker in enumerate(workers):
                worker.log_start = worker.log.stat().st_size
                task = Task(
                    module=function.__module__,
                    function=function.__qualname__,
                    arguments=args,
                    keywords=kwargs,
                    environment=_launcher_environment(rank, world_size, store.port) | (environment or {}),
                    path=tuple(sys.path),
                    initialize=init,
                    timeout=timeout,
                )
                worker.connection.send_bytes(pickle.dumps(task))
            if not init or self._group_is_formed(workers):
                break
        else:
            raise WorkerTimeout(f"{world_size} workers could not form a group in {GROUP_ATTEMPTS} attempts")
        results, order = self._collect(workers, timeout)
        failed = [rank for rank in order if isinstance(results[rank], BaseException)]
        if failed and not outcomes:
            # A lost worker explains itself last: what its peers raised because of it says less than its own end does.
            failed.sort(key=lambda rank: not isinstance(results[rank], WorkerDied))
            first = results[failed[0]]
            for rank in failed[1:]:
                first.add_note(f"--- also failed: {type(results[rank]).__name__}: {results[rank]}")
                for note in getattr(results[rank], "__notes__", []):
                    first.add_note(note)
            raise first
        return results

    def close(self) -> None:
        """Stop every worker. The pool may be used again; it starts new ones."""
        while self._workers:
            self._workers.pop().stop()

    def _group_is_formed(self, workers: Sequence[Worker]) -> bool:
        """Let the workers go on once all have formed their group; else replace them all, and the call begins again.

        Gloo's first connections fail now and then on a busy machine, most often where one rank is done with the group
        before another has seen all its connections. Nothing of the test has run by then.
        """
        deadline = time.monotonic() + GROUP_TIMEOUT
        try:
            forming = [worker.connection for worker in workers]
            while forming:
                ready = wait(forming, timeout=max(deadline - time.monotonic(), 0))
                if not ready:
                    raise TimeoutError
                for connection in ready:
                    assert isinstance(connection, Connection)
                    if connection.recv_bytes() != FORMED:
                        raise ConnectionError
                    forming.remove(connection)
            for worker in workers:
                worker.connection.send_bytes(GO)
        except (EOFError, OSError):
            for worker in workers:
                print(f"a worker formed no group; {_tail(worker)}", file=sys.stderr)
                self._replace(worker)
            return False
        return True

    def _first(self, count: int) -> list[Worker]:
        """The first ``count`` workers, alive."""
        for index, worker in enumerate(self._workers):
            if worker.process.poll() is not None:
                worker.stop()
                self._workers[index] = self._start(index)
        while len(self._workers) < count:
            self._workers.append(self._start(len(self._workers)))
        chosen = self._workers[:count]
        for worker in chosen:
            _await_ready(worker)
        return chosen

    def _start(self, rank: int) -> Worker:
        ours, theirs = Pipe()
        log = Path(self._folder.name) / f"worker-{next(self._numbers)}.log"
        variables = zygote.environment() | {"PYTHONUNBUFFERED": "1"}
        with open(os.devnull) as nothing, log.open("wb") as output, theirs:
            files = [nothing.fileno(), output.fileno(), output.fileno(), theirs.fileno()]
            process = zygote.fork(rank, ["-m", "tests.support.pool_worker", "3"], files, variables)
        return Worker(process, ours, log)

    def _collect(self, workers: Sequence[Worker], timeout: float) -> tuple[list[Any], list[int]]:
        """Each rank's result or exception, and the ranks in the order in which they ended."""
        results: list[Any] = [None] * len(workers)
        ended: dict[int, float] = {}
        pending = {worker.connection: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(pending), timeout=left):
                assert isinstance(ready, Connection)
                rank = pending.pop(ready)
                try:
                    ended[rank], results[rank] = pickle.loads(ready.recv_bytes())
                except (EOFError, ConnectionError):
                    ended[rank] = time.monotonic()
                    code = workers[rank].process.wait()
                    results[rank] = WorkerDied(f"rank {rank} ended with {_exit_text(code)}; {_tail(workers[rank])}")
                if isinstance(results[rank], BaseException):
                    results[rank].add_note(f"(on rank {rank} of {len(workers)})")
        for rank in pending.values():
            worker = workers[rank]
            worker.process.send_signal(signal.SIGUSR1)  # faulthandler prints every thread's stack to the log
            ended[rank] = deadline
        if pending:
            time.sleep(0.5)
        for rank in pending.values():
            results[rank] = WorkerTimeout(f"rank {rank} did not return in {timeout:g} s; {_tail(workers[rank])}")
            self._replace(workers[rank])
        for rank, result in enumerate(results):
            if isinstance(result, WorkerDied):
                self._replace(workers[rank])
        return results, sorted(ended, key=ended.__getitem__)

    def _replace(self, worker: Worker) -> None:
        worker.stop()
        rank = self._workers.index(worker)
        self._workers[rank] = self._start(rank)


def _launcher_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "pool",
    }


def _await_ready(worker: Worker) -> None:
    """Wait for a new worker's word that its imports are done."""
    if worker.ready:
        return
    if not worker.connection.poll(START_TIMEOUT):
        raise WorkerTimeout(f"a pool worker did not start in {START_TIMEOUT:g} s; {_tail(worker)}")
    try:
        worker.connection.recv_bytes()
    except (EOFError, ConnectionError):
        raise WorkerDied(f"a pool worker did not start; {_tail(worker)}") from None
    worker.ready = True


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _tail(worker: Worker) -> str:
    printed = worker.printed().strip()
    return f"it printed:\n{printed}" if printed else "it printed nothing"

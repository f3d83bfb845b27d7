"""Ranks as processes of their own, forked for a test, that may be killed: what each of the others raised, and when.

This file is both sides: a test calls `run_ranks`, and each rank runs the file as a script, in a fork (zygote.py).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support import zygote
from tests.support.forked import Process, kill_group
from tests.support.launch import agent_store, free_port

LIMIT = 10.0  # what is promised
PATIENCE, PATIENCE_EACH = 60.0, 3.0  # for a whole run, on a busy machine, and for each rank beyond eight
ENDING = 20.0  # for a process, once it has said how it ended


class End(NamedTuple):
    """How a rank ended: "killed", "stands still", "nothing" if its function returned, or the type and text of what it
    raised."""

    kind: str
    text: str
    at: float
    value: Any = None
    fault_at: float | None = None


_report: Connection | None = None
_fault_at: float | None = None


def fault_now() -> None:
    """Note the moment: what this rank raises next comes up through other code first."""
    global _fault_at
    _fault_at = time.time()


def kill_self() -> None:
    """End this process as the system does when memory runs out; the test hears of it."""
    assert _report is not None
    _report.send(End("killed", "", time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def end_with(value: Any) -> None:
    """End this process at once, from any thread, as if its function had returned `value`."""
    assert _report is not None
    _report.send(End("nothing", "", time.time(), value))
    os._exit(0)


def _rank_main(pipe: Connection) -> None:
    global _report
    _report = pipe
    torch.set_num_threads(1)
    function, arguments = pipe.recv()
    try:
        value = function(*arguments)
        pipe.send(End("nothing", "", time.time(), value))
    except BaseException as error:
        pipe.send(End(type(error).__name__, str(error), time.time(), traceback.format_exc(), _fault_at))
        raise


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, by_hand: bool = False) -> list[End]:
    """Run `function(*arguments)` on every rank and return how each ended.

    Args:
        by_hand: the store lives in rank 0, as without a launcher; otherwise in a process that outlives any rank.
    """
    with _meeting_place(by_hand) as place:
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            ours, theirs = Pipe()
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), **place}
            with theirs, open(os.devnull) as nothing:
                files = [nothing.fileno(), sys.__stdout__.fileno(), sys.__stderr__.fileno(), theirs.fileno()]
                processes.append(zygote.fork(rank, [__file__, "3"], files, zygote.environment() | variables))
            ours.send((function, arguments))
            pipes[ours] = rank
        try:
            ends = _collect(pipes, processes)
            deadline = time.monotonic() + ENDING
            while any(p.poll() is None and e.kind != "stands still" for p, e in zip(processes, ends, strict=True)):
                assert time.monotonic() < deadline, f"a process does not end: {ends}"
                time.sleep(0.02)
            return ends
        finally:
            for process in processes:
                if process.poll() is None:
                    kill_group(process.pid)
                    process.wait()


@contextlib.contextmanager
def _meeting_place(by_hand: bool) -> Iterator[dict[str, str]]:
    if by_hand:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return
    store = agent_store(60)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    del store


def _collect(pipes: dict[Connection, int], processes: list[Process]) -> list[End]:
    found: dict[int, End] = {}
    deadline = time.monotonic() + PATIENCE + PATIENCE_EACH * max(0, len(pipes) - 8)
    while len(found) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        if len(found) and all(_stands_still(p) for rank, p in enumerate(processes) if rank not in found):
            return [found.get(rank, End("stands still", "", time.time())) for rank in pipes.values()]
        for pipe in wait([pipe for pipe, rank in pipes.items() if rank not in found], timeout=min(left, 1.0)):
            assert isinstance(pipe, Connection)
            try:
                found[pipes[pipe]] = pipe.recv()
            except EOFError:
                found[pipes[pipe]] = End("died", "", time.time())
    return [found.get(rank, End("hangs", "", time.time())) for rank in pipes.values()]


def _stands_still(process: Process) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


if __name__ == "__main__":
    # What is sent is pickled under this module's imported name.
    importlib.import_module("tests.support.ended")._rank_main(Connection(int(sys.argv[1])))

"""Ranks as processes of their own, forked for a test, that may be killed: what each of the others raised, and when."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore

from launch import free_port

LIMIT = 10.0  # what is promised
PATIENCE = 60.0  # for a whole run, on a busy machine


class End(NamedTuple):
    """How a rank ended: "killed", "nothing" if its function returned, or the type and text of what it raised."""

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


def _rank_main(
    environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...], pipe: Connection
) -> None:
    global _report
    _report = pipe
    os.environ.update(environment)
    torch.set_num_threads(1)
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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock", "training", "transformers.models.gpt2.modeling_gpt2"])
    with _meeting_place(by_hand) as place:
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), **place}
            processes.append(context.Process(target=_rank_main, args=(environment, function, arguments, theirs)))
            processes[-1].start()
            theirs.close()
            pipes[ours] = rank
        try:
            return _collect(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


@contextlib.contextmanager
def _meeting_place(by_hand: bool) -> Iterator[dict[str, str]]:
    if by_hand:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    del store


def _collect(pipes: dict[Connection, int]) -> list[End]:
    found: dict[int, End] = {}
    deadline = time.monotonic() + PATIENCE
    while len(found) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        for pipe in wait([pipe for pipe, rank in pipes.items() if rank not in found], timeout=left):
            assert isinstance(pipe, Connection)
            try:
                found[pipes[pipe]] = pipe.recv()
            except EOFError:
                found[pipes[pipe]] = End("died", "", time.time())
    return [found.get(rank, End("hangs", "", time.time())) for rank in pipes.values()]

"""A rank killed in the middle of a step: the others end with an error that names it, within ten seconds.

Each rank is a process forked for the test, so that its end is a real one and no pool worker is lost.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from families import FAMILIES, batch
from pool import _launcher_environment as launcher_environment
from training import parallelize, rows

LIMIT = 10.0  # what is promised
MICROBATCHES = 4


def rank_main(environment: dict[str, str], stages: int, victim: int, moment: str, pipe: Connection) -> None:
    """One good step, then one in which the victim is killed; sends what this rank's own step raised, and when."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    try:
        model = parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=MICROBATCHES)
        inputs = rows(batch("causal", 8), model.data_parallel_rank, model.data_parallel_size)
        for step in range(2):
            for number, output in enumerate(model(**inputs)):
                if rank == victim and step == 1 and number == 1 and moment == "before the backward":
                    end_self(pipe)
                output.loss.backward()
                if rank == victim and step == 1 and number == MICROBATCHES - 1 and moment == "in the last microbatch":
                    end_self(pipe)
        if rank == victim:
            end_self(pipe)  # between two steps
        for output in model(**inputs):
            output.loss.backward()
        pipe.send(("nothing", "", time.time()))
    except Exception as error:
        pipe.send((type(error).__name__, str(error), time.time()))


def end_self(pipe: Connection) -> None:
    pipe.send(("killed", "", time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def lose(world_size: int, stages: int, victim: int, moment: str) -> dict[int, tuple[str, str, float]]:
    """What each survivor raised, and how many seconds after the kill."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock", "training", "transformers.models.gpt2.modeling_gpt2"])
    # As under torchrun, the store outlives any rank.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        environment = launcher_environment(rank, world_size, store.port)
        arguments = (environment, stages, victim, moment, theirs)
        processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes[ours] = rank
    try:
        return collect(pipes, victim)
    finally:
        for process in processes:
            process.kill()
            process.join()


def collect(pipes: dict[Connection, int], victim: int) -> dict[int, tuple[str, str, float]]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + 100
    while len(found) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        for pipe in wait([pipe for pipe, rank in pipes.items() if rank not in found], timeout=left):
            assert isinstance(pipe, Connection)
            found[pipes[pipe]] = pipe.recv()
    assert len(found) == len(pipes), f"ranks {sorted(set(pipes.values()) - set(found))} hang"
    kind, text, killed_at = found.pop(victim)
    assert kind == "killed", f"{kind}: {text}"
    return {rank: (kind, text, when - killed_at) for rank, (kind, text, when) in found.items()}


@pytest.mark.parametrize(
    ("world_size", "stages", "victim", "moment"),
    [
        (3, 3, 1, "before the backward"),
        (3, 3, 0, "before the backward"),
        (3, 3, 2, "in the last microbatch"),
        (3, 3, 1, "between two steps"),
        (4, 2, 3, "before the backward"),
        (4, 2, 0, "in the last microbatch"),
    ],
)
def test_survivors_of_a_killed_rank_name_it_within_ten_seconds(
    world_size: int, stages: int, victim: int, moment: str
) -> None:
    """Neighbours and ranks further away, of the same pipeline and of another."""
    for rank, (kind, text, seconds) in lose(world_size, stages, victim, moment).items():
        assert kind == "PipelineFailure", f"rank {rank}: {kind}: {text}"
        assert f"rank {victim} was lost" in text, f"rank {rank}: {text}"
        assert seconds < LIMIT, f"rank {rank} took {seconds:.1f} s"

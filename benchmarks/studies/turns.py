"""The side of a contestant's process: wait for turns of steps, time them, answer. See `processes.Contestant`."""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import torch
import torch.distributed as dist

# A step's figures: its loss, and maybe others.
Figures = dict[str, Any]
Step = Callable[[], Figures]


def serve(kinds: Mapping[str, Callable[[dict[str, Any]], Step]]) -> None:
    """Make the step of the kind that the JSON arguments name, warm it up, and time it as often as asked on stdin."""
    requests, answers = sys.stdin, _answers()
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step = kinds[arguments["kind"]](arguments)
    for _ in range(arguments["warmup"]):
        step()
    for request in requests:
        seconds, cpu, figures = [], [], []
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(int(request)):
            barrier()
            start, busy = time.perf_counter(), time.process_time()
            figures.append(step())
            cpu.append(time.process_time() - busy)
            barrier()
            seconds.append(time.perf_counter() - start)
        used = resource.getrusage(resource.RUSAGE_SELF)
        of_rank = {"peak_mib": used.ru_maxrss / 1024, "cpu": statistics.median(cpu), "faults": used.ru_minflt - faults}
        lists = {name: [entry[name] for entry in figures] for name in figures[0]}
        answers.write(json.dumps({"seconds": seconds, **lists, **of_rank}) + "\n")
        answers.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for all ranks, if there are several."""
    if dist.is_initialized():
        dist.barrier()


def _answers() -> TextIO:
    """The real stdout. What libraries print goes to stderr instead."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers

"""benchmarks/studies/free_transport.py: a step without transport time, and the same step written by hand."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

NUM_MICROBATCHES = 32


@pytest.fixture
def free_transport() -> Iterator[ModuleType]:
    """benchmarks/studies/free_transport.py, which makes a process group of its own."""
    import free_transport

    yield free_transport
    if dist.is_initialized():
        dist.destroy_process_group()


def calls_of(step: Callable[[], Any]) -> Counter[str]:
    """How often each of torch's own functions is called in a step; Python's may have the same names."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            calls[argument.__name__] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(("schedule", "num_ranks", "rank"), [("1f1b", 4, 1), ("zb-v", 4, 1)])
def test_the_calls_by_hand_are_those_of_the_executor(
    free_transport: ModuleType, schedule: str, num_ranks: int, rank: int
) -> None:
    """What the executor is measured against: the same messages and the same backwards."""
    arguments = {"schedule": schedule, "num_ranks": num_ranks, "rank": rank, "num_microbatches": NUM_MICROBATCHES}
    seen = {}
    for kind in ("with_executor", "by_hand"):
        step = getattr(free_transport, kind)(arguments)
        step()
        seen[kind] = calls_of(step)
    for name in ("send", "recv", "run_backward"):
        assert seen["with_executor"][name] == seen["by_hand"][name]
    assert seen["with_executor"]["wait"] == seen["by_hand"]["wait"] + 1  # for the sum of the losses
    assert seen["by_hand"]["run_backward"] >= NUM_MICROBATCHES

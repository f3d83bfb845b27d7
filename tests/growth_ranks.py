"""What a rank asks for, holds and is told, counted: for tests/test_growth.py and benchmarks/growth.py."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ended import kill_self
from families import FAMILIES, batch
from penstock.runtime.failures import ring
from training import parallelize, rows, run_step

TRANSPORT = ("allreduce", "allgather", "broadcast", "send", "recv")
# Python of a step that could look at every rank or pipeline.
COMPARING = ("settings.py", "layout.py", "frozen.py", "parts.py")
STAGES = 2


class CountingStore(dist.Store):
    """A store that counts what it is asked, by Python and by gloo, and the bytes of values."""

    def __init__(self, store: dist.Store, counts: Counter[str]) -> None:
        super().__init__()
        self._store, self._counts = store, counts

    def _count(self, value: Any = b"") -> None:
        self._counts["store operations"] += 1
        self._counts["store bytes"] += len(value)

    def set(self, key: str, value: Any) -> None:
        self._count(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count(value)
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value = self._store.compare_set(key, expected, desired)
        self._count(value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._count()
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._count()
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._count()
        self._store.wait(keys, *([] if timeout is None else [timeout]))

    def delete_key(self, key: str) -> bool:
        self._count()
        return self._store.delete_key(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._count(b"".join(map(bytes, values)))
        return values

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> CountingStore:
        return CountingStore(self._store.clone(), self._counts)  # type: ignore[attr-defined]

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout  # type: ignore[attr-defined, no-any-return]


@contextmanager
def counted_store(counts: Counter[str]) -> Iterator[None]:
    """Meanwhile ranks that meet from the environment ask a store that counts."""
    meet = dist.rendezvous

    def rendezvous(*args: Any, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        for store, rank, world_size in meet(*args, **options):
            yield CountingStore(store, counts), rank, world_size

    with mock.patch.object(dist, "rendezvous", rendezvous):
        yield


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count what this process asks of its process groups: calls, and the bytes that it hands them for the answers."""
    originals = {name: vars(dist.ProcessGroup)[name] for name in TRANSPORT}

    def counting(name: str) -> Any:
        def call(self: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            counts[name] += 1
            tensors = [leaf for leaf in pytree.tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            counts[f"bytes of {name}"] += sum(tensor.nbytes for tensor in tensors)
            return originals[name].__get__(self)(*args, **options)

        return call

    for name in TRANSPORT:
        setattr(dist.ProcessGroup, name, counting(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


@contextmanager
def python_calls(counts: Counter[str]) -> Iterator[None]:
    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and os.path.basename(frame.f_code.co_filename) in COMPARING:
            counts["python calls"] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def form_and_step() -> dict[str, Counter[str]]:
    """What forming asked for, what this rank has then, and what a step asks for."""
    forming, held, step, before = Counter[str](), Counter[str](), Counter[str](), _descriptors()
    new_group = dist.new_group

    def counting(*args: Any, **options: Any) -> Any:
        forming["new_group"] += 1
        return new_group(*args, **options)

    with counted(forming), counted_store(forming), mock.patch.object(dist, "new_group", counting):
        model = parallelize(FAMILIES["gpt2"].build(), STAGES, num_microbatches=2)
    inputs = rows(batch("causal", 2 * model.data_parallel_size), model.data_parallel_rank, model.data_parallel_size)
    run_step(model, inputs)
    with counted(step), python_calls(step):
        run_step(model, inputs)
    held["descriptors"], held["threads"] = _descriptors() - before, len(os.listdir("/proc/self/task"))
    held["groups"] = len(dist.distributed_c10d._world.pg_map)
    return {"forming": forming, "held": held, "step": step}


def lines_of_a_wait(slow: int, patience: float, seconds: float) -> int:
    """The lines that this rank sent to the watchers of others while one rank was slow for so long."""
    model = parallelize(FAMILIES["gpt2"].build(), STAGES, num_microbatches=2, patience=patience)
    inputs = rows(batch("causal", 2 * model.data_parallel_size), model.data_parallel_rank, model.data_parallel_size)
    run_step(model, inputs)
    lines, send, tell = Counter[str](), ring._Peer.send, ring.Ring.tell_one

    def counting(peer: Any, message: dict[str, Any]) -> None:
        lines["ring"] += 1
        send(peer, message)

    def counting_answers(*args: Any) -> None:
        lines["answers"] += 1
        tell(*args)

    with mock.patch.object(ring._Peer, "send", counting), mock.patch.object(ring.Ring, "tell_one", counting_answers):
        if dist.get_rank() == slow:
            time.sleep(seconds)
        run_step(model, inputs)
        dist.barrier()
    return lines.total()


def lose_one(victim: int, how: str) -> float:
    """Three steps; then one rank is killed or stopped inside a step. Raises on the others."""
    model = parallelize(FAMILIES["gpt2"].build(), STAGES, num_microbatches=2)
    inputs = rows(batch("causal", 2 * model.data_parallel_size), model.data_parallel_rank, model.data_parallel_size)
    for _ in range(3):
        run_step(model, inputs)
    for output in model(**inputs):
        if dist.get_rank() == victim:
            kill_self() if how == "kill" else stop_self()
        output.loss.backward()
    raise AssertionError("the step ended without the rank that was lost")


def stop_self() -> None:
    import signal

    assert threading.current_thread() is threading.main_thread()
    os.kill(os.getpid(), signal.SIGSTOP)

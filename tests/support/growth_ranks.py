"""What a rank asks for, holds and is told, counted: for test_growth.py and benchmarks/studies/growth.py."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils import _pytree as pytree

from penstock.layout.layout import Layout
from penstock.runtime.comm import groups
from penstock.runtime.comm.bootstrap import default_store
from penstock.runtime.failures import ring
from penstock.runtime.failures.board import PipelineFailure
from tests.support import ended
from tests.support.ended import End, kill_self, run_ranks
from tests.support.families import FAMILIES, batch
from tests.support.launch import agent_store
from tests.support.training import parallelize, rows, run_step

TRANSPORT = ("allreduce", "allgather", "broadcast", "send", "recv")
# Python of a step that could look at every rank or pipeline.
COMPARING = ("settings.py", "layout.py", "parts.py")
STAGES = 2
AT_REST = "penstock/at rest"


# Whose a question to the store is, by what is in its key.
OWNERS = {b"//cpu//": "gloo", b"penstock": "Penstock", b"is there an answer": "Penstock", b"": "torch"}


class CountingProxy:
    """Between the ranks and their store: counts their connections, what they send, which is one piece for each
    question, and all bytes; these also by whose they are. When a rank says `AT_REST`, also the connections that are
    held then, and the questions until then without those that a connection has brought before: how often something is
    looked for says how long it took to come.

    Attributes:
        port: where the ranks find it.
    """

    def __init__(self, store: dist.TCPStore) -> None:
        self._store, self.counts = store, Counter[str]()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        poll = selectors.DefaultSelector()
        poll.register(self._listener, selectors.EVENT_READ)
        held = 0
        while True:
            for key, _ in poll.select():
                if key.data is None:
                    caller, _ = self._listener.accept()
                    self.counts["connections"] += 1
                    held += 1
                    store = socket.create_connection(("127.0.0.1", self._store.port))
                    owner, known = ["torch"], set[bytes]()  # of the latest question, and all questions
                    for one, other, asks in ((caller, store, True), (store, caller, False)):
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        poll.register(one, selectors.EVENT_READ, (other, asks, owner, known))
                    continue
                assert isinstance(key.fileobj, socket.socket)
                other, asks, owner, known = key.data
                try:
                    piece = key.fileobj.recv(1 << 16)
                    other.sendall(piece)
                except OSError:
                    piece = b""
                if asks:
                    owner[0] = next(name for mark, name in OWNERS.items() if mark in piece)
                    self.counts["different operations"] += bool(piece) and piece not in known
                    known.add(piece)
                    if AT_REST.encode() in piece:
                        self.counts["held"], self.counts["asked"] = held, self.counts["different operations"]
                for whose in ("", f" of {owner[0]}"):
                    self.counts[f"bytes{whose}"] += len(piece)
                    self.counts[f"operations{whose}"] += asks and bool(piece)
                if not piece:
                    held -= asks
                    poll.unregister(key.fileobj)
                    key.fileobj.close()
                    with suppress(OSError):
                        other.shutdown(socket.SHUT_RDWR)


def run_counted(world_size: int, function: Callable[..., Any], *arguments: Any) -> tuple[list[End], Counter[str]]:
    """`run_ranks`, and what all of them asked the store."""
    proxy = CountingProxy(agent_store(60))
    with mock.patch.object(ended, "agent_store", lambda timeout: proxy):
        return run_ranks(world_size, function, *arguments), proxy.counts


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


def _held(what: str) -> int:
    """How many open files ("fd") or threads ("task") this process has at every look for half a second: some are there
    for a moment only."""
    looks = []
    for _ in range(10):
        looks.append(len(os.listdir(f"/proc/self/{what}")))
        time.sleep(0.05)
    return min(looks)


def _await_rest() -> None:
    """Until of this process's connections to the store only torch's is left: others go while there are no questions."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        calls = [call for call in psutil.Process().net_connections("tcp") if call.raddr]
        if sum(call.raddr.port == int(os.environ["MASTER_PORT"]) for call in calls) <= 1:
            return
        time.sleep(0.1)


@cache
def formed() -> tuple[Any, dict[str, torch.Tensor]]:
    """This process's model, and its rows of a batch."""
    model = parallelize(FAMILIES["gpt2"].build(), STAGES, num_microbatches=2)
    return model, rows(
        batch("causal", 2 * model.data_parallel_size), model.data_parallel_rank, model.data_parallel_size
    )


def form_and_step() -> dict[str, Counter[str]]:
    """What forming asked for, what this rank has then, and what a step asks for."""
    forming, held, step, before = Counter[str](), Counter[str](), Counter[str](), _held("fd")
    new_group = dist.new_group

    def counting(*args: Any, **options: Any) -> Any:
        forming["new_group"] += 1
        return new_group(*args, **options)

    with counted(forming), mock.patch.object(dist, "new_group", counting):
        model, inputs = formed()
    run_step(model, inputs)
    with counted(step), python_calls(step):
        run_step(model, inputs)
    dist.barrier()
    _await_rest()
    dist.barrier()
    if dist.get_rank() == 0:
        _get_default_store().set(AT_REST, "")
    dist.barrier()
    held["descriptors"], held["threads"] = _held("fd") - before, _held("task")
    held["groups"] = len(dist.distributed_c10d._world.pg_map)
    return {"forming": forming, "held": held, "step": step}


def groups_of_one(world_size: int, num_stages: int, rank: int, device: str) -> Counter[str]:
    """What one rank of a large world makes, alone in its process: nobody answers, so nothing is connected.

    Args:
        device: "cpu" for groups on gloo, or one whose groups stand for NCCL's.
    """
    counts, new_group = Counter[str](), dist.new_group

    def counting(*args: Any, **options: Any) -> Any:
        counts["new_group"] += 1
        return new_group(*args, **options)

    def connecting(group: dist.ProcessGroup, peers: set[int]) -> None:
        counts["connections"] += len(peers)

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    layout = Layout.place([[[f"unit {stage}"] for stage in range(num_stages)]] * (world_size // num_stages), None, 1)
    stages = [tuple(range(stage, world_size, num_stages)) for stage in range(num_stages)]
    threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    try:
        with (
            mock.patch.object(groups, "transport", lambda device: "gloo" if device.type == "cpu" else "fake"),
            mock.patch.multiple(groups.gloo, await_ranks=mock.DEFAULT, connect=connecting),
            mock.patch.object(dist, "new_group", counting),
        ):
            made = groups.Groups(layout, rank, torch.device(device), stages)
        counts["threads"] = len(os.listdir("/proc/self/task")) - threads
        counts["descriptors"] = len(os.listdir("/proc/self/fd")) - descriptors + counts["connections"]
        made.destroy()
    finally:
        dist.destroy_process_group()
    return counts


def lines_of_a_wait(slow: int, patience: float, stay: Callable[[], object]) -> int:
    """The lines that this rank sent to the watchers of others while one rank was slow, as it had to `stay`."""
    model, inputs = formed()
    usual, model.pipeline.board.patience = model.pipeline.board.patience, patience
    run_step(model, inputs)
    lines, send, tell = Counter[str](), ring._Peer.send, ring.Ring.tell_one

    def counting(peer: Any, message: dict[str, Any]) -> None:
        lines["ring"] += message.keys() != {"number"}  # with which whoever calls is met
        send(peer, message)

    def counting_answers(*args: Any) -> None:
        lines["answers"] += 1
        tell(*args)

    with mock.patch.object(ring._Peer, "send", counting), mock.patch.object(ring.Ring, "tell_one", counting_answers):
        if dist.get_rank() == slow:
            stay()
        run_step(model, inputs)
        dist.barrier()
    dist.barrier()  # none takes its leave while others count
    model.pipeline.board.patience = usual
    return lines.total()


def lose_one(victim: int, how: str, **told: Any) -> dict[str, Any]:
    """Three steps; then one rank is killed or stopped inside a step: what this rank says of it, after how many seconds
    it said so and had learned of it, and the lines that it sent to the watchers of others; and what it has `told`
    already."""
    model, inputs = formed()
    for _ in range(3):
        run_step(model, inputs)
    store, lines, send = default_store(), Counter[str](), ring._Peer.send
    assert store is not None

    def found(text: str) -> dict[str, Any]:
        fault, now = float(store.get("fault")), time.time()
        learned = (model.pipeline.board.failed_at or now) - fault
        return {**told, "text": text, "seconds": now - fault, "learned": learned, "lines": lines.total()}

    def counting(peer: Any, message: dict[str, Any]) -> None:
        lines["ring"] += message.keys() != {"number"}  # with which whoever calls is met
        send(peer, message)

    silent: list[dict[str, Any]] = []

    def end_with(record: logging.LogRecord) -> bool:
        # Its host waits for the rank that stands still until the time limit of transfers, and others need its watcher.
        if "does not answer" in record.getMessage():
            silent.append(found(record.getMessage()))
            threading.Timer(3.0, ended.end_with, silent[:1]).start()
        return True

    logging.getLogger("penstock").addFilter(end_with)
    try:
        with mock.patch.object(ring._Peer, "send", counting):
            for output in model(**inputs):
                if dist.get_rank() == victim:
                    store.set("fault", str(time.time()))
                    kill_self() if how == "kill" else os.kill(os.getpid(), signal.SIGSTOP)
                output.loss.backward()
    except PipelineFailure as error:
        # Of a rank that stands still it was told before: this is one of the others, which ended a moment earlier.
        return silent[0] if silent else found(str(error))
    raise AssertionError("the step ended without the rank that was lost")

"""Ranks as threads of one process, and one rank as a forked process that may be killed: for the checkpoint tests."""

from __future__ import annotations

import copy
import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock
from penstock.checkpoint.load import from_parallelized
from penstock.checkpoint.ranks import CheckpointRanks, SavingRank
from penstock.checkpoint.save import save_parallelized
from penstock.modeling.graph.units import list_units
from penstock.modeling.stage.split import SplitModel
from tests.support.families import FAMILIES
from tests.support.stage_driver import cut

TIMEOUT = 60.0


class ThreadComm(CheckpointRanks):
    """`CheckpointRanks` between threads. Counts the bytes each rank received."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        super().__init__(place=SavingRank(rank, shared.size))
        self._shared = shared
        self.rank, self.size, self.ranks = rank, shared.size, list(range(shared.size))
        self.received = 0

    def _exchange(self, mine: bytes, doing: str) -> list[Any]:
        self._shared.slots[self.rank] = mine
        self._shared.barrier.wait(TIMEOUT)
        gathered = [json.loads(one) for one in self._shared.slots]
        self._shared.barrier.wait(TIMEOUT)
        return gathered

    def receive(self, tensor: torch.Tensor | None, source: int, doing: str) -> torch.Tensor | None:
        received = super().receive(tensor, source, doing)
        self.received += 0 if received is None else received.nbytes
        return received

    def _send(self, tensor: torch.Tensor, destination: int, doing: str) -> None:
        assert tensor.is_contiguous() and not tensor.is_cuda
        self._shared.lines[self.rank, destination].put(tensor.clone(), timeout=TIMEOUT)

    def _receive(self, tensor: torch.Tensor, source: int, doing: str) -> None:
        arrived = self._shared.lines[source, self.rank].get(timeout=TIMEOUT)
        assert (arrived.shape, arrived.dtype) == (tensor.shape, tensor.dtype)
        tensor.copy_(arrived)


class _Shared:
    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        # One place each: a sender waits until the receiver has taken the message before, as a rendezvous would.
        self.lines: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            (a, b): queue.Queue(maxsize=1) for a in range(size) for b in range(size)
        }


def on_ranks(size: int, work: Callable[[int, ThreadComm], Any]) -> list[Any]:
    """`work(rank, comm)` on `size` threads: results in order of rank, or the exception in place of a result."""
    shared = _Shared(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, ThreadComm(shared, rank))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def raised(results: Sequence[Any]) -> list[Any]:
    """`results`, after raising the first exception among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


_UNITS: dict[tuple[str, int], list[str]] = {}


def stages_of(model: nn.Module, num_stages: int) -> list[list[str]]:
    """About equal numbers of units per stage."""
    kind = type(model).__name__, len(list(model.modules()))
    if kind not in _UNITS:
        _UNITS[kind] = list_units(model)
    return cut(_UNITS[kind], num_stages)


def split_copies(model: nn.Module, num_stages: int) -> list[nn.Module]:
    """The model of each rank of a pipeline with `num_stages` stages."""
    stages = stages_of(model, num_stages)
    return [SplitModel(copy.deepcopy(model), stages, [stage]).model for stage in range(num_stages)]


def save(models: Sequence[nn.Module], directory: Any, **options: Any) -> list[Any]:
    """Save a pipeline of as many ranks as there are models; each rank's result or exception."""

    def work(rank: int, comm: ThreadComm) -> ThreadComm:
        save_parallelized(models[rank], directory, world_comm=comm, **options)
        return comm

    return on_ranks(len(models), work)


def load(models: Sequence[nn.Module], directory: Any, **options: Any) -> list[Any]:
    """Load into a pipeline; each rank's result or exception."""
    return on_ranks(
        len(models), lambda rank, comm: from_parallelized(models[rank], directory, world_comm=comm, **options)
    )


def save_alone(model: nn.Module, directory: Any, **options: Any) -> None:
    """Save a whole model from one rank."""
    save_parallelized(model, directory, world_comm=CheckpointRanks(), **options)


def scramble(model: nn.Module, seed: int) -> nn.Module:
    """Give every parameter and floating persistent buffer fresh random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def gpt2(seed: int = 0, **settings: Any) -> Any:
    """A small model of these values, in float32."""
    return scramble(FAMILIES["gpt2"].build(dtype=torch.float32, **{"n_layer": 2, **settings}), seed)


def assert_holds(model: nn.Module, reference: nn.Module) -> set[str]:
    """Every tensor in `model` equals, bit for bit, the one of that name in `reference`. Returns the names."""
    expected = reference.state_dict()
    state = model.state_dict()
    for name, tensor in state.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
    return set(state)


def assert_hold_together(models: Sequence[nn.Module], reference: nn.Module) -> None:
    """The stages hold what `reference` does, and nothing of it is missing."""
    assert set().union(*(assert_holds(model, reference) for model in models)) == set(reference.state_dict())


def trained(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """A model and an optimizer that has state."""
    model = gpt2(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    give_state(model, optimizer, seed)
    return model, optimizer


def give_state(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A step with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def loaded(folder: Path, which: str | int = "latest") -> tuple[penstock.Checkpoint, Any, torch.optim.Optimizer]:
    """A checkpoint of a model and an optimizer, and others into which it was loaded."""
    model, optimizer = trained(99)
    return penstock.load_checkpoint(folder, which, model=model, optimizer=optimizer), model, optimizer


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for mine, theirs in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        for name, value in one.state[mine].items():
            assert torch.equal(value, other.state[theirs][name])


def content(folder: Path) -> dict[str, bytes]:
    """Of each file."""
    return {name: (folder / name).read_bytes() for name in os.listdir(folder)}


def flip(path: Path) -> None:
    """Change a bit in the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def in_fork(work: Callable[[], Any]) -> int:
    """Run `work` in a forked process. Returns its exit status: 0, 1 after an exception, or minus a signal's number."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

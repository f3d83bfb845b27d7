"""The pool's worker: a process in which pool.py runs one function after another."""

import faulthandler
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.support.pool import FORMED, Task


def serve(connection: Connection) -> None:
    """Answer tasks until the parent closes the connection."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection.send_bytes(b"ready")
    while True:
        try:
            task: Task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        before = dict(os.environ)
        threads = torch.get_num_threads()
        try:
            answer = _answer(task, connection)
        finally:
            os.environ.clear()
            os.environ.update(before)
            torch.set_num_threads(threads)
        connection.send_bytes(answer)


def _answer(task: Task, connection: Connection) -> bytes:
    """When the task's function ended and its result, or its exception with the traceback as a note; pickled."""
    ended = time.monotonic()
    try:
        try:
            _set_up(task)
            if task.initialize:
                connection.send_bytes(FORMED)
                connection.recv_bytes()
            result = _function(task)(*task.arguments, **task.keywords)
        finally:
            # Before anything is taken down: the peers that fail because this rank's connections close fail later.
            ended = time.monotonic()
            _take_down()
        return _pickled((ended, result))
    except BaseException as error:  # SystemExit and KeyboardInterrupt included: a rank's end is a result here
        text = "".join(traceback.format_exception(error))
        try:
            faithful = isinstance(error, Exception) and pickle.loads(pickle.dumps(error)) is not None
        except Exception:
            faithful = False
        if not faithful:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.__traceback__ = None
        error.add_note(text)
        return pickle.dumps((ended, error))


def _pickled(result: Any) -> bytes:
    """Plain tensors go as their bytes: else torch writes a file in memory for each."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
                return NotImplemented
            if value.requires_grad or vars(value) or value.dtype.is_complex:
                return NotImplemented
            data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            return _unpickled_tensor, (data, value.dtype, tuple(value.shape))

    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(result)
    return file.getvalue()


def _unpickled_tensor(data: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _function(task: Task) -> Callable[..., Any]:
    found: Any = importlib.import_module(task.module)
    for name in task.function.split("."):
        found = getattr(found, name)
    return found


def _set_up(task: Task) -> None:
    # Nothing of the last task is left. What there is stays (imports, caches): collections need not look at it again.
    gc.collect()
    gc.freeze()
    os.environ.update(task.environment)
    sys.path[:] = task.path
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    if task.initialize:
        dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout))


def _take_down() -> None:
    if dist.is_initialized():
        # A DDP model goes while its group's threads run: if both go at once, they may wait for each other.
        gc.collect()
        dist.destroy_process_group()
    # torch counts groups made in vain too, and puts the count into the keys under which ranks meet: a worker that once
    # failed to form a group would never again meet workers that did not.
    dist.distributed_c10d._world.group_count = 0
    gc.collect()


if __name__ == "__main__":
    # What is pickled here is found by the module's imported name only.
    importlib.import_module("tests.support.pool_worker").serve(Connection(int(sys.argv[1])))

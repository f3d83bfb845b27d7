"""The keys of a key-value store, each asked for with a time limit.

torch's TCPStore waits without end for an answer of a process that stands still (SIGSTOP, a hung machine): its own
timeouts are kept by the process that is asked.
"""

from __future__ import annotations

import copy
import socket
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

import torch.distributed as dist

from penstock.runtime.threads import start_thread

T = TypeVar("T")

# After so long without a question a connection of one's own is closed.
IDLE_SECONDS = 2.0


class StoreTimeout(dist.DistNetworkError):
    """The store has not answered in time: its process stands still."""


class Keys:
    """A part of a store, whose keys begin with `prefix`. `own`: a clone of the store, which is asked in its place, and
    closed while there are no questions. `host`: which has the store; None if no single one has it.

    Every method raises `StoreTimeout` if there is no answer within `seconds`, and at once while an earlier question is
    without one; other errors are the store's.
    """

    def __init__(self, store: dist.Store, seconds: float, prefix: str = "", own: dist.Store | None = None) -> None:
        self.seconds, self._prefix = seconds, prefix
        whole: Any = store
        while isinstance(whole, dist.PrefixStore):
            whole = whole.underlying_store
        self.host: str | None = whole.host if isinstance(whole, dist.TCPStore) else None
        self._client = _Client(store, own, None if self.host is None or own is None else (self.host, whole.port))
        self._asking = _StoreThread(self._client)

    @property
    def store(self) -> dist.Store:
        store = self._client.store()
        return dist.PrefixStore(self._prefix, store) if self._prefix else store

    def within(self, prefix: str) -> Self:
        part = copy.copy(self)
        part._prefix = "/".join(filter(None, (self._prefix, prefix)))
        return part

    def put(self, key: str, value: str) -> None:
        self.ask(lambda: self.store.set(key, value))

    def get(self, key: str) -> str | None:
        """The value of a key, None if it has none: at once, while torch's `get` would wait for it."""
        unlikely = "?"
        value = self.ask(lambda: self.store.compare_set(key, unlikely, unlikely)).decode()
        return None if value == unlikely else value

    def create(self, key: str, value: str) -> str:
        """Set a key that has no value; returns its value afterwards, which another process may have set first."""
        return self.ask(lambda: self.store.compare_set(key, "", value)).decode() or value

    def delete(self, key: str) -> None:
        self.ask(lambda: self.store.delete_key(key))

    def ask(self, question: Callable[[], T]) -> T:
        """The answer to a question to the store."""
        asking = self._asking
        if asking.unanswered is None or asking.unanswered.done():
            answer: Future[T] = Future()
            asking.questions.put(partial(_do, question, answer))
            wait([answer], self.seconds)
            if answer.done():
                return answer.result()
            asking.unanswered = answer
        raise StoreTimeout(f"the store has not answered for {self.seconds:g} s: its process stands still")


@dataclass
class _Client:
    """A store, or a clone that is asked instead, and made again once it was closed. `place`: where it listens."""

    shared: Any
    own: dist.Store | None
    place: tuple[str, int] | None

    def store(self) -> dist.Store:
        if self.place is not None and self.own is None:
            try:  # torch would call for long where nobody listens
                socket.create_connection(self.place, IDLE_SECONDS).close()
            except OSError as error:
                raise dist.DistNetworkError(f"the store is gone: {error}") from None
            self.own = self.shared.clone()
        return self.shared if self.own is None else self.own


class _StoreThread:
    """A thread that puts the questions to one store, for all its parts. It ends with them, or with the process."""

    def __init__(self, client: _Client) -> None:
        # The latest question that was not answered in time.
        self.unanswered: Future[Any] | None = None
        self.questions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        end = partial(self.questions.put, None)
        weakref.finalize(self, end)
        start_thread(_do_all, self.questions, client, name="penstock-store", end=end)


def _do_all(calls: SimpleQueue[Callable[[], None] | None], client: _Client) -> None:
    while True:
        try:
            call = calls.get(timeout=None if client.own is None or client.place is None else IDLE_SECONDS)
        except Empty:
            client.own = None
            continue
        if call is None:
            return
        call()
        del call  # with what it holds


def in_one_line(error: Exception) -> str:
    """An error of the store without torch's stack; its class if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Do `call` in a thread of its own, which is left behind if nobody waits for it to end."""
    outcome: Future[T] = Future()
    start_thread(_do, call, outcome, name=name)
    return outcome


def _do(call: Callable[[], T], outcome: Future[T]) -> None:
    try:
        result = call()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)

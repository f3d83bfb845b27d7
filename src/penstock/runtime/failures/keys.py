"""The keys of a key-value store, each asked for with a time limit.

torch's TCPStore waits without end for an answer of a process that stands still (SIGSTOP, a hung machine): its own
timeouts are kept by the process that is asked.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import torch.distributed as dist

from penstock.runtime.threads import start_thread

T = TypeVar("T")


class Unanswered(dist.DistNetworkError):
    """The store has not answered in time: its process stands still."""


class Keys:
    """A part of a store, whose keys begin with `prefix`.

    Every method raises `Unanswered` if there is no answer within `seconds`, and at once while an earlier question is
    without one; other errors are the store's.
    """

    def __init__(self, store: dist.Store, seconds: float, prefix: str = "") -> None:
        self.seconds = seconds
        self._whole, self._prefix = store, prefix
        self.store = dist.PrefixStore(prefix, store) if prefix else store
        self._asking = _Asking()

    @property
    def host(self) -> str | None:
        """The host that has the store; None if no single one has it."""
        store: Any = self._whole
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store.host if isinstance(store, dist.TCPStore) else None

    def within(self, prefix: str) -> Self:
        part = copy.copy(self)
        part._prefix = "/".join(filter(None, (self._prefix, prefix)))
        part.store = dist.PrefixStore(part._prefix, self._whole)
        return part

    def put(self, key: str, value: str) -> None:
        self.ask(lambda: self.store.set(key, value))

    def get(self, key: str) -> str | None:
        """The value of a key, None if it has none: at once, while torch's `get` would wait for it."""
        unlikely = "?"
        found = self.ask(lambda: self.store.compare_set(key, unlikely, unlikely)).decode()
        return None if found == unlikely else found

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
        raise Unanswered(f"the store has not answered for {self.seconds:g} s: its process stands still")


class _Asking:
    """A thread that puts the questions to one store, for all its parts. It ends with them."""

    def __init__(self) -> None:
        # The latest question that was not answered in time.
        self.unanswered: Future[Any] | None = None
        self.questions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self.questions.put, None)
        start_thread(_do_all, self.questions, name="penstock-store")


def _do_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
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

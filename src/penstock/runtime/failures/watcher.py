"""The watcher: a thread of each rank that notices when another rank ends, whatever its own main thread is doing.

It keeps the rank's place in a ring of connections (`ring`), tells the failure boards of this process what happened,
and ends what their main threads wait for. It also looks after those that wait for long (`inquiry`).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import multiprocessing.util
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from penstock.runtime.failures.board import Endings, FailureBoard, PipelineFailure
from penstock.runtime.failures.inquiry import Inquiries
from penstock.runtime.failures.keys import Keys, StoreTimeout, in_one_line, in_thread
from penstock.runtime.failures.ring import NEWS_SECONDS, Ring
from penstock.runtime.threads import start_thread

T = TypeVar("T")

logger = logging.getLogger("penstock")

TICK_SECONDS = 1.0
# How long an answer of the store may take. There is none if its process stands still.
STORE_SECONDS = 2.0
# How long a connection of the watch's own to the store may take.
CONNECT = datetime.timedelta(seconds=5)
# Characters of a failing rank's exception that are shown; a longer one is shortened.
LONGEST_WORDS = 4000


class Watch:
    """What this process knows about the job's other ranks. One serves all models, and lives as long as any of them."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, here: bool):
        self.rank = rank
        self.world_size = world_size
        self.endings = Endings()
        # The default process group it was started for, once there is one. Weakly: a group closes only when nothing
        # refers to it, and the watch may outlive it.
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._boards: weakref.WeakSet[FailureBoard] = weakref.WeakSet()
        # Notified whenever something is learned, for those who wait for it.
        self._learned = threading.Condition()
        self._inquiries = Inquiries(self)
        # Whether a job is about to be formed, for which it goes on.
        self.expecting = True
        self.hears_errors = False
        # A separate client: one that waits for a key blocks other threads.
        self.keys = Keys(store, STORE_SECONDS, own=_own_client(store))
        self.ring = Ring(
            self.keys, rank, world_size, "127.0.0.1" if here else self.keys.host,
            on_news=self._hear, on_lost=self._lose, on_left=self._note_end,
        )  # fmt: skip
        self._thread = start_thread(self._serve, name="penstock-watcher")

    def begin(self, world: dist.ProcessGroup | None) -> None:
        """Serve this default process group; None: one that is not made yet."""
        self._world = None if world is None else weakref.ref(world)

    def serves(self, world: dist.ProcessGroup | None) -> bool:
        """Whether it was begun for this one, which has not been given up since."""
        return world is None if self._world is None else world is not None and self._world() is world

    def add(self, board: FailureBoard) -> None:
        """Tell `board` of failures from now on, and of those before. The watch goes on as long as it has boards."""
        self._boards.add(board)
        self._tell_boards()

    def remove(self, board: FailureBoard) -> None:
        self._boards.discard(board)
        self._close_if_alone()

    def _close_if_alone(self) -> None:
        if not list(self._boards) and not self.expecting:
            _close(self)

    def ends_with(self, error: BaseException) -> None:
        """Tell the other ranks that `error` is ending this process."""
        text = "".join(traceback.format_exception_only(error)).strip()
        words = self.endings.words[self.rank] = text[:LONGEST_WORDS]
        self.ring.tell({"words": words})

    def wait(self, known: Callable[[], bool], seconds: float) -> bool:
        """Wait up to `seconds` until `known()`."""
        with self._learned:
            return self._learned.wait_for(known, max(0.0, seconds))

    def notify(self) -> None:
        with self._learned:
            self._learned.notify_all()

    def close(self, leave: bool = True) -> None:
        """End the thread and close the connections."""
        self.ring.stop(leave)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * TICK_SECONDS + NEWS_SECONDS)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self.ring.serve(self._tick, TICK_SECONDS)
        finally:
            self.ring.close()
            # Its connection goes with it.
            del self.keys

    def _hear(self, origin: int, news: dict[str, Any]) -> None:
        if "lost" in news:
            self._lose(news["lost"], tells_others=False)
        elif "left" in news:
            self._note_end(news["left"], tells_others=False)
        elif "words" in news:
            self.endings.words[origin] = news["words"]
            self._tell_boards()
        elif "at" in news:
            self._inquiries.hear(origin, news)
        else:
            for board in list(self._boards):
                if board.name == news["board"] and "failure" in news:
                    board.hear(news["failure"])
                elif board.name == news["board"] and "said" in news:
                    logger.warning(news["said"])
                elif board.name == news["board"]:
                    self._inquiries.answer(board, origin, news)
        self.notify()

    def _lose(self, rank: int, tells_others: bool = True) -> None:
        """A rank's process has ended without leave. `tells_others`: this rank noticed it itself, so the others are yet
        to be told."""
        if rank in self.endings.lost:
            return
        self.endings.lost.add(rank)
        if tells_others:
            self.ring.tell({"lost": rank})
        self._tell_boards()

    def _note_end(self, rank: int, tells_others: bool = True) -> None:
        self.endings.left.add(rank)
        if tells_others:
            self.ring.tell({"left": rank})
        self.notify()

    def _tell_boards(self) -> None:
        for board in list(self._boards):
            board.hear_of_losses()
        self.notify()

    def _tick(self) -> None:
        for board in list(self._boards):
            if not self.ring.complete:
                board.look_up()
            if board.failed is None:
                if fault := board.find_fault():
                    board.fail(fault[0], suspects=fault[1])
                self._inquiries.look_after(board)
        # Boards may also go by garbage collection, of which nobody is told: it runs in any thread, which may hold any
        # lock. Nor does this thread wait for the lock: who has it may wait for this thread to end.
        if not list(self._boards) and _lock.acquire(blocking=False):
            try:
                self._close_if_alone()
            finally:
                _lock.release()


# -- the watch of this process -----------------------------------------------------------------------------------------

_lock = threading.RLock()
_watch: Watch | None = None
# What to call when the watch closes.
_undo: contextlib.ExitStack = contextlib.ExitStack()


def _own_client(store: Any) -> dist.Store | None:  # torch's stubs know neither of these methods
    before = store.timeout
    try:
        store.set_timeout(CONNECT)
        client: dist.Store | None = store.clone()
        return client
    except Exception as error:
        logger.warning("the watcher may learn late of lost ranks: no connection of its own (%s)", in_one_line(error))
        return None
    finally:
        store.set_timeout(before)


def start(store: dist.Store | None, rank: int, world_size: int, here: bool = False) -> Watch | None:
    """Begin to watch the other ranks of a world that meets in `store`, all of them on this machine if they are `here`;
    None if there is nobody to watch. The watch closes with the last of its boards."""
    global _watch
    with _lock:
        world = dist.group.WORLD if dist.is_initialized() else None
        if _watch is not None and _watch.serves(world):
            _watch.expecting = True
            return _watch
        if _watch is not None:  # of a world that has been given up
            _close(_watch)
        if store is None or world_size == 1:
            return None
        _watch = Watch(store, rank, world_size, here)
        _watch.begin(world)
        _hook_up()
        return _watch


def stop() -> None:
    """Stop watching, because the watched world is given up."""
    with _lock:
        if _watch is not None:
            _close(_watch)


def _close(watch: Watch, leave: bool = True) -> None:
    global _watch
    with _lock:
        if _watch is not watch:
            return
        _watch = None
        _undo.close()
    watch.close(leave)


def _leave() -> None:
    """This process ends: tell the others how, so that they do not take it for lost."""
    watch = _watch
    if watch is None:
        return
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None or isinstance(error, PipelineFailure):
        _close(watch)
        return
    if watch.rank not in watch.endings.words:
        watch.ends_with(error)
    # One that was ended by an exception is lost to the others.
    _close(watch, leave=False)


def _hook_up() -> None:
    """Register hooks for this process's end: once for all models, until the last of them is closed."""
    atexit.register(_leave)
    _undo.callback(atexit.unregister, _leave)
    # A process that multiprocessing started never runs atexit's functions.
    _undo.callback(multiprocessing.util.Finalize(None, _leave, exitpriority=100).cancel)


def hear_of_errors(watch: Watch) -> None:
    """Hear of the exception that ends this process, from now on. torch has wrapped the hook itself by then."""
    watch.expecting = False
    if watch.hears_errors:
        return
    watch.hears_errors = True
    previous = sys.excepthook

    def tell_the_others(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        previous(kind, value, trace)
        if _watch is not None and not isinstance(value, PipelineFailure):
            _watch.ends_with(value)

    def restore() -> None:
        # Somebody else may have wrapped it meanwhile; then it stays, and does nothing.
        if sys.excepthook is tell_the_others:
            sys.excepthook = previous

    sys.excepthook = tell_the_others
    _undo.callback(restore)


def interruptible(call: Callable[[], T], board: FailureBoard, limit: datetime.timedelta | None) -> T:
    """Do `call`, which waits for other ranks where nothing can wake it, such as torch's rendezvous: in a thread of its
    own, which is left behind if the job fails meanwhile (PipelineFailure). `limit` is the call's own time limit: only
    after it is a store that does not answer an error."""
    watch = _watch
    if watch is None:
        return call()
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> T:
        if device is not None:  # each thread has its own
            torch.accelerator.set_device_index(device)
        return call()

    outcome, started = in_thread(run, "penstock-rendezvous"), time.monotonic()
    outcome.add_done_callback(lambda _: watch.notify())
    while not watch.wait(lambda: outcome.done() or board.failed is not None, TICK_SECONDS):
        try:
            # torch leaves its time limits to the store, which may stand still.
            watch.keys.get("is there an answer")
        except dist.DistError as error:
            late = limit is not None and time.monotonic() - started > limit.total_seconds()
            if isinstance(error, StoreTimeout) and late:
                raise
    if outcome.done() and (board.failed is None or outcome.exception() is None):
        return outcome.result()
    board.check()
    raise AssertionError("unreachable")

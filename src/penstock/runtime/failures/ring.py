"""A connection from each rank to the next: a ring on which a process that ends is noticed and news goes round.

The kernel closes a process's connections however it ends, so both neighbours of a killed rank notice within
milliseconds, whatever its main thread or its device was doing, and before any process group exists. News is passed on
by every rank that has not heard it, so it reaches all ranks even when one is gone; no key-value store is needed for
that.

Both sides of a call prove that they know the job's secret (see `strangers`); without one, what is in the store.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing.connection
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.runtime.failures import strangers
from penstock.runtime.failures.keys import Keys, StoreTimeout
from penstock.runtime.failures.strangers import proof, proves

logger = logging.getLogger("penstock")

# A line is one message: far more than any has.
LONGEST_LINE = 1 << 20
CONNECT_SECONDS = 2.0
# How long a caller has to say who it is.
CALLER_SECONDS = 10.0
# How long the store may take to answer the first time, before it is known to be there.
FIRST_SECONDS = 5.0
# How long a ring that takes leave waits for its neighbours to close their ends. A connection that is closed with
# something unread is reset, and a reset takes away what the other end has not read yet: the leave.
LEAVING_SECONDS = 1.0
# How long a ring that has news waits, before it closes, for neighbours that are not connected yet.
NEWS_SECONDS = 3.0
# How often to look for the next rank's address: often at first, because its process starts beside this one.
FIRST_LOOK, LAST_LOOK = 0.01, 1.0
NEWS_KEPT = 64

_open_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


class _Peer:
    """A connection to a neighbour."""

    def __init__(self, connection: socket.socket, rank: int | None = None):
        self.connection = connection
        # The rank that this one connected to, or None until a rank that connected here has said which it is.
        self.rank = rank
        self.called = rank is not None
        # Whether the neighbour has proved who it is.
        self.confirmed = False
        # What the rank that this one connected to says of itself in the store.
        self.address: dict[str, Any] = {}
        # What makes the proofs those of this connection: a random number (nonce) of each side.
        self.own_nonce, self.other_nonce = secrets.token_hex(16), ""
        self.received = b""
        self.left = False
        self.since = time.monotonic()
        self._sending = threading.Lock()
        connection.settimeout(CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that loses its power or its network closes nothing: the kernel probes it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 8000)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: dict[str, Any]) -> None:
        # What cannot be sent is noticed by whoever reads this connection.
        with self._sending, contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class Ring:
    """This rank's part of the ring. `serve` runs in its own thread until `stop`; `tell` may be called from any thread.

    Args:
        keys: where the ranks find each other. They are asked nothing once both neighbours are connected.
        host: where the ranks meet. This machine listens on the interface that leads there; without it, on all.
        on_news: called with the rank that has news and what it is, once for each.
        on_lost: called with a rank whose process ended without a word of leave.
        on_left: called with a rank that took its leave.
    """

    def __init__(
        self,
        keys: Keys,
        rank: int,
        world_size: int,
        host: str | None = None,
        *,
        on_news: Callable[[int, dict[str, Any]], None],
        on_lost: Callable[[int], None],
        on_left: Callable[[int], None],
    ):
        self._keys = keys.within(f"penstock/ring/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        self._rank = rank
        self._next = (rank + 1) % world_size
        self._before = (rank - 1) % world_size
        self._on_news, self._on_lost, self._on_left = on_news, on_lost, on_left
        # Guards the list of neighbours and the news, which are read in other threads, too.
        self._lock = threading.Lock()
        self._closed = False
        self._leaves = False
        self._peers: list[_Peer] = []
        self._gone: set[int] = set()
        # Messages that are known again when they come by the other way.
        self._heard: set[tuple[int, int]] = set()
        self._num_told = 0
        # For a neighbour that is connected later.
        self._latest: deque[dict[str, Any]] = deque(maxlen=NEWS_KEPT)
        # The next rank's address that was tried last.
        self._address = ""
        self._look_every, self._look_at = FIRST_LOOK, 0.0
        self._store_is_gone = False
        reached_by = strangers.interface(host)
        self._listener = strangers.listen(reached_by)
        self._waker, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        _open_rings.add(self)
        self.address: dict[str, Any] = {
            "hosts": [reached_by] if reached_by else strangers.own_addresses(), "port": self._listener.getsockname()[1],
            "token": secrets.token_hex(16), "machine": machine(), "process": os.getpid(),
        }  # fmt: skip
        seconds, self._keys.seconds = self._keys.seconds, FIRST_SECONDS
        self._keys.put(str(rank), json.dumps(self.address))
        self._keys.seconds = seconds
        if rank == 0 and not (reached_by and strangers.is_loopback(reached_by)):
            strangers.warn_without_secret()

    @property
    def complete(self) -> bool:
        """Whether both neighbours are connected, or known to be gone."""
        with self._lock:
            known = {peer.rank for peer in self._peers if peer.confirmed} | self._gone
        return {self._next, self._before} <= known

    @property
    def next_is_stopped(self) -> bool:
        """Whether the process of the next rank has been stopped (SIGSTOP), if it is on this machine."""
        address = json.loads(self._address or "{}")
        return _state(address.get("machine", ""), address.get("process", 0)) == "T"

    def tell(self, news: dict[str, Any], lasting: bool = True) -> None:
        """Send news round the ring; what is `lasting` also to a neighbour that is connected later."""
        with self._lock:
            self._num_told += 1
            identity = (self._rank, self._num_told)
            self._heard.add(identity)
        self._pass_on({"id": identity, "news": news, "lasting": lasting})

    def tell_one(self, address: dict[str, Any], news: dict[str, Any]) -> None:
        """Send news to one rank alone, by its `address`. What does not arrive is lost."""
        with contextlib.suppress(OSError, ValueError, KeyError), _connect(address) as connection:
            answer = json.loads(connection.makefile("rb").readline(LONGEST_LINE))
            call = self._call(address, answer["number"], secrets.token_hex(16), news)
            connection.sendall(json.dumps(call).encode() + b"\n")

    def serve(self, on_tick: Callable[[], None], every: float) -> None:
        """Listen to the neighbours until `stop`. `on_tick` is called about every `every` seconds."""
        next_tick = time.monotonic() + every
        while not self._closed:
            if time.monotonic() >= next_tick:
                on_tick()
                next_tick = time.monotonic() + every
                for peer in list(self._peers):
                    if peer.rank is None and time.monotonic() - peer.since > CALLER_SECONDS:
                        self._drop(peer)
            self._look_and_listen(next_tick)
        if self._leaves:
            # One that starts later than this rank ends would not hear what this rank knows, and blame this rank.
            deadline = time.monotonic() + NEWS_SECONDS
            while self._latest and not self.complete and time.monotonic() < deadline:
                self._look_and_listen(deadline)
            self._announce_end()

    def stop(self, leave: bool = True) -> None:
        """End `serve`, soon. With `leave` it tells the neighbours, which then do not take it for lost."""
        self._leaves = leave
        self._closed = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _announce_end(self) -> None:
        for peer in self._peers:
            peer.send({"leaves": self._rank})
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(Exception):  # the store may be gone
            if not self._store_is_gone:
                self._keys.delete(str(self._rank))
        deadline = time.monotonic() + LEAVING_SECONDS
        for peer in self._peers:
            with contextlib.suppress(OSError):
                while (seconds := deadline - time.monotonic()) > 0:
                    peer.connection.settimeout(seconds)
                    if not peer.connection.recv(1 << 16):
                        break

    def close(self) -> None:
        """Close this process's ends. Not while `serve` runs; in a forked child it leaves the parent's ends open."""
        _open_rings.discard(self)
        for each in (self._listener, self._waker, self._wakes, *(peer.connection for peer in self._peers)):
            with contextlib.suppress(OSError):
                each.close()
        del self._keys

    # -- the neighbours --------------------------------------------------------------------------------------------

    def _look_and_listen(self, until: float) -> None:
        """Call the next rank if it is time to, and listen once, no longer than `until`."""
        if time.monotonic() >= self._look_at:
            self._call_next()
        seconds = max(0.0, min(until, self._look_at) - time.monotonic())
        peers: dict[Any, _Peer] = {peer.connection: peer for peer in self._peers}
        for ready in multiprocessing.connection.wait([*peers, self._listener, self._wakes], seconds):
            if ready is self._listener:
                self._accept()
            elif ready is not self._wakes:
                self._read(peers[ready])
            else:
                with contextlib.suppress(OSError):
                    self._wakes.recv(64)

    def _call_next(self) -> None:
        """Call the next rank, once its address is known, unless it is connected or being called."""
        self._look_at = time.monotonic() + self._look_every
        self._look_every = min(LAST_LOOK, 1.5 * self._look_every)
        if any(peer.called for peer in self._peers):
            return
        written: str | None = self._address
        if not self._store_is_gone:
            try:
                written = self._keys.get(str(self._next))
            except StoreTimeout:
                return
            except Exception:  # its process has ended; what is connected stays connected
                self._store_is_gone = True
        if not written:
            return
        address = json.loads(written)
        if written != self._address:
            self._address = written
            self._gone.discard(self._next)
        elif self._next in self._gone:
            return
        elif has_ended(address["machine"], address["process"]):
            self._lose(self._next)
            return
        with contextlib.suppress(OSError):
            peer = _Peer(_connect(address), self._next)
            peer.address = address
            with self._lock:
                self._peers.append(peer)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        peer = _Peer(connection)
        peer.send({"number": peer.own_nonce})
        with self._lock:
            self._peers.append(peer)

    def _read(self, peer: _Peer) -> None:
        try:
            received = peer.connection.recv(1 << 16)
        except TimeoutError:
            return
        except OSError:
            received = b""
        if not received or len(peer.received) > LONGEST_LINE:
            self._drop(peer)
            return
        *lines, peer.received = (peer.received + received).split(b"\n")
        for line in lines:
            try:
                self._take(peer, json.loads(line))
            except Exception:  # whatever it is, this thread must go on
                if peer.confirmed:  # the mistake is here, and the neighbour is well
                    logger.exception("an error in what follows from the words of rank %s", peer.rank)
                    continue
                with contextlib.suppress(OSError):  # somebody else called, as anybody can, and may have gone
                    strangers.warn_of_stranger(str(peer.connection.getpeername()[0]))
                self._drop(peer)
                return

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.rank is None:
            caller = int(message["calls"])
            token, news = self.address["token"], message["news"]
            if not proves(message["proof"], "calls", caller, token, peer.own_nonce, message["number"], news):
                raise ValueError("the caller is no rank of this job")
            if news is not None:
                self._on_news(caller, news)
                return
            peer.rank, peer.confirmed = caller, True
            self._gone.discard(peer.rank)
            peer.send({"proof": proof("answers", token, peer.own_nonce, message["number"])})
            self._catch_up(peer)
        elif not peer.confirmed and "number" in message:
            peer.other_nonce = message["number"]
            peer.send(self._call(peer.address, peer.other_nonce, peer.own_nonce))
        elif not peer.confirmed:
            if not proves(message["proof"], "answers", peer.address["token"], peer.other_nonce, peer.own_nonce):
                raise ValueError("who answers is no rank of this job")
            peer.confirmed = True
            self._catch_up(peer)
        elif "leaves" in message:
            peer.left = True
        elif "id" in message:
            origin, number = message["id"]
            with self._lock:
                known = (origin, number) in self._heard
                self._heard.add((origin, number))
            if not known:
                self._pass_on(message, excluded=peer)
                self._on_news(origin, message["news"])

    def _drop(self, peer: _Peer) -> None:
        """A connection has ended."""
        with self._lock:
            self._peers.remove(peer)
        peer.connection.close()
        self._look_at = 0.0
        if peer.rank is None or not peer.confirmed:
            return
        if self._closed:
            self._gone.add(peer.rank)
        elif not peer.left:
            self._lose(peer.rank)
        elif peer.rank not in self._gone:
            self._gone.add(peer.rank)
            self._on_left(peer.rank)

    def _lose(self, rank: int) -> None:
        if rank not in self._gone:
            self._gone.add(rank)
            self._on_lost(rank)

    def _call(
        self, address: dict[str, Any], other_nonce: str, own_nonce: str, news: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What is said to a rank that this one calls, which has made `other_nonce`; after `news` no more is said."""
        proved = proof("calls", self._rank, address["token"], other_nonce, own_nonce, news)
        return {"calls": self._rank, "number": own_nonce, "news": news, "proof": proved}

    def _pass_on(self, message: dict[str, Any], excluded: _Peer | None = None) -> None:
        with self._lock:
            if message["lasting"]:
                self._latest.append(message)
            peers = [peer for peer in self._peers if peer is not excluded and peer.confirmed]
        for peer in peers:
            peer.send(message)

    def _catch_up(self, peer: _Peer) -> None:
        with self._lock:
            latest = list(self._latest)
        for message in latest:
            peer.send(message)


def _connect(address: dict[str, Any]) -> socket.socket:
    """Call a rank by its address: at the first of its hosts where somebody answers. Raises OSError."""
    for host in address["hosts"][:-1]:
        with contextlib.suppress(OSError):
            return socket.create_connection((host, address["port"]), CONNECT_SECONDS)
    return socket.create_connection((address["hosts"][-1], address["port"]), CONNECT_SECONDS)


@functools.cache
def machine() -> str:
    """What tells apart the places in which process numbers mean the same."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def has_ended(where: str, process: int) -> bool:
    """Whether a process on a `machine()` runs no more, as far as can be told from here."""
    return _state(where, process) in ("Z", "X")  # Z is one that has ended but was not waited for


def _state(where: str, process: int) -> str:
    if not where or where != machine():
        return ""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]  # after the name in brackets
    except FileNotFoundError:
        return "X"
    except OSError:
        return ""


def _let_go_in_child() -> None:
    """A forked child (a data loader's worker) must not keep this process's connections open after its end."""
    for ring in list(_open_rings):
        ring.close()


os.register_at_fork(after_in_child=_let_go_in_child)

"""Where the members of a run meet: a key-value store that outlives any of them, served by `penstock store` or a folder.

Values are strings. What a key holds may be created once and for all, which is what decisions are made with. Every
method may raise one of `STORE_ERRORS` when the store is gone.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
from functools import partial
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

from penstock.config.elastic import parse_address
from penstock.runtime.failures.keys import Keys, in_one_line, in_thread

# How long an answer of the store may take.
ANSWER = datetime.timedelta(seconds=10)
STORE_ERRORS = (OSError, RuntimeError)  # torch's are RuntimeErrors


class TcpMeeting(Keys):
    """A store that `penstock store` serves. `prefix` keeps runs apart."""

    def __init__(self, host: str, port: int, prefix: str = "") -> None:
        self.address = f"tcp://{host}:{port}"
        self._host, self._port = host, port
        connect = partial(dist.TCPStore, host, port, is_master=False, timeout=ANSWER)
        try:
            # It may stand still.
            client = in_thread(connect, "penstock-store").result(1 + ANSWER.total_seconds())
        except STORE_ERRORS as error:
            raise ConnectionError(
                f"no store answers at {self.address}: start one with `penstock store --port {port}` on {host} before "
                f"the run ({in_one_line(error)})"
            ) from None
        super().__init__(client, ANSWER.total_seconds(), prefix)

    def next_number(self, key: str) -> int:
        """The next of 0, 1, 2, ...: every call of any member gets a different one."""
        return self.ask(lambda: self.store.add(key, 1)) - 1

    def count(self, key: str) -> int:
        """How many numbers `next_number` has given."""
        return int(self.get(key) or 0)

    def process_store(self, name: str, timeout: datetime.timedelta) -> dist.Store:
        """A torch store in which a world of processes can meet; `name` is that world's."""
        store = dist.PrefixStore(name, self.store)
        store.set_timeout(timeout)
        return store

    def clone(self) -> TcpMeeting:
        """The same store by a connection of its own, for another thread."""
        return TcpMeeting(self._host, self._port, self._prefix)


class FolderMeeting:
    """A shared folder: a file for each key. It has the methods of a `TcpMeeting` that members of a run call."""

    def __init__(self, folder: Path) -> None:
        self.address = folder.as_uri()
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, value: str) -> None:
        os.replace(self._written(key, value), self._file(key))

    def get(self, key: str) -> str | None:
        try:
            return self._file(key).read_text(encoding="utf-8")
        except FileNotFoundError:
            if not self._folder.exists():
                raise
            return None

    def create(self, key: str, value: str) -> str:
        written = self._written(key, value)
        try:
            # A link, not a new file: it appears with its content, and only if there is none.
            with contextlib.suppress(FileExistsError):
                os.link(written, self._file(key))
        finally:
            written.unlink()
        return self._file(key).read_text(encoding="utf-8")

    def next_number(self, key: str) -> int:
        token, number = secrets.token_hex(8), 0
        while self.create(f"{key}/{number}", token) != token:
            number += 1
        return number

    def count(self, key: str) -> int:
        number = 0
        while self.get(f"{key}/{number}") is not None:
            number += 1
        return number

    def process_store(self, name: str, timeout: datetime.timedelta) -> dist.Store:
        store = dist.FileStore(str(self._file(f"world {name}")), -1)
        store.set_timeout(timeout)
        return store

    def clone(self) -> FolderMeeting:
        return self

    def within(self, prefix: str) -> FolderMeeting:
        return FolderMeeting(self._folder / quote(prefix, safe=""))

    def _file(self, key: str) -> Path:
        return self._folder / quote(key, safe=" ")

    def _written(self, key: str, value: str) -> Path:
        path = self._folder / f".{secrets.token_hex(8)}"
        path.write_text(value, encoding="utf-8")
        return path


Meeting = TcpMeeting | FolderMeeting


def meet(address: str, run: str) -> Meeting:
    """The store of the run `run` at an address."""
    place = parse_address(address)
    if isinstance(place, Path):
        return FolderMeeting(place).within(run)
    return TcpMeeting(*place).within(f"penstock/{run}")

"""A process forked by a zygote (zygote.py), as the one who starts it sees it; and a program that starts one.

As a program, ``python forked.py ADDRESSES ...`` stands in for ``python ...``: it starts the same in a fork of a zygote,
lends it its standard streams, passes signals on, and ends as it ends. It imports little, as it is run each time: what
`socket` and `signal` are made of, and not these, which take as long as the start of the interpreter.
"""

import _signal as signal  # type: ignore[import-not-found]  # typeshed has none
import marshal
import os
import select
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET, socket

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
REFUSED = -1  # in place of a process id
START_TIMEOUT = 180.0  # seconds; the zygote may still be importing torch and transformers on a busy machine


class Refused(Exception):
    """The environment changes what the zygote's imports have read; only a new interpreter can serve it."""


class Process:
    """A fork in the place of ``subprocess.Popen([python, *arguments])``. Killed when this object's process ends.

    Args:
        address: of the zygote.
        arguments: ``[file, ...]`` or ``["-m", module, ...]``.
        environment: all its variables.
        files: descriptors that are 0, 1, 2, 3, ... in the process.
    """

    def __init__(
        self, address: str, arguments: list[str], environment: dict[str, str], cwd: str, files: list[int]
    ) -> None:
        self.returncode: int | None = None
        self._socket = socket(AF_UNIX)
        self._socket.settimeout(START_TIMEOUT)
        self._socket.connect(address)
        request = marshal.dumps((arguments, environment, cwd))
        numbers = b"".join(file.to_bytes(4, sys.byteorder) for file in files)
        self._socket.sendmsg([len(request).to_bytes(4, "big")], [(SOL_SOCKET, SCM_RIGHTS, numbers)])
        self._socket.sendall(request)
        self.pid = self._number()
        self._socket.settimeout(None)
        if self.pid == REFUSED:
            self._socket.close()
            raise Refused

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while the process runs."""
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end; the exit status, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(self._number())
            self._socket.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def _number(self) -> int:
        """What the zygote says next: the process id, then the wait status."""
        return int.from_bytes(receive(self._socket, 4), "big", signed=True)


def kill_group(process: int) -> None:
    """Kill a fork and the processes it has started, also a moment after it was forked."""
    for kill in (os.killpg, os.kill):  # the group exists once the fork has run its first lines
        try:
            kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def receive(connection: socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the zygote's connection was closed")
        parts += part
    return parts


def stand_in(addresses: list[str], arguments: list[str]) -> int:
    """Run ``python arguments`` in a fork, or in a new interpreter where no fork is the same. Returns its status."""
    plain = arguments[1:] if arguments[:1] == ["-u"] else arguments
    environment = dict(os.environ)
    if len(plain) < len(arguments):
        environment["PYTHONUNBUFFERED"] = "1"
    if plain and (plain[0] == "-m" or not plain[0].startswith("-")):
        # A signal that comes before the fork is there has to wait for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        rank = environment.get("RANK", "0")
        address = addresses[int(rank) % len(addresses) if rank.isdecimal() else 0]
        try:
            process = Process(address, plain, environment, os.getcwd(), [0, 1, 2])
        except Refused:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        else:
            for number in PASSED_ON:
                signal.signal(number, lambda number, _: process.send_signal(number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            return process.wait()
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    status = stand_in(sys.argv[1].split(","), sys.argv[2:])
    if status < 0:  # end by the same signal
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    sys.exit(status)

"""Scripts as a user starts them: real processes, real launchers, with a time limit that leaves nothing behind."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from tests.support import zygote

ROOT = zygote.ROOT


def run_command(
    command: list[str],
    *,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its exit status, stdout and stderr as text.

    The package's and the tests' folders are on PYTHONPATH and every process computes on one thread. When ``timeout``
    seconds pass, the command and all its descendants are killed and subprocess.TimeoutExpired carries what it printed.

    A command that begins with this interpreter, and the processes that torchrun starts under it, are forks of a
    process that has imported everything (see zygote.py). With ``fresh`` they are new interpreters.
    """
    variables = zygote.environment()
    if command[0] == sys.executable and not fresh:
        command = [zygote.executable(), *command[1:]]
        variables["PENSTOCK_STAND_IN"] = zygote.executable()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or ROOT,
        env={**variables, **(environment or {})},
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # torchrun forwards it to its workers, which have their own groups
        try:
            stdout, stderr = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        raise subprocess.TimeoutExpired(command, timeout, stdout, stderr) from error
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def run_python(
    *arguments: str | Path,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with ``arguments`` (a script and its own, or ``-c`` and code). Options: see run_command."""
    return run_command(
        [sys.executable, *map(str, arguments)], timeout=timeout, environment=environment, cwd=cwd, fresh=fresh
    )


def torchrun(
    num_processes: int,
    script: str | Path,
    *arguments: str | Path,
    timeout: float = 90.0,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` under torchrun on this machine with ``num_processes`` ranks. Options: see run_command."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return run_python(*launcher, script, *arguments, timeout=timeout, environment=environment, cwd=cwd, fresh=fresh)


def agent_store(timeout: float) -> TCPStore:
    """A store that outlives any rank, as that of torchrun's agent does.

    It listens for IPv4 only: else it would look up the names of those who connect, as those of "::ffff:127.0.0.1", and
    so ask a name server.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def free_port() -> int:
    """A TCP port nobody listens on, on this machine, and that no connection of another process is given meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # below those that Linux gives to connections
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

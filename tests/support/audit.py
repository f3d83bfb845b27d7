"""Which files a piece of code opens or changes, whether it starts a process, and what it unpickles, as Python's audit
events tell."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed.distributed_c10d as c10d

# Events whose first arguments are paths, and how many of them.
_PATHS = {
    **{"open": 1, "os.remove": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2, "os.mkdir": 1, "os.rmdir": 1},
    **{"os.truncate": 1, "os.chmod": 1, "os.utime": 1, "shutil.rmtree": 1, "shutil.copyfile": 2, "shutil.move": 2},
}
_PROCESSES = {"os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "os.startfile", "socket.connect"}

_active: list[list[tuple[str, str]]] = []


def _hook(event: str, arguments: tuple) -> None:
    if not _active:
        return
    for path in arguments[: _PATHS.get(event, 0)]:
        if isinstance(path, (str, bytes, os.PathLike)):
            _active[-1].append((event, os.path.abspath(os.fsdecode(path))))
    if event in _PROCESSES:
        _active[-1].append((event, str(arguments)[:200]))


_hooked = False


@contextlib.contextmanager
def only_within(*folders: Path) -> Iterator[None]:
    """Fail if the block opens, changes or removes a file outside `folders`, or starts a process or a connection.

    Python's own files do not count: what is imported only now, and the source a traceback quotes.
    """
    global _hooked
    if not _hooked:  # an audit hook stays for ever
        sys.addaudithook(_hook)
        _hooked = True
    events: list[tuple[str, str]] = []
    _active.append(events)
    try:
        yield
    finally:
        _active.remove(events)
        repository = str(Path(__file__).parents[2])
        own = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__), repository, "/proc"}
        own |= {os.path.realpath(path) for path in own}
        allowed = tuple(f"{os.path.abspath(path)}/" for path in (*folders, *own)) + tuple(str(path) for path in folders)
        foreign = [(event, path) for event, path in events if event in _PROCESSES or not path.startswith(allowed)]
    assert not foreign, foreign[:5]


@contextlib.contextmanager
def unpickling(note: Callable[[str], None]) -> Iterator[None]:
    """Tell `note` what this process unpickles meanwhile, and where: names that a pickle has it look up, code objects
    (but of modules that are imported), and all that torch.distributed makes objects of, even of plain numbers."""
    active, unpickler = True, c10d._unpickler

    def told(event: str, arguments: tuple) -> None:
        if active and event in ("pickle.find_class", "marshal.loads"):
            frames = traceback.extract_stack(limit=12)[:-1]
            if not any("importlib" in frame.filename for frame in frames):
                note(f"{event} {str(arguments)[:100]} {frames}")

    sys.addaudithook(told)  # stays for ever
    c10d._unpickler = lambda *given: (note(f"torch.distributed {traceback.extract_stack(limit=6)}"), unpickler(*given))[
        1
    ]
    try:
        yield
    finally:
        active, c10d._unpickler = False, unpickler

"""Python processes without their start-up: forks of two processes that have imported torch, penstock and TRL.

A Python process takes seconds of imports before its first line runs, and a test session starts hundreds of them. Here
a zygote imports once and forks. ``fork()`` gives a process (forked.py) in place of ``subprocess.Popen``, and
``executable()`` is a program that can be named in place of the interpreter. It is ``sys.executable`` in the forks, so
that what torchrun starts is forked too.

A fork is as a new interpreter would be: its own session, working directory, environment, open files, ``sys.argv``,
``sys.path``, ``__main__`` and end, ``atexit`` included. It differs in what only an interpreter's first moments show:
modules are imported already, and variables that are read while they are imported have been read. Nor are modules taken
down at its end. An environment that changes such a variable gets a real interpreter, as does ``-c``; a test asks for
one with launch.py's ``fresh``.

There are two zygotes because they differ in what strings hash to, as interpreters do. Neighbouring ranks come from
different ones: an order of actions that comes from a set differs between them, and a test shows it.
"""

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import logging
import marshal
import os
import py_compile
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.support.forked import REFUSED, Process, Refused, kill_group, receive

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / folder) for folder in ("src", ".", "examples", "benchmarks/suite")]
NUM_ZYGOTES = 2
PRELOADED = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.utils.checkpoint",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "pytest",
    "tests.support.training",
    "tests.support.pool_worker",
    "peft",
    "trl.trainer.sft_trainer",
    "optimum.quanto",  # of `quantised`, with diffusers
    *sorted(
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "src/penstock").rglob("*.py")
        if path.stem != "__main__"
    ),
)
# Variables with these beginnings may have been read while those modules were imported...
READ_AT_IMPORT = (
    "HF_",
    "TRANSFORMERS_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "KMP_",
    "LD_",
    "CUDA_",
    "XDG_",
    "PYTHON",
    "MALLOC_",  # by the C library, as LD_
)
# ... except these, which are read later, or told by `_become`.
READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TRANSFORMERS_VERBOSITY")

MADV_COLLAPSE = 25  # of Linux, for which Python has no name


def environment() -> dict[str, str]:
    """What every process of the tests starts with: one thread, and the package, tests and examples on its path."""
    paths = [*PATHS, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def spare_torchrun_names() -> None:
    """Let torchrun's agent not look through all imported modules, of which there are thousands here, for the name of
    each function of its own that records an event."""
    module = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    module.get_method_name = lambda depth=2: "not looked for"  # type: ignore[attr-defined]


def follow_a_model() -> None:
    """Let torch and transformers do what they do for the first model that is built, run and followed in a process."""
    torch = importlib.import_module("torch")
    template = importlib.import_module("penstock.modeling.pipeline_template").PipelineTemplate
    model = importlib.import_module("tests.support.families").FAMILIES["gpt2"].build()
    template.balanced(model, 2)
    with torch.no_grad():  # a backward might start threads
        model(input_ids=torch.ones(1, 8, dtype=torch.long), labels=torch.ones(1, 8, dtype=torch.long))


def spare_forks_pages() -> None:
    """Arrange what imports have left in memory so that a fork copies less. It does so page by page, where it writes."""
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    # Fill the holes, each of which would take another page: then forks get memory from its end, in one piece.
    libc.malloc_trim(ctypes.c_size_t(0))
    end = libc.sbrk(0)
    for size in range(4096, 0, -16):
        while (place := libc.malloc(size)) and place < end:
            pass
    # In large pages, so that the tables of pages are short, which forks have copies of. (Linux 6.1; else in vain.)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in span.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def spare_libraries_their_end() -> None:
    """Let forks not take down, as they end, each operation that the imports have registered with torch."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


# ---------------------------------------------------------------- the session's side


# What `start` returned in the process that has started this one, if that was to be.
started: tuple[list[str], str] | None = None


@functools.cache
def start() -> tuple[list[str], str]:
    """Start the zygotes, once: their addresses, and the folder with their logs and the program that stands in.

    Returns before they have imported everything: who asks them for a fork waits for it.
    """
    if started is not None:
        return started
    folder = Path(tempfile.mkdtemp(prefix="penstock-zygote-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    addresses = []
    for number in range(NUM_ZYGOTES):
        addresses.append(str(folder / f"{number}"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(addresses[-1])
        listener.listen(100)
        with (folder / f"{number}.log").open("wb") as log, listener:
            zygote = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), *PRELOADED],
                stdin=subprocess.PIPE,  # its end tells the zygote that this process has ended
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
                env=environment() | {"JE_ARROW_MALLOC_CONF": "background_thread:false"},  # pyarrow's only thread
                start_new_session=True,
            )
        atexit.register(_end, zygote)
    program = folder / "python"
    stand_in = str(folder / "stand_in.pyc")
    py_compile.compile(str(Path(__file__).with_name("forked.py")), stand_in, doraise=True)
    words = [sys.executable, "-SE", stand_in, ",".join(addresses)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    return addresses, str(folder)


def _end(zygote: subprocess.Popen[bytes]) -> None:
    assert zygote.stdin is not None
    zygote.stdin.close()
    zygote.wait()


def fork(number: int, arguments: list[str], files: list[int], env: dict[str, str], cwd: str | None = None) -> Process:
    """Run ``python arguments`` in a fork of the zygote for rank ``number``; see Process."""
    addresses, folder = start()
    try:
        return Process(addresses[number % NUM_ZYGOTES], arguments, env, cwd or os.getcwd(), files)
    except (OSError, Refused) as error:
        log = Path(folder, f"{number % NUM_ZYGOTES}.log").read_text(errors="replace")[-6000:]
        raise RuntimeError(f"no fork for {shlex.join(arguments)}: {error!r}; the zygote printed:\n{log}") from error


def executable() -> str:
    """A program that stands in for this Python interpreter; see forked.py."""
    return os.path.join(start()[1], "python")


# ---------------------------------------------------------------- the zygote's side


class Zygote:
    """Forks for whoever connects to ``listener``, reports the end of each fork, and kills those nobody waits for."""

    def __init__(self, listener: socket.socket, base_path: list[str]) -> None:
        self._listener = listener
        self._base_path = base_path
        self._read_at_import = read_at_import(os.environ)
        self._running: dict[int, socket.socket] = {}
        self._ends, self._wakeup = os.pipe()
        for end in (self._ends, self._wakeup):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler the wakeup descriptor gets nothing
        signal.set_wakeup_fd(self._wakeup)
        self._selector = selectors.DefaultSelector()
        for source in (sys.stdin.fileno(), self._ends, listener):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> Callable[[], None]:
        """Until the session ends. Returns in the forks only: what each has to run."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == sys.stdin.fileno():
                    for process in self._running:
                        kill_group(process)
                    os._exit(0)
                elif key.fd == self._ends:
                    os.read(self._ends, 4096)
                    self._report_ends()
                elif key.fileobj is self._listener:
                    program = self._answer(self._listener.accept()[0])
                    if program is not None:
                        return program
                else:
                    # Nothing is ever sent here: whoever waited for this process has ended.
                    with contextlib.suppress(KeyError, ValueError):  # its end was reported a moment ago
                        self._selector.unregister(key.fileobj)
                    for process in [one for one, connection in self._running.items() if connection is key.fileobj]:
                        kill_group(process)

    def _answer(self, connection: socket.socket) -> Callable[[], None] | None:
        """Fork for one request. Returns what to run, in the fork."""
        try:
            connection.settimeout(10)
            size, files, _, _ = socket.recv_fds(connection, 4, 16)
            arguments, variables, cwd = marshal.loads(receive(connection, struct.unpack("!I", size)[0]))
        except (OSError, struct.error):  # whoever asked has ended meanwhile
            connection.close()
            return None
        if read_at_import(variables) != self._read_at_import:
            process = REFUSED
        else:
            process = os.fork()
            if process == 0:
                self._leave(connection)
                return functools.partial(_become, arguments, variables, cwd, files, self._base_path)
            self._running[process] = connection
            self._selector.register(connection, selectors.EVENT_READ)
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):  # then the selector sees it
            connection.sendall(struct.pack("!i", process))
        if process == REFUSED:
            connection.close()
        return None

    def _report_ends(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    return
                connection = self._running.pop(process)
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(struct.pack("!i", status))
                connection.close()

    def _leave(self, connection: socket.socket) -> None:
        """In a fork: close what is the zygote's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for end in (self._ends, self._wakeup):
            os.close(end)
        for other in (self._listener, connection, *self._running.values()):
            other.close()


def read_at_import(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in variables.items() if name.startswith(READ_AT_IMPORT) and name not in READ_LATER
    }


def _become(arguments: list[str], variables: dict[str, str], cwd: str, files: list[int], base_path: list[str]) -> None:
    """In a fork: be what ``python arguments`` would be."""
    os.setsid()
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 64) for file in files]
    for file in files:
        os.close(file)
    for number, file in enumerate(apart):
        if number > 2:
            with contextlib.suppress(OSError):
                fcntl.fcntl(number, fcntl.F_GETFD)
                raise RuntimeError(f"an import of the zygote has opened descriptor {number}")
        os.dup2(file, number, inheritable=number < 3)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
    # Python's own generator does so by itself.
    if "torch" in sys.modules:
        importlib.import_module("numpy").random.seed()
        importlib.import_module("torch").default_generator.seed()
    if verbosity := variables.get("TRANSFORMERS_VERBOSITY"):
        logging.getLogger("transformers").setLevel(verbosity.upper())
    sys.executable = variables.get("PENSTOCK_STAND_IN", sys.executable)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    own_path = dict.fromkeys(_entries(variables.get("PYTHONPATH", "")))
    if arguments[0] == "-m":
        sys.path[:] = [cwd, *own_path, *base_path]
        sys.argv = ["-m", *arguments[2:]]
        sys.modules.pop(arguments[1], None)
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    else:
        sys.path[:] = [os.path.dirname(os.path.realpath(arguments[0])), *own_path, *base_path]
        sys.argv = arguments
        module.__file__ = arguments[0]
        with io.open_code(arguments[0]) as file:
            code = compile(file.read(), arguments[0], "exec")
        exec(code, module.__dict__)


def _entries(path: str) -> list[str]:
    return [os.path.abspath(entry) for entry in path.split(os.pathsep) if entry]


class End:
    """A fork's end, from when all functions of `atexit` have run: without taking down every module, which would copy
    the zygote's memory and take most of the seconds that a short program takes; unless `WHOLE_END` is in the
    environment."""

    status: int | None = None

    def __call__(self) -> None:
        if self.status is not None and "WHOLE_END" not in os.environ:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(self.status)

    @contextlib.contextmanager
    def of(self) -> Iterator[None]:
        """Around a program. Where Ctrl-C ends it, the interpreter ends as it does by itself."""
        try:
            yield
        except SystemExit as end:
            code = end.code
            self.status = code & 0xFF if isinstance(code, int) else int(code is not None)
            raise
        except Exception:
            self.status = 1
            raise
        self.status = 0


def main(listener: socket.socket, modules: list[str]) -> None:
    """Import everything, then serve; a fork leaves here to run its program and end as an interpreter ends."""
    end = End()
    atexit.register(end)  # before all others, to be called after them
    inherited = _entries(os.environ["PYTHONPATH"])
    base_path = [entry for entry in sys.path[1:] if entry not in inherited]
    zygote = Zygote(listener, base_path)
    for name in modules:
        importlib.import_module(name)
    if "torch.distributed.run" in modules:
        spare_torchrun_names()
        follow_a_model()
    spare_libraries_their_end()
    # Forks see files that tests write into folders that imports have looked into.
    importlib.invalidate_caches()
    # What is imported stays: the collections in the forks need not look at it, nor copy the pages it is on.
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        spare_forks_pages()
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(os.listdir(threads)) == 1, (
        "forks have one thread, and an import has started more"
    )
    program = zygote.serve()
    with end.of():
        program()


if __name__ == "__main__":
    importlib.import_module("tests.support.zygote").main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])

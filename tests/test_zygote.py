"""A fork stands in for a new interpreter: the oracle of every claim is the interpreter itself."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import zygote
from tests.support.launch import run_python, torchrun
from tests.support.pool import Pool

REPORT = """
import atexit, json, os, signal, sys, threading
atexit.register(print, "the end")
print(json.dumps({
    "name": __name__, "file": __file__, "arguments": sys.argv, "path": sys.path, "folder": os.getcwd(),
    "main": sorted(vars(sys.modules["__main__"]).keys() - {"__cached__", "__annotations__"}),
    "environment": {name: value for name, value in os.environ.items() if name not in ("PENSTOCK_STAND_IN", "_", "PWD")},
    "input": sys.stdin.read(), "session": os.getsid(0) == os.getpid(), "threads": threading.active_count(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "files": sorted(os.readlink(f"/proc/self/fd/{file}").split(":")[0] for file in (0, 1, 2)),
}))
print("to stderr", file=sys.stderr)
exec(sys.argv[-1])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "report.py"
    path.write_text(REPORT)
    return path


@pytest.mark.parametrize(
    ("last_line", "status", "as_module"),
    [
        ("pass", 0, False),
        ("sys.exit(3)", 3, True),
        ("sys.exit('a message')", 1, False),
        ("raise SystemExit", 0, True),
        ("os._exit(5)", 5, False),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, True),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, False),
        ("os.abort()", -signal.SIGABRT, False),
    ],
)
def test_a_script_sees_and_ends_as_in_an_interpreter(
    script: Path, last_line: str, status: int, as_module: bool
) -> None:
    arguments = ["-m", "report"] if as_module else [script]
    found, expected = (
        run_python(
            *arguments,
            "one",
            last_line,
            cwd=script.parent,
            environment={"MINE": "x", "PYTHONUNBUFFERED": "1"},
            fresh=fresh,
        )
        for fresh in (False, True)
    )
    assert found.returncode == expected.returncode == status
    assert found.stderr == expected.stderr
    assert found.stdout.count("the end") == expected.stdout.count("the end")
    assert json.loads(found.stdout.splitlines()[0]) == json.loads(expected.stdout.splitlines()[0])


def test_an_error_ends_with_its_traceback(script: Path) -> None:
    result = run_python(script, "1 / 0")
    assert result.returncode == 1 and result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "the end" in result.stdout


TAKEN_DOWN = "sys.kept = type('Kept', (), {'__del__': lambda self, write=os.write: write(2, b'taken down')})()"


def test_what_a_program_has_made_is_taken_down_at_its_end_where_a_test_asks_for_it(script: Path) -> None:
    whole = run_python(script, TAKEN_DOWN, environment={"WHOLE_END": "1"})
    assert "taken down" in whole.stderr and "taken down" in run_python(script, TAKEN_DOWN, fresh=True).stderr
    assert "taken down" not in run_python(script, TAKEN_DOWN).stderr


# In one piece, as the outputs of several processes meet.
LOADED = "print(f\"{'torch' in sys.modules} {os.environ.get('HF_HOME')}\\n\", end='')"


def test_what_imports_have_read_already_takes_a_new_interpreter(script: Path) -> None:
    assert "True None" in run_python(script, LOADED).stdout
    assert "False /x" in run_python(script, LOADED, environment={"HF_HOME": "/x"}).stdout
    assert "False" in run_python("-c", "import sys; print('torch' in sys.modules)").stdout
    assert "False None" in run_python(script, LOADED, fresh=True).stdout


def test_forks_draw_different_random_numbers(tmp_path: Path) -> None:
    path = tmp_path / "draw.py"
    path.write_text("import random, numpy, torch\nprint(random.random(), numpy.random.rand(), float(torch.rand(())))")
    first, second = (run_python(path).stdout.split() for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))


def hash_of_a_string() -> int:
    return hash("a string")


def test_neighbouring_ranks_have_their_own_order_of_sets(pool: Pool) -> None:
    if os.environ.get("PYTHONHASHSEED", "random") != "random":
        pytest.skip("PYTHONHASHSEED gives every interpreter the same")
    first, second, third = pool.run(3, hash_of_a_string)
    assert first != second != third


def test_torchrun_and_its_workers_are_forks(script: Path) -> None:
    result = torchrun(2, script, LOADED)
    assert result.returncode == 0 and result.stdout.count("True None") == 2, result.stderr
    result = torchrun(1, script, "sys.exit(9)")
    assert result.returncode == 1 and "exitcode  : 9" in result.stderr


SLEEP = "print(os.getpid(), flush=True); import time; time.sleep(100)"


def started(script: Path) -> tuple[subprocess.Popen[str], int]:
    """A stand-in that sleeps, and the process id of its fork."""
    process = subprocess.Popen(
        [zygote.executable(), str(script), SLEEP],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=zygote.environment(),
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process, int(process.stdout.readline())


def wait_for_the_end_of(process: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline, f"process {process} goes on"
        time.sleep(0.01)


def test_signals_reach_the_fork_and_its_end_is_the_stand_ins(script: Path) -> None:
    process, fork = started(script)
    assert fork != process.pid
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    wait_for_the_end_of(fork)


def test_a_fork_does_not_outlive_its_stand_in(script: Path) -> None:
    process, fork = started(script)
    process.kill()
    process.wait()
    wait_for_the_end_of(fork)


def test_forks_and_zygotes_end_with_the_session(script: Path) -> None:
    """Also with one that is killed."""
    code = (
        "import os, signal, sys\nfrom tests.support import zygote\n"
        "zygote.PRELOADED = ()\n"
        f"fork = zygote.fork(0, [{str(script)!r}, {SLEEP!r}], [0, 2, 2], zygote.environment())\n"
        "zygote_pid = open(f'/proc/{fork.pid}/stat').read().split()[3]\n"
        "print(fork.pid, zygote_pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = run_python("-c", code)
    assert result.returncode == -signal.SIGKILL
    for process in map(int, result.stdout.split()):
        wait_for_the_end_of(process)

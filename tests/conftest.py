"""Fixtures that every test file may use: see support/pool.py (many ranks) and support/launch.py (real launchers)."""

import gc
import os
import signal
from collections.abc import Iterator
from importlib import metadata
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the network is a defect; fail at once
# torch's stores look up the names of those who connect. Where a name server now and then does not answer, each such
# connection waits for the resolver: 5 seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import hypothesis
import pytest
import torch

import penstock
from tests.support import zygote
from tests.support.pool import Pool

# A shell that starts the tests in the background has them ignore this signal, and so would zygotes and their forks; but
# not what is started once torch's launcher, in a test, has put a handler of its own in place.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
zygote.spare_torchrun_names()
# No deadline, because the machine may be busy; and in continuous integration the same examples in every run.
hypothesis.settings.register_profile("penstock", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("penstock")


def pytest_report_header() -> str:
    """What is tested, so that a log says it."""
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return f"penstock {penstock.__version__}, {libraries}"


def pytest_configure(config: pytest.Config) -> None:
    """`pytest -n 2 --dist loadfile` hands files out in the order of collection, not those with the most tests first."""
    config.option.loadscopereorder = False
    zygote.started = getattr(config, "workerinput", {}).get("zygotes")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """With `-n`, all sessions share the zygotes of the process that starts them."""
    node.workerinput["zygotes"] = zygote.start()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with slow files: begun late, one would keep its process busy when the others have nothing to do."""
    items.sort(key=lambda item: getattr(getattr(item, "module", None), "pytestmark", None) != pytest.mark.slow)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Zygotes import while the rest is collected, if a test will need them."""
    module = getattr(item, "module", None)
    if item.config.option.collectonly:
        return
    if "pool" in getattr(item, "fixturenames", ()) or hasattr(module, "run_python") or hasattr(module, "torchrun"):
        zygote.start()


def pytest_collection_finish() -> None:
    """What is imported by now stays; the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """A variable that a test leaves behind would keep all later ones from forks; see support/zygote.py."""
    before = zygote.read_at_import(os.environ)
    yield
    assert zygote.read_at_import(os.environ) == before


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Forks have the test process's group, too, and tests after this one would meet in it."""
    yield
    assert not torch.distributed.is_initialized()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The session's worker processes; see Pool.run."""
    workers = Pool()
    try:
        yield workers
    finally:
        workers.close()

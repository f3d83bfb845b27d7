"""The emulated GPUs: a pool of workers of their own, each of which has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import emulated_device
import pytest

from pool import Pool


@pytest.fixture(scope="session")
def gpus() -> Iterator[Callable[..., Any]]:
    """`Pool.run` on processes with an emulated GPU each; the functions call `emulated_ranks.use_gpu` first."""
    missing = emulated_device.missing_compiler()
    if missing is not None:
        pytest.skip(missing)
    workers = Pool()
    try:
        yield partial(workers.run, environment={emulated_device.LIBRARY: str(emulated_device.build())}, timeout=120)
    finally:
        workers.close()

"""The emulated GPUs: a pool of workers of their own, each of which has one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.emulated_gpu import emulated_device
from tests.support.emulated_gpu.emulated_ranks import REAL
from tests.support.pool import Pool


@pytest.fixture(scope="session")
def gpus() -> Iterator[Callable[..., Any]]:
    """`Pool.run` on processes with an emulated GPU each; the functions call `emulated_ranks.use_gpu` first."""
    if REAL in os.environ:  # the number of the one that all share; the variable hides it from this process
        environment = {"CUDA_VISIBLE_DEVICES": os.environ[REAL]}
    else:
        missing = emulated_device.missing_compiler()
        if missing is not None:
            pytest.skip(missing)
        environment = {emulated_device.LIBRARY: str(emulated_device.build())}
    workers = Pool()
    try:
        yield partial(workers.run, environment=environment, timeout=120)
    finally:
        workers.close()

"""Builds and loads the device "gpu" (device.cpp), and records what the host of a real GPU would wait for.

A process that has loaded it has an accelerator for good, so only the workers of this folder's own pool do.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

SOURCE = Path(__file__).with_name("device.cpp")
LIBRARY = "PENSTOCK_EMULATED_GPU"
COMPILER = os.environ.get("CXX", "g++")


def missing_compiler() -> str | None:
    """Why there can be no emulated GPU on this machine, None if there can."""
    return None if shutil.which(COMPILER) else f"the emulated GPU needs a C++ compiler, and there is no {COMPILER}"


def build() -> Path:
    """The compiled device; it is built once for each version of the source, of torch and of Python (20 seconds)."""
    about = f"{SOURCE.read_text()}{torch.__version__}{sys.version}{COMPILER}"
    folder = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / f"penstock-emulated-gpu-{os.getuid()}"
    library = folder / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        own = library.with_suffix(f".{os.getpid()}")
        root = Path(torch.__file__).parent
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu"]
        command = [
            COMPILER,
            "-O0",
            "-std=c++20",
            "-shared",
            "-fPIC",
            *includes,
            str(SOURCE),
            "-o",
            str(own),
            *libraries,
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
        own.rename(library)
    return library


@functools.cache
def load() -> torch.device:
    """Make the device known to torch in this process, where the pool has said which library it is."""
    torch.utils.rename_privateuse1_backend("gpu")
    torch.ops.load_library(os.environ[LIBRARY])
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.emulated_gpu_start()
    library.emulated_gpu_most_held.restype = ctypes.c_int64
    generator = torch.Generator()
    torch.ops.emulated_gpu.draw_from(generator)
    module = types.ModuleType("torch.gpu")
    module.__dict__.update(
        init=lambda: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        current_device=lambda: 0,
        set_device=lambda device: None,
        device_count=lambda: 1,
        default_generators=[generator],
        get_rng_state=lambda device=None: generator.get_state(),
        set_rng_state=lambda state, device=None: generator.set_state(state),
        manual_seed_all=generator.manual_seed,
        manual_seed=generator.manual_seed,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_device_properties=lambda device=None: SimpleNamespace(uuid=f"of process {os.getpid()}"),
        synchronize=lambda device=None: None,
        max_memory_allocated=lambda device=None: library.emulated_gpu_most_held(),
        reset_peak_memory_stats=lambda device=None: library.emulated_gpu_forget_most_held(),
    )
    torch._register_device_module("gpu", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device("gpu", 0)


@contextlib.contextmanager
def host_waits() -> Iterator[collections.Counter[str]]:
    """Counts, inside, what the host of a real GPU would wait for: `what < where < where it was called from`."""
    library = ctypes.CDLL(os.environ[LIBRARY])
    found: collections.Counter[str] = collections.Counter()

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    def report(what: bytes) -> None:
        found[" < ".join([what.decode(), *_where()])] += 1

    library.emulated_gpu_report(report)
    try:
        yield found
    finally:
        library.emulated_gpu_report(None)


def _where() -> list[str]:
    """The nearest places in this library, in transformers and in the tests."""
    places = []
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename
        if "/emulated_device.py" in path:
            continue
        for root in ("/src/penstock/", "/site-packages/transformers/", "/tests/"):
            if root in path:
                places.append(f"{path.split(root)[-1]}:{frame.name}")
    return places[:3]

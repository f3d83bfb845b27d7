"""Writing a file in safetensors' format: tensor after tensor straight from memory, with checksums taken on the way.

safetensors' own writer is as fast by itself. But checksums take another reading of everything after it, and the disk
waits until the last tensor is in the system's cache. Here one thread writes, a second takes the checksums of what is
written, and a third has the disk begin; and the next file is begun while the last one's end goes to disk. All three
release Python's lock, so a step that goes on meanwhile is not held up.

The format: https://huggingface.co/docs/safetensors, section "Format".
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from io import FileIO
from typing import Any

import torch

from .tensors import bytes_of

# The format's name of each dtype.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# Bytes that are written and summed at once, and after how many the disk is told to begin.
_CHUNK = 1024**2
_FLUSHED = 32 * _CHUNK
_ALIGNMENT = 8


# Around a flush: says what could not be written if it fails.
Told = Callable[[], AbstractContextManager[None]]


class Behind:
    """What is left to other threads while files are written one after another: checksums, and flushes to disk.

    When it is left without an error, all of that is done, and raises here if it has failed. With an error the files are
    removed: what is said of it may need the room.
    """

    def __init__(self) -> None:
        self.sums, self.flushes = Helper("sums"), Helper("flushes")
        self._files = contextlib.ExitStack()
        self._paths: list[str] = []

    def open(self, path: str) -> FileIO:
        """A new file, closed when all is done."""
        # Exclusively: what is there may be a link to somewhere else.
        file = self._files.enter_context(FileIO(path, "x"))
        self._paths.append(path)
        return file

    def flush(self, file: FileIO, told: Told) -> None:
        """Have what is in the file until now on disk, some time before the end."""
        self.flushes.do(partial(_flush, file, told))

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        whole = False
        try:
            if kind is None:
                self.flushes.finish()
                self.sums.finish()
                whole = True
        finally:
            self.flushes.end()
            self.sums.end()
            for path in () if whole else self._paths:
                with contextlib.suppress(OSError):
                    os.remove(path)
            self._files.close()


def write_safetensors(
    path: str, tensors: Mapping[str, torch.Tensor], behind: Behind, told: Told, metadata: Mapping[str, str]
) -> dict[str, int]:
    """Write tensors to a file that is not there yet. It is on disk when `behind` is left.

    Args:
        tensors: contiguous, on the CPU. Not to be changed until then.
        metadata: what else the file says.

    Returns:
        the CRC-32 of each tensor's bytes, which are there then, too.

    Raises:
        ValueError: the format has no such dtype. OSError: it cannot be written.
    """
    # Larger elements first, as in safetensors: so every tensor begins at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    sums: dict[str, int] = {}
    since = 0
    file = behind.open(path)
    _write_all(file, memoryview(_header(tensors, order, metadata)))
    for name in order:
        content = bytes_of(tensors[name])
        behind.sums.do(partial(_note_checksum, sums, name, content))
        for begin in range(0, len(content), _CHUNK):
            chunk = content[begin : begin + _CHUNK]
            _write_all(file, chunk)
            since += len(chunk)
            if since >= _FLUSHED:
                behind.flush(file, told)
                since = 0
    behind.flush(file, told)
    return sums


def _write_all(file: FileIO, content: memoryview) -> None:
    while content:  # the system may take less than it is given
        content = content[file.write(content) :]


def _flush(file: FileIO, told: Told) -> None:
    with told():
        os.fsync(file.fileno())


class Helper:
    """Threads that do calls. None but the caller's at a program's end, which starts no more."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, f"penstock-save-{name}")
        self._calls: list[Future[object]] = []

    def do(self, call: Callable[[], object]) -> None:
        try:
            self._calls.append(self._pool.submit(call))
        except RuntimeError:
            call()

    def finish(self) -> None:
        """Wait for all calls; raises what the first one that failed has raised."""
        self.end()
        for call in self._calls:
            call.result()

    def end(self) -> None:
        """Wait for all calls."""
        self._pool.shutdown()


def _header(tensors: Mapping[str, torch.Tensor], order: list[str], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    begin = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise ValueError(f"safetensors has no dtype for {name}, which is {tensor.dtype}")
        end = begin + tensor.nbytes
        content[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _note_checksum(sums: dict[str, int], name: str, content: memoryview) -> None:
    number = 0
    for begin in range(0, len(content), _CHUNK):
        number = zlib.crc32(content[begin : begin + _CHUNK], number)
    sums[name] = number

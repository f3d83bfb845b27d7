"""One file of tensors: written durably, read lazily, in torch's or in safetensors' format.

safetensors' own writer is as fast by itself, but checksums take another reading after it, and the disk waits for the
last tensor. Here one thread writes, and two others take the checksums and have the disk begin; the next file is begun
while the last one's end goes to disk. All of them release Python's lock, so a step that goes on is not held up.

The format: https://huggingface.co/docs/safetensors, section "Format".
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from io import FileIO
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file

from penstock.checkpoint.model_state import as_tensors
from penstock.checkpoint.tensors import bytes_of, checksum, dtype_name
from penstock.checkpoint.untrusted import CheckpointError, cannot_read, describe, open_plain

SaveFunction = Callable[[Any, str], Any]

_FLUSHED_AT_ONCE = 4
# The most bytes of an archive's table of contents, which has some hundred for each tensor.
MAX_TABLE = 8 * 1024**2


# -- writing -----------------------------------------------------------------------------------------------------------


def write_tensors(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    save_function: SaveFunction | None = None,
    background: BackgroundWork | None = None,
    metadata: Mapping[str, str] = MappingProxyType({}),
    plain: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """Write tensors, as `tensors.to_cpu` makes them, to a new file, whose format follows from the name, and have them
    on disk before returning; with `background` when this is left. `metadata`: what else a file of safetensors says.
    `plain`: what else one of torch's holds. Returns what a `TensorInfo` says of each, once the checksums are there.
    Raises CheckpointError, whatever went wrong."""
    if background is None:
        with BackgroundWork() as background:
            return write_tensors(path, tensors, save_function, background, metadata, plain)
    infos = {name: {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)} for name, tensor in tensors.items()}
    storages = {tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()}
    explained = partial(writing, path, f"{len(tensors)} tensors", sum(storages.values()))
    background.do(partial(_add_checksums, infos, tensors))
    with explained():
        if path.endswith(".safetensors"):
            write_safetensors(path, tensors, background, explained, metadata)
            return infos
        if save_function is not None:
            save_function({**tensors, **plain}, path)
        else:
            with open(path, "wb") as file:
                torch.save({**tensors, **plain}, file)
        flush_file(path)
    return infos


def _add_checksums(infos: Mapping[str, dict[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
    sums: dict[int, int] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in sums:
            sums[id(tensor)] = checksum(tensor)
        infos[name]["checksum"] = sums[id(tensor)]


def write_bytes(path: str, content: bytes) -> None:
    """Write a file that is not there yet; `flush_files` has it on disk. Raises CheckpointError."""
    # Exclusively: what is there may be a link to somewhere else.
    with writing(path, "a small file", len(content)), open(path, "xb") as file:
        file.write(content)


def replace_file(path: str, content: bytes, draft: str) -> None:
    """Write a file by way of a `draft` on the same file system, so that a kill at any moment leaves what was there, or
    this, whole. Raises CheckpointError."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(draft)  # of a save that was killed
    try:
        write_bytes(draft, content)
        with writing(path, "a small file", len(content)):
            flush_file(draft)
            os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(draft)
        raise
    flush_file(os.path.dirname(path))


@contextmanager
def writing(path: str, what: str, size: int | None = None) -> Iterator[None]:
    """Turn what goes wrong while `what`, of `size` bytes, is written to `path` into a CheckpointError. It says what the
    operating system said, and for a disk that may be full what is needed and what is free."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        number = _error_number(error) or 0
        free = _free_bytes(os.path.dirname(path))
        if not number and size is not None and free is not None and free < size:
            number = errno.ENOSPC  # the library that wrote did not say why it could not
        reason = os.strerror(number) if number else describe(error)
        room = ""
        if number in (0, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            wanted = "" if size is None else f"{size:,} bytes are needed, "
            room = "" if free is None else f" ({wanted}{free:,} are free in {os.path.dirname(path)})"
        raise CheckpointError(f"cannot write {path} ({what}): {reason}{room}{_ADVICE.get(number, '')}") from error


_ADVICE = {
    errno.ENOSPC: "; make room or save to another file system",
    errno.EDQUOT: "; your quota there is used up",
    errno.EFBIG: "; the file would exceed the limit on the size of files (ulimit -f)",
    errno.EROFS: "; the file system is mounted for reading only",
    errno.EACCES: "; you may not write there",
    errno.EPERM: "; you may not write there",
}


def _error_number(error: BaseException | None) -> int | None:
    """The operating system's error behind an error, as far as it is told."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        # safetensors is written in Rust.
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            return int(match[1])
        error = error.__cause__ or error.__context__
    return None


def _free_bytes(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        system = os.statvfs(folder)
        return system.f_bavail * system.f_frsize
    return None


def flush_file(path: str) -> None:
    """Have a file, or the names in a directory, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_files(paths: Iterable[str]) -> None:
    """Have files, and the names in directories, on disk. Several at a time, which file systems write down at once."""

    def flush(path: str) -> None:
        with writing(path, "flushing to disk"):
            flush_file(path)

    with BackgroundWork(_FLUSHED_AT_ONCE) as background:
        for path in paths:
            background.do(partial(flush, path))


# -- reading -----------------------------------------------------------------------------------------------------------


def open_tensors(path: str, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a regular file, backed by it: their pages are read when they are touched. Its `name` in the
    checkpoint tells the format. Raises CheckpointError, naming the path, if it is no whole file of that."""
    try:
        return load_file(path) if name.endswith(".safetensors") else _torch_state(path)
    except Exception as error:
        raise cannot_read(path, error) from None


def _torch_state(path: str) -> dict[str, torch.Tensor]:
    with open_plain(path) as file:
        check_archive(file, path)
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path} does not hold tensors by name")
    tensors = as_tensors(state)
    if not all(map(_is_whole, tensors.values())):
        raise CheckpointError(f"{path} does not hold tensors by name")
    return tensors


def load_data(path: str) -> Any:
    """What `torch.save` wrote to a file. No code in it is run. Raises FileNotFoundError or CheckpointError."""
    with open_plain(path) as file:
        return plain_content(file, path)


def plain_content(file: BinaryIO, path: str) -> Any:
    """The same, of an open file."""
    try:
        check_archive(file, path)
        return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        raise cannot_read(path, error) from None


def check_archive(file: BinaryIO, path: str) -> None:
    """Check that a file is an archive as `torch.save` writes it, which is not compressed: otherwise what it says of its
    own size could not be believed. Raises CheckpointError."""
    try:
        if (size := _table_size(file)) > MAX_TABLE:
            raise zipfile.BadZipFile(f"its table of contents has {size:,} bytes, the most are {MAX_TABLE:,}")
        with zipfile.ZipFile(file) as archive:
            compressed = [entry for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except Exception as error:  # a broken archive raises a dozen different types
        raise CheckpointError(
            f"cannot read {path}: it is not a complete file of torch.save ({describe(error)})"
        ) from None
    if compressed:
        raise CheckpointError(f"cannot read {path}: it is compressed, which no file of torch.save is")
    file.seek(0)


def _table_size(file: BinaryIO) -> int:
    """The bytes of an archive's table of contents, as is said at the end; Python's zipfile reads it whole. The last
    record is 22 bytes. Before it may stand another one, for large archives, of 56 bytes, and 20 that say so."""
    file.seek(-min(98, file.seek(0, os.SEEK_END)), os.SEEK_CUR)
    end = file.read().rjust(98, b"\0")
    is_large = end[56:60] == b"PK\6\7"
    if end[76:80] != b"PK\5\6" or end[96:] != b"\0\0" or (is_large and end[:4] != b"PK\6\6"):
        raise zipfile.BadZipFile("it does not end as an archive does")
    return int.from_bytes(end[40:48] if is_large else end[88:92], "little")


def _is_whole(value: torch.Tensor) -> bool:
    """Whether this is a dense tensor that has all its bytes in the file."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and not value.is_conj()
        and not value.is_neg()
        and value.is_contiguous()
    )


# -- safetensors' format -----------------------------------------------------------------------------------------------

# The format's name of each dtype.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

# Bytes that are written at once, and after how many the disk is told to begin.
_CHUNK = 1024**2
_FLUSHED = 32 * _CHUNK
_ALIGNMENT = 8


# Around a flush: says what could not be written if it fails.
Explained = Callable[[], AbstractContextManager[None]]


class BackgroundWork:
    """What is left to other threads while files are written one after another: checksums, and flushes to disk.

    When it is left without an error, all of that is done, and raises here if it has failed. With an error its files are
    removed, as a report of the error may need the room."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, "penstock-save")
        self._calls: list[Future[object]] = []
        self._files: list[FileIO] = []

    def do(self, call: Callable[[], object]) -> None:
        """Do this in another thread; in this one at a program's end, which starts no more."""
        try:
            self._calls.append(self._pool.submit(call))
        except RuntimeError:
            call()

    def open(self, path: str) -> FileIO:
        """A new file, closed when all is done."""
        # Exclusively: what is there may be a link to somewhere else.
        self._files.append(FileIO(path, "x"))
        return self._files[-1]

    def __enter__(self) -> BackgroundWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        whole, error = False, None
        try:
            self._pool.shutdown()
            error = next((error for call in self._calls if (error := call.exception())), None)
            whole = kind is None and error is None
        finally:
            for file in self._files:
                file.close()
                with contextlib.suppress(OSError):
                    if not whole:
                        os.remove(str(file.name))
        if error is not None and kind is None:
            raise error


def write_safetensors(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    background: BackgroundWork,
    explained: Explained,
    metadata: Mapping[str, str],
) -> None:
    """See `write_tensors`. Tensors are not to be changed until `background` is left. Raises ValueError if the format
    has no such dtype, OSError if it cannot be written."""
    # Larger elements first, as in safetensors: so every tensor begins at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    since = 0
    file = background.open(path)
    flush = partial(_flush, file, explained)
    _write_all(file, memoryview(_header(tensors, order, metadata)))
    for name in order:
        content = bytes_of(tensors[name])
        for begin in range(0, len(content), _CHUNK):
            chunk = content[begin : begin + _CHUNK]
            _write_all(file, chunk)
            since += len(chunk)
            if since >= _FLUSHED:
                background.do(flush)
                since = 0
    background.do(flush)


def _write_all(file: FileIO, content: memoryview) -> None:
    while content:  # the system may take less than it is given
        content = content[file.write(content) :]


def _flush(file: FileIO, explained: Explained) -> None:
    with explained():
        os.fsync(file.fileno())


def _header(tensors: Mapping[str, torch.Tensor], order: list[str], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    begin = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"safetensors has no dtype for {name}, which is {tensor.dtype}: save with safe_serialization=False"
            )
        end = begin + tensor.nbytes
        content[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

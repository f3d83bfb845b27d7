"""A number that tells two batches apart, cheap enough for every training step."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.nested import is_record, items_of

# Tensors and arrays up to this many bytes are read whole (the token ids of most batches); of larger ones, a sample.
WHOLE_BYTES = 1 << 16
SAMPLED_ELEMENTS = 2048


def fingerprint(inputs: Mapping[str, Any]) -> int:
    """Return a 63-bit digest of a batch, the same in every process that holds an equal batch.

    Covered: names (in any order), shapes, dtypes, numbers, strings, and the content of CPU tensors and numpy arrays of
    up to 64 KiB each; of larger ones an evenly strided sample of about 2048 elements, so a change of a few elements may
    go unseen. Tensors on accelerators count by shape and dtype only, because reading them would wait for the device; so
    do sparse, complex, meta and subclassed ones. Other objects, arrays of objects among them, count by their class.

    Ranks that take one batch compare it to notice that they were given different ones. It is no protection against a
    batch made to collide.
    """
    plain = repr(_told(inputs)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(plain, digest_size=8).digest(), "little") >> 1


def described(inputs: Mapping[str, Any], sizes: Sequence[int]) -> tuple[int, int, dict[str, list[Any]]]:
    """A batch's samples and microbatches, which have these `sizes`, and for each input what it is, in words, and its
    own fingerprint."""
    every = {str(name): [_in_words(value), fingerprint({"": value})] for name, value in inputs.items()}
    return sum(sizes), len(sizes), dict(sorted(every.items()))


def _in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list)) and value:
        return f"{len(value)} of {_in_words(value[0])}"
    return repr(value)[:40] if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _told(value: Any) -> Any:
    """Plain data that prints alike in every process for equal values."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), _checksum(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Mapping):
        items = list(value.items())
        told = {key: _told(each) for key, each in {id(each): each for _, each in items}.items()}  # labels are often ids
        return "mapping", sorted(((str(name), told[id(each)]) for name, each in items), key=lambda entry: entry[0])
    if is_record(value):
        return _told(dict(items_of(value) or ()))
    if isinstance(value, (tuple, list)):
        return [_told(part) for part in value]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        sample = value.reshape(-1)[:: _stride(value.shape, value.nbytes)]
        return "array", str(value.dtype), value.shape, zlib.crc32(sample.tobytes())
    return type(value).__qualname__, "object"  # no repr: it may hold an address, which differs between processes


def _checksum(tensor: torch.Tensor) -> int:
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if not plain or not tensor.is_cpu or tensor.layout != torch.strided or tensor.is_complex():
        return 0
    sample = tensor.detach().reshape(-1)[:: _stride(tensor.shape, tensor.numel() * tensor.element_size())]
    return zlib.crc32(sample.contiguous().view(torch.uint8).numpy().data)


def _stride(shape: Sequence[int], num_bytes: int) -> int:
    """One of how many elements is read."""
    if num_bytes <= WHOLE_BYTES:
        return 1
    stride = max(math.prod(shape) // SAMPLED_ELEMENTS, 1)
    # A stride that shares a factor with the row length would meet the same few columns (perhaps padding) each row.
    while math.gcd(stride, *shape[-1:]) != 1:
        stride += 1
    return stride

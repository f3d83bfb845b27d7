"""A number that tells two batches apart, cheap enough for every training step."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.nested import is_record, items_of

# Tensors up to this many bytes are read whole (the token ids of most batches); of larger ones, a sample.
WHOLE_BYTES = 1 << 16
SAMPLED_ELEMENTS = 2048

MASK_64 = (1 << 64) - 1
MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of splitmix64


def fingerprint(inputs: Mapping[str, Any]) -> int:
    """Return a 63-bit digest of a batch, the same in every process that holds an equal batch.

    Covered: names (in any order), shapes, dtypes, numbers, strings, and the content of CPU tensors and numpy arrays:
    whole up to 64 KiB each, beyond that an evenly strided sample of about 2048 elements, so a change of a few elements
    in a large tensor may go unseen. Tensors on accelerators count by shape and dtype only, because reading them would
    wait for the device; so do sparse, complex, meta and subclassed ones. Other objects count by their class.

    The ranks of one pipeline compare it to notice that they were given different batches. It is no protection against
    a batch made to collide.
    """
    total = 0
    # One tensor is often two inputs, the token ids and the labels. Kept with its digest: an identity is a value's own
    # only while that lives, and a mapping may make its values as they are asked for.
    known: dict[int, tuple[Any, int]] = {}
    for name, value in inputs.items():
        if id(value) not in known:
            known[id(value)] = value, _value_digest(value)
        digest = known[id(value)][1]
        # A sum, so that the order of the names does not matter.
        total += _mix(_text_digest(str(name)) ^ digest)
    return _mix(total) >> 1


def _value_digest(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return (_description_digest("tensor", str(value.dtype), value.shape) + _content_digest(value)) & MASK_64
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return _text_digest(f"{type(value).__name__}:{value!r}")
    if isinstance(value, Mapping):
        return fingerprint(value)
    if is_record(value):
        return fingerprint(dict(items_of(value) or ()))
    if isinstance(value, (tuple, list)):
        total = len(value)
        for part in value:
            total = _mix(total + _value_digest(part))
        return total
    if isinstance(value, np.ndarray) and value.dtype != object:
        array = np.ascontiguousarray(value)
        content = zlib.crc32(array.reshape(-1).view(np.uint8).data) if array.nbytes <= WHOLE_BYTES else 0
        return (_description_digest("array", str(array.dtype), array.shape) + content) & MASK_64
    # No repr: it may hold an address, which differs between processes.
    return _text_digest(type(value).__qualname__)


def _content_digest(tensor: torch.Tensor) -> int:
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if not plain or not tensor.is_cpu or tensor.layout != torch.strided or tensor.is_complex():
        return 0
    count = tensor.numel()
    if count * tensor.element_size() > WHOLE_BYTES:
        # A stride that shares a factor with the row length would meet the same few columns (perhaps padding) each row.
        stride = max(count // SAMPLED_ELEMENTS, 1)
        while math.gcd(stride, tensor.shape[-1]) != 1:
            stride += 1
        tensor = tensor.detach().reshape(-1)[::stride]
    return zlib.crc32(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)


def _mix(number: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    number = (number + MULTIPLIER) & MASK_64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK_64
    return number ^ (number >> 31)


@functools.lru_cache(maxsize=4096)
def _text_digest(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return (zlib.crc32(data) << 32) | zlib.adler32(data)


@functools.lru_cache(maxsize=4096)
def _description_digest(kind: str, dtype: str, shape: tuple[int, ...]) -> int:
    return _mix(_text_digest(f"{kind}:{dtype}:{tuple(shape)}"))

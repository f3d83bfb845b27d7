"""Ranks exchange plain data, compare it, and fail together; and how values and tensors become plain data, and back.

What one process tells another is JSON or a tensor. Nothing is pickled, as whoever unpickles runs what the sender wants.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import ModelOutput

from penstock.modeling.stage.outputs import output_of
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.comm.gloo import contact, raises_after_a_failure, wait_for_all, wait_for_transfer

T = TypeVar("T")

# What JSON can say: None, booleans, numbers, texts, lists, and mappings with texts as keys. Tuples arrive as lists.
Plain = Any

# (what this rank does, with which ranks of the world) -> a context that turns a transport's error into one that names
# the lost rank, on all ranks that are left.
Guard = Callable[[str, Sequence[int]], AbstractContextManager[None]]


class Ranks:
    """The ranks of a process group, None for a rank on its own. All of them make every call, except `send` and
    `receive`. A `guard` tells and names a lost rank, such as a board's. `ranks` are global, in the group's order.

    It refers to the group, which closes only when nobody does: make it where it is used. After its first error every
    call fails at once, as the group may be gone by then.
    """

    def __init__(self, group: dist.ProcessGroup | None, guard: Guard) -> None:
        self._group = group
        self.rank, self.size, self.ranks = 0, 1, [0]
        if group is not None:
            self.rank, self.ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
            self.size = len(self.ranks)
        self._own_guard = guard
        self._error: RuntimeError | None = None

    def exchange(self, mine: Plain, doing: str) -> list[Plain]:
        """Every rank's plain data, in the group's order. `doing` says what for, in the error of a rank that has lost
        another. Raises TypeError if it is not plain."""
        return self._exchange(_encoded(mine), doing)

    def together(self, doing: str, work: Callable[[], T], unchanged: str = "") -> list[T]:
        """Do `work` on every rank and return every rank's result, plain data. If it fails anywhere, all raise: what
        failed here, or a RuntimeError that names the others, and why; and says what is `unchanged`."""
        failure: BaseException | None = None
        try:
            outcome = _encoded([work(), None])
        except BaseException as error:  # whatever it is, the other ranks must hear of it
            failure, outcome = error, _encoded([None, self._words(error)])
        try:
            outcomes = self._exchange(outcome, doing)
        except Exception as lost:
            if failure is None:
                raise
            raise lost from failure
        failed = {rank: words for rank, (_, words) in zip(self.ranks, outcomes, strict=True) if words is not None}
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if failed:
            self._fail(doing, failed, unchanged, failure)
        return [result for result, _ in outcomes]

    def differing(self, mine: Plain, doing: str) -> list[Plain] | None:
        """None if all ranks have the same plain data; otherwise that of every rank.

        One digest is compared, so that what is told does not grow with the number of ranks.
        """
        if self.size == 1:
            return None
        digest = hashlib.sha256(_encoded(mine)).digest()
        numbers = [int.from_bytes(digest[start : start + 7]) for start in range(0, 28, 7)]
        most = torch.tensor([*numbers, *(-number for number in numbers)], device=self._device())
        with self._guard(doing, self._others):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        values = most.tolist()
        if all(high == -low for high, low in zip(values[:4], values[4:], strict=True)):
            return None
        return self.exchange(mine, doing)

    def require_equal(self, mine: Plain, doing: str, words: Callable[[Plain, Plain, int], str]) -> None:
        """Compare plain data over all ranks; see `differing`. Raises ValueError, the same on every rank, if a rank's is
        not the first rank's: what `words` say of both, and of whose the other is."""
        every = self.differing(mine, doing) or []
        for rank, theirs in zip(self.ranks, every, strict=False):
            if theirs != every[0]:
                raise ValueError(words(every[0], theirs, rank))

    def send(self, tensor: torch.Tensor | None, peer: int, doing: str) -> None:
        """Send a contiguous CPU tensor to a rank of the group, which calls `receive`; None if this rank has none. It is
        not sent if the other side has no memory for it. May block until the other side receives."""
        self._send(torch.tensor(tensor is not None), peer, doing)
        has_room = torch.tensor(False)
        self._receive(has_room, peer, doing)
        if tensor is not None and has_room:
            self._send(tensor, peer, doing)

    def receive(self, tensor: torch.Tensor | None, peer: int, doing: str) -> torch.Tensor | None:
        """Fill a contiguous CPU tensor, None if there is no memory, with what a rank of the group sends; returns it, or
        None if nothing was sent."""
        is_sent = torch.tensor(False)
        self._receive(is_sent, peer, doing)
        self._send(torch.tensor(tensor is not None), peer, doing)
        if tensor is None or not is_sent:
            return None
        self._receive(tensor, peer, doing)
        return tensor

    def _send(self, tensor: torch.Tensor, peer: int, doing: str) -> None:
        self._transfer(tensor, peer, doing, lambda: dist.isend(_bytes(tensor), group=self._group, group_dst=peer))

    def _receive(self, tensor: torch.Tensor, peer: int, doing: str) -> None:
        self._transfer(tensor, peer, doing, lambda: dist.irecv(_bytes(tensor), group=self._group, group_src=peer))

    def _transfer(self, tensor: torch.Tensor, peer: int, doing: str, begin: Callable[[], dist.Work | None]) -> None:
        if tensor.numel():
            with self._guard(doing, [self.ranks[peer]]):
                contact(self._group, peer)
                check, work = raises_after_a_failure(), begin()
                assert work is not None, "this rank is in the group"
                wait_for_transfer(work, tensor.nbytes, check)

    @contextlib.contextmanager
    def _guard(self, doing: str, peers: Sequence[int]) -> Iterator[None]:
        if self._error is not None:
            raise self._error
        try:
            with self._own_guard(doing, peers):
                yield
        except RuntimeError as error:
            self._error = error
            raise

    def _words(self, error: BaseException) -> Plain:
        """What other ranks are told of an error."""
        return f"{type(error).__name__}: {error}"

    def _fail(self, doing: str, failed: Mapping[int, Plain], unchanged: str, own: Exception | None) -> NoReturn:
        """Raise what `together` raises; `failed` has what each rank that failed told of its error."""
        if own is not None:
            raise own
        message = "; ".join(f"rank {rank} failed while {doing}: {words}" for rank, words in failed.items())
        raise RuntimeError(message + (f"; {unchanged}" if unchanged else ""))

    @property
    def _others(self) -> list[int]:
        return [rank for place, rank in enumerate(self.ranks) if place != self.rank]

    def _device(self) -> torch.device:
        """Where this group's backend takes tensors from: the CPU, if it can."""
        return torch.device(dist.distributed_c10d._get_object_coll_device(self._group))

    def _exchange(self, mine: bytes, doing: str) -> list[Plain]:
        """Tell the lengths; then sum what has each rank's bytes in a place of their own."""
        if self.size == 1:
            return [json.loads(mine)]
        device = self._device()
        with self._guard(doing, self._others):
            lengths = torch.zeros(self.size, dtype=torch.int64)
            lengths[self.rank] = len(mine)
            lengths = lengths.to(device)
            dist.all_reduce(lengths, group=self._group)
            places = list(pairwise(accumulate(lengths.tolist(), initial=0)))
            start, end = places[self.rank]
            every = torch.zeros(places[-1][1], dtype=torch.uint8)
            every[start:end] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            every, check = every.to(device), raises_after_a_failure()
            wait_for_all(dist.all_reduce(every, group=self._group, async_op=True), self._group, device, check)
        content = every.cpu().numpy().tobytes()
        return [json.loads(content[start:end]) for start, end in places]


def _encoded(mine: Plain) -> bytes:
    return json.dumps(mine).encode()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as bytes, whatever its dtype."""
    return tensor.view(-1).view(torch.uint8)


# Of classes only those are made that this process has, and that are containers.
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def to_plain(value: Any) -> Plain:
    """A value that `from_plain` makes again elsewhere."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):  # counters of samplers and loaders
        return to_plain(value.item())
    if type(value) is list:
        return [to_plain(each) for each in value]
    kind = type(value).__name__
    if _SEQUENCES.get(kind) is type(value):
        return {kind: [to_plain(each) for each in value]}
    if _MAPPINGS.get(kind) is type(value):
        return {kind: [[to_plain(key), to_plain(each)] for key, each in value.items()]}
    if isinstance(value, TensorSpec):
        return {"spec": [value.shape, _name(value.dtype), value.requires_grad]}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [value.shape, _name(value.dtype), base64.b64encode(content).decode()]}
    if isinstance(value, np.ndarray):
        return {"array": to_plain(torch.from_numpy(value))}
    if isinstance(value, ModelOutput) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        fields = value.items() if isinstance(value, ModelOutput) else zip(value._fields, value, strict=True)
        return {"fields": [_full_name(type(value)), [[name, to_plain(each)] for name, each in fields]]}
    raise TypeError(f"a {type(value).__name__} is neither plain data nor a tensor, and cannot be sent to another rank")


def from_plain(data: Plain) -> Any:
    """What `to_plain` was given; tensors on the CPU."""
    if isinstance(data, list):
        return [from_plain(each) for each in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](map(from_plain, content))
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({from_plain(key): from_plain(each) for key, each in content})
    if kind == "dtype":
        return _dtype(content)
    if kind == "array":
        return from_plain(content).numpy()
    if kind == "fields":
        return output_of(_class(content[0]), {name: from_plain(each) for name, each in content[1]})
    shape, dtype, last = content
    if kind == "spec":
        return TensorSpec(tuple(shape), _dtype(dtype), last)
    flat = torch.frombuffer(bytearray(base64.b64decode(last)), dtype=torch.uint8) if last else torch.empty(0)
    return flat.view(_dtype(dtype)).view(shape) if last else torch.empty(shape, dtype=_dtype(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _class(name: str) -> Any:
    """A class of outputs or named tuples, by its name."""
    todo = [ModelOutput, *(kind for kind in tuple.__subclasses__() if hasattr(kind, "_fields"))]
    for kind in todo:
        if _full_name(kind) == name:
            return kind
        todo += kind.__subclasses__()
    raise TypeError(f"another rank has sent a {name}, which this process does not know")

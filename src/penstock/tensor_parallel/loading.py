"""Initialising and loading weights of which a rank keeps a shard: each is whole only while it is written.

What initialises a weight writes all of it, may correct a part right after (the row of a padding token), and may write
all of it again. So one weight at a time is held whole, until another is written; in the model it stays a meta tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel, core_model_loading

from penstock.modeling.sharding import Sharding, WeightSharding
from penstock.modeling.weights.initialise import DRAWN_IN_PLACE, Scratch
from penstock.modeling.weights.whole import leave_shards

# In-place operations after which nothing is left of what was there.
_OVERWRITING = DRAWN_IN_PLACE | {"fill_", "zero_", "copy_"}


@dataclass(frozen=True)
class _WatchedParameter:
    parameter: nn.Parameter
    # Kept alive, so that its memory address, which is its identity, is not reused.
    storage: torch.UntypedStorage
    sharding: Sharding
    kept: torch.Tensor


class ShardKeeper:
    """Writes to watched weights, which are meta tensors, reach the shard that this rank keeps."""

    def __init__(self, index: int, count: int) -> None:
        self._index, self._count = index, count
        self._watched: dict[int, _WatchedParameter] = {}
        self._scratch = Scratch()
        self._open: _WatchedParameter | None = None
        self._whole = torch.empty(0)

    def watch(self, parameter: nn.Parameter, sharding: Sharding, value: torch.Tensor | None = None) -> None:
        """Keep a shard of `parameter`, a meta tensor, with its whole `value`; None if it will be written."""
        if value is None:
            kept = torch.empty(sharding.shape(parameter.shape, self._count), dtype=parameter.dtype)
        else:
            kept = sharding.take(value, self._index, self._count)
        self.keep(parameter, sharding, kept)

    def keep(self, parameter: nn.Parameter, sharding: Sharding, part: torch.Tensor) -> None:
        """As `watch`, for a shard that exists already."""
        self._watched[_storage(parameter)] = _WatchedParameter(parameter, parameter.untyped_storage(), sharding, part)

    def shard_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The kept shard of a parameter; None if it is not watched."""
        self._close()
        watched = next((watched for watched in self._watched.values() if watched.parameter is parameter), None)
        if watched is None:
            return None
        same = watched.sharding.shape(parameter.shape, self._count) == list(watched.kept.shape)
        # transformers copies a head's bias when it ties the head, lest it be shorter than the weight.
        copied = parameter.dim() == 1 or watched.storage._cdata == _storage(parameter)
        if not (same and copied and parameter.dtype == watched.kept.dtype):
            raise NotImplementedError("a sharded weight got other data instead of its own")
        return watched.kept

    def whole(self, tensor: torch.Tensor, overwritten: bool) -> torch.Tensor | None:
        """Memory to write to in place of `tensor`, a watched weight or a view of one, of which maybe all will be
        `overwritten`; None if it is neither."""
        watched = self._watched.get(_storage(tensor)) if tensor.is_meta else None
        if watched is None:
            return None
        if self._open is not watched:
            if not (overwritten and tensor.numel() == watched.parameter.numel()):
                raise NotImplementedError("a sharded weight is changed in part, after another weight was written")
            self._close()
            self._open, self._whole = watched, self._scratch.like(watched.parameter)
        return self._whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Run an operation that writes to a watched weight. Returns whether it is one."""
        if not func._schema.is_mutable:
            return False
        target = args[0] if args and isinstance(args[0], torch.Tensor) and self._watches(args[0]) else None
        others = [leaf for leaf in pytree.tree_leaves((args[target is not None :], kwargs)) if _is_meta(leaf)]
        if target is None:
            if any(map(self._watches, others)):
                raise NotImplementedError("something is computed from a weight that is sharded")
            return False
        if others:
            raise NotImplementedError("a weight that is sharded is computed from one that is not here")
        func(self.whole(target, func.overloadpacket.__name__ in _OVERWRITING), *args[1:], **kwargs)
        return True

    def _watches(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and _storage(tensor) in self._watched

    def _close(self) -> None:
        if self._open is not None:
            part = self._open.sharding.take(self._whole, self._index, self._count)
            self._open.kept.copy_(part)
            self._open = None


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _storage(tensor: torch.Tensor) -> int:
    """A key that a tensor and its views share. (A meta tensor's storage has no address.)"""
    return int(tensor.untyped_storage()._cdata)


class ShardLoading:
    """How one rank loads its shards of those of the weights `names` that are sharded: each is read whole, in its turn.

    Raises ValueError if a weight has not the shape that `tensor_parallel` was made for.
    """

    def __init__(self, model: PreTrainedModel, names: Collection[str], tensor_parallel: WeightSharding) -> None:
        self.writer = ShardKeeper(tensor_parallel.index, tensor_parallel.size)
        self._tensor_parallel = tensor_parallel
        self._shards = {name: sharding for name, sharding in tensor_parallel.shards.items() if name in names}
        self._shapes = {name: model.get_parameter(name).shape for name in self._shards}
        # Of weights that the model ties, what tells two of them apart as a whole.
        self._digests: dict[str, bytes] = {}
        misfits = [
            f"{name}: {list(shape)} in the checkpoint, {list(tensor_parallel.whole_shape(name, shape))} in the model"
            for name, shape in sorted(self._shapes.items())
            if tensor_parallel.whole_shape(name, shape) != tuple(shape)
        ]
        if misfits:
            raise ValueError(f"the checkpoint does not fit the model: {'; '.join(misfits)}")

    @contextlib.contextmanager
    def keeping(self, ties: Mapping[str, str]) -> Iterator[None]:
        """Inside, only the shard is kept of what is read for a sharded weight. `ties`: each name's source."""
        original = core_model_loading.set_param_for_module
        tied = {*ties, *ties.values()}

        def set_shard(model: Any, name: str, value: torch.Tensor, info: Any, quantizer: Any) -> None:
            if name not in self._shards:
                original(model, name, value, info, quantizer)
                return
            info.missing_keys.discard(name)
            if value.shape != self._shapes[name]:
                info.mismatched_keys.add((name, value.shape, self._shapes[name]))
                return
            if name in tied:
                self._digests[name] = _digest(value)
            parameter = _renewed(model, name, value.dtype)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark
            part = self._shards[name].take(value, self._tensor_parallel.index, self._tensor_parallel.size)
            self.writer.keep(parameter, self._shards[name], part)

        with _reading_in_turn(), mock.patch.object(core_model_loading, "set_param_for_module", set_shard):
            yield

    def initialise_later(self, model: PreTrainedModel, names: Collection[str]) -> set[str]:
        """Prepare the sharded ones of `names`, which the checkpoint lacks, for their initialisation. Returns them."""
        chosen = self._shards.keys() & set(names)
        for name in chosen:
            self.writer.watch(_renewed(model, name), self._shards[name])
        return chosen

    def find_ties(self, model: PreTrainedModel, missing: set[str]) -> None:
        """Make transformers tie two names that are both in the checkpoint only if their values there are equal.

        It compares values where it finds some, but here are shards, which may be alike when the whole weights are not.
        """
        for target, other in list(_pairs_of_ties(model.all_tied_weights_keys, self._digests)):
            if self._digests[target] == self._digests[other]:
                missing.add(target)
            else:
                model.all_tied_weights_keys.pop(target)

    def finish(self, model: PreTrainedModel) -> None:
        """Leave the shards where `TensorParallel.apply` finds them."""
        leave_shards(model, self.writer.shard_of)


def _digest(tensor: torch.Tensor) -> bytes:
    """The same for tensors of equal values."""
    positive = (tensor.detach() + 0).cpu().contiguous()  # no negative zeros
    return hashlib.sha256(positive.view(torch.uint8).numpy().tobytes()).digest()


def _pairs_of_ties(ties: Mapping[str, str], loaded: Collection[str]) -> Iterator[tuple[str, str]]:
    """Tied names that were all loaded, each but the first with the first: the source if it is there."""
    first: dict[str, str] = {source: source for source in ties.values() if source in loaded}
    for target, source in ties.items():
        if target in loaded and first.setdefault(source, target) != target:
            yield target, first[source]


def _renewed(model: nn.Module, name: str, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Put a new meta tensor in a parameter's place, under this one of its names only, as loading does; return it."""
    owner, _, attribute = name.rpartition(".")
    old = model.get_parameter(name)
    new = nn.Parameter(torch.empty(old.shape, dtype=dtype or old.dtype, device="meta"), old.requires_grad)
    setattr(model.get_submodule(owner), attribute, new)
    return new


@contextlib.contextmanager
def _reading_in_turn() -> Iterator[None]:
    """Inside, transformers reads each tensor in its turn: ahead, in threads, it would hold many whole ones. Only this
    variable is touched: `mock.patch.dict` would empty the environment for a moment, which other threads read."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

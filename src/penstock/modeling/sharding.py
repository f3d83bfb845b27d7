"""How weights are sharded among the ranks that share a stage: what modeling/ and runtime/ ask of `tensor_parallel/`.

This file imports nothing else of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Sharding:
    """A parameter sharded along one dimension; of `blocks` fused weights, each is sharded by itself: GPT-2's `c_attn`
    fuses queries, keys and values along its columns (`Sharding(1, blocks=3)`), and a rank holds the columns of its own
    heads from each of the three."""

    dim: int
    blocks: int = 1

    def take(self, whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
        """Shard `index` of `count`, in memory of its own."""
        dim = self.dim % whole.dim()
        # `cat` copies, also a single part.
        ranges = self.ranges(whole.shape, index, count)
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)

    def ranges(self, whole: Sequence[int], index: int, count: int) -> list[tuple[int, int]]:
        """Where shard `index` of `count` lies along `dim` in a weight of shape `whole`: from and to, in each block."""
        width = whole[self.dim % len(whole)] // self.blocks
        size = width // count
        return [(block * width + index * size, block * width + (index + 1) * size) for block in range(self.blocks)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole from all shards, in order."""
        dim, count = self.dim % parts[0].dim(), len(parts)
        shape = list(parts[0].shape)
        width = shape[dim] // self.blocks
        blocked = [part.reshape(*shape[:dim], self.blocks, width, *shape[dim + 1 :]) for part in parts]
        shape[dim] *= count
        return torch.cat(blocked, dim + 1).reshape(shape)

    def shape(self, whole: Sequence[int], count: int) -> list[int]:
        shape = list(whole)
        shape[self.dim % len(shape)] //= count
        return shape

    def whole_shape(self, part: Sequence[int], count: int) -> list[int]:
        shape = list(part)
        shape[self.dim % len(shape)] *= count
        return shape


class ShardWriter(Protocol):
    """Keeps this rank's shards of what is written to weights, which are meta tensors, while they are made."""

    def watch(self, parameter: nn.Parameter, sharding: Sharding, value: torch.Tensor | None = None) -> None:
        """Keep a shard of `parameter`, with its whole `value`; None if it will be written."""

    def shard_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The kept shard of a parameter; None if it is not watched."""

    def whole(self, tensor: torch.Tensor, overwritten: bool) -> torch.Tensor | None:
        """Memory to write to in place of a watched weight, of which maybe all will be `overwritten`; None for any other
        tensor."""

    def write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Run an operation that writes to a watched weight. Returns whether it is one."""


class ShardReader(Protocol):
    """Reads this rank's shards from a checkpoint, through transformers' `from_pretrained`."""

    @property
    def writer(self) -> ShardWriter:
        """Keeps the shards, also of what is initialised."""

    def keeping(self, ties: Mapping[str, str]) -> AbstractContextManager[None]:
        """Inside, only the shard is kept of what is read for a sharded weight. `ties`: each name's source."""

    def initialise_later(self, model: PreTrainedModel, names: Collection[str]) -> set[str]:
        """Prepare the sharded ones of `names`, which the checkpoint lacks, for their initialisation. Returns them."""

    def find_ties(self, model: PreTrainedModel, missing: set[str]) -> None:
        """Make transformers tie two names that are both in the checkpoint only if their values there are equal."""

    def finish(self, model: PreTrainedModel) -> None:
        """Leave the shards where `WeightSharding.apply` finds them."""


class GroupGuard(Protocol):
    """Makes errors in communication errors on every rank; see `runtime.failures.board.FailureBoard`."""

    def guard(self, doing: str, peers: Sequence[int] = ()) -> AbstractContextManager[None]:
        """Around communication with `peers`."""

    def check(self) -> None:
        """Raise the job's failure if there is one."""

    def on_close(self, close: Callable[[], None]) -> None:
        """Call `close` when the groups are given up."""


class WeightSharding(Protocol):
    """How one model's weights are sharded, and this rank's part in it.

    Attributes:
        index, size: this rank's place among those that share its stages, and their number.
        shards: of every parameter of the unsplit model that is sharded, by each of its names, how.
        partial: names of whole parameters that are used on shards, so that each rank has a part of their gradient.
    """

    shards: dict[str, Sharding]
    partial: set[str]

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The unsplit model's shape of the tensor `name`, which has this `shape` here."""

    def shard_writer(self) -> ShardWriter:
        """Keeps shards of weights that are initialised."""

    def shard_reader(self, model: PreTrainedModel, names: Collection[str]) -> ShardReader:
        """Reads the shards of the weights `names`."""

    def apply(self, model: nn.Module, stage_of: Mapping[str, int]) -> None:
        """Replace the weights of `model` by this rank's shards, in place, and adapt its layers to them."""

    def connect(self, group: dist.ProcessGroup, device: torch.device, board: GroupGuard) -> None:
        """From here on the layers exchange through a process group."""

    def disconnect(self) -> None:
        """Give up the group."""

    def refuse(self, inputs: Mapping[str, Any], config: PretrainedConfig | None) -> None:
        """Raise NotImplementedError for a forward whose outputs would not be the unsplit model's."""

    def run(self, digest: str, draws: bool, own_loss: bool, forward: Callable[[], Any]) -> Any:
        """Run a forward of the plan with this `digest`, which `draws` random numbers or not. `own_loss`: whether the
        model's own loss, a single mean, is trained on."""


# Takes a whole model, this rank's index among those that share its stages, their number, and what is tied.
MakeSharding = Callable[[nn.Module, int, int, Sequence[tuple[str, ...]]], WeightSharding]

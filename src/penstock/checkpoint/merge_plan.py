"""Which ordinary checkpoint the ranks of a pipeline write together: names, shards, and who assembles which.

Everything is decided on meta tensors from names, shapes and dtypes, by every rank for itself and alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from penstock.modeling.tensor_parallel import Slicing

from .names import weight_file_names
from .options import SaveOptions
from .tensors import dtype_name, dtype_of, shards_of, tensor_parallel_place, tied_groups, whole_shape, whole_state


@dataclass(frozen=True)
class Holding:
    """A tensor that a rank holds, by its name in the unsplit model."""

    shape: tuple[int, ...]
    dtype: str
    is_parameter: bool


@dataclass(frozen=True)
class Shard:
    """One file of the merged checkpoint.

    Attributes:
        outputs: names in the file.
        inputs: names in the model from which they are made.
        assembler: the rank that gathers the inputs and writes the file: the one that holds most of it already.
    """

    file_name: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    assembler: int


@dataclass(frozen=True)
class MergePlan:
    """The merged checkpoint. `holders` says from which rank each tensor of the model comes.

    Of one that is cut (`cuts`), that rank has the first slice, and the ranks after it the others.
    """

    shards: tuple[Shard, ...]
    holders: dict[str, int]
    holdings: dict[str, Holding]
    index_name: str | None
    index: dict[str, Any]
    cuts: Mapping[str, Slicing]
    num_slices: int

    def sources(self, name: str) -> range:
        """The ranks that a tensor comes from, in the order of its slices."""
        return range(self.holders[name], self.holders[name] + (self.num_slices if name in self.cuts else 1))


def describe_holdings(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, Holding]:
    """What this rank can contribute, or its tensor-parallel group together."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: Holding(whole_shape(model, name, tensor), dtype_name(tensor.dtype), name in parameters)
        for name, tensor in state.items()
    }


def plan_merge(model: PreTrainedModel, ranks: Sequence[Mapping[str, Holding]], options: SaveOptions) -> MergePlan:
    """Plan the checkpoint that `save_pretrained` would write for the unsplit model.

    Args:
        ranks: what each rank of the pipeline holds.

    Raises:
        RuntimeError: from transformers, if weights are tied that the model does not declare as tied.
    """
    holders = {name: rank for rank in reversed(range(len(ranks))) for name in ranks[rank]}
    holdings = {name: ranks[rank][name] for name, rank in holders.items()}
    order = {name: place for place, name in enumerate(whole_state(model))}
    names = sorted(holdings, key=lambda name: order.get(name, len(order)))
    total_parameters = _count_parameters(model, holdings)
    names = _saved_names(model, names)

    inputs = {
        name: torch.empty(holdings[name].shape, dtype=dtype_of(holdings[name].dtype), device="meta") for name in names
    }
    outputs, origin = dict(inputs), {name: frozenset({name}) for name in names}
    if options.save_original_format:
        with _Provenance(inputs) as provenance:
            outputs = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, inputs).items()}
        origin = {name: provenance.origin(tensor) for name, tensor in outputs.items()}

    single, index_name = weight_file_names(options.extension, options.variant)
    stem, _, extension = single.rpartition(".")
    # Fresh tensors: pieces of one fused weight would count as one block of memory and land in one shard.
    split = split_torch_state_dict_into_shards(
        {name: torch.empty_like(tensor) for name, tensor in outputs.items()},
        filename_pattern=f"{stem}{{suffix}}.{extension}",
        max_shard_size=options.max_shard_size,
    )
    shards = []
    for file_name, shard_names in split.filename_to_tensors.items():
        needed = frozenset[str]().union(*(origin[name] for name in shard_names))
        held = [0] * len(ranks)
        for name in needed:
            held[holders[name]] += inputs[name].nbytes
        ordered = tuple(name for name in names if name in needed)
        shards.append(Shard(file_name, tuple(shard_names), ordered, held.index(max(held))))
    index = {
        "metadata": {"total_parameters": total_parameters, **split.metadata},
        "weight_map": split.tensor_to_filename,
    }
    cuts, (_, num_slices) = shards_of(model), tensor_parallel_place(model)
    return MergePlan(
        tuple(shards), holders, holdings, index_name if split.is_sharded else None, index, cuts, num_slices
    )


def _saved_names(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """`names` without those that `save_pretrained` leaves out: the ignored ones, and all but one of tied ones."""
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = [name for name in names if name not in ignored]
    representative = {name: group[0] for group in tied_groups(model) for name in group}
    memory: dict[str, torch.Tensor] = {}
    stand_ins = {name: memory.setdefault(representative.get(name, name), torch.empty(1)) for name in kept}
    return list(remove_tied_weights_from_state_dict(stand_ins, model))


def _count_parameters(model: PreTrainedModel, holdings: Mapping[str, Holding]) -> int:
    """Elements of all parameters, tied ones once, as `num_parameters()` of the unsplit model counts them."""
    representative = {name: group[0] for group in tied_groups(model) for name in group}
    sizes = {
        representative.get(name, name): torch.Size(holding.shape).numel()
        for name, holding in holdings.items()
        if holding.is_parameter
    }
    return sum(sizes.values())


class _Provenance(TorchDispatchMode):
    """Follows which inputs the memory of each meta tensor was made from."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._origins: dict[int, frozenset[str]] = {}
        self._alive: list[Any] = []  # a freed storage's address would be used again
        for name, tensor in inputs.items():
            self._add(tensor, frozenset({name}))

    def origin(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._origins.get(tensor.untyped_storage()._cdata, frozenset())

    def _add(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._origins[storage._cdata] = self._origins.get(storage._cdata, frozenset()) | names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        names = frozenset[str]().union(*(self.origin(tensor) for tensor in read))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, names)
        return result

"""One ordinary checkpoint from the ranks of a pipeline: which files it has and who assembles each, and writing them.

The plan is decided on meta tensors from names, shapes and dtypes, by every rank for itself and alike. Then a shard at a
time is gathered and written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from penstock.modeling.graph.dataflow import DataFlow, Given
from penstock.tensor_parallel import Sharding

from .comm import CheckpointRanks
from .files import write_bytes, write_tensors
from .names import EXTENSIONS, STAGED_INDEX, is_shard, weight_file_names
from .save_pretrained import SaveOptions, write_side_files
from .staging import Replacement, index_content
from .tensors import (
    DTYPES,
    dtype_name,
    dtype_of,
    first_of_tied,
    shards_of,
    tensor_parallel_place,
    tied_groups,
    to_cpu,
    whole_shape,
    whole_state,
)
from .untrusted import Count, is_regular, kind_of


@dataclass(frozen=True)
class Holding:
    """A tensor that a rank holds, by its name in the unsplit model."""

    shape: tuple[Count, ...]
    dtype: Annotated[str, DTYPES]
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
    """The merged checkpoint.

    Attributes:
        sources: the rank that each tensor of the model comes from; of one that is sharded (`slicings`) those that have
            its shards, in order.
        index_name: of the file that says which shard holds which tensor; None if there is one shard.
    """

    shards: tuple[Shard, ...]
    sources: dict[str, range]
    holdings: dict[str, Holding]
    slicings: Mapping[str, Sharding] = field(default_factory=dict)
    index_name: str | None = None
    index: dict[str, Any] = field(default_factory=dict)


class Assembler(Protocol):
    """Writes what was gathered."""

    def assemble(self, gathered: dict[str, torch.Tensor], shard: Shard, folder: str) -> None:
        """Write a shard from its tensors."""


class MergedFolder(Assembler, Protocol):
    """A kind of folder that one rank's files do not make up: how the ranks of a pipeline write it together."""

    def describe(self, folder: str) -> tuple[list[str], list[str]]:
        """On the rank that leads: write the small files; their names, and those of the tensors that are needed."""

    def plan(self, ranks: Sequence[Mapping[str, Holding]], needed: Collection[str]) -> MergePlan:
        """What each rank gathers and writes; the same plan on every rank, from what all hold and the leader needs."""

    def replacement(self, directory: str, folder: str, plan: MergePlan, sides: Sequence[str]) -> Replacement:
        """How what was written to `folder` becomes the checkpoint in `directory`."""


@dataclass(frozen=True)
class ModelFolder:
    """The folder that `save_pretrained` writes for the unsplit model."""

    model: nn.Module
    options: SaveOptions

    def describe(self, folder: str) -> tuple[list[str], list[str]]:
        return write_side_files(self.model, folder), []

    def plan(self, ranks: Sequence[Mapping[str, Holding]], needed: Collection[str]) -> MergePlan:
        return plan_merge(self.model, ranks, self.options)

    def assemble(self, gathered: dict[str, torch.Tensor], shard: Shard, folder: str) -> None:
        reverted = self.options.save_original_format and isinstance(self.model, PreTrainedModel)
        tensors = revert_weight_conversion(self.model, gathered) if reverted else gathered
        wanted = to_cpu({name: tensors[name] for name in shard.outputs})
        if self.options.safe_serialization:  # whose files hold no tensor under two names
            first: dict[int, str] = {}
            shared = [name for name, tensor in wanted.items() if first.setdefault(id(tensor), name) != name]
            wanted.update({name: wanted[name].clone() for name in shared})
        write_tensors(os.path.join(folder, shard.file_name), wanted, self.options.save_function)

    def replacement(self, directory: str, folder: str, plan: MergePlan, sides: Sequence[str]) -> Replacement:
        return merged_replacement(directory, plan, sides, self.options)


def describe_holdings(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, Holding]:
    """What this rank can contribute, or its tensor-parallel group together."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: Holding(whole_shape(model, name, tensor), dtype_name(tensor.dtype), name in parameters)
        for name, tensor in state.items()
    }


def plan_merge(model: nn.Module, ranks: Sequence[Mapping[str, Holding]], options: SaveOptions) -> MergePlan:
    """Plan the checkpoint that `save_pretrained` would write for the unsplit model.

    Args:
        ranks: what each rank of the pipeline holds.

    Raises:
        RuntimeError: from transformers, if weights are tied that the model does not declare as tied.
    """
    slicings, (_, num_slices) = shards_of(model), tensor_parallel_place(model)
    sources, holdings = first_holders(ranks, slicings, num_slices)
    order = {name: place for place, name in enumerate(whole_state(model))}
    names = sorted(holdings, key=lambda name: order.get(name, len(order)))
    total_parameters = _count_parameters(model, holdings)
    names = _saved_names(model, names)

    inputs = {
        name: torch.empty(holdings[name].shape, dtype=dtype_of(holdings[name].dtype), device="meta") for name in names
    }
    outputs, origin = dict(inputs), {name: frozenset({name}) for name in names}
    if options.save_original_format and isinstance(model, PreTrainedModel):
        with followed(inputs) as origin_of:
            outputs = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, inputs).items()}
        origin = {name: origin_of(tensor) for name, tensor in outputs.items()}

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
            held[sources[name].start] += inputs[name].nbytes
        ordered = tuple(name for name in names if name in needed)
        shards.append(Shard(file_name, tuple(shard_names), ordered, held.index(max(held))))
    index = {
        "metadata": {"total_parameters": total_parameters, **split.metadata},
        "weight_map": split.tensor_to_filename,
    }
    return MergePlan(tuple(shards), sources, holdings, slicings, index_name if split.is_sharded else None, index)


def first_holders(
    ranks: Sequence[Mapping[str, Holding]], slicings: Collection[str] = (), num_slices: int = 1
) -> tuple[dict[str, range], dict[str, Holding]]:
    """For each tensor the first rank that holds it, or of `slicings` the first `num_slices`; and what it is."""
    first = {name: rank for rank in reversed(range(len(ranks))) for name in ranks[rank]}
    sources = {name: range(rank, rank + (num_slices if name in slicings else 1)) for name, rank in first.items()}
    return sources, {name: ranks[rank][name] for name, rank in first.items()}


def _saved_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """`names` without those that `save_pretrained` leaves out: the ignored ones, and all but one of tied ones.

    A module that is no model of transformers has them all, as its `load_state_dict` asks for them.
    """
    if not isinstance(model, PreTrainedModel):
        return list(names)
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = [name for name in names if name not in ignored]
    first = first_of_tied(tied_groups(model))
    memory: dict[str, torch.Tensor] = {}
    stand_ins = {name: memory.setdefault(first.get(name, name), torch.empty(1)) for name in kept}
    return list(remove_tied_weights_from_state_dict(stand_ins, model))


def _count_parameters(model: nn.Module, holdings: Mapping[str, Holding]) -> int:
    """Elements of all parameters, tied ones once, as `num_parameters()` of the unsplit model counts them."""
    first = first_of_tied(tied_groups(model))
    sizes = {
        first.get(name, name): torch.Size(holding.shape).numel()
        for name, holding in holdings.items()
        if holding.is_parameter
    }
    return sum(sizes.values())


@contextmanager
def followed(inputs: Mapping[str, torch.Tensor]) -> Iterator[Callable[[torch.Tensor], frozenset[str]]]:
    """Follow what becomes of some meta tensors inside. Gives what tells from which of them another one was made."""
    with DataFlow(position=lambda: 0) as flow:
        for name, tensor in inputs.items():
            flow.mark(tensor, (Given(name),))
        yield lambda tensor: frozenset(one.name for one in flow.sources(tensor) if isinstance(one, Given))


def write_merged(
    form: Assembler, state: Mapping[str, torch.Tensor], plan: MergePlan, folder: str, comm: CheckpointRanks
) -> None:
    """Assemble and write this rank's shards into `folder`, and send what others need for theirs.

    Transfers happen in one order on all ranks, so they cannot deadlock. A rank that fails goes on taking part in them,
    so that no other waits for it, and raises at the end.
    """
    failure: Exception | None = None
    for shard in plan.shards:
        failure = _write_shard(form, state, plan, shard, folder, comm, failure)
    if failure is None and plan.index_name is not None and comm.rank == 0:
        write_index(plan.index["weight_map"], plan.index["metadata"], folder)
    if failure is not None:
        raise failure


def _write_shard(
    form: Assembler,
    state: Mapping[str, torch.Tensor],
    plan: MergePlan,
    shard: Shard,
    folder: str,
    comm: CheckpointRanks,
    failure: Exception | None,
) -> Exception | None:
    """Do this rank's transfers for a shard, and write it if it is this rank's and nothing has failed.

    Returns:
        what has failed on this rank until now.
    """
    gathered: dict[str, torch.Tensor] = {}
    for name in shard.inputs:
        holding, sources, slicing = plan.holdings[name], plan.sources[name], plan.slicings.get(name)
        if comm.rank not in (*sources, shard.assembler):
            continue
        shape = holding.shape if slicing is None else slicing.shape(holding.shape, len(sources))
        slices: list[torch.Tensor] = []
        for source in sources:
            try:
                tensor = state[name].cpu().contiguous() if comm.rank == source else None
            except Exception as error:  # for example out of host memory
                failure, tensor = failure or error, None
            if tensor is None:
                tensor = torch.empty(shape, dtype=dtype_of(holding.dtype))
            if comm.rank == shard.assembler:
                if source != shard.assembler:
                    comm.receive(tensor, source, f"gathering {name} for {shard.file_name}")
                slices.append(tensor)
            elif comm.rank == source:
                comm.send(tensor, shard.assembler, f"giving {name} for {shard.file_name}")
        if failure is None and comm.rank == shard.assembler:
            gathered[name] = slices[0] if slicing is None else slicing.join(slices)
    if comm.rank == shard.assembler and failure is None:
        try:
            form.assemble(gathered, shard, folder)
        except Exception as error:
            return error
    return failure


def write_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any], folder: str) -> None:
    """Stage the index of a save, which leads to the files where they are staged."""
    staging = os.path.basename(folder)
    staged = {name: f"{staging}/{file_name}" for name, file_name in weight_map.items()}
    write_bytes(os.path.join(folder, STAGED_INDEX), index_content({"metadata": metadata, "weight_map": staged}))


def merged_replacement(directory: str, plan: MergePlan, sides: Sequence[str], options: SaveOptions) -> Replacement:
    """How the staged files become the checkpoint in `directory`.

    transformers starts from the first of these that exists: `model.safetensors`, its index, `pytorch_model.bin`, its
    index. So the new one is put in place first, and then those are removed that come before it in this order.
    """
    search_order = [
        *weight_file_names(".safetensors", options.variant),
        *weight_file_names(".bin", options.variant),
    ]
    start, (_, index) = (
        plan.index_name or plan.shards[0].file_name,
        weight_file_names(options.extension, options.variant),
    )
    found = [name for name in search_order if kind_of(os.path.join(directory, name)) is not None]
    hiding = [name for name in reversed(search_order[: search_order.index(start)]) if name in found]
    old = [index] if index in found and index != start else []
    shards = () if plan.index_name is None else [shard.file_name for shard in plan.shards]
    starts = {start: STAGED_INDEX if plan.index_name else start}
    return Replacement(sides, starts, shards, hiding, old + _old_shards(directory, plan, options))


def _old_shards(directory: str, plan: MergePlan, options: SaveOptions) -> list[str]:
    """Shards in `directory` that no index refers to any more once the new checkpoint is complete."""
    current = {shard.file_name for shard in plan.shards}
    # A safetensors checkpoint hides a .bin one that may stand beside it, but does not replace it.
    extensions = (".safetensors",) if options.safe_serialization else EXTENSIONS
    return sorted(
        name
        for name in os.listdir(directory)
        if name not in current
        and any(is_shard(name, extension, options.variant) for extension in extensions)
        and is_regular(os.path.join(directory, name))
    )

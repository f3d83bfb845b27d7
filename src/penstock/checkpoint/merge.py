"""Writing one ordinary checkpoint from the ranks of a pipeline, a shard at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from .comm import Comm
from .errors import CheckpointError
from .files import write_bytes, write_tensors
from .merge_plan import MergePlan, Shard
from .names import EXTENSIONS, FINAL_INDEX, STAGED_INDEX, is_shard, weight_file_names
from .options import SaveOptions
from .plain_files import is_regular, kind_of, open_plain
from .staging import Operation
from .tensors import dtype_of, to_cpu


def write_merged(
    model: PreTrainedModel,
    state: Mapping[str, torch.Tensor],
    plan: MergePlan,
    folder: str,
    options: SaveOptions,
    comm: Comm,
) -> None:
    """Assemble and write this rank's shards into `folder`, and send what others need for theirs.

    Transfers happen in one order on all ranks, so they cannot deadlock. A rank that fails goes on taking part in them,
    so that no other waits for it, and raises at the end.
    """
    failure: Exception | None = None
    for shard in plan.shards:
        failure = _write_shard(model, state, plan, shard, folder, options, comm, failure)
    if failure is None and plan.index_name is not None and comm.rank == 0:
        _write_indices(plan, folder)
    if failure is not None:
        raise failure


def _write_shard(
    model: PreTrainedModel,
    state: Mapping[str, torch.Tensor],
    plan: MergePlan,
    shard: Shard,
    folder: str,
    options: SaveOptions,
    comm: Comm,
    failure: Exception | None,
) -> Exception | None:
    """Do this rank's transfers for a shard, and write it if it is this rank's and nothing has failed.

    Returns:
        what has failed on this rank until now.
    """
    gathered: dict[str, torch.Tensor] = {}
    for name in shard.inputs:
        holding, sources, cut = plan.holdings[name], plan.sources(name), plan.cuts.get(name)
        if comm.rank not in (*sources, shard.assembler):
            continue
        shape = holding.shape if cut is None else cut.shape(holding.shape, plan.num_slices)
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
            gathered[name] = slices[0] if cut is None else cut.join(slices)
    if comm.rank == shard.assembler and failure is None:
        try:
            _assemble(model, gathered, shard, folder, options)
        except Exception as error:
            return error
    return failure


def _assemble(
    model: PreTrainedModel, gathered: dict[str, torch.Tensor], shard: Shard, folder: str, options: SaveOptions
) -> None:
    tensors = revert_weight_conversion(model, gathered) if options.save_original_format else gathered
    wanted = to_cpu({name: tensors[name] for name in shard.outputs})
    write_tensors(os.path.join(folder, shard.file_name), wanted, options.save_function)


def _write_indices(plan: MergePlan, folder: str) -> None:
    staging = os.path.basename(folder)
    staged = {name: f"{staging}/{file_name}" for name, file_name in plan.index["weight_map"].items()}
    for name, weight_map in ((STAGED_INDEX, staged), (FINAL_INDEX, plan.index["weight_map"])):
        content = {"metadata": plan.index["metadata"], "weight_map": weight_map}
        write_bytes(os.path.join(folder, name), (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def merged_operations(
    directory: str, folder: str, plan: MergePlan, sides: Sequence[str], options: SaveOptions
) -> list[Operation]:
    """The renames that turn the staged files into the checkpoint in `directory`; any prefix leaves a whole one.

    transformers starts from the first of these that exists: `model.safetensors`, its index, `pytorch_model.bin`, its
    index. So the new one is put in place first, and then those are removed that come before it in this order, the one
    in use until now last. An index first refers to the shards where they are staged, and to their final names only when
    they are there. A configuration that changed is replaced a moment before: the one step that is not atomic with the
    rest, and only seen when another model, or a resized one, is saved into the same folder.
    """
    changed = [name for name in sides if not _same(os.path.join(folder, name), os.path.join(directory, name))]
    operations: list[Operation] = [("replace", name, name) for name in changed]
    search_order = [
        *weight_file_names(".safetensors", options.variant),
        *weight_file_names(".bin", options.variant),
    ]
    start = plan.index_name or plan.shards[0].file_name
    operations.append(("replace", STAGED_INDEX if plan.index_name else start, start))
    hiding = search_order[: search_order.index(start)]
    operations += [("remove", "", name) for name in reversed(hiding) if kind_of(os.path.join(directory, name))]
    if plan.index_name is not None:
        operations += [("publish", shard.file_name, shard.file_name) for shard in plan.shards]
        operations.append(("replace", FINAL_INDEX, start))
    elif kind_of(os.path.join(directory, index := weight_file_names(options.extension, options.variant)[1])):
        operations.append(("remove", "", index))
    operations += [("remove", "", name) for name in _old_shards(directory, plan, options)]
    return operations


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


def _same(one: str, other: str) -> bool:
    """Whether two files exist with the same content."""
    try:
        with open_plain(one) as first, open_plain(other) as second:
            return first.read() == second.read()
    except (OSError, CheckpointError):
        return False

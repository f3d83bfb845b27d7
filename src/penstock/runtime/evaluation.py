"""Forward only: one ordinary output for the whole batch, on every rank of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from penstock.modeling.loss import Criterion

from .inputs import StepInputs
from .program import Program
from .station import StageOpener, Station
from .transfer import TensorSpec, broadcast_specs, broadcast_tensor


def evaluate(
    station: Station,
    program: Program,
    inputs: StepInputs,
    criterion: Criterion | None = None,
    over_all_pipelines: bool = False,
) -> Any:
    """Run the forwards; return the merged output on the rank of the last stage, None elsewhere.

    Args:
        program: of a schedule of forwards alone.
        criterion: gives the loss in place of the model's own.
        over_all_pipelines: make the loss this pipeline's share of the global batch's loss rather than the mean over its
            own batch. All pipelines must evaluate together then; one without any microbatch has no output.
    """
    last = program.last
    is_last = program.top == last
    outputs: list[Any] = [None] * len(inputs.microbatches)
    totals: Sequence[int] = inputs.total_counts() if is_last else ()
    if over_all_pipelines and is_last:
        totals = station.totals.counts(totals)
    station.channel.sends_ahead = program.sends_ahead
    with torch.no_grad():
        opener = StageOpener(station, program.orders, inputs)
        for position, action in enumerate(program.actions):
            stage, microbatch = action.stage, action.microbatch
            if program.posts:
                opener.post(program.posts[position].before)
            if stage not in opener.states:
                opener.open(stage)
            received = station.exchange.below[stage].take_activations(microbatch)
            plan, batch = inputs.plans[microbatch], inputs.microbatches[microbatch]
            shares = None
            if stage == last and plan.loss is not None:
                shares = plan.loss.shares(inputs.counts[microbatch], totals)
            seed = inputs.seed(station.seed, microbatch)
            output, sent = station.split.forward(
                plan, stage, batch, received, seed=seed, shares=shares, criterion=criterion
            )
            if stage == last:
                outputs[microbatch] = output
            else:
                station.exchange.above[stage].give_activations(microbatch, sent)
        station.channel.flush()
        return merge_outputs(outputs, inputs.sizes) if is_last and outputs else None


def merge_outputs(outputs: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> Any:
    """One output for the batch from those of its microbatches of `sizes` samples.

    The loss is the sum of the shares; tensors with a row per sample are concatenated, also inside tuples; other scalars
    (a router's balance loss) are averaged by samples. Caches are dropped: each stage's holds only its own layers.
    """
    first = outputs[0]
    merged = {
        name: sum(output[name] for output in outputs) if name == "loss" else _merge([o[name] for o in outputs], sizes)
        for name in first
        if not isinstance(first[name], Cache)
    }
    return type(first)(**merged)


def _merge(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        if first.dim() and all(value.shape[0] == size for value, size in zip(values, sizes, strict=True)):
            return torch.cat(list(values))
        if not first.dim() and first.is_floating_point():
            return sum(value * (size / sum(sizes)) for value, size in zip(values, sizes, strict=True))
        # A row per token (router logits of shape (samples * length, experts)).
        return torch.cat(list(values)) if first.dim() else first
    if isinstance(first, tuple | list):
        return type(first)(_merge(list(parts), sizes) for parts in zip(*values, strict=True))
    return first


def share_output(
    output: Any, group: dist.ProcessGroup, control: dist.ProcessGroup, source: int, device: torch.device
) -> Any:
    """Every rank of `group` gets the output that the global rank `source` holds (or its None).

    `control` joins the same ranks' hosts.
    """
    if dist.get_world_size(group) == 1:
        return output
    is_source = dist.get_rank() == source
    leaves: list[Any] = []
    structure: list[Any] = [None]
    if is_source and output is not None:
        leaves, spec = pytree.tree_flatten(dict(output))
        are_tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        plain = [None if is_tensor else leaf for leaf, is_tensor in zip(leaves, are_tensors, strict=True)]
        structure = [(type(output), spec, plain, are_tensors)]
    dist.broadcast_object_list(structure, source, group=control)
    if structure[0] is None:
        return None
    kind, spec, plain, are_tensors = structure[0]
    tensors = [leaf.detach().contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    specs = broadcast_specs(
        [TensorSpec.of(t) for t in tensors] if is_source else None, sum(are_tensors), source, control
    )
    if not is_source:
        tensors = [spec.empty(device) for spec in specs]
    for tensor in tensors:
        broadcast_tensor(tensor, source, group)
    if is_source:
        return output
    received = iter(tensors)
    merged = [next(received) if is_tensor else leaf for leaf, is_tensor in zip(plain, are_tensors, strict=True)]
    return kind(**pytree.tree_unflatten(merged, spec))

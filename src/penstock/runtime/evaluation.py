"""Forward only: one ordinary output for the whole batch, on every rank of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from penstock.data.microbatch import rows_of
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.stage.outputs import Shapes, merge_outputs
from penstock.modeling.stage.split import SplitModel

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
                plan,
                stage,
                batch,
                received,
                seed=seed,
                shares=shares,
                criterion=criterion,
                host=inputs.hosts[microbatch],
            )
            if stage == last:
                outputs[microbatch] = output
            else:
                station.exchange.above[stage].give_activations(microbatch, sent)
        station.channel.flush()
        if not (is_last and outputs):
            return None
        first = partial(_grown, station.split, inputs.microbatches[0], inputs.sizes[0])
        rule = inputs.plans[0].loss
        return merge_outputs(outputs, inputs.sizes, () if rule is None else rule.fields, first)


def _grown(split: SplitModel, inputs: Mapping[str, Any], size: int) -> Shapes:
    """The shapes of the model's output for a microbatch of `size` samples and one more."""
    arguments = {
        name: torch.cat([value, value[:1]]) if rows_of(name, value) == size else value for name, value in inputs.items()
    }
    return split.output_shapes(arguments)


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

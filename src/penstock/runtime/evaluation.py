"""Forward only: one ordinary output for the whole batch, on every rank of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from penstock.data.batch import with_one_sample_more
from penstock.data.media import MediaTokens
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.stage.named_output import Form, named_output, output_of
from penstock.modeling.stage.outputs import Shapes, merge_outputs
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.boundary.tensors import broadcast_specs, broadcast_tensor
from penstock.runtime.context import RankContext
from penstock.runtime.inputs import StepInputs
from penstock.runtime.labels import labelled, profiling
from penstock.runtime.program import Program
from penstock.runtime.stages import StageExecutor


def evaluate(
    stages: StageExecutor,
    program: Program,
    inputs: StepInputs,
    states: Sequence[Hashable],
    counts: Callable[[Sequence[int]], Sequence[int]] | None = None,
    *,
    seed: int = 0,
    criterion: Criterion | None = None,
    media: MediaTokens | None = None,
) -> Any:
    """Run the forwards; return the merged output on the rank of the last stage, None elsewhere.

    Args:
        program: of a schedule of forwards alone.
        states: see `Boundaries.begin`.
        counts: makes this pipeline's numbers of terms in the loss's means those of the global batch, so that the loss
            is a share of the global batch's loss. All pipelines must evaluate together then; one without any microbatch
            has no output. Without it the loss is the mean over this pipeline's batch.
        seed: the run's, for dropout.
        criterion: gives the loss in place of the model's own.
        media: the tokens of images and other media, with which the batch was split.
    """
    last = program.last
    is_last = program.top == last
    outputs: list[Any] = [None] * len(inputs.microbatches)
    totals: Sequence[int] = inputs.total_counts() if is_last else ()
    if counts is not None and is_last:
        totals = counts(totals)
    boundaries = stages.boundaries
    boundaries.channels.sends_ahead = program.sends_ahead
    with torch.no_grad():
        num_values = [len(values) for values in inputs.plans[0].boundaries] if inputs.plans else []
        boundaries.begin(program.orders, inputs.signatures, num_values, states)
        actions = enumerate(program.actions)
        for position, action in labelled(actions) if profiling() else actions:
            stage, microbatch = action.stage, action.microbatch
            if program.posts:
                boundaries.post(program.posts[position].before)
            plan, shares = inputs.plans[microbatch], None
            if stage == last and plan.loss is not None:
                shares = plan.loss.shares(inputs.counts[microbatch], totals)
            output, _, _ = stages.forward(
                plan,
                stage,
                microbatch,
                inputs.microbatches[microbatch],
                seed=inputs.seed(seed, microbatch),
                shares=shares,
                criterion=criterion,
                host=inputs.hosts[microbatch],
            )
            if stage == last:
                outputs[microbatch] = named_output(output)
        boundaries.channels.flush()
        if not (is_last and outputs):
            return None

        def grown() -> Shapes:
            more = with_one_sample_more(inputs.microbatches[0], inputs.sizes[0], media)
            return stages.split.output_shapes(more)

        rule = inputs.plans[0].loss
        return merge_outputs(outputs, inputs.sizes, () if rule is None else rule.fields, grown)


def share_output(output: Any, context: RankContext, form: Form | None = None) -> Any:
    """Every rank of the pipeline gets the output that the rank of the last stage holds (or its None).

    `form` is that of the plan; a class of the user's own need not travel.
    """
    group, control, source = context.groups.pipeline, context.groups.pipeline_control, context.output_rank
    if dist.get_world_size(group) == 1:
        return output
    is_source = context.rank == source
    skeleton: list[Any] = [None]
    leaves: list[Any] = []
    if is_source and output is not None:
        leaves, spec = pytree.tree_flatten(dict(output))
        marked = [_Tensor() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        # Not the spec itself: torch warns about its own class when one is unpickled.
        skeleton = [(type(output) if form is None else None, pytree.tree_unflatten(marked, spec))]
    dist.broadcast_object_list(skeleton, source, group=control)
    if skeleton[0] is None:
        return None
    kind, content = skeleton[0]
    marked, spec = pytree.tree_flatten(content)
    tensors = [leaf.detach().contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    count = sum(isinstance(leaf, _Tensor) for leaf in marked)
    specs = broadcast_specs([TensorSpec.of(t) for t in tensors] if is_source else None, count, source, control)
    if not is_source:
        tensors = [one.empty(context.device) for one in specs]
    for tensor in tensors:
        broadcast_tensor(tensor, source, group)
    if is_source:
        return output
    received = iter(tensors)
    merged = [next(received) if isinstance(leaf, _Tensor) else leaf for leaf in marked]
    return output_of(form or kind, pytree.tree_unflatten(merged, spec))


class _Tensor:
    """Stands for a tensor of an output whose other parts are sent as they are."""

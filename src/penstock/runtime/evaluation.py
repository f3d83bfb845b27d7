"""Forward only: one ordinary output for the whole batch, on every rank of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from penstock.modeling.stage.named_output import Form, named_output, output_of
from penstock.modeling.stage.outputs import Shapes, merge_outputs
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.boundary.boundaries import Boundaries
from penstock.runtime.boundary.tensors import carried
from penstock.runtime.comm.exchange import Ranks, from_plain, to_plain
from penstock.runtime.context import RankContext
from penstock.runtime.inputs import StepInputs
from penstock.runtime.labels import numbered
from penstock.runtime.program import Program


def evaluate(
    split: SplitModel,
    boundaries: Boundaries,
    program: Program,
    inputs: StepInputs,
    states: Sequence[Hashable],
    counts: Callable[[Sequence[int]], Sequence[int]] | None = None,
    grown: Callable[[], Shapes] | None = None,
) -> Any:
    """Run the forwards; return the merged output on the rank of the last stage, None elsewhere.

    `counts` makes this pipeline's numbers of terms in the loss's means those of the global batch, of whose loss it then
    gives a share. All pipelines must evaluate together then; one without any microbatch has no output."""
    last = program.last
    is_last = program.top == last
    outputs: list[Any] = [None] * len(inputs.microbatches)
    totals: Sequence[int] = inputs.total_counts() if is_last else ()
    if counts is not None and is_last:
        totals = counts(totals)
    with torch.no_grad():
        program.begin(boundaries, inputs, states)
        for position, action in numbered(program.actions):
            stage, microbatch = action.stage, action.microbatch
            if program.posts:
                boundaries.post(program.posts[position].before)
            shares = inputs.shares(microbatch, totals) if stage == last else None
            output, sent = split.forward(
                inputs.plans[microbatch],
                stage,
                inputs.microbatches[microbatch],
                boundaries.below[stage].recv_forward(microbatch),
                seed=inputs.seed(microbatch),
                shares=shares,
                criterion=inputs.criterion,
                host=inputs.hosts[microbatch],
            )
            if stage == last:
                outputs[microbatch] = named_output(output)
            else:
                boundaries.above[stage].send_forward(microbatch, sent)
        boundaries.channels.flush()
        if not (is_last and outputs):
            return None
        rule = inputs.plans[0].loss
        return merge_outputs(outputs, inputs.sizes, () if rule is None else rule.fields, grown)


def share_output(output: Any, context: RankContext, form: Form | None = None) -> Any:
    """Every rank of the pipeline gets the output that the rank of the last stage holds (or its None). `form` is that of
    the plan, so that a class of the user's own need not travel."""
    group, control, source = context.groups.pipeline, context.groups.pipeline_control, context.output_rank
    if dist.get_world_size(group) == 1:
        return output
    told: Any = None
    if context.rank == source and output is not None:
        fields = pytree.tree_map_only(torch.Tensor, TensorSpec.of, dict(output))
        # A class of the user's own is not looked up: the plan has it.
        told = to_plain(fields if form is not None else output_of(type(output), fields))
    ranks = Ranks(control, context.board.guard)
    told = ranks.exchange(told, "sharing the output")[ranks.ranks.index(source)]
    if told is None:
        return None
    if context.rank == source:
        for leaf in pytree.tree_leaves(dict(output)):
            if isinstance(leaf, torch.Tensor):
                dist.broadcast(carried(leaf.detach().contiguous()), source, group=group)
        return output
    marked = from_plain(told)

    def received(spec: TensorSpec) -> torch.Tensor:
        tensor = spec.empty(context.device)
        dist.broadcast(carried(tensor), source, group=group)
        return tensor

    fields = pytree.tree_map_only(TensorSpec, received, dict(marked), lambda leaf: isinstance(leaf, TensorSpec))
    return output_of(form or type(marked), fields)

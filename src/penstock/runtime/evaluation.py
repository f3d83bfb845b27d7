"""Forward only: one ordinary output for the whole batch, on every rank of the pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from penstock.data.batch import with_one_sample_more
from penstock.data.fingerprint import described, fingerprint
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.stage.outputs import (
    OutputForm,
    Shapes,
    form_of,
    joint_form,
    merge_outputs,
    named_output,
    output_of,
)
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.boundary.boundaries import Boundaries
from penstock.runtime.boundary.p2p import carried
from penstock.runtime.comm.exchange import Ranks, from_plain, to_plain
from penstock.runtime.comm.gloo import wait_for_all
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.comm.settings import states_of_stages
from penstock.runtime.context import RankContext
from penstock.runtime.engine import Engine
from penstock.runtime.failures.position import Among
from penstock.runtime.gradients.gradients import autocast
from penstock.runtime.inputs import StepInputs, refuse_without_loss
from penstock.runtime.options import SequenceParts
from penstock.runtime.program import Program
from penstock.runtime.report import numbered


def evaluate(
    engine: Engine, inputs: Mapping[str, Any], criterion: Criterion | None = None, in_parts: bool = True
) -> Any:
    """The model's output for the whole batch, on every rank of this pipeline, without gradients. `in_parts`: pipelines
    that share their sequences in training do so here."""
    with _evaluation(engine, inputs, criterion, Call.EVALUATE, in_parts) as (output, form):
        return share_output(output, engine.context, form)


def evaluate_together(
    engine: Engine, inputs: Mapping[str, Any], criterion: Criterion | None = None, share_outputs: bool = False
) -> tuple[float, Any]:
    """The loss of the global batch, on every rank, and this pipeline's output. Each pipeline gives its own part of the
    batch, and all of them call this together. With `share_outputs` all ranks of the pipeline have the
    output, otherwise those of the last stage. It is None elsewhere, and on a pipeline without any microbatch."""
    with _evaluation(engine, inputs, criterion, Call.EVALUATE_TOGETHER, joined=share_outputs) as (output, form):
        # Where sequences are put together, each of their pipelines has the whole loss: only the first one gives it.
        gives_loss = not share_outputs or engine.layout.part_of(engine.place.pipeline) == 0
        loss = output.loss.detach() if gives_loss and output is not None else torch.zeros((), device=engine.device)
        engine.parts.totals.start(loss.to(torch.float64))
        global_loss, _ = engine.parts.totals.finish()
        return float(global_loss), share_output(output, engine.context, form) if share_outputs else output


def shapes_of_one_more(engine: Engine, microbatch: Mapping[str, Any], size: int) -> Shapes:
    """The shapes of the output for a microbatch of `size` samples with one sample more."""
    return engine.split.output_shapes(with_one_sample_more(microbatch, size, engine.media, engine.options.batch_dim))


@contextlib.contextmanager
def _evaluation(
    engine: Engine,
    inputs: Mapping[str, Any],
    criterion: Criterion | None,
    call: Call,
    in_parts: bool = True,
    joined: bool = True,
) -> Iterator[tuple[Any, OutputForm | None]]:
    """Evaluate a batch; gives the output on the rank of the last stage, None elsewhere, and its form. `joined`: whether
    sequences that are computed in parts are put together; otherwise the output has only the loss, a part's share."""
    everyone = call is Call.EVALUATE_TOGETHER
    microbatches, sizes = engine.microbatches(inputs, at_most=True)
    first = engine.context.replica * len(microbatches) if everyone else 0
    prepared = engine.prepare(microbatches, sizes, first, criterion, in_parts=in_parts)
    if everyone:
        refuse_without_loss(engine.split.model, prepared)
    sequences = engine.parts.sequences if in_parts else None
    among = Among.ALL if everyone else Among.BATCH  # this pipeline, with those that share its sequences
    with autocast(engine.device, engine.autocast):
        settings = engine.parts.settings(fingerprint(inputs), prepared, engine.loss_scale, engine.reduces_gradients)
        with (
            engine.together(call, settings, among, partial(described, inputs, sizes)) as gathered,
            engine.board.guard("evaluating", engine.board.ranks_of(among)),
        ):
            engine.num_evaluations += 1
            stage_states = states_of_stages(gathered, engine.context, training=False)
            parts, program = engine.parts, engine.parts.program(len(microbatches), forwards=True)
            counts = _counts(engine, prepared, everyone, sequences) if engine.context.holds_output else ()
            outputs = run_forwards(engine.split, parts.boundaries, program, prepared, stage_states, counts)
            output = None
            if outputs:
                fields = {field for plan in prepared.plans if plan.loss is not None for field in plan.loss.fields}
                if sequences is not None:
                    pairs = zip(outputs, prepared.microbatches, microbatches, strict=True)
                    outputs = [
                        sequences.join(of_part, part, whole, {"loss", *fields}) if joined else _loss_alone(of_part)
                        for of_part, part, whole in pairs
                    ]
                grown = partial(shapes_of_one_more, engine, microbatches[0], sizes[0])
                with torch.no_grad():  # an output may be a parameter itself
                    output = merge_outputs(outputs, sizes, fields, grown)
            yield output, joint_form(plan.form for plan in prepared.plans)


def _counts(engine: Engine, prepared: StepInputs, everyone: bool, sequences: SequenceParts | None) -> Sequence[float]:
    """The numbers of elements in the means of the loss, over all that it is a mean of. For ranks of the last stage."""
    counts = prepared.total_counts()
    if everyone:
        engine.parts.totals.start_counts(counts)
        return engine.parts.totals.finish_counts()
    return counts if sequences is None else sequences.sums(counts)


@torch.no_grad()
def run_forwards(
    split: SplitModel,
    boundaries: Boundaries,
    program: Program,
    inputs: StepInputs,
    stage_states: Sequence[Hashable],
    counts: Sequence[float] = (),
) -> list[Any] | None:
    """Run the forwards; gives the microbatches' outputs on the rank of the last stage, None elsewhere. `counts`: the
    numbers of elements in the means of the loss, of which the losses are shares."""
    last = program.last
    is_last = program.top == last
    outputs: list[Any] = [None] * len(inputs.microbatches)
    program.prepare(boundaries, inputs, stage_states)
    for position, action in numbered(program.actions):
        stage, microbatch = action.stage, action.microbatch
        if program.posts:
            boundaries.post(program.posts[position].before)
        plan = inputs.plans[microbatch]
        output, sent = split.forward(
            plan,
            stage,
            inputs.microbatches[microbatch],
            boundaries.to_previous[stage].recv_forward(microbatch),
            seed=inputs.seed(microbatch) if split.draws(plan) else None,
            shares=inputs.shares(microbatch, counts) if stage == last else None,
            criterion=inputs.criterion,
            host=inputs.hosts[microbatch],
            watch=microbatch == 0,
        )
        if stage == last:
            outputs[microbatch] = named_output(output)
        else:
            boundaries.to_next[stage].send_forward(microbatch, sent)
    boundaries.channels.flush()
    return outputs if is_last else None


def _loss_alone(output: Any) -> Any:
    return output_of(form_of(output) or type(output), {"loss": output["loss"]})


def share_output(output: Any, context: RankContext, form: OutputForm | None = None) -> Any:
    """Every rank of the pipeline gets the output that the rank of the last stage holds (or its None). `form` is that of
    the plan, so that a class of the user's own need not travel."""
    group, control, source = context.groups.pipeline, context.groups.pipeline_control, context.output_rank
    if dist.get_world_size(group) == 1:
        return output

    def share(tensor: torch.Tensor) -> None:
        work = dist.broadcast(carried(tensor), source, group=group, async_op=True)
        wait_for_all(work, group, tensor.device, context.board.check)

    plain: Any = None
    if context.rank == source and output is not None:
        fields = pytree.tree_map_only(torch.Tensor, TensorSpec.of, dict(output))
        # A class of the user's own is not looked up: the plan has it.
        plain = to_plain(fields if form is not None else output_of(type(output), fields))
    ranks = Ranks(control, context.board.guard)
    plain = ranks.exchange(plain, "sharing the output")[ranks.ranks.index(source)]
    if plain is None:
        return None
    if context.rank == source:
        for leaf in pytree.tree_leaves(dict(output)):
            if isinstance(leaf, torch.Tensor):
                share(leaf.detach().contiguous())
        return output
    marked = from_plain(plain)

    def received(spec: TensorSpec) -> torch.Tensor:
        tensor = spec.empty(context.device)
        share(tensor)
        return tensor

    fields = pytree.tree_map_only(TensorSpec, received, dict(marked), lambda leaf: isinstance(leaf, TensorSpec))
    return output_of(form or type(marked), fields)

"""What few runs do with an engine that stands: take up another layout, copy the model, put other modules into it.

All ranks of the layout make each of these calls together, but for `copy_of` and mostly `engine_of`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.layout.layout import Layout
from penstock.modeling.instrumentation import known_of, original_class, record_of
from penstock.modeling.libraries import base_of
from penstock.modeling.stage.split import SplitModel, refuse_moved
from penstock.runtime.comm.gloo import wait_for_all
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.context import RankContext
from penstock.runtime.engine import Engine
from penstock.runtime.failures.board import FailureBoard, noting_on
from penstock.runtime.formation import connect_ranks, job_board, new_job, start_engine
from penstock.runtime.gradients.weight_gradients import uninstall
from penstock.runtime.migration import FillValues, Migration
from penstock.runtime.parts import ScheduleMaker, holders_of


def change_layout(
    engine: Engine,
    layout: Layout,
    make_schedule: ScheduleMaker | None = None,
    *,
    fill_values: FillValues,
    migration: Migration | None = None,
    on_board: Callable[[FailureBoard], object] = lambda board: None,
) -> None:
    """Take up another layout with the same model, the same parameters and the same optimizer.

    The ranks that remain of the old layout call this together, after `engine.dissolve()`, `destroy_process_group()` and
    a new `init_process_group()`; ranks that come new call `parallelize(..., fill_values=...)` meanwhile. Units that are
    held no longer give up their storage; those that are held newly get storage on the same `Parameter` objects. Raises
    ValueError if the layout does not fit the model or the world; nothing has changed then.

    Args:
        make_schedule: for this rank's pipeline; by default the present one, which must fit.
        fill_values: fills in what is held newly: from a checkpoint, or from ranks that have it (`from_live_ranks`).
        migration: of an attempt that failed before, or that has begun to move values.
        on_board: is given the failure board first of all.
    """
    size, before = layout.tensor_parallel_size, engine.layout
    if layout.world_size != dist.get_world_size():
        raise ValueError(f"the layout is of {layout.world_size} ranks, but the world has {dist.get_world_size()}")
    if layout.units != before.units:
        other = ", ".join(sorted({*layout.units} ^ {*before.units})) or "the order differs"
        raise ValueError(f"another layout must place the same units in the same order: {other}")
    place, shard = layout.place_of(dist.get_rank()), engine.place.tensor_parallel_rank
    if (size, place.tensor_parallel_rank) != (before.tensor_parallel_size, shard):
        raise ValueError(
            f"this rank has shard {shard} of {before.tensor_parallel_size} of each weight, and a layout with shard "
            f"{place.tensor_parallel_rank} there and a tensor_parallel_size of {size} cannot be taken up: split a new "
            "model for it"
        )
    engine.dissolve()  # does nothing if the caller has, as it must where it has left the old world
    pipeline = layout.pipelines[place.pipeline]
    saved = engine.board.resume
    migration = Migration.of(engine) if migration is None else migration
    with new_job(engine.options.timeout, on_board, "a re-formation", engine.options.patience) as board:
        board.resume.update(saved)
        engine.split.change_stages(pipeline.stages, pipeline.stages_of(place.pipeline_rank))
        migration.lacking |= set(engine.split.taken)
        connect_ranks(
            engine, layout, make_schedule or engine.make_schedule, board, partial(_fill, engine, fill_values, migration)
        )


def _fill(engine: Engine, fill_values: FillValues, migration: Migration) -> None:
    """After a re-formation: fill in the values of everything that is held and lacks them."""
    lacking = {name: tensor for name, tensor in engine.values_here().items() if name in migration.lacking}
    with torch.no_grad():
        for name in list(lacking):
            if name in migration.had:  # a rank that leaves gave it, or an attempt that failed released it
                lacking.pop(name).copy_(migration.had[name])
    fill_values(engine, lacking, migration)
    # All ranks have what they need. What is no longer held has no optimizer state now: it does not count as had, even
    # if this re-formation fails yet.
    migration.take_stock(engine)


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that runs a model; None if it is not parallelised. All ranks together form the engine of a copy, when
    it is first asked for."""
    base = base_of(model)
    record = known_of(base)
    if record.engine is None and record.copied_from is not None:
        record.engine = for_copy(record.copied_from, base)
    engine: Engine | None = record.engine
    return engine


def for_copy(engine: Engine, model: nn.Module) -> Engine:
    """An engine of the same layout for a copy of the model. All ranks of the layout call this together."""
    before = engine.split
    if before.tensor_parallel is not None:
        raise NotImplementedError(
            "a copy of a model whose weights are sharded over tensor-parallel ranks cannot be run: initialize() "
            "another whole model, or save this one and load it"
        )
    engine.refuse_if_over()
    refuse_moved(model, engine.device)
    split = SplitModel(model, before.stages, before.local_stages, aliases=before.aliases)
    made = Engine(split, engine.device, replace(engine.options, trace=None, trace_steps=None))
    start_engine(made, engine.layout, engine.make_schedule, job_board())
    made.autocast, made.step_number, made.own_means = engine.autocast, engine.step_number, engine.own_means
    return made


def copy_of(model: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a parallelised model, without communication. Its engine is made by `for_copy`."""
    record, kind = record_of(model), type(model)
    original: Any = original_class(kind)
    made = original.__new__(original)
    memo[id(model)] = made
    state = {name: value for name, value in vars(model).items() if name != "_compiled_call_impl"}
    made.__setstate__(copy.deepcopy(state, memo))
    uninstall(made)
    made.__class__ = kind
    copied = record_of(made)
    copied.configuration, copied.criterion = record.configuration, record.criterion
    copied.copied_from = record.engine or record.copied_from
    return made


@contextlib.contextmanager
def renewing(engine: Engine) -> Iterator[None]:
    """Around what puts other modules or parameters in the place of some, such as merging adapters into the layers. All
    ranks do the same to the whole model, ghosts included, and rename no unit. A tied weight that one of its stages
    changes meanwhile is changed on all of them."""
    parts, context = engine.parts, engine.context
    tied = {
        weight.parameter: weight.ranks for weight in parts.held if context.layout.are_of_several_stages(weight.ranks)
    }
    with engine.together(Call.RENEW):
        before = {parameter: parameter.detach().clone() for parameter in tied}
        parts.remove_hooks()
        try:
            yield
            with context.board.guard("sharing tied weights", context.everyone):
                for parameter, was in before.items():
                    _share_change(parameter.detach(), was, context, context.groups.reduction[tied[parameter]])
        except BaseException as error:
            with noting_on(error):
                _take_stock(engine)
            raise
        _take_stock(engine)


def _take_stock(engine: Engine) -> None:
    """Find the parameters anew, and put the hooks on them."""
    parts, before = engine.parts, engine.parts.held
    engine.split.renew()
    parts.held, _ = holders_of(engine.split, engine.context.layout)
    parts.build_gradients(before)
    engine.note_known()


def _share_change(value: torch.Tensor, before: torch.Tensor, context: RankContext, group: dist.ProcessGroup) -> None:
    """Give all holders of a parameter the change that any of them made. Pipelines change the same: one speaks."""
    speaker = context.place.pipeline == 0 and not torch.equal(value, before)
    count = torch.full((), float(speaker), device=value.device)
    dist.all_reduce(count, group=group)
    if count:
        alone = count == 1  # then the value itself, to the last bit
        change = (value.clone() if alone else value - before) if speaker else torch.zeros_like(value)
        work = dist.all_reduce(change, group=group, async_op=True)
        wait_for_all(work, group, change.device, context.board.check)
        value.copy_(change if alone else before + change)

"""Ranks form the engine of a model.

`parallelize` is the one function that turns a model and a layout into a running engine. All ranks of the layout call it
together. See `reforming` for what may come later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.layout.layout import Layout
from penstock.modeling.graph.shapes import ShapeFunctions
from penstock.modeling.sharding import MakeSharding
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.weights.names import alias_groups
from penstock.runtime import torch_calls
from penstock.runtime.comm.devices import default_timeout, local_device
from penstock.runtime.comm.forming import (
    adopt_random_state,
    copy_from_first_holders,
    job_board,
    require_layout,
    shared_progress,
)
from penstock.runtime.comm.groups import Groups
from penstock.runtime.context import RankContext
from penstock.runtime.engine import Engine
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.failures.interrupts import Interrupts
from penstock.runtime.failures.watcher import interruptible
from penstock.runtime.options import EngineOptions
from penstock.runtime.parts import Parts, ScheduleMaker, holders_of


@dataclass
class Migration:
    """What a change of the layout finds on this rank, and moves: one object from its beginning to its end, over
    re-formations that fail. Values are parameters and buffers, by unsplit name.

    Attributes:
        had: the values that this rank has. What it receives meanwhile is added, so that it counts in another attempt.
        lacking: names of what it holds newly, and has no values of yet.
        elsewhere: names of what it has but does not own: with a sharded optimizer its newest value and its state are on
            other ranks.
    """

    had: dict[str, torch.Tensor] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, engine: Engine) -> Migration:
        """That of an engine that stands, or was dissolved."""
        found = cls()
        found.take_stock(engine)
        return found

    def take_stock(self, engine: Engine) -> None:
        """Begin with what the engine holds now, all of which has its values."""
        self.had, self.lacking, self.elsewhere = engine.values_here(), set(), engine.owned_elsewhere()

    def arrived(self, name: str, tensor: torch.Tensor, with_state: bool) -> None:
        """A value has come, and its optimizer's state if `with_state`."""
        self.had[name] = tensor
        (self.elsewhere.discard if with_state else self.elsewhere.add)(name)


# Fills in what a rank holds newly: given the engine, these parameters and buffers by their unsplit names, and what the
# rank has of the time before.
Values = Callable[[Engine, Mapping[str, torch.Tensor], Migration], None]


def parallelize(
    model: nn.Module,
    layout: Layout,
    make_schedule: ScheduleMaker,
    board: FailureBoard | None = None,
    options: EngineOptions | None = None,
    *,
    make_weights: Callable[[torch.device], Any] | None = None,
    make_sharding: MakeSharding | None = None,
    values: Values | None = None,
    functions: ShapeFunctions | None = None,
) -> Engine:
    """Split `model` for this rank's place in `layout`, move it to this rank's device, and form the engine. All ranks
    call this together, with equal models.

    Args:
        model: a whole model, or one whose foreign units are ghosts already; it is shrunk in place.
        make_schedule: gives this rank's pipeline's schedule for a number of microbatches.
        board: where failures are recorded, from `forming()`; by default a new one.
        make_sharding: makes what shards the weights, such as `TensorParallel`; for a layout with tensor parallelism.
        make_weights: makes those of this rank's stages on a device, of a model on the meta device.
        values: on a rank that joins others which call `reform`, fills in what it holds.
        functions: the units' shape functions, if there are some already.
    """
    place = layout.place_of(dist.get_rank())
    mine = layout.pipelines[place.pipeline]
    own = mine.stages_of(place.pipeline_rank)
    aliases, sharding = alias_groups(model), None
    if layout.tensor_parallel_size > 1:
        if make_sharding is None:
            raise TypeError(f"a layout of tensor_parallel_size {layout.tensor_parallel_size} needs make_sharding")
        sharding = make_sharding(model, place.tensor_parallel_rank, layout.tensor_parallel_size, aliases)
    split = SplitModel(model, mine.stages, own, sharding, aliases, functions)
    device = local_device()
    (make_weights or model.to)(device)
    engine = Engine(split, device, EngineOptions() if options is None else options)
    form_first(engine, layout, make_schedule, job_board() if board is None else board, values)
    return engine


def form_first(
    engine: Engine, layout: Layout, make_schedule: ScheduleMaker, board: FailureBoard, values: Values | None = None
) -> None:
    """Form an engine that was never formed before; all ranks start alike, or as `values` says."""

    def fill() -> None:
        if values is None:
            copy_from_first_holders(engine.held, engine.split.model, engine.context.groups)
        else:
            values(engine, engine.values_here(), Migration())

    form(engine, layout, make_schedule, board, fill)
    torch_calls.follow(engine)


def form(
    engine: Engine, layout: Layout, make_schedule: ScheduleMaker, board: FailureBoard, share_values: Callable[[], None]
) -> None:
    """Meet the other ranks of `layout`, build all that depends on it, and start alike."""
    split, device = engine.split, engine.device
    require_layout(layout, board)
    make_schedule(1)  # what the maker refuses, it refuses before anything is made
    held, shared = holders_of(split, layout)
    rank, timeout = dist.get_rank(), engine.options.timeout
    broadcasts = engine.options.choose_owners is not None
    with board.guard("making process groups", range(layout.world_size)):
        groups = interruptible(
            partial(Groups, layout, rank, device, shared, timeout, board.refuse_if_failed, broadcasts),
            board,
            timeout or default_timeout(device),
        )
    context = RankContext(layout, rank, device, groups, board, Interrupts())
    board.mates, board.patience = frozenset(context.pipeline_ranks), engine.options.patience
    board.on_end(groups.abort)
    board.find_fault = groups.fault
    # Registered first, to be called last: a group closes only when nothing refers to it.
    board.on_abort(groups.destroy)
    if split.tensor_parallel is not None:
        assert groups.tensor_parallel is not None
        split.tensor_parallel.connect(groups.tensor_parallel, device, board)
    parts = Parts(split, context, make_schedule, held, engine.options.choose_owners)
    engine.take_up(parts)
    first, engine.seed, engine.step_number = shared_progress(context, engine.seed, engine.step_number)
    engine.num_evaluations = 0  # of ranks that come new, too
    with board.guard("sharing weights and random numbers before the first step", context.everyone):
        parts.connect()
        share_values()
        # A shuffle without a seed then draws the same order on all ranks of a pipeline: they need the same batches.
        if first is None:
            adopt_random_state(context.pipeline_ranks[0], groups.model_parallel_control, device)
        else:  # a re-formation: the ranks that come new go on from one that was there
            adopt_random_state(first, groups.world_control, device)

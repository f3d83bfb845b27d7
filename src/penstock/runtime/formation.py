"""Ranks form the engine of a model.

`new_job` is around all that they do together until it stands. `parallelize` turns a model and a layout into a running
engine; all ranks of the layout call it together. What they agree on before their first step stands below: the model,
equal weights, random numbers. `reforming` takes an engine to another layout, and makes that of a copy of a model.
"""

from __future__ import annotations

import datetime
import hashlib
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.layout.layout import Layout
from penstock.modeling.graph.shapes import ShapeFunctions
from penstock.modeling.instrumentation import known_of, tensors_of
from penstock.modeling.libraries import configuration_of
from penstock.modeling.sharding import MakeSharding
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.weights.whole import alias_groups
from penstock.random_state import generators_of, seed_as_new, set_states, states_of
from penstock.runtime import torch_calls
from penstock.runtime.comm.bootstrap import all_here, default_store, ensure_process_group
from penstock.runtime.comm.devices import default_timeout, local_device, refuse_shared_devices
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.comm.gloo import wait_for_transfer
from penstock.runtime.comm.groups import Groups, abort_groups
from penstock.runtime.context import RankContext
from penstock.runtime.engine import Engine
from penstock.runtime.failures import watcher
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.failures.interrupts import Interrupts
from penstock.runtime.failures.position import PATIENCE_SECONDS, Among
from penstock.runtime.failures.watcher import interruptible
from penstock.runtime.gradients.holders import HeldParameter
from penstock.runtime.migration import FillValues, Migration
from penstock.runtime.options import EngineOptions
from penstock.runtime.parts import Parts, ScheduleMaker, holders_of


def parallelize(
    model: nn.Module,
    layout: Layout,
    make_schedule: ScheduleMaker,
    board: FailureBoard | None = None,
    options: EngineOptions | None = None,
    *,
    make_weights: Callable[[torch.device], object] | None = None,
    make_sharding: MakeSharding | None = None,
    fill_values: FillValues | None = None,
    functions: ShapeFunctions | None = None,
) -> Engine:
    """Split `model` for this rank's place in `layout`, move it to this rank's device, and start its engine. All ranks
    call this together, with equal models.

    Args:
        model: a whole model, or one whose foreign units are ghosts already; it is shrunk in place.
        make_schedule: gives this rank's pipeline's schedule for a number of microbatches.
        board: where failures are recorded, from `new_job()`; by default a new one.
        options: the engine's.
        make_weights: makes the weights of this rank's stages on a device, for a model on the meta device, as the
            benchmark suite has one. (`from_pretrained` and `from_config` give a model that has this rank's weights.)
        make_sharding: makes what shards the weights, such as `TensorParallel`; for a layout with tensor parallelism.
        fill_values: on a rank that joins others which call `change_layout`, fills in what it holds.
        functions: the units' shape functions, if there are some already.
    """
    place = layout.place_of(dist.get_rank())
    pipeline = layout.pipelines[place.pipeline]
    local_stages = pipeline.stages_of(place.pipeline_rank)
    aliases, sharding = alias_groups(model), None
    if layout.tensor_parallel_size > 1:
        if make_sharding is None:
            raise TypeError(f"a layout of tensor_parallel_size {layout.tensor_parallel_size} needs make_sharding")
        sharding = make_sharding(model, place.tensor_parallel_rank, layout.tensor_parallel_size, aliases)
    split = SplitModel(model, pipeline.stages, local_stages, sharding, aliases, functions)
    device = local_device()
    if make_weights is None:
        model.to(device)
    else:
        make_weights(device)
    engine = Engine(split, device, EngineOptions() if options is None else options)
    start_engine(engine, layout, make_schedule, job_board() if board is None else board, fill_values)
    return engine


def start_engine(
    engine: Engine,
    layout: Layout,
    make_schedule: ScheduleMaker,
    board: FailureBoard,
    fill_values: FillValues | None = None,
) -> None:
    """Make a new engine ready for its first step. All ranks start with the same values, or `fill_values` has them."""

    def fill_in_weights() -> None:
        if fill_values is None:
            copy_from_first_holders(engine.held, engine.split.model, engine.context.groups, board.check)
        else:
            fill_values(engine, engine.values_here(), Migration())

    connect_ranks(engine, layout, make_schedule, board, fill_in_weights)
    torch_calls.follow(engine)


def connect_ranks(
    engine: Engine,
    layout: Layout,
    make_schedule: ScheduleMaker,
    board: FailureBoard,
    fill_in_weights: Callable[[], None],
) -> None:
    """Meet the other ranks of `layout`, make groups and `Parts`, `fill_in_weights`, and share random numbers."""
    split, device = engine.split, engine.device
    require_equal_layouts(layout, board)
    make_schedule(1)  # what the maker refuses, it refuses here, before there are process groups
    held, shared = holders_of(split, layout)
    rank, timeout = dist.get_rank(), engine.options.timeout
    broadcasts = engine.options.owner_choice is not None
    with board.guard("making process groups", range(layout.world_size)):
        groups = interruptible(
            partial(Groups, layout, rank, device, shared, timeout, board.refuse_if_failed, broadcasts),
            board,
            timeout or default_timeout(device),
        )
    context = RankContext(layout, rank, device, groups, board, Interrupts())
    board.ranks = {Among.PIPELINE: context.pipeline_ranks, Among.BATCH: context.batch_ranks}
    board.on_failure(groups.abort)
    board.find_fault = groups.fault
    # Registered first, to be called last: a group closes only when nothing refers to it.
    board.on_close(groups.destroy)
    if split.tensor_parallel is not None:
        assert groups.tensor_parallel is not None
        split.tensor_parallel.connect(groups.tensor_parallel, device, board)
    parts = Parts(split, context, make_schedule, held, engine.options.owner_choice, engine.options.share_sequences)
    engine.begin_formation(parts)
    random_replicas = share_progress(context, engine)
    engine.num_evaluations = 0  # of ranks that come new, too
    # A rank that is lost in the first step, when this one has all that it needs, leaves it a member of an elastic run.
    with board.guard("sharing weights and random numbers before the first step", context.everyone, looks_after=False):
        parts.connect()
        fill_in_weights()
        share_random_state(context, random_replicas)
        engine.random_replica = context.replica


# -- what the ranks compare, and agree on, before their first step -----------------------------------------------------


def facts_of(model: nn.Module) -> dict[str, Any]:
    """What tells two models apart, other than where they come from and their weights; see `require_equal_facts`."""
    config = configuration_of(model)
    settings = {} if config is None else config.to_dict()
    facts = {f"the model's config.{name}": value for name, value in settings.items() if name != "_name_or_path"}
    if not settings:
        shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
        facts["the model's layers"] = f"of shapes with digest {zlib.crc32(repr(shapes).encode()):x}"
    return {
        "the model's class": type(model).__name__,
        "the model's number of parameters": sum(parameter.numel() for parameter in model.parameters()),
        "the type of its weights": str(next((p.dtype for p in model.parameters() if p.is_floating_point()), None)),
        "example_inputs": kinds_of_inputs(known_of(model).example_inputs),
        **facts,
    }


def kinds_of_inputs(inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is compared of example inputs, by name: not their values."""
    return {
        name: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        for name, value in (inputs or {}).items()
    }


@contextmanager
def new_job(
    timeout: datetime.timedelta | None = None,
    on_board: Callable[[FailureBoard], object] = lambda board: None,
    call: str = "initialize()",
    patience: float = PATIENCE_SECONDS,
) -> Iterator[FailureBoard]:
    """Begin a job: around all that ranks do together until its pipelines stand. Gives the board on which its failures
    will be, to `on_board` first of all. `call`: what errors say that the ranks were in; `patience`: see
    `EngineOptions`.

    torch.distributed is initialised from the environment, with `timeout`, unless it is already. From here on a rank
    that is lost is an error on every rank. After an error the board is given up here.
    """
    ensure_process_group(timeout)
    board = job_board()
    board.patience = patience
    on_board(board)
    try:
        with board.position.call(call, among=Among.ALL):
            refuse_shared_devices(default_store(), board)
            yield board
    except BaseException:
        board.retire()
        raise


# How many jobs there were in a world.
_num_jobs: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def job_board() -> FailureBoard:
    """A board for one more job of torch's default process group. Every rank makes its own, as its first, second, ..."""
    world = dist.group.WORLD
    assert world is not None
    number = _num_jobs[world] = _num_jobs.get(world, 0) + 1
    store, rank, world_size = default_store(), dist.get_rank(), dist.get_world_size()
    watch = watcher.start(store, rank, world_size, all_here(world_size))
    board = FailureBoard(rank, f"job {number}", watch)
    if watch is not None:
        watcher.hear_of_errors(watch)
    return board


def world_ranks(board: FailureBoard) -> Ranks:
    """All ranks of the world, over torch's default group, before there are others."""
    world = dist.group.WORLD
    assert world is not None

    @contextmanager
    def guard(doing: str, peers: Sequence[int]) -> Iterator[None]:
        with board.ending(partial(abort_groups, [world])), board.guard(doing, peers):
            yield

    return Ranks(world, guard)


def require_equal_facts(facts: Mapping[str, Any], board: FailureBoard, of: str = "models or configurations") -> None:
    """Compare what every rank of the world was given, by name. Raises ValueError, on every rank, that quotes what
    differs."""
    texts = {name: _as_text(value) for name, value in facts.items()}
    by_rank = world_ranks(board).differing(texts, f"comparing {of}")
    if by_rank is None:
        return
    differences = []
    for name in dict.fromkeys(chain.from_iterable(by_rank)):
        values = [theirs.get(name, "nothing") for theirs in by_rank]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            differences.append(f"{name} is {values[0][:200]} on rank 0 and {values[other][:200]} on rank {other}")
    if differences:
        raise ValueError(
            f"the ranks were given different {of}, but all must be given the same: {'; '.join(differences[:5])}"
        )


def require_equal_layouts(layout: Layout, board: FailureBoard) -> None:
    """Compare every rank's layout, before groups are made of it. Raises ValueError, on every rank, if they differ."""
    facts: dict[str, Any] = {"the number of pipelines": len(layout.pipelines)}
    for index, pipeline in enumerate(layout.pipelines):
        facts[f"pipeline {index}'s split into units of each stage"] = [len(stage) for stage in pipeline.stages]
        facts[f"pipeline {index}'s order of ranks that hold its stages"] = tuple(pipeline.stage_to_rank)
        facts |= {f"unit {number} of pipeline {index}": unit for number, unit in enumerate(chain(*pipeline.stages))}
    require_equal_facts(facts, board, "layouts")


def digest_of(facts: Mapping[str, Any]) -> str:
    """The same for all processes whose facts `require_equal_facts` takes for equal."""
    return hashlib.sha256(_as_text(facts).encode()).hexdigest()


def _as_text(value: Any) -> str:
    """`repr(value)`, but of what has no order, or none that matters, the same for every process."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{key!r}: {_as_text(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_as_text, value))) + "}"
    if type(value) is list:
        return f"[{', '.join(map(_as_text, value))}]"
    return repr(value)


def share_progress(context: RankContext, engine: Engine) -> list[int | None]:
    """Let all ranks know how far the run is: the seed of its dropout, and the number of training steps begun. The seed
    of a new run, where no rank has one, is that of rank 0's generator, so that a user's manual_seed decides the run's
    dropout. Gives for each rank the replica whose random numbers it has; None if it comes new."""
    seed = torch.initial_seed() & ((1 << 62) - 1) if engine.seed is None else engine.seed
    mine = [engine.seed is not None, seed, engine.step_number, engine.random_replica]
    by_rank = Ranks(context.groups.world_control, context.board.guard).exchange(mine, "agreeing on the run's seed")
    _, engine.seed, engine.step_number, _ = next((each for each in by_rank if each[0]), by_rank[0])
    return [each[-1] for each in by_rank]


def share_random_state(context: RankContext, random_replicas: Sequence[int | None]) -> None:
    """Let the ranks of a replica have the same of torch's random numbers, so that a shuffle without a seed draws one
    order on all that need the same batches. `random_replicas`: for each rank the replica whose numbers it
    has had, see `share_progress`.

    In a new run these are those of the replica's first rank. After a re-formation a replica goes on with the numbers
    that one of its place had; one that is new begins with its own, also of Python's and NumPy's, which follow from
    those of the first rank."""
    layout, groups, device = context.layout, context.groups, context.device
    first = next((rank for rank, replica in enumerate(random_replicas) if replica is not None), None)
    if first is None:
        adopt_random_state(layout.of_replica(context.replica)[0].first_rank, groups.batch_control, device)
        return
    own = states_of(generators_of(device))
    states = own.new_zeros(layout.num_replicas, *own.shape)  # all at once, as there may be hundreds
    for replica in range(layout.num_replicas):
        if context.rank == (random_replicas.index(replica) if replica in random_replicas else first):
            states[replica] = own
    dist.all_reduce(states, group=groups.world_control)
    set_states(generators_of(device), states[context.replica])
    if context.replica not in random_replicas:
        seed_as_new(context.replica)


def adopt_random_state(first_rank: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor | None:
    """Go on from torch's random state on `first_rank`, for models on `device`; every rank of `group` calls this. Gives
    this rank's state before, for `set_states`; None if it was the same."""
    generators = generators_of(device)
    own = states_of(generators)
    # A sum goes round, where a broadcast would need connections of its own.
    shared = own.clone() if dist.get_rank() == first_rank else torch.zeros_like(own)
    dist.all_reduce(shared, group=group)
    if torch.equal(own, shared):
        return None
    set_states(generators, shared)
    return own


# How much of a tensor is passed on at a time.
PIECE_BYTES = 4 * 2**20


@torch.no_grad()
def copy_from_first_holders(
    held: Sequence[HeldParameter], model: torch.nn.Module, groups: Groups, check: Callable[[], object]
) -> None:
    """Give every holder of a parameter the first holder's values, as replicas must start alike. `check` ends a wait by
    what it raises."""
    inside = tensors_of(model)
    shared = [(tensor, weight.ranks) for weight in held if len(weight.ranks) > 1 for tensor in inside[weight.parameter]]
    sent: list[tuple[dist.Work, int]] = []
    for tensor, ranks in shared:
        group, place = groups.reduction[ranks], ranks.index(dist.get_rank())
        flat = tensor.contiguous().view(-1)
        if tensor.device.type != "cpu":
            dist.broadcast(flat.view(torch.uint8), ranks[0], group=group)
        else:  # over a connection of the ring in which sums go round: a broadcast would need others
            for piece in flat.view(torch.uint8).split(PIECE_BYTES):
                if place > 0:
                    wait_for_transfer(group.recv([piece], place - 1, 0), piece.nbytes, check)
                if place < len(ranks) - 1:
                    sent.append((group.send([piece], place + 1, 0), piece.nbytes))
        if flat.data_ptr() != tensor.data_ptr():  # it does not lie in one piece
            tensor.copy_(flat.view(tensor.shape))
    for work, num_bytes in sent:
        wait_for_transfer(work, num_bytes, check)

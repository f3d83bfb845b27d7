"""What the ranks agree on before their first step: the model, equal weights, and random numbers."""

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
from penstock.modeling.configuration import configuration_of
from penstock.modeling.instrumentation import known_of, tensors_of
from penstock.random_state import generators_of, set_states, states_of
from penstock.runtime.comm.bootstrap import all_here, default_store, ensure_process_group
from penstock.runtime.comm.devices import refuse_shared_devices
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.comm.groups import Groups, abort_groups
from penstock.runtime.context import RankContext
from penstock.runtime.failures import watcher
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.gradients.ownership import HeldParameter


def facts_of(model: nn.Module) -> dict[str, Any]:
    """What tells two models apart, other than where they were loaded from and the weights; for `require_agreement`."""
    config, given = configuration_of(model), known_of(model).example_inputs or {}
    settings = {} if config is None else config.to_dict()
    facts = {f"the model's config.{name}": value for name, value in settings.items() if name != "_name_or_path"}
    if not settings:
        shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
        facts["the model's layers"] = f"of shapes with digest {zlib.crc32(repr(shapes).encode()):x}"
    return {
        "the model's class": type(model).__name__,
        "the model's number of parameters": sum(parameter.numel() for parameter in model.parameters()),
        "the type of its weights": str(next((p.dtype for p in model.parameters() if p.is_floating_point()), None)),
        "example_inputs": {
            name: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
            for name, value in given.items()
        },
        **facts,
    }


@contextmanager
def forming(
    timeout: datetime.timedelta | None = None, on_board: Callable[[FailureBoard], object] = lambda board: None
) -> Iterator[FailureBoard]:
    """Around all that ranks do together until a pipeline stands; gives the board on which its failures will be, to
    `on_board` first of all.

    torch.distributed is initialised from the environment, with `timeout`, unless it is already. From here on a rank
    that is lost is an error on every rank. After an error the board is given up here.
    """
    ensure_process_group(timeout)
    board = job_board()
    on_board(board)
    try:
        with board.position.call("initialize()", world=True):
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
    board = FailureBoard(rank, f"job {number}", watch, range(world_size))
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


def require_agreement(facts: Mapping[str, Any], board: FailureBoard, of: str = "models or configurations") -> None:
    """Compare what every rank of the world was given, by name. Raises ValueError, on every rank, that quotes what
    differs."""
    told = {name: _told(value) for name, value in facts.items()}
    every = world_ranks(board).differing(told, f"comparing {of}")
    if every is None:
        return
    differences = []
    for name in dict.fromkeys(chain.from_iterable(every)):
        values = [theirs.get(name, "nothing") for theirs in every]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            differences.append(f"{name} is {values[0][:200]} on rank 0 and {values[other][:200]} on rank {other}")
    if differences:
        raise ValueError(
            f"the ranks were given different {of}, but all must be given the same: {'; '.join(differences[:5])}"
        )


def require_layout(layout: Layout, board: FailureBoard) -> None:
    """Compare every rank's layout, before groups are made of it. Raises ValueError, on every rank, if they differ."""
    facts: dict[str, Any] = {"the number of pipelines": len(layout.pipelines)}
    for index, pipeline in enumerate(layout.pipelines):
        facts[f"pipeline {index}'s split into units of each stage"] = [len(stage) for stage in pipeline.stages]
        facts[f"pipeline {index}'s order of ranks that hold its stages"] = tuple(pipeline.stage_to_rank)
        facts |= {f"unit {number} of pipeline {index}": unit for number, unit in enumerate(chain(*pipeline.stages))}
    require_agreement(facts, board, "layouts")


def digest_of(facts: Mapping[str, Any]) -> str:
    """The same for all processes whose facts `require_agreement` finds alike."""
    return hashlib.sha256(_told(facts).encode()).hexdigest()


def _told(value: Any) -> str:
    """`repr(value)`, but of what has no order, or none that matters, the same for every process."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{key!r}: {_told(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_told, value))) + "}"
    if type(value) is list:
        return f"[{', '.join(map(_told, value))}]"
    return repr(value)


def shared_progress(context: RankContext, seed: int | None, step_number: int) -> tuple[int | None, int, int]:
    """How far the run is: the first rank that has been part of it, None if no rank has (its `seed` is None), the seed
    of its dropout and the number of training steps begun. The seed of a new run is that of rank 0's generator, so that
    a user's manual_seed decides the run's dropout."""
    mine = [seed is not None, torch.initial_seed() & ((1 << 62) - 1) if seed is None else seed, step_number]
    told = Ranks(context.groups.world_control, context.board.guard).exchange(mine, "agreeing on the run's seed")
    first = next((rank for rank, (is_live, _, _) in enumerate(told) if is_live), None)
    _, shared, steps = told[first or 0]
    return first, shared, steps


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


# So much of a tensor is passed on at a time.
PIECE_BYTES = 4 * 2**20


@torch.no_grad()
def copy_from_first_holders(held: Sequence[HeldParameter], model: torch.nn.Module, groups: Groups) -> None:
    """Give every holder of a parameter the first holder's values, as replicas must start alike."""
    inside = tensors_of(model)
    shared = [(tensor, one.ranks) for one in held if len(one.ranks) > 1 for tensor in inside[one.parameter]]
    sent: list[dist.Work] = []
    for tensor, ranks in shared:
        group, place = groups.reduction[ranks], ranks.index(dist.get_rank())
        flat = tensor.contiguous().view(-1)
        if tensor.device.type != "cpu":
            dist.broadcast(flat.view(torch.uint8), ranks[0], group=group)
        else:  # over a connection of the ring in which sums go round: a broadcast would need others
            for piece in flat.view(torch.uint8).split(PIECE_BYTES):
                if place > 0:
                    group.recv([piece], place - 1, 0).wait()
                if place < len(ranks) - 1:
                    sent.append(group.send([piece], place + 1, 0))
        if flat.data_ptr() != tensor.data_ptr():  # it does not lie in one piece
            tensor.copy_(flat.view(tensor.shape))
    for work in sent:
        work.wait()

"""Starting torch.distributed from the environment of any launcher."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import re
import resource
import sys
import uuid
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from penstock.runtime.comm import gloo
from penstock.runtime.comm.devices import backend, use_local_device
from penstock.runtime.comm.groups import NO_DUMPS, abort_groups, is_gloo, zero
from penstock.runtime.failures import watcher
from penstock.runtime.failures.board import FailureBoard, num_failures
from penstock.runtime.failures.position import Among

DEFAULT_PORT = 29500
# The variables in which launchers say the rank, the number of processes and the rank on the machine: torchrun's, which
# DeepSpeed sets as well, SLURM's and Open MPI's.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
# Open files of a process besides the connections between ranks: its own, the store's, libraries' and data's.
SPARE_DESCRIPTORS = 256


def ensure_process_group(timeout: datetime.timedelta | None = None) -> None:
    """Initialise torch.distributed from the environment (see `LAUNCHERS`), unless somebody has, and make this rank's
    device current. Without a launcher the job is this one process.

    Raises ValueError if the environment names a rank outside the world, or a value that is no number.
    """
    if dist.is_initialized():
        allow_descriptors(dist.get_world_size())
        use_local_device()
        return
    atexit.register(leave_in_order)
    place = find_place(os.environ)
    if place is None:
        use_local_device()
        dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    for name, value in place.items():
        os.environ.setdefault(name, value)
    use_local_device()
    limit = timeout or dist.distributed_c10d.default_pg_timeout
    store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(agree_on_start(store, rank, world_size, limit), store)
    meet(store, rank, world_size, timeout, here=all_here(world_size))


def allow_descriptors(world_size: int) -> None:
    """Raise this process's limit on open files to what so many ranks need; RuntimeError if the hard limit is lower. The
    process that has the store is called twice by each rank, and a default group of somebody else's connects all pairs.
    """
    needed = 2 * world_size + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < needed:
        raise RuntimeError(
            f"{world_size} ranks need about {needed} open files (connections) in each process, but the hard limit here "
            f"is {hard}: raise it before the start (`ulimit -n {needed}` by root, LimitNOFILE= of a service, --ulimit "
            "nofile= of a container)"
        )
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def all_here(world_size: int) -> bool:
    """Whether the launcher says that all ranks are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")) == str(world_size)


def agree_on_start(store: dist.Store, rank: int, world_size: int, limit: datetime.timedelta) -> str:
    """A name for this start of the job: torchrun keeps its store when it starts a job again, with all that the ranks
    before have left in it. Every rank leaves a name of its own in a queue, which rank 0 answers with its own until all
    have heard it. What lies there from earlier starts is answered too, and read by nobody."""
    mine, where, answered = uuid.uuid4().hex, "penstock/start", 0

    def all_have_come() -> bool:
        nonlocal answered
        while store.check([f"{where}/queue/{answered + 1}"]):
            answered += 1
            store.set(f"{where}/{store.get(f'{where}/queue/{answered}').decode()}", mine)
        return store.add(f"{where}/{mine}/here", 0) == world_size - 1

    if rank == 0:
        if not gloo.comes(all_have_come, limit):
            late = [other for other in range(1, world_size) if not store.check([f"{where}/{mine}/{other}"])]
            raise TimeoutError(
                f"ranks {late} did not start within {limit}"
                ": see their logs, and whether as many processes were started as WORLD_SIZE says"
            )
        return mine
    store.set(f"{where}/queue/{store.add(f'{where}/queue', 1)}", mine)
    if not gloo.comes(lambda: store.check([f"{where}/{mine}"]), limit):
        raise TimeoutError(
            f"rank 0 did not start within {limit}"
            ": see its log, and whether MASTER_ADDR and MASTER_PORT lead to it from here"
        )
    start = store.get(f"{where}/{mine}").decode()
    store.set(f"{where}/{start}/{rank}", "here")
    store.add(f"{where}/{start}/here", 1)
    return start


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta | None,
    on_board: Callable[[FailureBoard], object] = lambda board: None,
    here: bool = False,
) -> None:
    """Make torch's default process group with the ranks that meet in `store`; `on_board` is given the board on which
    failures of their meeting are. `here`: whether all of them are on this machine."""
    allow_descriptors(world_size)

    limit = timeout or dist.distributed_c10d.default_pg_timeout

    def join(check: Callable[[], object]) -> None:
        with gloo.lazily(), zero(NO_DUMPS):
            dist.init_process_group(
                backend(), store=dist.PrefixStore("default_pg", store), rank=rank, world_size=world_size,
                timeout=timeout,
            )  # fmt: skip
        world = dist.group.WORLD
        if world is not None and is_gloo(world, torch.device("cpu")):
            gloo.note_new(world)
            gloo.await_ranks(store, "penstock/world", rank, world_size, check, limit)
            gloo.connect(world, gloo.in_trees(rank, world_size))

    watch = watcher.start(store, rank, world_size, here)
    if watch is None:
        join(lambda: None)
        return
    board = FailureBoard(rank, "rendezvous", watch)
    doing = "setting up torch.distributed"
    on_board(board)
    with board.position.call(doing, among=Among.ALL), board.guard(doing):
        watcher.interruptible(partial(join, board.refuse_if_failed), board, limit)
    watch.begin(dist.group.WORLD)


def leave_in_order() -> None:
    """Give up the process groups before the interpreter goes: a thread of theirs that is still at work then may abort
    the process. After a failure what is under way may never end, so it is ended."""
    if not dist.is_initialized():
        return
    if hasattr(sys, "last_value") or num_failures():
        abort_groups(list(dist.distributed_c10d._world.pg_map))
    else:
        dist.destroy_process_group()


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of processes, also before torch.distributed is initialised."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = find_place(os.environ)
    return (0, 1) if place is None else (int(place["RANK"]), int(place["WORLD_SIZE"]))


def find_place(environment: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from a launcher's environment; None without a
    launcher."""
    launchers = [names for names in LAUNCHERS if names[0] in environment and names[1] in environment]
    # Inside a job of one task somebody else may start processes.
    launchers = [names for names in launchers if (names[1], environment[names[1]]) != ("SLURM_NTASKS", "1")]
    if not launchers:
        return None
    rank, world_size, local_rank = (environment.get(name, "") for name in launchers[0])
    if not (rank.isdigit() and world_size.isdigit() and int(rank) < int(world_size)):
        raise ValueError(
            f"the launcher's environment says rank {rank!r} of {world_size!r} processes"
            ": start with torchrun, srun or mpirun, or set RANK and WORLD_SIZE"
        )
    place = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment),
        # By the number of a SLURM job, so that two on one machine do not collide.
        "MASTER_PORT": environment.get("MASTER_PORT")
        or str(DEFAULT_PORT + int(environment.get("SLURM_JOB_ID", "0")) % 10_000),
    }
    if local_rank:
        place["LOCAL_RANK"] = local_rank
    return place


def first_host(environment: Mapping[str, str]) -> str:
    """The first host of a SLURM node list such as `gpu[03-06,9],login1` or `rack[0-1]n[1-4]`, without calling SLURM;
    else this machine."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return "127.0.0.1" if first is None else re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def default_store() -> dist.Store | None:
    """The job's key-value store, or None where torch keeps none."""
    with contextlib.suppress(Exception):
        return dist.distributed_c10d._get_default_store()
    return None

"""torch's default process group of a generation: given up, and made anew with the members of the next one."""

from __future__ import annotations

import atexit
import datetime
from collections.abc import Callable

import torch.distributed as dist

from penstock.runtime.comm import bootstrap
from penstock.runtime.comm.devices import use_local_device
from penstock.runtime.failures import watcher
from penstock.runtime.failures.board import FailureBoard


def form_world(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
    on_board: Callable[[FailureBoard], object],
) -> None:
    """Make a new default process group of torch's, in place of the present one, with the ranks that meet in `store`;
    `on_board` is given the board on which failures of their meeting are."""
    leave_world()
    # The counter by which torch names groups must agree on all ranks; an attempt that failed has advanced it.
    dist.distributed_c10d._world.group_count = 0
    use_local_device()
    atexit.unregister(bootstrap.leave_in_order)
    atexit.register(bootstrap.leave_in_order)
    try:
        bootstrap.meet(store, rank, world_size, timeout, on_board)
    except BaseException:
        watcher.stop()
        raise


def leave_world() -> None:
    """Give up torch's default process group, if there is one."""
    watcher.stop()
    if dist.is_initialized():
        dist.destroy_process_group()

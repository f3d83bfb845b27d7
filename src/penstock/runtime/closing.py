"""Ending process groups: at once after a failure, in order otherwise."""

from __future__ import annotations

import contextlib
import datetime
import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# How long closing the groups may hold up the error that made it necessary.
CLOSING_SECONDS = 5.0
# Of a message that nobody sends.
_NO_TAG = (1 << 30) - 1
_AT_ONCE = datetime.timedelta(milliseconds=1)


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """End everything under way in `groups`, so that whoever waits in them wakes with an error, on this rank too.

    Any thread may call this, whatever the host does. The groups can only be destroyed afterwards.
    """
    on_device = []
    for group in groups:
        for device in _devices_of(group):
            if _is_gloo(group, device):
                _abort_gloo(group)
            else:
                on_device.append((group, device))
    if not on_device:
        return
    # NCCL's aborts wait for each other unless they are in one of its groups.
    backends: list[Any] = [group._get_backend(device) for group, device in on_device]
    grouped = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if grouped is not None:
        grouped._group_start()
    for backend in backends:
        with contextlib.suppress(Exception):
            backend.abort()
    if grouped is not None:
        grouped._group_end()


def _devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    try:
        return list(group._device_types)
    except Exception:  # destroyed already
        return []


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    with contextlib.suppress(Exception):
        return group._get_backend(device).name() == "gloo"
    return False


def _abort_gloo(group: dist.ProcessGroup) -> None:
    """gloo has no abort, but a wait that times out closes all of its group's connections."""
    rank = group.rank()
    for peer in range(group.size()):
        if peer == rank:
            continue
        with contextlib.suppress(Exception):
            group.recv([torch.empty(1)], peer, _NO_TAG).wait(_AT_ONCE)


def destroy_groups(groups: list[dist.ProcessGroup], aborted: bool = False) -> None:
    """Destroy `groups`, which this empties: a group closes only when nobody refers to it."""
    # That waits for what is under way in it, maybe on a rank that waits for another group to close: all at once, and
    # without end only in the background.
    threads = [threading.Thread(target=_destroy_last, args=(groups, aborted), daemon=True) for _ in groups]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CLOSING_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if aborted:  # what is dead may still be referred to in cycles; otherwise nobody waits for its end
        gc.collect()


def _destroy_last(groups: list[dist.ProcessGroup], aborted: bool) -> None:
    """Destroy one group. It is taken off the list here, because it closes only when nobody refers to it."""
    group = groups.pop()
    if aborted and not all(_is_gloo(group, device) for device in _devices_of(group)):
        # To destroy it would wait for kernels that never end.
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)

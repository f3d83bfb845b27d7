"""Which device a rank computes on, and which transport carries the tensors on it."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.comm.gloo import await_ranks
from penstock.runtime.failures.board import FailureBoard, ranks_in_words

# Of a device's memory, what libraries, buffers of messages and fragments leave to a run.
USABLE = 0.9


def accelerator() -> torch.device | None:
    """The kind of device that stages compute on, if it is not the CPU: one with a transport of its own, as NCCL is for
    CUDA."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if kind is None or transport(kind) == "gloo" else kind


def transport(device: torch.device) -> str:
    """The backend of process groups that carry tensors on `device`."""
    name: str = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    return name


def backend() -> str:
    """The backend of torch's default process group: gloo carries CPU tensors, NCCL those on GPUs."""
    kind = accelerator()
    return "gloo" if kind is None else f"cpu:gloo,{kind.type}:{transport(kind)}"


def local_device() -> torch.device:
    """This rank's device: the one that torch's default process group was bound to (`init_process_group(device_id=...)`)
    or the only one that this process sees, or the one of its local rank, or, without LOCAL_RANK, the current one."""
    kind = accelerator()
    if kind is None:
        return torch.device("cpu")
    world = dist.group.WORLD
    bound = None if world is None else world.bound_device_id
    if bound is not None and bound.type == kind.type:
        return torch.device(kind.type, bound.index)
    count, local_rank = torch.accelerator.device_count(), os.environ.get("LOCAL_RANK")
    if count == 1:  # the launcher shows each process its own
        return torch.device(kind.type, 0)
    if not local_rank:
        return torch.device(kind.type, torch.accelerator.current_device_index())
    if int(local_rank) >= count:
        raise RuntimeError(
            f"local rank {local_rank} has no GPU: this process sees {count}; start at most {count} processes on this "
            "machine, or show each process its own GPU (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device(kind.type, int(local_rank))


def use_local_device() -> None:
    """Make `local_device()` the current one. NCCL, and torch for objects and random state, use the current one."""
    device = local_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def refuse_shared_devices(store: dist.Store | None, board: FailureBoard) -> None:
    """Every rank calls this, before any communication between devices. Raises RuntimeError, on every rank, if two of
    them compute on the same physical device."""
    device, world_size = local_device(), dist.get_world_size()
    if device.type == "cpu" or store is None or world_size == 1:
        return
    ours, rank = dist.PrefixStore(f"penstock/{board.name}/devices", store), dist.get_rank()
    properties = torch.get_device_module(device).get_device_properties(device.index)
    name = str(getattr(properties, "uuid", ""))
    # The first to ask for a device has it.
    first = int(ours.compare_set(f"of {name}", "", str(rank))) if name else rank
    if first != rank:
        ours.set("shared", f"{ranks_in_words([first, rank])} compute on the same GPU ({name})")
    await_ranks(ours, "asked", rank, world_size, board.check, None)
    if ours.check(["shared"]):
        raise RuntimeError(
            f"{ours.get('shared').decode()}, but each rank needs its own: start one process for each GPU, and let the "
            "launcher set LOCAL_RANK or show each process its own (CUDA_VISIBLE_DEVICES)"
        )


def default_timeout(device: torch.device) -> datetime.timedelta | None:
    """How long torch's default process group lets a transfer of tensors on `device` take; if it has no such device, on
    one that it has."""
    world: Any = dist.group.WORLD
    kinds = [] if world is None else [kind.type for kind in world._device_types]
    if not kinds:
        return None
    carrier = world._get_backend(torch.device(device.type if device.type in kinds else kinds[0]))
    return getattr(getattr(carrier, "options", None), "_timeout", None)


def device_memory() -> float | None:
    """Bytes that a run may use of this rank's GPU; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    return USABLE * torch.cuda.get_device_properties(local_device()).total_memory

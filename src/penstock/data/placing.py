"""A batch on the accelerator, with copies of its values on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.data.batch import to_device

# Tensors on the device up to this many bytes are copied to the host, as somebody may ask for their values.
SMALL_BYTES = 1 << 20


def place(
    microbatches: Sequence[Mapping[str, Any]], device: torch.device
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """The microbatches with all tensors on `device`, an accelerator, and with what of them is on the host.

    Tensors from the CPU are copied through pinned memory, and the host waits for nothing. Those on the device are
    copied to the host if they are small and hold integers or booleans (ids, labels, masks): it waits once for all of
    them. A large one, or one of fractions, is the device's in both results.
    """
    copies: dict[Any, torch.Tensor] = {}

    def to_the_device(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in copies:  # labels are often the ids
            copies[key] = tensor.pin_memory().to(device, non_blocking=True)
        return copies[key]

    placed: list[dict[str, Any]] = []
    hosts: list[dict[str, Any]] = []
    waits = False
    for microbatch in microbatches:
        here, host = {}, {}
        for name, value in microbatch.items():
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                here[name] = host[name] = to_device(value, device)
            elif value.is_cpu:
                here[name], host[name] = to_the_device(value), value
            else:
                here[name] = host[name] = value
                if _is_small(value):
                    host[name] = torch.empty_like(value, device="cpu", pin_memory=True)
                    host[name].copy_(value, non_blocking=True)
                    waits = True
        placed.append(here)
        hosts.append(host)
    if waits:
        torch.accelerator.current_stream(device).synchronize()
    return placed, hosts


def _is_small(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.nbytes <= SMALL_BYTES

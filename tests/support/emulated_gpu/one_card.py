"""Several ranks on one GPU, which penstock and NCCL refuse outside of checks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch


def count_as_own() -> None:
    """Give this rank a card of its own, by name, and a host of its own where NCCL looks: it then carries over sockets.

    NCCL refuses two ranks on one card of one host only. The ranks still take turns on the card.
    """
    module = torch.get_device_module()
    properties = module.get_device_properties
    module.get_device_properties = lambda device=None: _Own(properties(device))
    os.environ |= {"NCCL_HOSTID": f"of process {os.getpid()}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


class _Own(SimpleNamespace):
    """Properties of a device, with a name of this process."""

    def __init__(self, properties: Any):
        super().__init__(uuid=f"of process {os.getpid()}")
        self._properties = properties

    def __getattr__(self, name: str) -> Any:
        return getattr(self._properties, name)

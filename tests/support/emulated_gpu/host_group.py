"""The part of a process group that is alike whatever carries the tensors of an accelerator through the host."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist


def rooted(kind: type[Any], options: Any) -> Any:
    """The options of a collective that has a root; torch's short form of the call gives the root alone."""
    if not isinstance(options, int):
        return options
    made = kind()
    made.rootRank = options
    return made


def listed(tensors: list[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a collective; the short form gives one alone."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


class HostGroup(dist.ProcessGroup):
    """A group on gloo, `inner`; a subclass says what is done with the tensors before and after.

    Attributes:
        backend: the name under which it is registered.
    """

    backend = ""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta):
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._inner: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def name(self) -> str:
        return self.backend

    def getBackendName(self) -> str:
        return self.backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(torch.accelerator.current_accelerator().type)]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    @classmethod
    def register(cls, device: str) -> None:
        """Make it the transport of tensors on this kind of device."""

        def create(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> HostGroup:
            return cls(store, rank, size, timeout)

        dist.Backend.register_backend(cls.backend, create, devices=[device])

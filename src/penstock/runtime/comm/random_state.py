"""torch's random state, and how the ranks of a pipeline come to share one."""

from __future__ import annotations

import torch
import torch.distributed as dist


def random_state(device: torch.device) -> torch.Tensor:
    """The states of the generators that a model on `device` draws from, as bytes on the CPU."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Go on from what `random_state` returned."""
    length = torch.get_rng_state().numel()
    torch.set_rng_state(state[:length])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[length:], device)


def adopt_random_state(first_rank: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor | None:
    """Go on from the random state of `first_rank`; every rank of `group` calls this.

    Returns:
        This rank's state before, None if it was the same.
    """
    own = random_state(device)
    shared = own.clone()
    dist.broadcast(shared, first_rank, group=group)
    if torch.equal(own, shared):
        return None
    set_random_state(shared, device)
    return own

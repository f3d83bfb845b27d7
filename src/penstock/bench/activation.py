"""What happens to a block's activations between its forward and its backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NOOP, CHECKPOINT, OFFLOAD = "noop", "checkpoint", "offload"
POLICIES = (NOOP, CHECKPOINT, OFFLOAD)


def apply_policy(blocks: Iterable[nn.Module], policy: str) -> None:
    """Keep the activations of `blocks` ("noop"), recompute them in backward ("checkpoint", Chen et al. 2016), or
    move them to host memory and back ("offload").

    Raises:
        ValueError: an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown activation policy {policy!r}: known are {', '.join(POLICIES)}")
    if policy == NOOP:
        return
    wrap = _checkpointed if policy == CHECKPOINT else _offloaded
    for block in blocks:
        # The forward, and not the module's call: whoever hooks the call (FSDP, a stage) stays outside.
        block.forward = wrap(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _offloaded(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    return run

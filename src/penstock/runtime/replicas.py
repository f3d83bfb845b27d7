"""Holders of the same parameters start alike, and stay alike when the model's modules are replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from penstock.modeling.weights.whole import tensors_of
from penstock.runtime.gradients.ownership import HeldParameter
from penstock.runtime.gradients.reduction import make_buckets

if TYPE_CHECKING:
    from penstock.runtime.comm.groups import Groups


def copy_from_first_holders(held: Sequence[HeldParameter], model: torch.nn.Module, groups: Groups) -> None:
    """Give every holder of a parameter the first holder's values, as replicas must start alike."""
    inside = tensors_of(model)
    with torch.no_grad():
        for bucket in make_buckets([(tensor, one.ranks) for one in held for tensor in inside[one.parameter]]):
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in bucket.parameters])
            if dist.get_rank() != bucket.ranks[0]:
                flat.zero_()
            # A sum goes round, where a broadcast would need connections of its own.
            dist.all_reduce(flat.view(torch.uint8), group=groups.reduction[bucket.ranks])
            pieces = flat.split([parameter.numel() for parameter in bucket.parameters])
            for parameter, piece in zip(bucket.parameters, pieces, strict=True):
                parameter.copy_(piece.view(parameter.shape))


def share_changes(
    before: Mapping[torch.nn.Parameter, torch.Tensor],
    holders: Mapping[torch.nn.Parameter, tuple[int, ...]],
    groups: Groups,
    speaks: bool,
) -> None:
    """Give all `holders` of some parameters, in an order all ranks share, the changes that any of them made. All call
    this together; pipelines change the same, so that one of them `speaks`."""
    for parameter, ranks in holders.items():
        group, value = groups.reduction[ranks], parameter.detach()
        speaker = speaks and not torch.equal(value, before[parameter])
        count = torch.full((), float(speaker), device=value.device)
        dist.all_reduce(count, group=group)
        if count == 1:  # the value itself, to the last bit
            told = value.clone() if speaker else torch.zeros_like(value)
            dist.all_reduce(told, group=group)
            value.copy_(told)
        elif count > 1:
            told = value - before[parameter] if speaker else torch.zeros_like(value)
            dist.all_reduce(told, group=group)
            value.copy_(before[parameter] + told)

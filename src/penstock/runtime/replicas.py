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


# So much of a tensor is passed on at a time.
PIECE_BYTES = 4 * 2**20


def copy_from_first_holders(held: Sequence[HeldParameter], model: torch.nn.Module, groups: Groups) -> None:
    """Give every holder of a parameter the first holder's values, as replicas must start alike."""
    inside = tensors_of(model)
    shared = [(tensor, one.ranks) for one in held if len(one.ranks) > 1 for tensor in inside[one.parameter]]
    with torch.no_grad():
        if all(tensor.device.type == "cpu" for tensor, _ in shared):
            _pass_on(shared, groups)
            return
        for bucket in make_buckets(shared):
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in bucket.parameters])
            if dist.get_rank() != bucket.ranks[0]:
                flat.zero_()
            # Sums are connected already, which a broadcast need not be.
            dist.all_reduce(flat.view(torch.uint8), group=groups.reduction[bucket.ranks])
            pieces = flat.split([parameter.numel() for parameter in bucket.parameters])
            for parameter, piece in zip(bucket.parameters, pieces, strict=True):
                parameter.copy_(piece.view(parameter.shape))


def _pass_on(shared: Sequence[tuple[torch.Tensor, tuple[int, ...]]], groups: Groups) -> None:
    """Each holder of a tensor hears it from the one before, over a connection of the ring in which sums go round."""
    sent: list[dist.Work] = []
    for tensor, ranks in shared:
        group, place = groups.reduction[ranks], ranks.index(dist.get_rank())
        flat = tensor.reshape(-1)
        for piece in flat.view(torch.uint8).split(PIECE_BYTES):
            if place > 0:
                group.recv([piece], place - 1, 0).wait()
            if place < len(ranks) - 1:
                sent.append(group.send([piece], place + 1, 0))
        if flat.data_ptr() != tensor.data_ptr():  # it does not lie in one piece
            tensor.copy_(flat.view(tensor.shape))
    for work in sent:
        work.wait()


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

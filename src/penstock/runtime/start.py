"""What the ranks agree on before their first step: the model, equal weights, and the seed of the run's dropout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from .buckets import make_buckets
from .failure import PipelineFailure
from .groups import Groups
from .holders import HeldParameter


def facts_of(model: PreTrainedModel) -> dict[str, Any]:
    """What tells two models apart, other than where they were loaded from and the weights; for `require_agreement`."""
    settings = {f"the model's config.{name}": value for name, value in model.config.to_dict().items()}
    settings.pop("the model's config._name_or_path", None)
    return {
        "the model's class": type(model).__name__,
        "the model's number of parameters": sum(parameter.numel() for parameter in model.parameters()),
        "the type of its weights": str(model.dtype),
        **settings,
    }


def require_agreement(facts: Mapping[str, Any]) -> None:
    """Compare what every rank of the world was given.

    Args:
        facts: names and values; what differs is quoted.

    Raises:
        ValueError: on every rank, if one was given something else; names the facts that differ.
        PipelineFailure: a rank ended before it came here.
    """
    every: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    try:
        dist.all_gather_object(every, {name: repr(value) for name, value in facts.items()})
    except RuntimeError as error:
        raise PipelineFailure(f"a rank ended before all ranks had given the same model: {error}") from error
    differences = []
    for name in sorted(set().union(*every)):
        values = [theirs.get(name, "nothing") for theirs in every]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            differences.append(f"{name} is {values[0][:200]} on rank 0 and {values[other][:200]} on rank {other}")
    if differences:
        raise ValueError(
            "the ranks were given different models or configurations, but all must be given the same: "
            + "; ".join(differences[:5])
        )


def shared_seed(groups: Groups) -> int:
    """The seed of rank 0's random number generator, so that a user's manual_seed decides the run's dropout."""
    return _from_first_rank(torch.initial_seed() & ((1 << 62) - 1), groups)


def shared_name(groups: Groups) -> str:
    """A name for this pipeline in the job's store. Rank 0 counts, as the others may have had fewer jobs before."""
    return str(_from_first_rank(next(_names), groups))


def _from_first_rank(number: int, groups: Groups) -> int:
    shared = torch.tensor(number, dtype=torch.int64)
    dist.broadcast(shared, 0, group=groups.world_control)
    return int(shared)


_names = itertools.count(1)


def copy_from_first_holders(held: Sequence[HeldParameter], groups: Groups) -> None:
    """Give every holder of a parameter the first holder's values, as replicas must start alike."""
    with torch.no_grad():
        for bucket in make_buckets([(parameter.parameter, parameter.ranks) for parameter in held]):
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in bucket.parameters])
            dist.broadcast(flat, bucket.ranks[0], group=groups.reduction[bucket.ranks])
            pieces = flat.split([parameter.numel() for parameter in bucket.parameters])
            for parameter, piece in zip(bucket.parameters, pieces, strict=True):
                parameter.copy_(piece.view(parameter.shape))

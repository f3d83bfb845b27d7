"""A job whose sequences are each shared out over several devices (`context_parallel_size`).

They stand as one device, which computes and keeps a part of each.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from penstock.planning.cluster import Cluster, Link
from penstock.planning.memory import OF_WEIGHTS
from penstock.planning.plan import Job
from penstock.planning.profile import UnitCost

# Queries, keys, values and outputs of a layer are estimated to be as many times its hidden state: exact where the heads
# are together as wide as it, and as many for keys and values. Grouped heads are fewer (Llama 3: 2.5), wide ones more
# (Qwen3 0.6B: 6).
EXCHANGED = 4


def share_sequences(job: Job, size: int) -> Job | None:
    """The job over groups of `size` devices, all of one class and node; None if the devices cannot be divided so.
    Weights, gradients and the optimizer's state are whole on each device of a group."""
    if size == 1:
        return job
    groups = _groups_of(job.cluster, size)
    if groups is None:
        return None
    units = tuple(_cost_of_part(unit, size, job.cluster.inside) for unit in job.profile.units)
    return replace(job, profile=replace(job.profile, units=units), cluster=groups, context_parallel_size=size)


def _groups_of(cluster: Cluster, size: int) -> Cluster | None:
    if any(kind.count % size for kind in cluster.classes) or any(count % size for count in cluster.node_sizes):
        return None
    classes = tuple(replace(kind, count=kind.count // size) for kind in cluster.classes)
    return replace(cluster, classes=classes, node_sizes=tuple(count // size for count in cluster.node_sizes))


def _cost_of_part(unit: UnitCost, size: int, link: Link) -> UnitCost:
    own: dict[str, Any] = {
        attribute.name: None if (cost := getattr(unit, attribute.name)) is None else cost / size
        for attribute in fields(unit)
        if attribute.type in ("float", "float | None") and attribute.metadata != OF_WEIGHTS
    }
    # See `context_parallel.attention.Exchange`; the backward brings as much.
    received = EXCHANGED * unit.crossing * (size - 1) / size**2
    seconds = link.seconds(received) if unit.crossing else 0.0
    return replace(unit, **own | {"forward_messages": seconds, "backward_messages": seconds})

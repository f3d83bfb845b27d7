"""What it costs to share every sequence out over several devices (`context_parallel_size`): they stand as one device,
which computes and keeps a part of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.planning.cluster import Cluster, Link
from penstock.planning.profile import Profile, UnitCost

# Queries, keys, values and outputs of a layer: at most as many times its hidden state.
EXCHANGED = 4
PER_MICROBATCH = (
    "forward", "backward", "weight", "kept", "working", "deferred", "splitting", "received", "sent", "output",
    "forwarding", "kept_checkpointed", "crossing",
)  # fmt: skip
KEY = "context_parallel_size"


def in_parts(profile: Profile, parts: int, link: Link) -> Profile:
    """The costs of one of `parts` of each sequence; weights, gradients and the optimizer's state are whole. `link`:
    between the devices of a group."""
    units = tuple(_in_parts(unit, parts, link) for unit in profile.units)
    return replace(profile, units=units, about={**profile.about, KEY: parts})


def groups_of(cluster: Cluster, parts: int) -> Cluster | None:
    """The cluster whose devices are groups of so many, all of one class and node; None if it cannot be divided so."""
    if any(kind.count % parts for kind in cluster.classes) or any(size % parts for size in cluster.node_sizes):
        return None
    classes = tuple(replace(kind, count=kind.count // parts) for kind in cluster.classes)
    return replace(cluster, classes=classes, node_sizes=tuple(size // parts for size in cluster.node_sizes))


def _in_parts(unit: UnitCost, parts: int, link: Link) -> UnitCost:
    sizes = {name: getattr(unit, name) for name in PER_MICROBATCH}
    mine: dict[str, Any] = {name: None if size is None else size / parts for name, size in sizes.items()}
    # See `context_parallel.attention.Exchange`; the backward brings as much.
    received = EXCHANGED * unit.crossing * (parts - 1) / parts**2
    seconds = link.seconds(received) if unit.crossing else 0.0
    return replace(
        unit, **{**mine, "forward": unit.forward / parts + seconds, "backward": unit.backward / parts + seconds}
    )

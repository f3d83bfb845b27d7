"""How fast messages between ranks are: latency and bandwidth, inside a node and between nodes."""

from __future__ import annotations

import socket
import statistics
import time
from contextlib import nullcontext
from dataclasses import astuple

import torch
import torch.distributed as dist

from penstock.planning.cluster import Link
from penstock.runtime.comm.devices import local_device
from penstock.runtime.comm.exchange import Ranks

SMALL, LARGE = 4096, 8 * 2**20
REPETITIONS = 9


def measure_links() -> tuple[Link | None, Link | None]:
    """The link inside a node and the one between nodes, on every rank; None for one that no two ranks have.

    Rank 0 and another rank send messages to and fro; half of the median way there and back is taken. Every rank calls
    this together, with torch.distributed initialised.
    """
    ranks = Ranks(dist.group.WORLD, lambda doing, peers: nullcontext())
    hosts = ranks.exchange(socket.gethostname(), "measuring links")
    found: list[Link | None] = []
    for peers in (
        [rank for rank, host in enumerate(hosts) if rank and host == hosts[0]],
        [rank for rank, host in enumerate(hosts) if host != hosts[0]],
    ):
        found.append(_between_first_and(peers[0]) if peers else None)
    measured = ranks.exchange([link and astuple(link) for link in found], "measuring links")[0]
    inside, between = (link and Link(*link) for link in measured)
    return inside, between


def _between_first_and(peer: int) -> Link | None:
    if dist.get_rank() not in (0, peer):
        return None
    small, large = (_seconds(size, peer) for size in (SMALL, LARGE))
    bandwidth = (LARGE - SMALL) / max(large - small, 1e-9)
    return Link(max(0.0, small - SMALL / bandwidth), bandwidth)


def _seconds(size: int, peer: int) -> float:
    """One way of a message of `size` bytes."""
    buffer = torch.zeros(size, dtype=torch.uint8, device=local_device())
    samples = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(buffer, peer)
            dist.recv(buffer, peer)
        else:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
        if buffer.is_cuda:
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / 2)
    return statistics.median(samples[1:])

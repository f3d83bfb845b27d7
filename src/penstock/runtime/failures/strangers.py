"""Who may call a process of this library, and where it listens: what a stranger on the network meets.

A caller proves that it knows the job's secret by an answer to a number that was made for this call; the secret itself
is never sent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import socket
from typing import Any

logger = logging.getLogger("penstock")

# The variable that has the secret of a job, the same for all its processes.
SECRET = "PENSTOCK_SECRET"


@functools.cache
def warn_without_secret() -> None:
    """Say once what it means to have no secret where other machines can call."""
    if not os.environ.get(SECRET):
        logger.warning(
            "%s is not set: whoever reaches the job's store over the network can take a rank's place in the watch and "
            "end the run. Set it to one secret for all processes, or let the job have a network of its own",
            SECRET,
        )


@functools.cache
def warn_of_stranger(host: str) -> None:
    """Say once that somebody at `host` did not prove what a rank can."""
    logger.warning("a call from %s was refused: all ranks must have the same %s", host, SECRET)


def proof(*facts: Any) -> str:
    """What nobody can say of `facts` who does not know the job's secret."""
    secret, text = os.environ.get(SECRET, "").encode(), json.dumps(facts, sort_keys=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def proves(given: str, *facts: Any) -> bool:
    """Whether `given` is the `proof` of `facts`."""
    return hmac.compare_digest(given.encode(), proof(*facts).encode())


def interface(host: str | None) -> str | None:
    """The address of this machine on the way to `host`, None if that cannot be told. Nothing is sent."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[: host is not None]:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own_address: str = probe.getsockname()[0]
            # A machine may know its own name by a loopback address, at which no other machine can call it.
            return None if is_loopback(own_address) and host not in ("localhost", address[0]) else own_address
    return None


def is_loopback(address: str) -> bool:
    """Whether only this machine can call an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen(address: str | None, port: int = 0) -> socket.socket:
    """A socket that this machine listens on: of the interface with an address, or of all."""
    if address is not None:
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def own_addresses() -> list[str]:
    """Addresses of this machine as another rank may know it, the likeliest first."""
    addresses = []
    with contextlib.suppress(OSError):
        addresses.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys([*addresses, "127.0.0.1"]))

"""`penstock store`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

EVERYWHERE = "0.0.0.0"


def store(
    port: Annotated[int, typer.Option(help="TCP port to serve at; 0 takes a free one.")] = 29400,
    host: Annotated[str, typer.Option(help="Name or address by which the others reach this machine.")] = EVERYWHERE,
) -> None:
    """Serve the store in which the processes of elastic runs meet, until it is stopped.

    Many runs may share one (Elastic(run=...)). It needs no GPU and next to no memory; it should outlive the runs.
    """
    import torch.distributed as dist

    from penstock.runtime.failures.strangers import interface, listen

    try:
        listener = listen(None if host == EVERYWHERE else interface(host), port)
        served = dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (RuntimeError, OSError) as error:
        raise OSError(f"cannot serve a store at {host}:{port}: {str(error).splitlines()[0]}") from None
    print(f"store for elastic runs at tcp://{host}:{served.port}", flush=True)
    while True:
        time.sleep(3600)

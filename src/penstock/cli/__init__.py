"""The command line: `penstock --help` lists its commands. One file for each kind of thing; all start without torch."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from penstock import __version__
from penstock.checkpoint.untrusted import CheckpointError
from penstock.cli import bench, checkpoints, models, plans, schedules


class _Commands(typer.core.TyperGroup):
    """A user's mistake ends with one line on stderr and status 1; anything else is a defect and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has left; click ends quietly
        except (ValueError, NotImplementedError, OSError, ImportError, CheckpointError) as error:
            text = str(error) or type(error).__name__
            if isinstance(error, OSError) and error.filename is not None:
                text = f"{error.filename}: {error.strerror}"
            Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(text)}", highlight=False)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    help="Pipeline parallelism for Hugging Face models, exact to the unsplit model.",
    no_args_is_help=True,
    rich_markup_mode=None,  # whose tables cut the names of options at 80 columns
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script, and `python -m penstock`."""
    gc.set_threshold(1_000_000, 50, 50)  # imports make millions of objects, and they stay
    atexit.register(gc.freeze)  # the interpreter would look through all of them once more at its end
    for library in ("TRANSFORMERS", "DIFFUSERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")  # their notes are for scripts that train
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # which these import
        logging.getLogger(name).setLevel(logging.ERROR)
    app(prog_name="penstock")


@app.callback(invoke_without_command=True)
def common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Options before the command."""
    if version:
        print(__version__)
        raise typer.Exit


def store(
    port: Annotated[int, typer.Option(help="TCP port to serve at; 0 takes a free one.")] = 29400,
    host: Annotated[str, typer.Option(help="Name or address by which the others reach this machine.")] = "0.0.0.0",
) -> None:
    """Serve the store in which the processes of elastic runs meet, until it is stopped.

    Many runs may share one (Elastic(run=...)). It needs no GPU and next to no memory; it should outlive the runs.
    """
    import torch.distributed as dist

    from penstock.runtime.failures.strangers import interface, listen

    try:
        listener = listen(None if host == "0.0.0.0" else interface(host), port)
        port, descriptor = listener.getsockname()[1], listener.detach()
        served = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    except (RuntimeError, OSError) as error:
        raise OSError(f"cannot serve a store at {host}:{port}: {str(error).splitlines()[0]}") from None
    print(f"store for elastic runs at tcp://{host}:{served.port}", flush=True)
    while True:
        time.sleep(3600)


for command in (
    *(models.check, models.verify, plans.describe, plans.profile, plans.plan, plans.fit),
    *(schedules.simulate, schedules.draw),
    *(checkpoints.inspect, checkpoints.merge, store),
):
    app.command(short_help=(command.__doc__ or "").partition("\n")[0])(command)  # whole, where a doc would be cut
app.command(context_settings=bench.CONTEXT, short_help="Train one model in every mode; print one table.")(bench.bench)

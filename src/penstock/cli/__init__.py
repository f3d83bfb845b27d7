"""The command line: `penstock --help` lists its commands. One file for each kind of thing; all start without torch."""

from __future__ import annotations

import atexit
import gc
import logging
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from penstock import __version__
from penstock.cli import bench, checkpoints, models, plans, schedules, stores


class _Commands(typer.core.TyperGroup):
    """A user's mistake ends with one line on stderr and status 1; anything else is a defect and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has left; click ends quietly
        except (ValueError, NotImplementedError, OSError, ImportError) as error:
            Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_plain(error)}", highlight=False)
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


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options before the command."""


for command in (
    *(models.check, models.verify, plans.describe, plans.profile, plans.plan, plans.fit),
    *(schedules.simulate, schedules.draw),
    *(checkpoints.inspect, checkpoints.merge, stores.store),
):
    app.command(short_help=(command.__doc__ or "").partition("\n")[0])(command)  # whole, where a doc would be cut
app.command(context_settings=bench.CONTEXT, short_help="Train one model in every mode; print one table.")(bench.bench)


def _plain(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return escape(f"{error.filename}: {error.strerror}")
    return escape(str(error) or type(error).__name__)

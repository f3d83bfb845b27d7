"""The command line: `penstock --help` lists its commands. One file for each kind of thing; all start without torch."""

from __future__ import annotations

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
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script."""
    app()


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


app.command()(models.check)
app.command()(plans.describe)
app.command()(plans.profile)
app.command()(plans.plan)
app.command()(plans.fit)
app.command()(schedules.simulate)
app.command()(schedules.draw)
app.command()(checkpoints.inspect)
app.command()(checkpoints.merge)
app.command()(stores.store)
app.command(context_settings=bench.CONTEXT)(bench.bench)


def _plain(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return escape(f"{error.filename}: {error.strerror}")
    return escape(str(error) or type(error).__name__)

"""The command `penstock describe`: a layout of pipelines for a model, before any process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.models import subject_of
from penstock.schedule import DEFAULT_SCHEDULE, schedule_names


def describe(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CLASS",
            help="A folder or name of a checkpoint (only its configuration is read), a transformers class such as "
            "LlamaForCausalLM (with its default configuration), or MODULE:NAME of your own.",
        ),
    ],
    pipelines: Annotated[
        str,
        typer.Option(
            help="Stages x microbatches of each pipeline, such as 1x3,2x5. Stages are balanced by cost. (Ranks x "
            "microbatches, where the schedule puts several stages on a rank.)"
        ),
    ],
    microbatch_size: Annotated[int, typer.Option(min=1, help="Samples in a microbatch.")] = 1,
    schedule: Annotated[
        str, typer.Option(help=f"Schedule of every pipeline: {', '.join(schedule_names())}.")
    ] = DEFAULT_SCHEDULE,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the layout and a step's timeline to this .svg file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the layout as JSON.")] = False,
) -> None:
    """Show how pipelines, maybe of different depth, hold a model: stages, ranks, units, parameters, share of the batch.

    Loads no weights and computes nothing.

    Example: penstock describe GPT2LMHeadModel --pipelines 1x2,3x6 --plot layout.svg
    """
    # Here, because the command line shall start without torch.
    from penstock.modeling.check import build_on_meta
    from penstock.planning.describe import describe_pipelines
    from penstock.planning.pipelines import parse_pipelines

    found = subject_of(model)
    whole = build_on_meta(found) if isinstance(found, str | type) else found
    description = describe_pipelines(whole, parse_pipelines(pipelines), microbatch_size, schedule)
    print(json.dumps(description.data(), indent=1) if as_json else description)
    if plot is not None:
        path = description.write_svg(plot)
        if not as_json:
            print(f"drawn to {path}")
